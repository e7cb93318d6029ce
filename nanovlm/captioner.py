"""Captioner: a model and its processor, from images and a prompt to text."""

import logging
import os
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

import models.formats  # noqa: F401 (lets the core read other formats)
from models.checkpoint import load_config, snapshot_path
from models.config import VLMConfig
from models.decoding import trim_repetition
from models.inference.continuous_batching import ContinuousBatch, Request, TokenOutput
from models.inference.inference_model import InferenceModel
from models.vision_language_model import VisionLanguageModel, load_model
from nanovlm.device import choose_device, choose_dtype
from nanovlm.embedded import EMBEDDED, PROMPT, default_prompt, write_prompt
from nanovlm.errors import InputError
from nanovlm.options import GenerationOptions, ModelOptions, generation_options, read_generation_defaults, with_changes
from nanovlm.processing.conversation import Chat, dialogue, images_of
from nanovlm.processing.image_loading import is_array, load_or_fetch
from nanovlm.processing.processor import Processor, pair_prompts
from nanovlm.processing.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovlm.choices import Choice
    from nanovlm.processing.structured_output import StructuredOutput

logger = logging.getLogger(__name__)

PathOrId = str | os.PathLike[str]  # a folder, or a Hub id
# A path, a file's bytes, a PIL image, a tensor (C, H, W), a numpy array (H, W, C), a binary file or an http(s) URL
ImageInput = str | os.PathLike[str] | bytes | Image.Image | Tensor | Any
ImageInputs = ImageInput | Sequence[ImageInput] | None
NO_IMAGE = "a question without an image: the model may describe one that it does not see"


@dataclass
class Stats:
    """Token counts of one call, and its times in seconds since this object was made."""

    prompt_tokens: int = 0  # that were computed, image tokens included: what several prompts share counts once
    new_tokens: int = 0  # of all answers, end tokens included
    first_token_s: float = 0.0
    total_s: float = 0.0
    finish_reasons: list[str] = field(default_factory=list)  # of each answer: stop, length or repetition
    started: float = field(default_factory=time.perf_counter)

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed after each answer's first token; 0 if there was only one token."""
        decode_s = self.total_s - self.first_token_s
        return (self.new_tokens - len(self.finish_reasons)) / decode_s if decode_s > 0 else 0.0


class Captioner:
    """Captions images and answers prompts about them.

    >>> captioner = Captioner.from_pretrained()
    >>> captioner.caption("photo.jpg")
    >>> captioner.caption("photo.jpg", "How many objects are there?", max_new_tokens=20)

    Methods that answer take fields of `GenerationOptions` as keywords, or options, a whole record, or both. An answer
    is a str, or with a schema the value that the schema allows, such as a dict. Without a prompt they ask the one that
    the model was trained with. `inference` generates; `model` is the plain `VisionLanguageModel`.
    """

    def __init__(
        self,
        model: VisionLanguageModel | InferenceModel,
        processor: Processor,
        *,
        allow_urls: bool = False,  # http(s) URLs may name images, which are then fetched from public addresses
        prompt: str = PROMPT,
        defaults: Mapping[str, Any] | None = None,  # of GenerationOptions, as generation_config.json says
    ):
        self.inference = model if isinstance(model, InferenceModel) else InferenceModel(model)
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.allow_urls = allow_urls
        self.prompt = prompt
        self.defaults = defaults or {}

    @cached_property
    def structured_output(self) -> "StructuredOutput":
        """Grammars of JSON schemas for this model's vocabulary."""
        from nanovlm.processing.structured_output import StructuredOutput  # here, as few answers follow one

        return StructuredOutput(self.tokenizer)

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
        return cls.load(with_changes(ModelOptions(), given | options))

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

    # ------------------------------------------------------------------------------------------------------ requests

    def request(
        self, image: ImageInputs, prompt: str | None = None, options: GenerationOptions | None = None, **changes: Any
    ) -> Request:
        """Preprocess images and tokenize a prompt. Threads may do so while others generate."""
        return self.requests(image, [prompt], options, **changes)[0]

    def requests(
        self,
        image: ImageInputs,
        prompts: Sequence[str | None],
        options: GenerationOptions | None = None,
        **changes: Any,
    ) -> list[Request]:
        """Make a request for each prompt about the same image. InputError for one too long."""
        options = generation_options(options, changes, self.defaults)
        shown = self.load_images(image)
        if not shown:
            warnings.warn(NO_IMAGE, stacklevel=2)
        parts = self.processor.prepare(shown)
        chats = [dialogue([self.prompt if prompt is None else prompt], parts) for prompt in prompts]
        return [self.chat_request(chat, options, must_fit=True) for chat in chats]

    def chat_request(
        self,
        chat: Chat,
        options: GenerationOptions,
        *,
        must_fit: bool = False,
        default: str | None = None,
        remedy: str = "shorten it",
    ) -> Request:
        """Make a request for the answer to a conversation about `TiledImage`s.

        The answer ends where the context does, or with must_fit the context must hold max_new_tokens. InputError for a
        conversation that is too long, names the remedy, or has no question, for which default stands where it shows
        images.
        """
        ids = self.processor.encode(chat, default) + self._start_ids(options)
        cfg = self.inference.cfg
        if must_fit:
            cfg.validate_length(len(ids), options.max_new_tokens)
        room = cfg.validate_length(len(ids), 1, f"prompt is too long: {len(ids)} tokens", remedy)
        request = Request(ids, images_of(chat), options, min(options.max_new_tokens, room))
        if options.schema is not None:
            request.grammar = self.structured_output.make_processor(options.schema)
        return request

    def choice_requests(self, image: ImageInputs, choices: Sequence[str], prompt: str | None = None) -> list[Request]:
        """Make a request for each choice as the answer to a prompt; see `ranked_choices`."""
        from nanovlm.choices import forced_answers, score_requests

        answers = forced_answers(choices, self.tokenizer)
        longest = max(len(answer.steps) for answer in answers)
        return score_requests(self.request(image, prompt, max_new_tokens=longest), answers)

    def batch(self, batch_size: int = 16, **caches: Any) -> ContinuousBatch:
        """An empty batch that runs batch_size requests at once; see `ContinuousBatch` for caches."""
        ends = self.tokenizer.eos_token_ids
        return ContinuousBatch(self.inference, max_num_seqs=batch_size, eos_token_id=ends, **caches)

    def run(self, requests: Iterable[Request], batch_size: int = 16, n_together: int = 1) -> Iterator[Request]:
        """Yield requests in order, each when it has ended, with its output or its error.

        Requests are taken when slots are free, so at most 2 * batch_size have been taken and not yielded. n_together in
        succession, of one image, are taken at once: the first then still runs when the others copy its beginning. One
        that has an error already is passed through.
        """
        batch = self.batch(batch_size)
        pending = deque[Request]()
        requests = iter(requests)
        while True:
            while pending and pending[0].finished:
                yield pending.popleft()
            free = min(batch_size - batch.running - batch.waiting, 2 * batch_size - len(pending))
            if free >= batch_size // 4:  # prefilled together, prompts are faster
                for request in islice(requests, free - free % n_together):
                    pending.append(request)
                    if not request.finished:
                        batch.add(request)
            if not pending:
                return
            batch.step()

    def run_groups(self, requests: Iterable[Request], n: int, n_images: int) -> Iterator[list[Request]]:
        """Yield the n requests of each image when they have ended.

        Those of the first image are run alone, so that they end soon, and then those of n_images at once.
        """
        requests = iter(requests)
        answered = chain(self.run(islice(requests, n), n), self.run(requests, n * n_images, n))
        while group := list(islice(answered, n)):
            yield group

    def generate(
        self, requests: Sequence[Request], stats: Stats | None = None, batch: ContinuousBatch | None = None
    ) -> Generator[TokenOutput]:
        """Yield the tokens of all requests and fill in stats. Raises the first error of a request."""
        stats = stats or Stats()
        batch = batch or self.batch(max(1, len(requests)))
        for request in requests:
            batch.add(request)
        try:
            while batch.running or batch.waiting:
                outputs = batch.step()
                stats.total_s = time.perf_counter() - stats.started
                stats.first_token_s = stats.first_token_s or stats.total_s
                for output in outputs:
                    if output.error is not None:
                        raise output.error
                    yield output
        finally:
            for request in requests:
                batch.cancel(request)
            stats.prompt_tokens = sum(len(request.ids) - request.n_cached for request in requests)
            stats.new_tokens = sum(len(request.output) for request in requests)
            stats.finish_reasons = [str(request.finished) for request in requests]

    def answer(self, request: Request, options: GenerationOptions | None = None) -> Any:
        """The text of a request that has ended, or the value that it is by a schema. Raises the request's error."""
        if request.error is not None:
            raise request.error
        text = self.text(request, options)
        return text if options is None or options.schema is None else self.structured_output.parse(text)

    def text(self, request: Request, options: GenerationOptions | None = None) -> str:
        """The text of a request's output: from start_with up to the end token or the first repetition."""
        eos = self.tokenizer.eos_token_id
        ids = request.output[: request.output.index(eos)] if eos in request.output else request.output
        trimmed = trim_repetition(ids, request.sampling.repetition_detection)
        return self.tokenizer.decode([*self._start_ids(options or GenerationOptions()), *trimmed])

    def _start_ids(self, options: GenerationOptions) -> list[int]:
        """Ids of the beginning of an answer; without the spaces at its end, which belong to the word that follows."""
        text = options.start_with.rstrip()
        return self.tokenizer.encode_answer(text)[:-1] if text else []

    def check_prompt(self, prompt: str, max_new_tokens: int) -> None:
        """Raise InputError if the prompt and max_new_tokens exceed the model's context even without an image."""
        self.inference.cfg.validate_length(len(self.processor.encode(dialogue([prompt]))), max_new_tokens)

    def prepare(self, image: ImageInputs, prompt: str | None = None) -> tuple[list[int], list[Tensor]]:
        """Token ids of one prompt, and the tiles (n, 3, S, S) of each image."""
        parts = self.processor.prepare(self.load_images(image))
        chat = dialogue([self.prompt if prompt is None else prompt], parts)
        return self.processor.encode(chat), [one.tiles for one in images_of(chat)]

    def load_images(self, images: Any) -> list[Any]:
        """Upright RGB images of one source or several, or the `Video`. Raises ImageError."""
        sources = [] if images is None else [images] if is_one_image(images) else list(images)
        return [one if hasattr(one, "frames") else load_or_fetch(one, self.allow_urls) for one in sources]


def check_several(images: Any, batch_size: int, method: str, method_of_one: str) -> None:
    """InputError for one image where a method takes several, and for a batch_size below 1."""
    if is_one_image(images):
        raise InputError(f"{method} takes several images, such as a list; for one image use {method_of_one}")
    if batch_size < 1:
        raise InputError(f"{batch_size} must be 1 or more", field="batch_size")


def is_one_image(images: Any) -> bool:
    """True of an image or a `Video`, not of several: an array of four dimensions, for example, is a batch."""
    if is_array(images):
        return len(images.shape) < 4
    is_file = hasattr(images, "read") or isinstance(images, (str, bytes, bytearray, memoryview, dict))
    return is_file or not isinstance(images, Iterable)
