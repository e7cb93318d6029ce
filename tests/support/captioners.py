"""Captioners that differ from a loaded one."""

import copy

from models.inference.inference_model import InferenceModel
from nanovlm import Captioner
from nanovlm.processing.processor import Processor


class WatchedModel(InferenceModel):
    """Calls before(name, inputs) before each prefill, decode and encode_images; inputs are their ids or images."""

    def __init__(self, model, before):
        super().__init__(model)
        self.before = before

    def prefill(self, input_ids, *args, **options):
        self.before("prefill", input_ids)
        return super().prefill(input_ids, *args, **options)

    def decode(self, input_ids, *args, **options):
        self.before("decode", input_ids)
        return super().decode(input_ids, *args, **options)

    def encode_images(self, images):
        self.before("encode_images", images)
        return super().encode_images(images)


def ending_with(captioner, *eos_token_ids):
    """The same captioner, whose answers end with other tokens."""
    tokenizer = copy.copy(captioner.tokenizer)
    tokenizer.eos_token_ids = eos_token_ids
    return Captioner(captioner.inference, Processor(captioner.processor.cfg, tokenizer))
