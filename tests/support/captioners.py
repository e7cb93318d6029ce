"""Captioners, models and processors that are watched, or differ from a loaded one."""

import copy

from models.inference.inference_model import InferenceModel
from nanovlm import Captioner
from nanovlm.processing.processor import Processor


class WatchedModel(InferenceModel):
    """Calls before(name, inputs) before each encode_images; inputs are the images."""

    def __init__(self, model, before):
        super().__init__(model)
        self.before = before

    def encode_images(self, images):
        self.before("encode_images", images)
        return super().encode_images(images)


class WatchedProcessor(Processor):
    """Counts the images it preprocesses; calls before_image() before each, and before_prompt(question)."""

    def __init__(self, processor, before_image=lambda: None, before_prompt=lambda question: None):
        super().__init__(processor.cfg, processor.tokenizer)
        self.n_images, self.before_image, self.before_prompt = 0, before_image, before_prompt

    def preprocess(self, image, max_tiles=None):
        self.before_image()
        self.n_images += 1
        return super().preprocess(image, max_tiles)

    def encode_prompt(self, grids, question, *args, **options):
        self.before_prompt(question)
        return super().encode_prompt(grids, question, *args, **options)


class WatchedCaptioner(Captioner):
    """Calls before_prepare(image) before each prompt, and before(name, inputs) as WatchedModel does."""

    def __init__(self, captioner, before_prepare=lambda image: None, before=lambda name, inputs: None):
        super().__init__(WatchedModel(captioner.model, before), captioner.processor)
        self.before_prepare = before_prepare

    def requests(self, image, prompts, options=None, **changes):
        self.before_prepare(image)
        return super().requests(image, prompts, options, **changes)


def ending_with(captioner, *eos_token_ids):
    """The same captioner, whose answers end with other tokens."""
    tokenizer = copy.copy(captioner.tokenizer)
    tokenizer.eos_token_ids = eos_token_ids
    return Captioner(captioner.inference, Processor(captioner.processor.cfg, tokenizer))
