"""ModelOptions and GenerationOptions: which model runs where, and how answers are generated.

Each setting is one field, with its default, its check and the help of its flag, which `nanovlm.cli.options` adds.
A record is made once, from keyword arguments or from flags, and passed whole.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from models.common.options import (
    MAX_NEW_TOKENS,
    QUANTIZATIONS,
    RepetitionDetection,
    SamplingParams,
    check_settings,
    setting,
)
from nanovlm.embedded import EMBEDDED, PROMPT, default_prompt
from nanovlm.errors import CheckpointError, InputError, UsageError
from nanovlm.processing import MAX_FRAMES

logger = logging.getLogger(__name__)

DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("float32", "bfloat16", "float16")
CHAT_MAX_NEW_TOKENS = 256
RESERVED = {"file_name", "text", "finish_reason", "model", "prompt", "prefix", "choices"}  # columns of every caption
# Of a generation_config.json, as transformers writes and reads it:
FOLLOWED = {"repetition_penalty", "max_new_tokens"}
SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}  # transformers' defaults, with do_sample only
# Read elsewhere, or without a say in the answer: token ids, what is returned, speed, and settings of beams alone.
OTHERS = {
    "do_sample", "transformers_version", "_from_model_config", "eos_token_id", "bos_token_id", "pad_token_id",
    "decoder_start_token_id", "use_cache", "cache_implementation", "cache_config", "early_stopping", "length_penalty",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size",
    "disable_compile", "compile_config", "prefill_chunk_size", "is_assistant",
}  # fmt: skip
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def is_model_name(name: Any) -> bool:
    """True of a folder with config.json, and of a name that is no folder's and that a Hub repository may have."""
    if not isinstance(name, (str, os.PathLike)):
        return False
    is_folder = Path(name).is_dir()
    return Path(name, "config.json").is_file() if is_folder else HUB_ID.fullmatch(str(name)) is not None


def is_adapter(folder: Any) -> bool:
    """True of a folder with adapters, our own or PEFT's."""
    names = ("adapter_config.json", "adapter/adapter_config.json")
    return isinstance(folder, (str, os.PathLike)) and any(Path(folder, name).is_file() for name in names)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model runs, where and how. InputError for a value that is not supported."""

    model: str | Path = setting(  # noqa: RUF009
        EMBEDDED, "a folder or a Hub id, owner/name",
        "a folder with config.json, or a Hub id like owner/name (LoRA adapters: --adapter)", is_model_name,
        metavar="FOLDER_OR_HUB_ID", default_text="the embedded model",
    )  # fmt: skip
    adapter: str | Path | None = setting(  # noqa: RUF009
        None, "LoRA adapters for the model, from nanovlm train --lora-rank or PEFT; without --model, their own base",
        "a folder with adapter_config.json", is_adapter, metavar="FOLDER",
    )  # fmt: skip
    revision: str | None = setting(None, "branch, tag or commit of a Hub model")
    device: str = setting("auto", "where the model runs", choices=DEVICES)
    dtype: str = setting("auto", "of weights", choices=("auto", *DTYPES))
    threads: int | None = setting(
        None, "CPU threads; on a busy machine 1 may be many times faster", minimum=1, maximum=1024,
        default_text="PyTorch's choice, which follows OMP_NUM_THREADS",
    )  # fmt: skip
    quantize: str | None = setting(
        None,
        "int8: weights, and on CPUs with kernels for it activations, in 8 bits; int4: the language model's weights in "
        "4 bits",
        choices=QUANTIZATIONS, default_text="as --dtype",
    )  # fmt: skip
    max_tiles: int | None = setting(
        None, "split an image into at most N tiles, or show N frames of a video: faster, less detail", minimum=1,
        default_text="as many as in training",
    )  # fmt: skip
    allow_urls: bool = False  # http(s) URLs may name images, which are then fetched from public addresses

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def prompt(self) -> str:
        """The prompt that the model was trained to answer; a Hub model is downloaded for it."""
        folder = self.adapter or self.model
        if not Path(folder).is_dir():
            from models.checkpoint import snapshot_path

            folder = snapshot_path(self.model, self.revision)
        return default_prompt(folder)

    @property
    def base(self) -> tuple[str | Path, str | None]:
        """The model to load and its revision: without a model, the one that the adapter was trained on, if it says."""
        if self.adapter is None or self.model != EMBEDDED:
            return self.model, self.revision
        from models.lora.files import recorded_base

        name, revision = recorded_base(Path(self.adapter))
        return name or self.model, revision


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(SamplingParams):
    """How answers are generated: how tokens are chosen, with another default, and three fields more.

    `given` names the fields that were passed; the others give way to the model's own generation_config.json.
    """

    given: ClassVar[frozenset[str]] = frozenset()

    repetition_detection: RepetitionDetection = field(
        default=(8, 64, 4), metadata=SamplingParams.__dataclass_fields__["repetition_detection"].metadata
    )
    max_new_tokens: int = setting(MAX_NEW_TOKENS, "maximum length of an answer", minimum=1)
    start_with: str = setting(
        "", "beginning of each answer, which the model continues", "a text", lambda text: isinstance(text, str),
        metavar="TEXT",
    )  # fmt: skip
    schema: Any = None  # a JSON schema; answers are then JSON values that it allows

    def __new__(cls, *args: Any, **given: Any) -> Self:
        self = super().__new__(cls)
        object.__setattr__(self, "given", frozenset(given))
        return self

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schema is not None:
            if self.start_with:
                raise InputError("schema excludes start_with, as JSON begins by itself")
            object.__setattr__(self, "repetition_detection", (0, 0, 0))  # a list may repeat a value


@dataclass(frozen=True, kw_only=True)
class CaptionOptions(GenerationOptions):
    """Questions about each image of many, and how they are answered."""

    prompts: tuple[str, ...] = (PROMPT,)  # a table has a column for each of several; {folder} as in prefix
    choices: tuple[str, ...] = ()  # the answer is the most probable of these
    prefix: str = ""  # before each caption; {folder} is the name of the image's folder
    as_video: bool = False  # describe each video or animation as a whole
    max_frames: int = MAX_FRAMES  # of a video

    def has_answer(self, text: str) -> bool:
        """True if the model has added to what an answer was to start with."""
        return bool(text.removeprefix(self.start_with.rstrip()).strip())

    def filled(self, text: str, image: str) -> str:
        """A prompt or prefix with the name of an image's folder for {folder}; image is a path or a URI."""
        if "{folder}" not in text:
            return text
        folder = Path(image if "://" in image else os.path.abspath(image)).parent.name
        return text.replace("{folder}", folder)


@dataclass(frozen=True)
class ReadOptions:
    """How to read sources, where the files themselves do not decide it."""

    prompt: str | None = setting(
        None, "the question for data with captions only", metavar="TEXT",
        default_text=f"the prompt that the model was trained with, else {PROMPT!r}",
    )  # fmt: skip
    model_prompt: str = PROMPT  # the question without a prompt
    images: str | None = setting(
        None,
        "folder of the images that tables and .json files name (default: their own, or the one below it)",
        metavar="FOLDER",
    )
    text_column: str | None = setting(
        None, "column with the answers (default: text, caption or answer)", metavar="NAME"
    )
    prompt_column: str | None = setting(None, "column with the questions (default: question or prompt)", metavar="NAME")
    image_column: str | None = setting(
        None, "column with the images (default: image, images or another usual name)", metavar="NAME"
    )
    extension: str | None = setting(
        None, "extension of the text files beside images, such as .caption", "like .caption",
        lambda text: bool(re.fullmatch(r"\.?\w+", text)), metavar="EXT", default_text=".txt",
    )  # fmt: skip
    stream: bool = setting(False, "read .tar, .parquet or .arrow files or a Hub data set in sequence, without a copy")
    on_error: str = setting("stop", "what to do with an unusable example", choices=("stop", "skip"))
    is_shared: bool = False  # by several sources, some of which may lack the columns that are named

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def question(self) -> str:
        """The question about images that come with captions only."""
        return self.model_prompt if self.prompt is None else self.prompt

    @property
    def skip_errors(self) -> bool:
        """True if examples that cannot be used are left out."""
        return self.on_error == "skip"


def parse_data(name: str | os.PathLike[str]) -> tuple[str, float | None]:
    """PATH@SHARE as its two parts; a path that exists, or has a / behind its last @, is a path without a share."""
    text = os.fspath(name)
    path, separator, share = text.rpartition("@")
    if not separator or "/" in share or os.path.exists(text):
        return text, None
    if not re.fullmatch(r"\d*\.?\d+(e-?\d+)?", share) or not float(share):
        raise UsageError(f"--data {text}: no such file or folder, and {share!r} is no share; a share must be above 0")
    return path, float(share)


def generation_options(
    options: GenerationOptions | None, changes: Mapping[str, Any], defaults: Mapping[str, Any]
) -> GenerationOptions:
    """Options with changes, and with a model's defaults for fields that neither gives.

    Among changes, sampling stands for all its fields. TypeError for an unknown name, InputError for a value.
    """
    options = options or GenerationOptions()
    values = {name: value for name, value in defaults.items() if name not in options.given}
    if sampling := changes.get("sampling"):
        values |= vars(sampling)
    return replace(options, **values | {name: value for name, value in changes.items() if name != "sampling"})


def read_generation_defaults(folder: Path) -> dict[str, Any]:
    """Fields of `GenerationOptions` that the generation_config.json of a model's folder recommends, if there is one.

    Settings that would change answers but are not computed here are named in one line. CheckpointError for a value out
    of range.
    """
    from models.checkpoint import read_object  # here, as it imports torch

    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    raw = {key: value for key, value in read_object(path).items() if value is not None}
    defaults = {key: raw[key] for key in raw if key in FOLLOWED}
    if raw.get("do_sample"):
        defaults |= {key: raw.get(key, default) for key, default in SAMPLED.items()}
    try:
        GenerationOptions(**defaults)
    except InputError as error:
        raise CheckpointError(f"{path}: {error}") from None
    ignored = []
    for key in raw.keys() - OTHERS - FOLLOWED - SAMPLED.keys():
        is_one = raw[key] == 1 and raw[key] is not True  # off, for a number of beams or a penalty
        if raw[key] and not (is_one and not key.startswith(("min_", "max_"))):
            ignored.append(f"{key}={json.dumps(raw[key])[:60]}")
    if ignored:
        settings = ", ".join(sorted(ignored))
        logger.warning("note: %s: %s: not supported, answers are generated without", path, settings)
    return defaults


def check_positive(numbers: Mapping[str, int | None]) -> None:
    """UsageError for a number, by its name, that is less than 1; None is not given."""
    for name, n in numbers.items():
        if n is not None and n < 1:
            raise UsageError(f"{name} {n} is less than 1")


def check_output_folder(folder: str | os.PathLike[str], n_bytes: int = 0) -> None:
    """Raise InputError for an output folder that cannot be made or written, or lacks room for n_bytes."""
    path = Path(folder).absolute()
    if not os.fspath(folder):
        raise InputError("'' is empty; name a folder, or . for the current one", field="out")
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise InputError(f"{folder}: {existing.name} is a file; name a folder", field="out")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"{folder}: {existing} is not writable; name another folder", field="out")
    if (free := shutil.disk_usage(existing).free) < n_bytes:
        numbers = f"{free / 2**20:,.0f} MiB are free, {n_bytes / 2**20:,.0f} MiB needed"
        raise InputError(f"{folder}: {numbers}; free some", field="out")
