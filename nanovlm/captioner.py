"""Captioner: a model and its processor as one thing that looks at pictures and speaks."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from models.checkpoint import load_config, load_model, snapshot_path
from models.convert.backbones import find_backbones, read_backbones
from models.decoding import GREEDY, SamplingParams
from models.inference.inference_model import make_fast
from models.vision_language_model import VisionLanguageModel
from nanovlm.device import choose_device, choose_dtype
from nanovlm.embedded import EMBEDDED, PROMPT
from nanovlm.image_processing import load_image
from nanovlm.processor import Inputs, Processor
from nanovlm.tokenizer import Tokenizer

Picture = str | os.PathLike | bytes | Image.Image


@dataclass
class Stats:
    """What one answer cost; times in seconds."""

    prompt_tokens: int = 0  # pictures included
    new_tokens: int = 0  # of all answers, their end tokens included
    answers: int = 0  # as many as samples
    first_token_s: float = 0.0  # from the pixels to the first token
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed after each answer's first token; 0 when there was no other."""
        later = self.total_s - self.first_token_s
        return (self.new_tokens - self.answers) / later if later > 0 else 0.0


class Captioner:
    """Looks at pictures and answers prompts about them.

    >>> captioner = Captioner.from_pretrained()
    >>> captioner.caption("picture.png")
    >>> captioner.caption("picture.png", "How many objects are there?")
    """

    def __init__(self, model: VisionLanguageModel, processor: Processor):
        self.model, self.processor, self.tokenizer = model, processor, processor.tokenizer

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | os.PathLike = EMBEDDED,
        device: str = "auto",
        dtype: str = "auto",
        revision: str | None = None,
        max_tiles: int | None = None,
        upscale: bool = True,
        quantize: str | None = None,
        compile: bool | None = None,
    ) -> "Captioner":
        """The model in a folder or behind a Hub id (owner/name), by default the one that ships with the package.

        device is auto, cpu, cuda or mps; dtype auto, float32, bfloat16 or float16; max_tiles and upscale say what a
        picture may cost, see `Processor`; quantize int8 makes the language model's weights 8 bits long. compile=True
        compiles the decode step, which takes a minute or two once (see `models.inference.aot_compile`), None uses what was compiled,
        and False does not. A CheckpointError says what is wrong with the model, a ValueError what is wrong with the
        rest, a RuntimeError why nothing can be compiled.
        """
        if quantize not in (None, "int8"):
            raise ValueError(f"quantize={quantize} is not int8")
        place = choose_device(device)
        precision = choose_dtype(dtype, place)
        folder = snapshot_path(name_or_folder, revision)
        cfg = load_config(folder)
        tokenizer = Tokenizer.from_pretrained(folder, cfg)
        model = load_model(folder, cfg, tokenizer.image_token_id, precision, place)
        return cls(make_fast(model, quantize == "int8", compile), Processor(cfg, tokenizer, max_tiles, upscale))

    @classmethod
    def from_backbones(
        cls, vision: str | os.PathLike, language: str | os.PathLike, dtype: str = "float32", **options
    ) -> "Captioner":
        """A new model of a pretrained SigLIP and a pretrained Llama, with the latter's tokenizer: to be trained.

        Each is a folder or a Hub id. Options are vision_revision, language_revision and fields of VLMConfig, see
        `models.convert.backbones.find_backbones`. `save_checkpoint(folder, captioner.model, captioner.tokenizer.to_json())`
        makes it a model's folder.
        """
        precision = choose_dtype(dtype, choose_device("cpu"))
        found = find_backbones(vision, language, **options)
        tokenizer = Tokenizer.from_backbone(found.language, found.cfg)
        return cls(read_backbones(found, tokenizer.image_token_id, precision), Processor(found.cfg, tokenizer))

    def check_prompt(self, prompt: str, max_new_tokens: int) -> None:
        """Raise ValueError if no answer can follow this prompt, however small the picture."""
        self.model.validate_length(len(self.processor.prompt([], prompt)), max_new_tokens)

    def caption(
        self,
        picture: Picture | Sequence[Picture] | None,
        prompt: str = PROMPT,
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams = GREEDY,
    ) -> str:
        """The answer to a prompt about one picture, several, or none (None)."""
        return "".join(self.stream(picture, prompt, max_new_tokens=max_new_tokens, sampling=sampling))

    def stream(
        self,
        picture: Picture | Sequence[Picture] | None,
        prompt: str = PROMPT,
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams = GREEDY,
        stats: Stats | None = None,
    ) -> Iterator[str]:
        """The same answer in pieces of whole characters, as they are found. stats, if given, is filled on the way."""
        columns = self._columns(self._batch([(picture, prompt)]), max_new_tokens, sampling, 1, stats)
        return self.tokenizer.stream(ids[0] for ids in columns if ids[0] != self.tokenizer.eos_token_id)

    def samples(
        self,
        picture: Picture | Sequence[Picture] | None,
        prompt: str = PROMPT,
        n: int = 1,
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams = GREEDY,
        stats: Stats | None = None,
    ) -> list[str]:
        """n answers to one prompt, which is read once; alike unless sampling has a temperature."""
        return self._texts(self._columns(self._batch([(picture, prompt)]), max_new_tokens, sampling, n, stats))

    def ask(
        self,
        picture: Picture | Sequence[Picture] | None,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams = GREEDY,
        stats: Stats | None = None,
    ) -> list[str]:
        """An answer to each prompt about the same picture, which is looked at and read once for all of them."""
        if isinstance(prompts, str):
            raise ValueError(f"ask takes several prompts, a list, not {prompts!r}; for one there is caption")
        if not prompts:
            return []

        def prepare():
            return self.processor.questions([load_image(one) for one in _as_list(picture)], list(prompts))

        return self._texts(self._columns(prepare, max_new_tokens, sampling, 1, stats))

    def captions(
        self,
        pictures: Sequence[Picture | Sequence[Picture] | None],
        prompt: str | Sequence[str] = PROMPT,
        *,
        batch_size: int = 16,
        max_new_tokens: int = 128,
        sampling: SamplingParams = GREEDY,
    ) -> Iterator[str]:
        """An answer for each of the pictures, batch_size at a time; one prompt for all, or one for each."""
        prompts = [prompt] * len(pictures) if isinstance(prompt, str) else list(prompt)
        asked = list(zip(pictures, prompts, strict=True))
        for start in range(0, len(asked), batch_size):
            batch = self._batch(asked[start : start + batch_size])
            yield from self._texts(self._columns(batch, max_new_tokens, sampling))

    def prepare(self, picture: Picture | Sequence[Picture] | None, prompt: str = PROMPT) -> Inputs:
        """What the model is to read; threads may prepare it while the model runs."""
        return self.processor.row([load_image(one) for one in _as_list(picture)], prompt)

    def _batch(self, asked: Sequence[tuple[Picture | Sequence[Picture] | None, str]]) -> Callable[[], dict]:
        return lambda: self.processor.batch([self.prepare(picture, prompt) for picture, prompt in asked])

    def _columns(
        self, prepare: Callable[[], dict], max_new_tokens: int, sampling: SamplingParams, n_samples: int = 1, stats=None
    ) -> Iterator[list[int]]:
        """Yield the ids that `VisionLanguageModel.stream` chooses for what prepare() returns, which is timed, too."""
        started = time.perf_counter()
        inputs = {k: v.to(self.model.device) if isinstance(v, Tensor) else v for k, v in prepare().items()}
        stats, mask = stats or Stats(), inputs["attention_mask"]
        again = inputs.get("shared", 0) * (len(mask) - 1)  # columns that were read once, but stand in every row
        stats.prompt_tokens, stats.answers = int(mask.sum()) - again, len(mask) * n_samples
        stream = self.model.stream(
            **inputs,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            eos_token_id=self.tokenizer.eos_token_id,
            n_samples=n_samples,
        )
        column = [None] * stats.answers
        for ids in stream:
            stats.new_tokens += sum(id != self.tokenizer.eos_token_id for id in column)  # of rows that go on
            column = ids.tolist()
            stats.total_s = time.perf_counter() - started
            stats.first_token_s = stats.first_token_s or stats.total_s
            yield column

    def _texts(self, columns: Iterator[list[int]]) -> list[str]:
        """Each row's ids up to its end token, as text."""
        texts = []
        for ids in zip(*columns):
            end = ids.index(self.tokenizer.eos_token_id) if self.tokenizer.eos_token_id in ids else len(ids)
            texts.append(self.tokenizer.decode(ids[:end]))
        return texts


def _as_list(pictures: Picture | Sequence[Picture] | None) -> list[Picture]:
    if pictures is None:
        return []
    return list(pictures) if isinstance(pictures, (list, tuple)) else [pictures]
