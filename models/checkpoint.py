"""A folder is a model: config.json, model.safetensors and tokenizer.json, read strictly and written atomically."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models.config import VLMConfig
from models.errors import CheckpointError
from models.language_model import inverse_frequencies
from models.vision_language_model import VisionLanguageModel

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"  # nothing here reads it, see write_files
AT_ONCE = 8  # tensors of one mapping
MOST_BLOCKS = 1000  # the deepest models have a few hundred; a million would take an hour to refuse otherwise
HEAD, EMBEDDING, INV_FREQ = "decoder.head.weight", "decoder.token_embedding.weight", "decoder.rotary_embd.inv_freq"


def snapshot_path(
    name_or_folder: str | os.PathLike,
    revision: str | None = None,
    files: Sequence[str] = (CONFIG, "*.safetensors", TOKENIZER),
) -> Path:
    """The local folder of a model: itself, or a Hub id's files, downloaded unless they are in the Hub's cache."""
    folder = Path(name_or_folder)
    name = str(name_or_folder)
    if folder.is_dir():
        if revision:
            raise CheckpointError(f"{name} is a folder, which has no revision {revision!r}; leave the revision away")
        return folder
    if folder.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        kind = "a file, not a folder" if folder.exists() else "neither a folder nor a Hub id like owner/name"
        raise CheckpointError(f"{name}: {kind}; pass a folder with {CONFIG} and {WEIGHTS}")

    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # many kinds, from DNS to disk; none of them is a bug here
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{name}: no such folder, and the Hub could not be reached or has no such model ({reason}); "
            "if you are offline, pass a local folder instead"
        ) from error


def load_config(folder: Path) -> VLMConfig:
    """The config of the model in folder; anything wrong with it is a CheckpointError."""
    path = Path(folder) / CONFIG
    raw = read_object(path)
    try:
        return VLMConfig.from_dict(raw)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_object(path: Path) -> dict:
    """The object in a JSON file of a model's folder; anything wrong with it is a CheckpointError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}; a model is a folder with {CONFIG} and {WEIGHTS}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds {type(raw).__name__}, not an object of settings")
    return raw


def load_model(
    folder: Path,
    cfg: VLMConfig,
    image_token_id: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> VisionLanguageModel:
    """The model in folder, in eval mode; every tensor must be there, with its shape, and no other.

    Names and shapes are compared before anything is allocated; weights already in dtype stay memory-mapped.
    """
    path = Path(folder) / WEIGHTS
    if cfg.lm_n_blocks + cfg.vit_n_blocks > MOST_BLOCKS:
        blocks = f"lm_n_blocks={cfg.lm_n_blocks} and vit_n_blocks={cfg.vit_n_blocks}"
        raise CheckpointError(f"{Path(folder) / CONFIG}: {blocks} are more than {MOST_BLOCKS} in all")
    try:
        with torch.device("meta"), skip_init():
            model = VisionLanguageModel(cfg, image_token_id)
    except RuntimeError:  # more bytes than 64 bits can count
        keys = ("vit_hidden_dim", "vit_inter_dim", "vit_patch_size", "lm_hidden_dim", "lm_inter_dim", "lm_vocab_size")
        sizes = ", ".join(f"{key}={getattr(cfg, key)}" for key in keys)
        raise CheckpointError(f"{Path(folder) / CONFIG}: no computer holds a model of {sizes}") from None
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if cfg.lm_tie_weights:
        del wanted[EMBEDDING]
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = set(file.keys()) - {INV_FREQ}
            alike = sorted(wanted, key=lambda name: name.split(".")[::-1])  # mapped together, let go of together
            source = {name: name for name in alike}
            if cfg.lm_tie_weights and EMBEDDING in names:  # either name of a tied pair will do, both if they agree
                if HEAD in names and not torch.equal(file.get_tensor(EMBEDDING), file.get_tensor(HEAD)):
                    raise CheckpointError(f"{path}: lm_tie_weights=true, but {EMBEDDING} and {HEAD} differ")
                if HEAD not in names:
                    source[HEAD] = EMBEDDING
                names = (names - {EMBEDDING}) | {HEAD}
            if missing := sorted(wanted.keys() - names):
                raise CheckpointError(f"{path} lacks {len(missing)} tensors that {CONFIG} asks for, first {missing[0]}")
            if surplus := sorted(names - wanted.keys()):
                raise CheckpointError(
                    f"{path} has {len(surplus)} tensors that {CONFIG} has no place for, first {surplus[0]!r}"
                )
            for name, shape in wanted.items():
                if (found := tuple(file.get_slice(source[name]).get_shape())) != shape:
                    raise CheckpointError(f"{path}: {name} is {found}, but {CONFIG} asks for {shape}")
        state = {}
        for name, tensor in tensors(path, source):
            problem = wrong_numbers(tensor, dtype)
            if problem:
                raise CheckpointError(f"{path}: {name} {problem}")
            state[name] = tensor.to(device, dtype)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {WEIGHTS}; a model is a folder with {CONFIG} and {WEIGHTS}") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read, it may be truncated: {error}") from None
    if cfg.lm_tie_weights:
        state[EMBEDDING] = state[HEAD]
    model.load_state_dict(state, assign=True)
    model.decoder.tie_weights()
    if torch.device(device).type == "cpu" and dtype != torch.float32:  # float32 weights stay mapped
        model.decoder.pack_projections()
    return model.eval()


class skip_init(TorchFunctionMode):
    """`with Undrawn():` modules are made without drawing weights, for which torch imports its compiler on meta."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def tensors(path: Path, source: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Of each name the tensor that the file calls source[name], memory-mapped.

    What was read of a mapping stays in memory with it, beside the copies in another dtype: so there are many mappings,
    each of which goes when nobody holds its tensors.
    """
    with open(path, "rb") as first:
        for start in range(0, len(source), AT_ONCE):
            with safe_open(path, framework="pt", device="cpu") as file:
                if not os.path.samestat(os.fstat(first.fileno()), os.stat(path)):
                    raise CheckpointError(f"{path} was replaced while it was read; try again")
                for name in islice(source, start, start + AT_ONCE):
                    yield name, file.get_tensor(source[name])


def checkpoint_dtype(folder: Path) -> torch.dtype:
    """What the weights in folder are stored in; of several dtypes, the smallest that holds them all."""
    with safe_open(Path(folder) / WEIGHTS, framework="pt", device="cpu") as file:
        found = {file.get_tensor(name).dtype for name in set(file.keys()) - {INV_FREQ}}
    return reduce(torch.promote_types, found)


def wrong_numbers(tensor: Tensor, dtype: torch.dtype) -> str:
    """Say why a tensor's numbers can be no weights in dtype: not finite, or none at all. "" where they can.

    Reads the weights once, where they are, and copies nothing.
    """
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return f"is stored as {tensor.dtype}, not as floating-point numbers of 16 bits or more"
    low, high = (bound.item() for bound in tensor.aminmax())  # nan, if any is
    limit = torch.finfo(dtype).max
    if -limit <= low <= high <= limit:
        return ""
    return f"has values from {low} to {high}, but weights must be finite, in {dtype} up to {limit}"


def save_checkpoint(
    folder: str | os.PathLike, model: VisionLanguageModel, tokenizer: str, dtype: torch.dtype | None = None
) -> None:
    """Write model and tokenizer (tokenizer.json's text) as a folder, atomically: see `atomic_dir`, `write_checkpoint_files`."""
    with atomic_dir(folder) as new:
        write_checkpoint_files(new, model, tokenizer, dtype)


def write_checkpoint_files(
    folder: Path, model: VisionLanguageModel, tokenizer: str, dtype: torch.dtype | None = None
) -> None:
    """Write the files of a model so that stock nanoVLM, which is strict, loads them too.

    dtype is what the weights are stored in; None keeps the model's own. transformers' AutoTokenizer, with which stock
    reads the tokenizer, learns from a fourth file what config.json says to us; then lm_tokenizer can be the folder.
    """
    state = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in model.state_dict().items()}
    metadata = {"format": "pt"}
    if model.cfg.lm_tie_weights:
        del state[EMBEDDING]
        metadata[EMBEDDING] = HEAD
    state[INV_FREQ] = inverse_frequencies(model.cfg.lm_head_dim, model.cfg.lm_re_base)
    save_file(state, folder / WEIGHTS, metadata)
    tokenizer_config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": model.cfg.end_token}
    tokenizer_config |= {"extra_special_tokens": model.cfg.special_tokens, "chat_template": model.cfg.lm_chat_template}
    (folder / TOKENIZER).write_text(tokenizer, encoding="utf-8")
    for name, values in ((CONFIG, model.cfg.to_dict()), (TOKENIZER_CONFIG, tokenizer_config)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


@contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """`with atomic_write(path) as new:` write the file `new`; it replaces `path` at the end, or vanishes after an error.

    `new` is in the folder of `path`, which must exist, and has the same suffix. The mode follows the umask.
    """
    path = Path(path)
    new = _temporary_name(path)
    new.touch(exist_ok=False)
    mode = new.stat().st_mode
    try:
        yield new
        _finish_file(new, mode)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def atomic_dir(path: str | os.PathLike) -> Iterator[Path]:
    """`with atomic_dir(path) as new:` fill the folder `new`; it becomes `path` at the end, or vanishes after an error.

    If `path` exists already, its files of the same names are replaced one by one, each atomically, and others stay.
    Modes follow the umask.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _temporary_name(path)
    new.mkdir()
    try:
        yield new
        for file in new.iterdir():
            _finish_file(file, new.stat().st_mode & 0o666)
        if path.exists():
            for file in new.iterdir():
                os.replace(file, path / file.name)
        else:
            os.rename(new, path)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _temporary_name(path: Path) -> Path:
    """A hidden name beside path that nobody uses. tempfile's files would be private instead of following the umask."""
    return path.with_name(f".{secrets.token_hex(8)}.tmp{path.suffix}")


def _finish_file(file: Path, mode: int) -> None:
    """Give file its mode, which safetensors makes private, and store it on the disk."""
    file.chmod(mode)
    with open(file, "r+b") as handle:
        os.fsync(handle.fileno())
