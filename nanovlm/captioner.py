"""Captioner: a model and its processor, from images and a prompt to text."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any

import torch

import models.formats  # noqa: F401 (lets the core read other formats)
from models.checkpoint import load_config, snapshot_path
from models.config import VLMConfig
from models.inference.continuous_batching import Request
from models.inference.inference_model import InferenceModel
from models.vision_language_model import VisionLanguageModel, load_model
from nanovlm.device import choose_device, choose_dtype
from nanovlm.embedded import EMBEDDED, default_prompt, write_prompt
from nanovlm.errors import InputError
from nanovlm.options import GenerationOptions, ModelOptions, generation_options, read_generation_defaults
from nanovlm.processing.processor import Processor, pair_prompts
from nanovlm.processing.tokenizer import Tokenizer
from nanovlm.request_runner import ImageInputs, RequestRunner, Stats, is_one_image

if TYPE_CHECKING:
    from nanovlm.choices import Choice

logger = logging.getLogger(__name__)

PathOrId = str | os.PathLike[str]  # a folder, or a Hub id


class Captioner(RequestRunner):
    """Captions images and answers prompts about them.

    >>> captioner = Captioner.from_pretrained()
    >>> captioner.caption("photo.jpg")
    >>> captioner.caption("photo.jpg", "How many objects are there?", max_new_tokens=20)

    Methods that answer take fields of `GenerationOptions` as keywords, or options, a whole record, or both. An answer
    is a str, or with a schema the value that the schema allows, such as a dict. Without a prompt they ask the one that
    the model was trained with. `inference` generates; `model` is the plain `VisionLanguageModel`.
    """

    @property
    def model(self) -> VisionLanguageModel:
        """The plain model, to train or save. InputError if `quantize=` released it."""
        return self.inference.model

    # -------------------------------------------------------------------------------------------- loading and saving

    @classmethod
    def from_pretrained(
        cls, name_or_folder: PathOrId = EMBEDDED, device: Any = "auto", dtype: Any = "auto", **options: Any
    ) -> "Captioner":
        """Load a folder or a Hub id (owner/name), by default the model that ships with the package.

        device is auto, cpu, cuda, mps or a torch.device; dtype is auto, float32, bfloat16, float16 or a torch.dtype.
        options are the other fields of `ModelOptions`, such as adapter, revision, threads, quantize or max_tiles.
        Raises CheckpointError if the model cannot be loaded, InputError for a value, and TypeError for an unknown name.
        """
        given = {"model": name_or_folder, "device": str(device), "dtype": str(dtype).removeprefix("torch.")}
        return cls.load(ModelOptions(**given | options))

    @classmethod
    def load(cls, options: ModelOptions) -> "Captioner":
        """Load what a record of options names; see `from_pretrained`."""
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        device = choose_device(options.device)
        folder = snapshot_path(*options.base)
        cfg = load_config(folder)
        tokenizer = Tokenizer.from_pretrained(folder, cfg)
        model = load_model(folder, cfg, tokenizer.image_token_id, choose_dtype(options.dtype, device, folder), device)
        if options.adapter is not None:
            from models.lora import merge
            from models.lora.files import read_adapters

            read_adapters(options.adapter, model)
            model = merge(model)
        inference = InferenceModel(model, quantize=options.quantize)
        del model  # so that release_source frees it
        if options.quantize:
            inference.release_source()
        return cls(
            inference,
            Processor(cfg, tokenizer, options.max_tiles),
            allow_urls=options.allow_urls,
            prompt=default_prompt(options.adapter or folder),
            defaults=read_generation_defaults(folder),
        )

    @classmethod
    def from_backbones(
        cls, vision: PathOrId, language: PathOrId, dtype: str = "float32", format: str = "nanovlm", **options: Any
    ) -> "Captioner":
        """Join a pretrained SigLIP and a pretrained Llama; the projector between them is randomly initialized.

        Each is a folder or a Hub id; the tokenizer is the language model's. format is the layout of images and chats,
        nanovlm or smolvlm. Options are those of `models.formats.backbones.find_backbones`.
        """
        from models.formats.backbones import find_backbones, read_backbones
        from nanovlm.processing.convert import check_format, convert_layout

        check_format(VLMConfig(), format)  # before anything is downloaded
        backbones = find_backbones(vision, language, **options)
        tokenizer = Tokenizer.from_backbone(backbones.language, backbones.cfg)
        is_smolvlm = format == "smolvlm"  # whose pixels are SigLIP's
        weights = choose_dtype(dtype, torch.device("cpu"))
        model = read_backbones(backbones, tokenizer.image_token_id, weights, unit_pixels=not is_smolvlm)
        if is_smolvlm:
            return cls(*convert_layout(model, tokenizer, rescale=False))
        return cls(model, Processor(backbones.cfg, tokenizer))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write config, weights and tokenizer, atomically, and the default prompt, as `from_pretrained` loads them.

        A line says so if the network is not the one that the config describes.
        """
        self.note_edits()
        self.model.save_pretrained(folder, tokenizer=self.tokenizer.to_json())
        if self.prompt != default_prompt(folder):
            write_prompt(folder, self.prompt)

    def note_edits(self) -> None:
        """Log a line if the core was edited or the model changed, which no written config can say."""
        if difference := self.inference.difference:
            logger.warning("note: the files describe the network as it was published, but %s", difference)

    # ------------------------------------------------------------------------------------------------------- answers

    def caption(self, image: ImageInputs, prompt: str | None = None, **options: Any) -> Any:
        """Answer a prompt about one image, several, a `Video`, or none (None)."""
        return self.samples(image, prompt, **options)[0]

    def stream(
        self, image: ImageInputs, prompt: str | None = None, *, stats: Stats | None = None, **options: Any
    ) -> Iterator[str]:
        """Yield the answer in pieces of whole characters, as they are generated; a schema's answer, too, is text."""
        record = self._options(options)

        def ids() -> Iterator[int]:
            outputs = self.generate([self.request(image, prompt, record)], stats)
            answer = (output.token_id for output in outputs if output.token_id != self.tokenizer.eos_token_id)
            first = list(islice(answer, 1))  # before start_with is shown, as an error comes before any text
            yield from chain(self._start_ids(record), first, answer)

        return self.tokenizer.stream(ids())

    def samples(
        self, image: ImageInputs, prompt: str | None = None, n: int = 1, *, stats: Stats | None = None, **options: Any
    ) -> list[Any]:
        """Give n answers to one prompt, with one prefill; all are equal unless a temperature is given.

        With a seed, answer i is the one that `caption` gives with seed + i.
        """
        record = self._options(options)
        if n < 1:
            raise InputError(f"{n} is less than 1", field="n")
        requests = self.requests(image, [prompt] * n, record)
        if record.seed is not None:
            for i, request in enumerate(requests):
                request.sampling = replace(request.sampling, seed=(int(record.seed) + i) % 2**63)
        return self._answers(requests, record, stats)

    def ask(
        self, image: ImageInputs, prompts: Sequence[str], *, stats: Stats | None = None, **options: Any
    ) -> list[Any]:
        """Answer several prompts about the same image, which is encoded and prefilled once."""
        record = self._options(options)
        if isinstance(prompts, str):
            raise InputError(f"ask takes a list of prompts, not {prompts!r}; for one prompt use caption")
        return self._answers(self.requests(image, prompts, record), record, stats)

    def classify(self, image: ImageInputs, choices: Sequence[str], prompt: str | None = None) -> "list[Choice]":
        """Rank choices as answers, the most probable first; each has text, probability and log_probability."""
        return next(self.classify_each([image], choices, prompt))

    def classify_each(
        self, images: Iterable[ImageInputs], choices: Sequence[str], prompt: str | None = None, batch_size: int = 16
    ) -> "Iterator[list[Choice]]":
        """Yield what `classify` gives for each image, in order; answers about several images are computed together."""
        from nanovlm.choices import ranked_choices

        check_several(images, batch_size, "classify_each", "classify")
        n = max(1, len(choices))
        requests = chain.from_iterable(self.choice_requests(image, choices, prompt) for image in images)
        yield from map(ranked_choices, self.run_groups(requests, n, max(1, batch_size // n)))

    def caption_video(
        self, video: Any, prompt: str | None = None, max_frames: int | None = None, **options: Any
    ) -> Any:
        """Answer a prompt about a `Video`, or about what `Video.read` takes, such as a file's name."""
        from nanovlm.processing.video import MAX_FRAMES, Video

        if not isinstance(video, Video):
            video = Video.read(video, MAX_FRAMES if max_frames is None else max_frames)
        return self.caption(video, prompt, **options)

    def captions(
        self,
        images: Iterable[ImageInputs],
        prompt: str | Iterable[str] | None = None,
        *,
        batch_size: int = 16,
        **options: Any,
    ) -> Iterator[Any]:
        """Yield one answer per image, in order, when it is done: with one prompt for all images, or one for each.

        images and prompt may be generators: they are read while others are answered, some batch_size ahead. An answer
        is the one that `caption` gives for the image with the same options, a seed included, whatever the batch_size.
        An image that fails raises its error after the answers before it.
        """
        record = self._options(options)
        check_several(images, batch_size, "captions", "caption")
        pairs = pair_prompts(images, self.prompt if prompt is None else prompt)

        def requests() -> Iterator[Request]:
            for number in count(1):
                try:
                    image, text = next(pairs)
                    yield self.request(image, text, record)
                except StopIteration:
                    return
                except Exception as error:
                    error.add_note(f"at item {number} of captions")
                    yield Request((), error=error)

        for request in self.run(requests(), batch_size):
            yield self.answer(request, record)

    def _options(self, given: dict[str, Any]) -> GenerationOptions:
        return generation_options(given.pop("options", None), given, self.defaults)

    def _answers(self, requests: list[Request], options: GenerationOptions, stats: Stats | None = None) -> list[Any]:
        for _ in self.generate(requests, stats):
            pass
        return [self.answer(request, options) for request in requests]


def check_several(images: Any, batch_size: int, method: str, method_of_one: str) -> None:
    """InputError for one image where a method takes several, and for a batch_size below 1."""
    if is_one_image(images):
        raise InputError(f"{method} takes several images, such as a list; for one image use {method_of_one}")
    if batch_size < 1:
        raise InputError(f"{batch_size} must be 1 or more", field="batch_size")
