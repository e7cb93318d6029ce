"""Checkpoint folders: config.json, model.safetensors and tokenizer.json; read strictly, written atomically.

`Format` says how the files name settings and tensors: it is nanoVLM's own format, and its subclasses in
`models.formats` are the others. This module knows state dicts, not model classes.
"""

import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from models import files
from models.config import VLMConfig
from models.errors import CheckpointError, FileError, InputError
from models.language_model import inverse_frequencies

CONFIG = "config.json"
WEIGHTS = files.WEIGHTS
TOKENIZER = "tokenizer.json"
INDEX = "model.safetensors.index.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
# Without this in tokenizer_config.json, transformers 4 adds token_type_ids, which no model here takes.
MODEL_INPUT_NAMES = ["input_ids", "attention_mask"]
MAX_MAPPED_TENSORS = 8  # of one mapping of the file
NO_IMAGE_TOKEN = -1  # nanoVLM v0.1 has no token for images
HEAD = "decoder.head.weight"
EMBEDDING = "decoder.token_embedding.weight"
TIED = (EMBEDDING, HEAD)  # one tensor if lm_tie_weights
INV_FREQ = "decoder.rotary_embd.inv_freq"
BUFFERS = re.compile(r"decoder\.rotary_embd\.\w+")  # computed when needed; float32 in files of any dtype
FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
Shapes = Mapping[str, tuple[int, ...]]


class Format:
    """Names of settings and tensors in a model's folder: nanoVLM's own, and the base of the others.

    An instance of a subclass, `cfg.format`, has the settings that VLMConfig has no field for.
    """

    name: ClassVar[str] = "nanovlm"
    other_files: ClassVar[tuple[str, ...]] = ()  # read and written beside config.json, weights and tokenizer.json
    tied: ClassVar[tuple[str, str]] = TIED  # the files' names of token embedding and head, which may be one tensor
    unit_pixels: ClassVar[bool] = True  # pixels are in [0, 1]; in [-1, 1] if False
    crops_to_patches: ClassVar[bool] = False  # pixels beyond the last whole patch of a tile are cut off
    for_transformers: ClassVar[bool] = False  # transformers reads the folder
    words: ClassVar[Mapping[str, str]] = {}  # the key in config.json for some fields of VLMConfig, in errors

    @classmethod
    def read_config(cls, raw: dict, files: Mapping[str, str]) -> VLMConfig:
        """The config of config.json's object and the texts of the other files that are there."""
        return VLMConfig.from_dict(raw)

    def config_dict(self, cfg: VLMConfig) -> dict:
        """The object to write as config.json."""
        return cfg.own_dict()

    def texts(self, cfg: VLMConfig, dtype: torch.dtype, tokenizer: str | None, home: str | None) -> dict[str, str]:
        """Texts of the files to write beside weights in dtype and tokenizer.json; see `write_checkpoint_files`."""
        config = cfg.to_dict()
        objects = {CONFIG: config}
        if tokenizer is not None:
            name = config["lm_tokenizer"]
            on_hub = name != "none" and not Path(name).exists() and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)
            if home is not None and not on_hub:
                config["lm_tokenizer"] = home  # where stock nanoVLM finds the tokenizer, by AutoTokenizer
            objects[TOKENIZER_CONFIG] = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_input_names": MODEL_INPUT_NAMES,
                "eos_token": cfg.end_token,
                "extra_special_tokens": cfg.special_tokens,
                "chat_template": cfg.lm_chat_template,
            }
        return {name: json.dumps(values, indent=2) + "\n" for name, values in objects.items()}

    @staticmethod
    def to_stored(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of VisionLanguageModel under the names of the files; shares memory with it."""
        return dict(state)

    @staticmethod
    def from_stored(stored: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names of ours. Empties the dict, so that joined tensors are not kept twice."""
        return stored

    @classmethod
    def tensors(cls, cfg: VLMConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors to write, of a tied pair one. Stock nanoVLM, which is strict, wants the frequencies, too."""
        tensors = {**state, INV_FREQ: inverse_frequencies(cfg.lm_head_dim, cfg.lm_re_base)}
        if cfg.lm_tie_weights:
            del tensors[EMBEDDING]
        return tensors

    def for_names(self, names: Iterable[str]) -> "Format":
        """The format of a folder whose files have tensors of these names."""
        return self

    @staticmethod
    def patch_positions(grid: int) -> list[int] | None:
        """The position, along a side, of each of its `grid` patches; None if they are 0, 1, 2 ..."""
        return None

    def find_image_token_id(self, folder: Path, cfg: VLMConfig) -> int:
        """The id of the image token in folder's tokenizer.json, or without one by nanoVLM's rule for extra tokens.

        A tokenizer.json of lm_base_vocab_size tokens is a backbone's own and is read as if the extra tokens followed.
        NO_IMAGE_TOKEN if cfg names none. Raises CheckpointError if the tokenizer does not know the token.
        """
        if cfg.vlm_extra_tokens is None:
            return NO_IMAGE_TOKEN
        path = folder / TOKENIZER
        if not path.exists():  # the extra tokens follow the base vocabulary, in their order
            return cfg.base_vocab_size + list(cfg.vlm_extra_tokens).index("image_token")
        ids = _vocabulary(path)
        if is_base_vocabulary(ids, cfg):
            missing = [token for token in dict.fromkeys(cfg.special_tokens.values()) if token not in ids]
            ids |= {token: len(ids) + i for i, token in enumerate(missing)}
        image_token_id = ids.get(cfg.vlm_extra_tokens["image_token"])
        if image_token_id is None:
            raise CheckpointError(f"{path}: {missing_token(cfg, 'image_token', len(ids))}")
        return image_token_id

    def check_image_token_id(self, image_token_id: int, folder: Path) -> None:
        """CheckpointError if config.json names another id than image_token_id, that of the tokenizer in folder."""
        return


NANOVLM = Format()
# model_type of config.json -> a function that imports a subclass of Format; "import models.formats" fills it.
FORMATS: dict[str, Callable[[], type[Format]]] = {}


def format_of(cfg: VLMConfig) -> Format:
    """The format of a config; nanoVLM's own for one that names none."""
    return NANOVLM if cfg.format is None else cfg.format


# ----------------------------------------------------------------------------------------------------------- reading


def snapshot_path(
    name_or_folder: str | os.PathLike[str], revision: str | None = None, files: Sequence[str] | None = None
) -> Path:
    """The local folder of a model: the folder itself, or the snapshot of a Hub id, downloaded unless it is cached.

    files are patterns of what to download, by default of everything that a model's folder may hold.
    """
    folder = Path(name_or_folder)
    name = str(name_or_folder)
    if folder.is_dir():
        if revision:
            raise CheckpointError(f"{name} is a folder, which has no revision {revision!r}; leave revision out")
        return folder
    if folder.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        kind = "a file, not a folder" if folder.exists() else "neither a folder nor a Hub id like owner/name"
        raise CheckpointError(f"{name}: {kind}; pass a folder with {CONFIG} and {WEIGHTS}")

    from huggingface_hub import snapshot_download

    patterns = list(files or ("*.json", "*.jinja", "*.safetensors"))
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # of many kinds, from DNS to disk
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{name}: no such folder, and the Hub could not be reached or has no such model ({reason}); "
            "if you are offline, pass a local folder instead"
        ) from error


def load_config(folder: str | os.PathLike[str]) -> VLMConfig:
    """The config of the model in folder, in the format that config.json tells. CheckpointError if it cannot be used."""
    path = Path(folder) / CONFIG
    raw = read_object(path)
    if raw.get("quantization_config"):
        raise CheckpointError(f"{path} has a quantization_config: take the model in 16 bits, which quantize= reduces")
    kind = raw.get("model_type")
    format = FORMATS[str(kind)]() if str(kind) in FORMATS else Format
    if format is Format and kind is not None and not (FORMATS and "lm_hidden_dim" in raw):
        known = f"none of {', '.join(FORMATS)}, and nanoVLM's own config.json has none; take a model of one of these"
        cure = 'not nanoVLM\'s own format; "import models.formats" first, which reads others'
        raise CheckpointError(f"{path}: model_type={kind!r} is {known if FORMATS else cure}")
    try:
        others = [path.with_name(name) for name in format.other_files]
        return format.read_config(raw, {other.name: read_model_text(other) for other in others if other.exists()})
    except CheckpointError as error:  # names one of the files
        raise CheckpointError(f"{folder}: {error}") from None
    except (TypeError, ValueError, OverflowError) as error:
        message = re.sub(r"\b(vit|lm|mp)_\w+", lambda field: format.words.get(field[0], field[0]), str(error))
        raise CheckpointError(f"{path}: {message}") from None


def find_image_token_id(folder: str | os.PathLike[str], cfg: VLMConfig) -> int:
    """The id of the image token of the model in folder; see `Format.find_image_token_id`."""
    return format_of(cfg).find_image_token_id(Path(folder), cfg)


def _vocabulary(path: Path) -> dict[str, int]:
    """Ids by token of a tokenizer.json."""
    raw = read_object(path)
    try:
        vocabulary = raw["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pieces with scores
            vocabulary = {piece: i for i, (piece, _) in enumerate(vocabulary)}
        ids = vocabulary | {entry["content"]: entry["id"] for entry in raw.get("added_tokens") or ()}
        return {token: id for token, id in ids.items() if type(id) is int}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a {TOKENIZER} of the tokenizers library: {error!r}") from None


def is_base_vocabulary(ids: Mapping[str, int], cfg: VLMConfig) -> bool:
    """Tell a language model's own tokenizer, to which stock nanoVLM adds the extra tokens, by its ids."""
    return len(ids) == cfg.lm_base_vocab_size == max(ids.values(), default=-1) + 1


def missing_token(cfg: VLMConfig, name: str, n_tokens: int) -> str:
    """The message for a tokenizer of n_tokens that lacks an extra token and is not the language model's own."""
    return (
        f"vlm_extra_tokens names {name}={cfg.special_tokens[name]!r}, but the tokenizer has no such token, and with "
        f"{n_tokens} tokens it is not the language model's own of lm_base_vocab_size={cfg.lm_base_vocab_size}"
    )


def read_object(path: Path) -> dict:
    """The object in a JSON file of a model's folder. Raises CheckpointError if there is none."""
    return parse_object(read_model_text(path), path)


def parse_object(text: str, name: object) -> dict:
    """The object in the text of a file called name. Lone surrogates are refused: no file could hold them."""
    try:
        raw = json.loads(text)
        json.dumps(raw, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{name} holds {type(raw).__name__}, not an object of settings")
    return raw


def read_model_text(path: Path) -> str:
    """The text of a file in a model's folder; CheckpointError if it cannot be read."""
    try:
        return files.read_text(path)
    except FileError as error:
        if error.errno == errno.ENOENT:
            raise CheckpointError(f"{path.parent} has no {path.name}; a model has {CONFIG} and {WEIGHTS}") from None
        raise CheckpointError(error) from None


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """A safetensors file, memory-mapped; CheckpointError if it cannot be read."""
    try:
        files.check_regular(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileError as error:
        raise CheckpointError(error) from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read, it may be truncated: {error}; replace the file") from None


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors or, if the weights are sharded, the files that model.safetensors.index.json names."""
    files = [folder / WEIGHTS]
    if not files[0].exists():
        if not (folder / INDEX).exists():
            pickled = sorted(path.name for path in folder.glob("*.bin"))
            hint = f"; {pickled[0]} may run code and is not read: save it as safetensors" if pickled else ""
            raise CheckpointError(f"{folder} has no {WEIGHTS}; a model is a folder with {CONFIG} and {WEIGHTS}{hint}")
        names = read_object(folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not names or any(Path(str(n)).name != n for n in names.values()):
            raise CheckpointError(f"{folder / INDEX} has no weight_map of tensors to files beside it")
        files = [folder / name for name in sorted(set(names.values()))]
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file} is missing, which {INDEX} names")
    return files


def tensor_names(folder: Path) -> list[str]:
    """The names of all tensors in a folder's files."""
    names: list[str] = []
    for path in weight_files(folder):
        with open_tensors(path) as file:
            names += file.keys()
    return names


def checkpoint_dtype(folder: str | os.PathLike[str]) -> torch.dtype:
    """The dtype of the weights in folder; of several, the smallest that can represent them all.

    Of tensors that are no weights, such as 8-bit ones, only `read_state_dict` says so.
    """
    dtypes = set()
    for path in weight_files(Path(folder)):
        with open_tensors(path) as file:
            dtypes |= {file.get_tensor(name).dtype for name in [*file.keys()] if not BUFFERS.fullmatch(name)}
    return reduce(torch.promote_types, dtypes & FLOATS) if dtypes & FLOATS else torch.float32


def read_weights(folder: str | os.PathLike[str], cfg: VLMConfig, empty: Mapping[str, Tensor], **options: Any) -> dict:
    """The state dict of the model in folder, of the names and shapes of `empty`; options are dtype and device."""
    format = format_of(cfg).for_names(tensor_names(Path(folder)))
    shapes = {name: tuple(tensor.shape) for name, tensor in format.to_stored(empty).items()}
    tied = format.tied if cfg.lm_tie_weights else None
    return format.from_stored(read_state_dict(folder, shapes, tied=tied, **options), empty)


def read_state_dict(
    folder: str | os.PathLike[str],
    shapes: Shapes,
    *,
    tied: tuple[str, str] | None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    rename: Callable[[str], str | None] = lambda name: None if BUFFERS.fullmatch(name) else name,
) -> dict[str, Tensor]:
    """The tensors of these names and shapes from a folder's safetensors files, which must hold all and no other.

    Names and shapes are compared before anything is allocated. Weights already in dtype stay memory-mapped on a CPU.
    tied names an embedding and a head that are one: the files may hold either or, if they are equal, both. rename gives
    a name of shapes for one of the files, or None for a tensor that is not used. Raises CheckpointError.
    """
    wanted = {name: shape for name, shape in shapes.items() if not (tied and name == tied[0])}
    files = weight_files(Path(folder))
    path = files[0] if len(files) == 1 else Path(folder)
    state = {}
    with ExitStack() as stack:
        found: dict[str, tuple[Path, str]] = {}
        handles = {file: stack.enter_context(open_tensors(file)) for file in files}
        stats = {file: os.stat(file) for file in files}
        for file, handle in handles.items():
            stored = [*handle.keys()]
            found |= {name: (file, theirs) for theirs in stored if (name := rename(theirs)) is not None}
        if tied and tied[0] in found:
            embedding = found.pop(tied[0])
            head = found.setdefault(tied[1], embedding)
            if not torch.equal(*(handles[file].get_tensor(theirs) for file, theirs in (embedding, head))):
                raise CheckpointError(f"{path}: {CONFIG} ties {embedding[1]} and {head[1]}, but they differ")
        _check_names(path, wanted, {name: (handles[file], theirs) for name, (file, theirs) in found.items()})
        names = sorted(wanted, key=lambda name: name.split(".")[::-1])  # equal kinds are mapped and released together
        for start in range(0, len(names), MAX_MAPPED_TENSORS):
            for name, tensor in _mapped({name: found[name] for name in names[start:][:MAX_MAPPED_TENSORS]}, stats):
                if reason := why_unusable(tensor, dtype):
                    raise CheckpointError(f"{path}: {name} {reason}")
                state[name] = tensor.to(device, dtype)
    if tied:
        state[tied[0]] = state[tied[1]]
    return state


def _mapped(tensors: Mapping[str, tuple[Path, str]], stats: Mapping[Path, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors by file and name there, in mappings of their own: pages stay while a mapping lives."""
    with ExitStack() as stack:
        handles: dict[Path, Any] = {}
        for name, (file, theirs) in tensors.items():
            if file not in handles:
                handles[file] = stack.enter_context(open_tensors(file))
                if not os.path.samestat(os.stat(file), stats[file]):
                    raise CheckpointError(f"{file} was replaced while it was read; try again")
            yield name, handles[file].get_tensor(theirs)


def _check_names(path: Path, wanted: Shapes, found: Mapping[str, tuple[Any, str]]) -> None:
    """Raise CheckpointError unless the tensors found, (file, its name), are those wanted, in name and shape."""
    if missing := sorted(wanted.keys() - found.keys()):
        raise CheckpointError(f"{path} lacks {len(missing)} tensors that {CONFIG} asks for, first {missing[0]}")
    if more := sorted(found[name][1] for name in found.keys() - wanted.keys()):
        raise CheckpointError(f"{path} has {len(more)} tensors that {CONFIG} has no place for, first {more[0]!r}")
    for name, shape in wanted.items():
        handle, theirs = found[name]
        if (actual := tuple(handle.get_slice(theirs).get_shape())) != shape:
            raise CheckpointError(f"{path}: {theirs} is {actual}, but {CONFIG} asks for {shape}")


def why_unusable(tensor: Tensor, dtype: torch.dtype) -> str:
    """Why the values of a tensor, read in place, cannot be weights in dtype, as not finite; "" if they can."""
    if tensor.dtype not in FLOATS:
        return f"is stored as {tensor.dtype}, not as floating-point numbers of 16 bits or more"
    low, high = (bound.item() for bound in tensor.aminmax())  # nan, if any is
    limit = torch.finfo(dtype).max
    if -limit <= low <= high <= limit:
        return ""
    return f"has values from {low} to {high}, but weights must be finite, in {dtype} up to {limit}"


# ----------------------------------------------------------------------------------------------------------- writing


def save_checkpoint(
    folder: str | os.PathLike[str], model: Any, tokenizer: str | None, dtype: torch.dtype | None = None
) -> None:
    """Write a model's folder atomically; see `write_checkpoint_files` and `files.filling`."""
    try:
        with files.filling(folder) as new:
            write_checkpoint_files(new, model, tokenizer, dtype)
    except FileError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise InputError(f"{folder} is a file or lies below one; name a folder") from None
        raise


def write_checkpoint_files(
    folder: Path, model: Any, tokenizer: str | None, dtype: torch.dtype | None = None, home: str | None = None
) -> None:
    """Write config, weights and tokenizer in the model's format; nanoVLM's so that stock nanoVLM loads them too.

    dtype is that of the stored weights; None keeps the model's. tokenizer is the text of tokenizer.json; None writes no
    tokenizer. home is the folder's final path, by which a config.json may say where the tokenizer is.
    """
    cfg = model.cfg
    format = format_of(cfg)
    state = {name: tensor.detach().to("cpu", dtype) for name, tensor in model.state_dict().items()}
    texts = format.texts(cfg, state[HEAD].dtype, tokenizer, home)
    for name, text in (texts | ({} if tokenizer is None else {TOKENIZER: tokenizer})).items():
        files.replace(folder / name, text)
    tensors = {name: tensor.contiguous() for name, tensor in format.tensors(cfg, state).items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
