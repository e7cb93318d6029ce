"""Captioner: a model and its processor, from images and a prompt to text."""

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

import models.formats  # noqa: F401 (lets the core read other formats)
from models.checkpoint import load_config, snapshot_path
from models.config import VLMConfig
from models.decoding import finish_reason, trim_repetition
from models.inference.inference_model import InferenceModel
from models.vision_language_model import VisionLanguageModel, load_model
from nanovlm.device import choose_device, choose_dtype
from nanovlm.embedded import EMBEDDED, PROMPT
from nanovlm.errors import InputError
from nanovlm.options import GenerationOptions, ModelOptions, generation_options, with_changes
from nanovlm.processing.image_loading import as_list, is_array, load_or_fetch
from nanovlm.processing.processor import EncodedPrompt, Processor, pair_prompts
from nanovlm.processing.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovlm.processing.structured_output import StructuredOutput

PathOrId = str | os.PathLike[str]  # a folder, or a Hub id
# A path, a file's bytes, a PIL image, a tensor (C, H, W), a numpy array (H, W, C), a binary file or an http(s) URL
ImageInput = str | os.PathLike[str] | bytes | Image.Image | Tensor | Any
ImageInputs = ImageInput | Sequence[ImageInput] | None
Prepare = Callable[[], dict[str, Any]]  # makes the inputs of `generate`; its time counts in Stats
NO_IMAGE = "a question without an image: the model may describe one that it does not see"


@dataclass
class Stats:
    """Token counts and times, in seconds, of one call."""

    prompt_tokens: int = 0  # image tokens included; tokens that several prompts share count once
    new_tokens: int = 0  # of all answers, end tokens included
    answers: int = 0
    first_token_s: float = 0.0  # from preprocessing to the first token
    total_s: float = 0.0
    finish_reasons: list[str] = field(default_factory=list)  # of each answer: stop, length or repetition
    cache_bytes: int = 0  # of keys and values of prompt and answers, at the end
    cache_bytes_allocated: int = 0  # the same with unused capacity
    state: Any = field(default=None, repr=False)  # the cache's newest `PrefillState`

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed after each answer's first token; 0 if there was only one token."""
        decode_s = self.total_s - self.first_token_s
        return (self.new_tokens - self.answers) / decode_s if decode_s > 0 else 0.0


class Captioner:
    """Captions images and answers prompts about them.

    >>> captioner = Captioner.from_pretrained()
    >>> captioner.caption("photo.jpg")
    >>> captioner.caption("photo.jpg", "How many objects are there?")

    `inference` generates; `model` is the plain `VisionLanguageModel`. allow_urls lets http(s) URLs name images, which
    are then fetched from public addresses.
    """

    def __init__(self, model: VisionLanguageModel | InferenceModel, processor: Processor, *, allow_urls: bool = False):
        self.inference, self.processor, self.tokenizer = model, processor, processor.tokenizer
        self.allow_urls = allow_urls

    @cached_property
    def structured_output(self) -> "StructuredOutput":
        """What makes answers follow a JSON schema."""
        from nanovlm.processing.structured_output import StructuredOutput  # here, as few answers follow one

        return StructuredOutput(self.tokenizer)

    @property
    def model(self) -> VisionLanguageModel:
        """The plain model, to train or save. InputError if `quantize=` released it."""
        return self.inference.model if isinstance(self.inference, InferenceModel) else self.inference

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
        """The same with a record of options."""
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        device = choose_device(options.device)
        folder = snapshot_path(*options.base)
        cfg, dtype = load_config(folder), choose_dtype(options.dtype, device, folder)
        tokenizer = Tokenizer.from_pretrained(folder, cfg)
        model = load_model(folder, cfg, tokenizer.image_token_id, dtype, device)
        if options.adapter is not None:
            from models.lora import merge
            from models.lora.files import read_adapters

            read_adapters(options.adapter, model)
            model = merge(model)
        inference = InferenceModel(model, quantize=options.quantize)
        del model  # so that release_source frees it
        if options.quantize:
            inference.release_source()
        processor = Processor(cfg, tokenizer, options.max_tiles)
        return cls(inference, processor, allow_urls=options.allow_urls)

    @classmethod
    def from_backbones(
        cls, vision: PathOrId, language: PathOrId, dtype: str = "float32", format: str = "nanovlm", **options: Any
    ) -> "Captioner":
        """Join a pretrained SigLIP and a pretrained Llama; the projector between them is randomly initialized.

        Each is a folder or a Hub id; the tokenizer is the language model's. format is the layout of images and chats.
        Options are those of `models.formats.backbones.find_backbones`.
        """
        from models.formats.backbones import find_backbones, read_backbones
        from nanovlm.processing.convert import check_format, convert_layout

        torch_dtype = choose_dtype(dtype, choose_device("cpu"))
        check_format(VLMConfig(), format)  # before anything is downloaded
        backbones = find_backbones(vision, language, **options)
        tokenizer = Tokenizer.from_backbone(backbones.language, backbones.cfg)
        model = read_backbones(backbones, tokenizer.image_token_id, torch_dtype)
        if format == "smolvlm":
            return cls(*convert_layout(model, tokenizer, rescale=False))
        return cls(model, Processor(backbones.cfg, tokenizer))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write config, weights and tokenizer, atomically, as `from_pretrained` loads them."""
        self.model.save_pretrained(folder, tokenizer=self.tokenizer.to_json())

    def check_prompt(self, prompt: str, max_new_tokens: int) -> None:
        """Raise InputError if the prompt and max_new_tokens exceed the model's context even without an image."""
        self.inference.validate_length(len(self.processor.encode_prompt([], prompt)), max_new_tokens)

    def caption(
        self, image: ImageInputs, prompt: str = PROMPT, *, options: GenerationOptions | None = None, **changes: Any
    ) -> Any:
        """The answer to a prompt about one image, several, or none (None).

        It is a str, or with a schema the value that the schema allows, such as a dict. changes are fields of
        `GenerationOptions`, such as max_new_tokens or temperature, and options a whole record of them. All this is so
        for the other methods; only `stream` gives a schema's answer as text.
        """
        return self.samples(image, prompt, options=options, **changes)[0]

    def stream(
        self,
        image: ImageInputs,
        prompt: str = PROMPT,
        *,
        stats: Stats | None = None,
        options: GenerationOptions | None = None,
        **changes: Any,
    ) -> Iterator[str]:
        """The same answer in pieces of whole characters, as they are generated. stats, if given, is filled in."""
        options = generation_options(options, changes)
        steps = self.generate_ids(self._batch([(image, prompt)]), options, stats=stats)
        ids = (ids[0] for ids in steps if ids[0] != self.tokenizer.eos_token_id)
        return self.tokenizer.stream(_prepend(self.start_ids(options.start_with), ids))

    def samples(
        self,
        image: ImageInputs,
        prompt: str = PROMPT,
        n: int = 1,
        *,
        stats: Stats | None = None,
        options: GenerationOptions | None = None,
        **changes: Any,
    ) -> list[Any]:
        """n answers to one prompt, with one prefill; all equal unless sampling has a temperature."""
        return self._texts(self._batch([(image, prompt)]), generation_options(options, changes), n, stats)

    def ask(
        self,
        image: ImageInputs,
        prompts: Sequence[str],
        *,
        stats: Stats | None = None,
        options: GenerationOptions | None = None,
        **changes: Any,
    ) -> list[Any]:
        """One answer per prompt about the same image, which is encoded and prefilled once."""
        options = generation_options(options, changes)
        if isinstance(prompts, str):
            raise InputError(f"ask takes a list of prompts, not {prompts!r}; for one prompt use caption")
        if not prompts:
            return []

        def prepare() -> dict[str, Any]:
            return self.processor.encode_questions(self._load(image), list(prompts))

        return self._texts(prepare, options, stats=stats)

    def caption_video(self, video: Any, prompt: str = PROMPT, max_frames: int | None = None, **options: Any) -> Any:
        """The answer to a prompt about a `Video`, or about what `Video.read` takes, such as a file's name."""
        from nanovlm.processing.video import MAX_FRAMES, Video

        if not isinstance(video, Video):
            video = Video.read(video, MAX_FRAMES if max_frames is None else max_frames)
        return self.caption(video, prompt, **options)

    def captions(
        self,
        images: Iterable[ImageInputs],
        prompt: str | Iterable[str] = PROMPT,
        *,
        batch_size: int = 16,
        options: GenerationOptions | None = None,
        **changes: Any,
    ) -> Iterator[Any]:
        """One answer per image, in order: with one prompt for all images, or one for each.

        images and prompt may be generators: they are consumed lazily, batch_size at a time.
        """
        options = generation_options(options, changes)
        if is_one_image(images):
            raise InputError("captions takes several images, such as a list; for one image use caption")
        if batch_size < 1:
            raise InputError(f"batch_size={batch_size} must be 1 or more")
        requests = pair_prompts(images, prompt)
        while batch := list(islice(requests, batch_size)):
            yield from self._texts(self._batch(batch), options)

    def start_ids(self, start_with: str) -> list[int]:
        """Ids of the beginning of an answer; without the spaces at its end, which belong to the word that follows."""
        text = start_with.rstrip()
        return self.tokenizer.encode_answer(text)[:-1] if text else []

    def prepare(self, image: ImageInputs, prompt: str = PROMPT) -> EncodedPrompt:
        """Token ids and tiles of one prompt; thread-safe, so threads may prepare while the model runs."""
        return self.processor.encode(self._load(image), prompt)

    def load_image(self, source: ImageInput) -> Image.Image:
        """An upright RGB image of a source. Raises ImageError, for a URL unless this captioner allows them."""
        return load_or_fetch(source, self.allow_urls)

    def _load(self, images: ImageInputs) -> list[Image.Image]:
        if not (sources := as_list(images)):
            warnings.warn(NO_IMAGE, stacklevel=2)
        return [source if hasattr(source, "frames") else self.load_image(source) for source in sources]  # a Video's

    def _batch(self, requests: Sequence[tuple[ImageInputs, str]]) -> Prepare:
        return lambda: self.processor.collate([self.prepare(image, prompt) for image, prompt in requests])

    def generate_ids(
        self, prepare: Prepare, options: GenerationOptions, n_samples: int = 1, stats: Stats | None = None
    ) -> Iterator[list[int]]:
        """Yield the ids of each decoding step, one per answer, without those of start_with."""
        started, stats = time.perf_counter(), stats or Stats()
        stats.new_tokens, stats.first_token_s = 0, 0.0  # of an earlier call
        device, eos = self.inference.device, self.tokenizer.eos_token_id
        inputs: dict[str, Any] = {
            name: value.to(device) if isinstance(value, Tensor) else value for name, value in prepare().items()
        }
        start = torch.tensor(self.start_ids(options.start_with), dtype=torch.long, device=device)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        inputs["input_ids"] = torch.cat([ids, start.expand(len(ids), -1)], dim=1)
        inputs["attention_mask"] = mask = torch.cat([mask, torch.ones_like(start).expand(len(ids), -1)], dim=1)
        stats.answers = len(mask) * n_samples
        stats.prompt_tokens = int(mask.sum()) - inputs.get("shared_prefix_length", 0) * (len(mask) - 1)
        steps: list[list[int]] = []
        grammar = None
        if options.schema is not None:
            grammar = self.structured_output.for_rows(options.schema, steps, stats.answers)
        for ids in self.inference.stream(
            **inputs,
            logits_processor=grammar,
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling,
            eos_token_id=self.tokenizer.eos_token_ids,
            n_samples=n_samples,
            on_state=partial(setattr, stats, "state"),
        ):
            stats.new_tokens += sum(id != eos for id in steps[-1]) if steps else stats.answers
            steps.append(ids.tolist())
            stats.total_s = time.perf_counter() - started
            stats.first_token_s = stats.first_token_s or stats.total_s
            yield steps[-1]
        detection = options.repetition_detection
        stats.finish_reasons = [finish_reason(answer, eos, detection) for answer in zip(*steps)]
        stats.cache_bytes, stats.cache_bytes_allocated = stats.state.bytes_used, stats.state.bytes_allocated

    def _texts(
        self, prepare: Prepare, options: GenerationOptions, n_samples: int = 1, stats: Stats | None = None
    ) -> list[Any]:
        """The text of each answer, or the value that it is by a schema."""
        steps = self.generate_ids(prepare, options, n_samples, stats)
        texts = [self.answer_text(ids, options) for ids in zip(*steps)]
        return texts if options.schema is None else list(map(self.structured_output.parse, texts))

    def answer_text(self, ids: Sequence[int], options: GenerationOptions) -> str:
        """The text of an answer's generated ids: from start_with up to the end token or the first repetition."""
        eos = self.tokenizer.eos_token_id
        answer = ids[: ids.index(eos)] if eos in ids else ids
        trimmed = trim_repetition(answer, options.repetition_detection)
        return self.tokenizer.decode([*self.start_ids(options.start_with), *trimmed])


def is_one_image(images: Any) -> bool:
    """Whether it is an image or a `Video`, not several: an array of four dimensions, for example, is a batch."""
    is_one_array = is_array(images) and len(images.shape) < 4
    is_file_or_video = hasattr(images, "read") or hasattr(images, "frames")
    return (
        is_one_array or is_file_or_video or isinstance(images, (str, bytes, bytearray, dict, os.PathLike, Image.Image))
    )


def _prepend(start: Sequence[int], ids: Iterator[int]) -> Iterator[int]:
    """start, then ids; nothing comes before the first of ids is there, so that an error comes first."""
    first = list(islice(ids, 1))
    yield from chain(start, first, ids)
