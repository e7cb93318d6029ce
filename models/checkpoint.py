"""Checkpoint folders: config.json, model.safetensors and tokenizer.json; read strictly, written atomically.

This module knows state dicts, not model classes; `VisionLanguageModel.from_pretrained` and `save_pretrained` use it.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.config import VLMConfig
from models.errors import CheckpointError
from models.formats import smolvlm
from models.language_model import inverse_frequencies

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
INDEX = "model.safetensors.index.json"
TOKENIZER_CONFIG = "tokenizer_config.json"  # written for stock nanoVLM, see write_checkpoint_files
# Without this, transformers 4 adds token_type_ids, which no model here takes.
MODEL_INPUT_NAMES = ["input_ids", "attention_mask"]
MAX_MAPPED_TENSORS = 8  # of one mapping of the file
MAX_BLOCKS = 1000  # the deepest models have a few hundred; refusing a million by building it would take an hour
HEAD, EMBEDDING, INV_FREQ = "decoder.head.weight", "decoder.token_embedding.weight", "decoder.rotary_embd.inv_freq"
NOWHERE = "none"  # lm_tokenizer of a model whose tokenizer is in its own folder only
NO_IMAGE_TOKEN = -1  # nanoVLM v0.1 has no token for images

Shapes = Mapping[str, tuple[int, ...]]


class HasWeights(Protocol):
    """A model as `save_checkpoint` sees it."""

    @property
    def cfg(self) -> VLMConfig: ...
    def state_dict(self) -> dict[str, Any]: ...


def snapshot_path(
    name_or_folder: str | os.PathLike,
    revision: str | None = None,
    files: Sequence[str] = (CONFIG, "*.safetensors", INDEX, TOKENIZER, *smolvlm.OTHER_FILES),
) -> Path:
    """The local folder of a model: the folder itself, or the snapshot of a Hub id, downloaded unless it is cached."""
    folder = Path(name_or_folder)
    name = str(name_or_folder)
    if folder.is_dir():
        if revision:
            raise CheckpointError(f"{name} is a folder, which has no revision {revision!r}; leave revision away")
        return folder
    if folder.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        kind = "a file, not a folder" if folder.exists() else "neither a folder nor a Hub id like owner/name"
        raise CheckpointError(f"{name}: {kind}; pass a folder with {CONFIG} and {WEIGHTS}")

    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # of many kinds, from DNS to disk
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{name}: no such folder, and the Hub could not be reached or has no such model ({reason}); "
            "if you are offline, pass a local folder instead"
        ) from error


def load_config(folder: str | os.PathLike) -> VLMConfig:
    """The config of the model in folder. Raises CheckpointError if it cannot be used."""
    path = Path(folder) / CONFIG
    raw = read_object(path)
    if raw.get("model_type") in smolvlm.MODEL_TYPES:
        return _load_smolvlm_config(Path(folder))
    if "model_type" in raw and "lm_hidden_dim" not in raw:
        raise CheckpointError(
            f"{path}: model_type={raw['model_type']!r} is not supported; nanoVLM's own config.json and those of "
            f"transformers' {' and '.join(smolvlm.MODEL_TYPES)} are"
        )
    try:
        return VLMConfig.from_dict(raw)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _load_smolvlm_config(folder: Path) -> VLMConfig:
    files = {}
    for name in (CONFIG, *smolvlm.OTHER_FILES):
        try:
            if (folder / name).exists():
                files[name] = read_model_text(folder / name)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from None
    try:
        return smolvlm.config_from_files(files)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def read_object(path: Path) -> dict:
    """The object in a JSON file of a model's folder. Raises CheckpointError if there is none."""
    check_regular_file(path)
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


def read_model_text(path: Path) -> str:
    """The text of a file in a model's folder, which must be a regular file: opening a pipe may block forever."""
    check_regular_file(path)
    return path.read_text(encoding="utf-8")


def check_regular_file(path: Path) -> None:
    """Raise CheckpointError for a pipe, a device or a folder in the place of a model's file."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise CheckpointError(f"{path} is {kind}, not a regular file; copy the model's files there")


def find_image_token_id(folder: str | os.PathLike, cfg: VLMConfig) -> int:
    """The id of the image token: from tokenizer.json, or without one by nanoVLM's rule for extra tokens.

    A tokenizer.json of lm_base_vocab_size tokens is a backbone's own and is read as if the extra tokens followed.
    NO_IMAGE_TOKEN if cfg names none. Raises CheckpointError if the tokenizer does not know the token.
    """
    if cfg.vlm_extra_tokens is None:
        return NO_IMAGE_TOKEN
    token, path = cfg.vlm_extra_tokens["image_token"], Path(folder) / TOKENIZER
    if not path.exists():  # the extra tokens follow the base vocabulary, in their order
        base = cfg.lm_vocab_size if cfg.lm_base_vocab_size is None else cfg.lm_base_vocab_size
        return base + list(cfg.vlm_extra_tokens).index("image_token")
    raw = read_object(path)
    try:
        ids = {entry["content"]: entry["id"] for entry in raw.get("added_tokens") or ()}
        vocabulary = raw["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pieces with scores
            vocabulary = {piece: i for i, (piece, _) in enumerate(vocabulary)}
        ids = vocabulary | ids
        image_token_id = ids.get(token)
        if image_token_id is None and is_base_vocabulary(ids, cfg):
            missing = [extra for extra in dict.fromkeys(cfg.special_tokens.values()) if extra not in ids]
            image_token_id = len(ids) + missing.index(token)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a {TOKENIZER} of the tokenizers library: {error!r}") from None
    if type(image_token_id) is not int:
        raise CheckpointError(f"{path}: {missing_token(cfg, 'image_token', len(ids))}")
    if cfg.smolvlm is not None and smolvlm.image_token_id(cfg) != image_token_id:
        raise CheckpointError(
            f"{path}: {token} is {image_token_id}, but {CONFIG} has image_token_id={smolvlm.image_token_id(cfg)}"
        )
    return image_token_id


def is_base_vocabulary(ids: Mapping[str, int], cfg: VLMConfig) -> bool:
    """Whether a tokenizer with these ids is the language model's own, to which stock nanoVLM adds the extra tokens."""
    return len(ids) == cfg.lm_base_vocab_size == max(ids.values(), default=-1) + 1


def missing_token(cfg: VLMConfig, name: str, n_tokens: int) -> str:
    """The message for a tokenizer of n_tokens that lacks an extra token and is not the language model's own."""
    return (
        f"vlm_extra_tokens names {name}={cfg.special_tokens[name]!r}, but the tokenizer has no such token, and with "
        f"{n_tokens} tokens it is not the language model's own of lm_base_vocab_size={cfg.lm_base_vocab_size}"
    )


def read_weights(
    folder: str | os.PathLike,
    cfg: VLMConfig,
    empty: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> dict[str, Tensor]:
    """The state dict of the model in folder, of the names and shapes of `empty`; see `read_state_dict`."""
    tied: tuple[str, str] | None = (EMBEDDING, HEAD)
    expected = dict(empty)
    if cfg.smolvlm is not None:
        tied, expected = (smolvlm.EMBEDDING, smolvlm.HEAD), smolvlm.to_smolvlm(empty)
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    state = read_state_dict(folder, shapes, tied=tied if cfg.lm_tie_weights else None, dtype=dtype, device=device)
    return state if cfg.smolvlm is None else smolvlm.from_smolvlm(state, empty)


def read_state_dict(
    folder: str | os.PathLike,
    shapes: Shapes,
    *,
    tied: tuple[str, str] | None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> dict[str, Tensor]:
    """The tensors of these names and shapes from a folder's safetensors files, which must hold all and no other.

    Names and shapes are compared before anything is allocated. Weights already in dtype stay memory-mapped on a CPU.
    tied names an embedding and a head that are one: the files may hold either or, if they are equal, both. Raises
    CheckpointError.
    """
    wanted = {name: shape for name, shape in shapes.items() if not (tied and name == tied[0])}
    path = Path(folder)
    try:
        files = weight_files(path)
        path = files[0] if len(files) == 1 else path
        state = {}
        for name, tensor in _mapped_tensors(_match_names(files, path, wanted, tied)):
            if reason := why_unusable(tensor, dtype):
                raise CheckpointError(f"{path}: {name} {reason}")
            state[name] = tensor.to(device, dtype)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read, it may be truncated: {error}") from None
    if tied:
        state[tied[0]] = state[tied[1]]
    return state


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors or, if the weights are sharded, the files that model.safetensors.index.json names."""
    if (folder / WEIGHTS).exists():
        check_regular_file(folder / WEIGHTS)
        return [folder / WEIGHTS]
    if (folder / "shards").is_dir():  # of a training run
        raise CheckpointError(f"{folder} is sharded; make a model of it: nanovlm merge {folder} --out FOLDER")
    if not (folder / INDEX).exists():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; {pickled[0]} may run code and is not read: save it as safetensors" if pickled else ""
        raise CheckpointError(f"{folder} has no {WEIGHTS}; a model is a folder with {CONFIG} and {WEIGHTS}{hint}")
    weight_map = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or any(Path(str(n)).name != n for n in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map of tensors to files beside it")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    for file in files:
        check_regular_file(file)
        if not file.exists():
            raise CheckpointError(f"{file} is missing, which {INDEX} names")
    return files


def _match_names(
    files: Sequence[Path], path: Path, wanted: Shapes, tied: tuple[str, str] | None
) -> dict[Path, dict[str, str]]:
    """For each file, each wanted name that it holds with the file's name for it, in the order in which to read them."""
    found: dict[str, Path] = {}
    with ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, framework="pt", device="cpu")) for file in files}
        for file, handle in opened.items():
            found |= dict.fromkeys(set(handle.keys()) - {INV_FREQ}, file)
        source = {name: name for name in wanted}
        if tied and tied[0] in found:
            embedding, head = tied
            if head not in found:
                source[head] = embedding
            elif not torch.equal(*(opened[found[name]].get_tensor(name) for name in tied)):
                key = "lm_tie_weights" if head == HEAD else "tie_word_embeddings"
                raise CheckpointError(f"{path}: {key}=true, but {embedding} and {head} differ")
            file = found.pop(embedding)
            found.setdefault(head, file)
        compare_names(wanted, found, str(path))
        for name, shape in wanted.items():
            stored = tuple(opened[found[name]].get_slice(source[name]).get_shape())
            if stored != shape:
                raise CheckpointError(f"{path}: {name} is {stored}, but {CONFIG} asks for {shape}")
    order = sorted(wanted, key=lambda name: name.split(".")[::-1])  # equal kinds are mapped and released together
    return {file: {name: source[name] for name in order if found[name] == file} for file in files}


def compare_names(wanted: Collection[str], found: Collection[str], path: str) -> None:
    """Raise CheckpointError unless both hold the same names."""
    if missing := sorted(set(wanted) - set(found)):
        raise CheckpointError(f"{path} lacks {len(missing)} tensors that {CONFIG} asks for, first {missing[0]}")
    if surplus := sorted(set(found) - set(wanted)):
        raise CheckpointError(f"{path} has {len(surplus)} tensors that {CONFIG} has no place for, first {surplus[0]!r}")


def _mapped_tensors(files: Mapping[Path, Mapping[str, str]]) -> Iterator[tuple[str, Tensor]]:
    """Each name with the tensor that a file calls files[file][name], memory-mapped.

    What was read of a mapping stays in memory as long as the mapping, beside a copy in another dtype. So there are many
    mappings, and each one ends when its tensors are released.
    """
    for path, source in files.items():
        with open(path, "rb") as first:
            for start in range(0, len(source), MAX_MAPPED_TENSORS):
                with safe_open(path, framework="pt", device="cpu") as file:
                    if not os.path.samestat(os.fstat(first.fileno()), os.stat(path)):
                        raise CheckpointError(f"{path} was replaced while it was read; try again")
                    for name in islice(source, start, start + MAX_MAPPED_TENSORS):
                        yield name, file.get_tensor(source[name])


def checkpoint_dtype(folder: str | os.PathLike) -> torch.dtype:
    """The dtype of the weights in folder; of several, the smallest that can represent them all."""
    dtypes = set()
    for path in weight_files(Path(folder)):
        with safe_open(path, framework="pt", device="cpu") as file:
            dtypes |= {file.get_tensor(name).dtype for name in set(file.keys()) - {INV_FREQ}}
    return reduce(torch.promote_types, dtypes)


def why_unusable(tensor: Tensor, dtype: torch.dtype) -> str:
    """Why the values of a tensor cannot be weights in dtype: not finite, or not floating-point. "" if they can.

    Reads the values once, in place, and copies nothing.
    """
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return f"is stored as {tensor.dtype}, not as floating-point numbers of 16 bits or more"
    low, high = (bound.item() for bound in tensor.aminmax())  # nan, if any is
    limit = torch.finfo(dtype).max
    if -limit <= low <= high <= limit:
        return ""
    return f"has values from {low} to {high}, but weights must be finite, in {dtype} up to {limit}"


def save_checkpoint(
    folder: str | os.PathLike, model: HasWeights, tokenizer: str | None, dtype: torch.dtype | None = None
) -> None:
    """Write a model's folder atomically; see `write_checkpoint_files` and `atomic_dir`."""
    with atomic_dir(folder) as new:
        write_checkpoint_files(new, model, tokenizer, dtype)


def write_checkpoint_files(
    folder: Path,
    model: HasWeights,
    tokenizer: str | None,
    dtype: torch.dtype | None = None,
    home: str | None = None,
) -> None:
    """Write config, weights and tokenizer so that stock nanoVLM, which is strict, loads them too.

    dtype is that of the stored weights; None keeps the model's. A model in SmolVLM's layout is written in that layout.
    See `write_settings` for the rest.
    """
    cfg = model.cfg
    state = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in model.state_dict().items()}
    write_settings(folder, cfg, tokenizer, state[HEAD].dtype, home)
    metadata = {"format": "pt"}
    if cfg.smolvlm is not None:
        state = {name: tensor.contiguous() for name, tensor in smolvlm.to_smolvlm(state).items()}
        if cfg.lm_tie_weights:
            del state[smolvlm.HEAD]
    else:
        if cfg.lm_tie_weights:
            del state[EMBEDDING]
            metadata[EMBEDDING] = HEAD
        state[INV_FREQ] = inverse_frequencies(cfg.lm_head_dim, cfg.lm_re_base)
    save_tensors(state, folder / WEIGHTS, metadata)


def write_settings(
    folder: Path, cfg: VLMConfig, tokenizer: str | None, dtype: torch.dtype, home: str | None = None
) -> None:
    """Write what a model's folder holds beside weights in dtype.

    tokenizer is the text of tokenizer.json; None writes no tokenizer. Stock reads the tokenizer by transformers'
    AutoTokenizer, which needs a tokenizer_config.json. It looks for lm_tokenizer, which becomes home, the folder's
    final path, if home is given, unless it is a Hub id already. In SmolVLM's layout the other files that the model was
    read with are written, too.
    """
    objects: dict[str, dict] = {}
    if cfg.smolvlm is not None:
        texts = cfg.smolvlm.files | {CONFIG: smolvlm.config_text(cfg, dtype)}
    else:
        config = cfg.to_dict()
        objects = {CONFIG: config if tokenizer is None or home is None else with_tokenizer_at(home, config)}
        if tokenizer is not None:
            objects[TOKENIZER_CONFIG] = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_input_names": MODEL_INPUT_NAMES,
                "eos_token": cfg.end_token,
                "extra_special_tokens": cfg.special_tokens,
                "chat_template": cfg.lm_chat_template,
            }
        texts = {name: json.dumps(values, indent=2) + "\n" for name, values in objects.items()}
    for name, text in (texts | ({} if tokenizer is None else {TOKENIZER: tokenizer})).items():
        (folder / name).write_text(text, encoding="utf-8")


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """safetensors' `save_file`, whose bytes depend on the arguments alone.

    safetensors itself writes the keys of the metadata in another order in every process.
    """
    save_file(tensors, path, dict(metadata))
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        file.seek(8)
        file.write(text.ljust(size))  # safetensors pads with spaces, too


def with_tokenizer_at(home: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The object of a config.json whose lm_tokenizer stock nanoVLM finds: home, unless it is a Hub id already."""
    name = config["lm_tokenizer"]
    on_hub = name != NOWHERE and not Path(name).exists() and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)
    return {**config, "lm_tokenizer": name if on_hub else home}


def upload_checkpoint(
    folder: Path,
    repo_id: str,
    *,
    card: str | None = None,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> str:
    """Upload the model's files in folder, and no other, to the Hub as one commit; returns the commit's URL.

    The repository owner/name, and the branch named by revision, are created if needed. card is the text of README.md.
    Without token, that of `hf auth login` is used.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    known = dict.fromkeys((WEIGHTS, TOKENIZER, TOKENIZER_CONFIG, *smolvlm.OTHER_FILES))
    names = [name for name in known if (folder / name).is_file()]
    config = read_object(folder / CONFIG)
    if TOKENIZER in names and "lm_tokenizer" in config:
        config = with_tokenizer_at(repo_id, config)
    operations = [CommitOperationAdd(CONFIG, (json.dumps(config, indent=2) + "\n").encode("utf-8"))]
    operations += [CommitOperationAdd(name, str(folder / name)) for name in names]
    if card is not None:
        operations.append(CommitOperationAdd("README.md", card.encode("utf-8")))
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return api.create_commit(repo_id, operations, commit_message="Upload model", revision=revision).commit_url


@contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """`with atomic_write(path) as new:` write the file `new`; it replaces `path` at the end and vanishes on an error.

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
    """`with atomic_dir(path) as new:` fill the folder `new`, which becomes `path` at the end and vanishes on an error.

    If `path` exists already, its files of the same names are replaced one by one, each atomically, and others stay;
    so are those of subfolders. Modes follow the umask.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _temporary_name(path)
    new.mkdir()
    try:
        yield new
        files = [file for file in new.rglob("*") if file.is_file()]
        for file in files:
            _finish_file(file, new.stat().st_mode & 0o666)
        if path.exists():
            for file in files:
                target = path / file.relative_to(new)
                target.parent.mkdir(exist_ok=True)
                os.replace(file, target)
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
