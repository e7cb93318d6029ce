"""The decode step compiled ahead of time: one package per shape, precision, machine and thread count, in a cache.

A package holds no weights, so all models of a shape share it. Compiling takes a minute or two and a C++ compiler,
loading a tenth of a second. Code for a fixed number of threads is 5% to 7% faster than code that asks for the number
when it runs, so packages for several numbers stand side by side. Without one for the current number, a package for
fewer threads is used.
"""

import hashlib
import json
import logging
import os
import platform
from pathlib import Path

import torch
from torch import nn

from models import language_model
from models.checkpoint import atomic_write
from models.errors import CompileError
from models.inference import decode_step
from models.inference.cpu_kernels import (
    OneDNNLinear,
    check_compiler,
    cpu_info,
    load_aoti_package,
    packages_read_weights_in_place,
    save_aoti_package,
)
from models.inference.decode_step import DecodeStep
from models.inference.fused_decode_step import DecodeFunction
from models.inference.quantization import Int8Linear
from models.language_model import LanguageModel

logger = logging.getLogger(__name__)

SHAPE_FIELDS = (
    "lm_hidden_dim", "lm_inter_dim", "lm_n_heads", "lm_n_kv_heads", "lm_n_blocks", "lm_vocab_size", "lm_rms_eps",
    "lm_re_base", "lm_attn_scaling",
)  # fmt: skip
KNOWN_MODULES = {
    *(type_ for type_ in vars(language_model).values() if isinstance(type_, type)),
    nn.Linear, nn.Embedding, nn.Dropout, nn.ModuleList, OneDNNLinear, Int8Linear,
}  # fmt: skip


def package_path(decoder: LanguageModel) -> Path:
    """The path of the package for a decoder of this shape and precision on this machine, with the current thread count.

    The folder is $NANOVLM_CACHE, or nanovlm in $XDG_CACHE_HOME or ~/.cache.
    """
    given = os.environ.get("NANOVLM_CACHE")
    folder = Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nanovlm"))
    return folder / f"decode-{_shape(decoder)}-{_digest(_environment())}-{torch.get_num_threads()}t.pt2"


def _shape(decoder: LanguageModel) -> str:
    fields = [(name, getattr(decoder.cfg, name)) for name in SHAPE_FIELDS]
    state = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in decoder.state_dict().items()]
    return _digest([fields, sorted(state)])


def _environment() -> dict[str, str]:
    """What compiled code depends on besides the decoder's shape, with names for messages."""
    sources = [Path(str(module.__file__)).read_text("utf-8") for module in (decode_step, language_model)]
    return {
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _digest(cpu_info("flags")),
        "code": _digest(sources),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


@torch.no_grad()
def compile_decode(decoder: LanguageModel) -> Path:
    """Compile the decode step into the cache and return its path. Raises CompileError if that is not possible."""
    from torch.export import Dim, export

    if decoder.norm.weight.device.type != "cpu":
        raise CompileError("the decode step is compiled ahead of time for CPUs only; use InferenceModel(compile=True)")
    if other := [type(module).__name__ for module in decoder.modules() if type(module) not in KNOWN_MODULES]:
        raise CompileError(f"a language model with {other[0]} modules cannot be compiled; merge adapters first")
    try:
        check_compiler()
    except RuntimeError:
        raise CompileError("compiling needs a C++ compiler: install g++, or leave compile away") from None
    if not packages_read_weights_in_place():
        raise CompileError(f"compiling needs a newer torch than {torch.__version__}; upgrade it, or leave compile away")
    cfg, like, path = decoder.cfg, decoder.norm.weight, package_path(decoder)
    cache = [[like.new_zeros(1, cfg.lm_n_kv_heads, 64, cfg.lm_head_dim) for _ in decoder.blocks] for _ in range(2)]
    capacity = [{2: Dim("capacity", min=2)}] * len(decoder.blocks)
    inputs = (torch.tensor([0]), torch.tensor([3]), *cache)
    program = export(DecodeStep(decoder).eval(), inputs, dynamic_shapes=(None, None, capacity, capacity))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as new:
        save_aoti_package(program, new)
    with atomic_write(path.with_suffix(".json")) as new:
        new.write_text(json.dumps(_environment(), indent=2) + "\n", encoding="utf-8")
    return path


def load_compiled_decode(decoder: LanguageModel) -> DecodeFunction | None:
    """The compiled decode step from the cache, reading the decoder's weights in place; None if there is none.

    A package that does not fit or cannot be loaded is logged with the reason.
    """
    if any(type(module) not in KNOWN_MODULES for module in decoder.modules()):
        return None
    wanted = package_path(decoder)
    path = wanted if wanted.exists() else _with_fewer_threads(wanted)
    if path is None:
        _log_miss(decoder, wanted)
        return None
    if path != wanted:
        logger.info(
            "%s was compiled for another number of threads than %d, but is used; compile again for the full speed",
            path, torch.get_num_threads(),
        )  # fmt: skip
    try:
        return load_aoti_package(path, DecodeStep(decoder).state_dict())
    except (RuntimeError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        logger.warning("%s is not a usable package (%s); decoding goes without it: delete it", path, reason)
        return None


def _with_fewer_threads(wanted: Path) -> Path | None:
    """The package like the wanted one, but for the next lower number of threads; a higher one would slow it down."""
    stem, _, threads = wanted.stem.rpartition("-")
    for fewer in range(int(threads.removesuffix("t")) - 1, 0, -1):
        path = wanted.with_name(f"{stem}-{fewer}t.pt2")
        if path.exists():
            return path
    return None


def _log_miss(decoder: LanguageModel, wanted: Path) -> None:
    """If the cache holds packages of this shape that do not fit, say why the one that differs least does not."""
    differences = []
    for path in wanted.parent.glob(f"decode-{_shape(decoder)}-*.json"):
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            continue
        differs = [
            f"{name} {found.get(name)} instead of {value}"
            for name, value in _environment().items()
            if found.get(name) != value
        ]
        threads = path.stem.rpartition("-")[2].removesuffix("t")
        differs += [f"{threads} threads instead of {torch.get_num_threads()}"] * (not differs)
        differences.append((len(differs), path.with_suffix(".pt2"), ", ".join(differs)))
    if differences:
        _, path, reason = min(differences)
        logger.info("no compiled decode step fits; %s was compiled for %s. `nanovlm compile` makes one", path, reason)
