"""The decoder block compiled ahead of time: one package per shape, precision, machine and thread count, in a cache.

The weights are inputs. One package therefore serves all blocks of a model and all models with blocks of that shape, and
follows every change of the weights. Compiling needs a C++ compiler and takes up to a minute, loading a few
milliseconds. Code for a fixed number of threads is 5% to 7% faster than code that asks for the number when it runs, so
packages for several numbers stand side by side. Without one for the current number, a package for fewer threads is
used.
"""

import json
import logging
import platform
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from models import language_model
from models.checkpoint import atomic_write
from models.config import VLMConfig
from models.errors import CompileError
from models.inference import compiled_ops, decode_step
from models.inference.compile_cache import cache_folder, digest
from models.inference.cpu_kernels import (
    OneDNNLinear,
    check_compiler,
    cpu_info,
    load_aoti_package,
    save_aoti_package,
)
from models.inference.decode_step import BlockFunction, DecodeStep, decode_block
from models.inference.fused_prefill import FusedBlock
from models.inference.int8_blocks import Int8Block, Int8Head
from models.inference.quantization import Int8Linear, quantizer
from models.language_model import Block, LanguageModel

logger = logging.getLogger(__name__)

KNOWN_MODULES = {
    *(type_ for type_ in vars(language_model).values() if isinstance(type_, type)),
    nn.Linear, nn.Embedding, nn.Dropout, nn.ModuleList, OneDNNLinear, Int8Linear, FusedBlock,
    Int8Block, Int8Head,
}  # fmt: skip


def package_path(block: Block) -> Path:
    """The path of the package for a block of this shape and precision on this machine, with the current thread count.

    The folder is $NANOVLM_CACHE, or nanovlm in $XDG_CACHE_HOME or ~/.cache.
    """
    return cache_folder() / f"block-{_shape(block)}-{digest(_environment())}-{torch.get_num_threads()}t.pt2"


def _shape(block: Block) -> str:
    attn = block.attn
    state = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in block.state_dict().items()]
    return digest([attn.n_heads, attn.n_kv_heads, block.norm1.eps, block.norm2.eps, sorted(state)])


def _environment() -> dict[str, str]:
    """What compiled code depends on besides the block's shape, with names for messages."""
    paths = decode_step.__file__, language_model.__file__, *compiled_ops.SOURCES  # these are compiled first
    sources = [Path(str(path)).read_text("utf-8") for path in paths]
    return {
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": digest(cpu_info("flags")),
        "code": digest(sources),
    }


def is_compilable(decoder: LanguageModel) -> bool:
    """Whether one compiled block can stand for all blocks of a decoder."""
    known = all(type(module) in KNOWN_MODULES for module in decoder.modules())
    return known and len({_shape(block) for block in decoder.blocks}) == 1


class BlockStep(nn.Module):
    """`decode_block` with the block's weights as inputs, in the order of its state dict, after the others."""

    def __init__(self, block: Block):
        super().__init__()
        self.names = list(block.state_dict())
        self._block = [_BlockForward(block)]  # in a list, so that its weights are not exported as this module's own

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, key: Tensor, value: Tensor, *weights: Tensor
    ) -> Tensor:
        state = {f"block.{name}": weight for name, weight in zip(self.names, weights)}
        return functional_call(self._block[0], state, (x, cos, sin, position, key, value))


class _BlockForward(nn.Module):
    def __init__(self, block: Block):
        super().__init__()
        self.block = block

    def forward(self, *inputs: Tensor) -> Tensor:
        return decode_block(self.block, *inputs)


@torch.no_grad()
def compile_block(block: Block) -> Path:
    """Compile the decode step of a block into the cache and return its path. CompileError if that is not possible."""
    from torch.export import Dim, export

    if block.norm1.weight.device.type != "cpu":
        raise CompileError("blocks are compiled ahead of time for CPUs only; use InferenceModel(compile=True)")
    if other := [type(module).__name__ for module in block.modules() if type(module) not in KNOWN_MODULES]:
        raise CompileError(f"a language model with {other[0]} modules cannot be compiled; merge adapters first")
    try:
        check_compiler()
    except RuntimeError:
        raise CompileError("compiling needs a C++ compiler: install g++, or leave compile away") from None
    attn, like, path = block.attn, block.norm1.weight, package_path(block)
    cache = [like.new_zeros(1, attn.n_kv_heads, 64, attn.head_dim) for _ in range(2)]
    angles = [torch.zeros(attn.head_dim // 2) for _ in range(2)]
    weights = [weight.detach() for weight in block.state_dict().values()]
    inputs = (torch.zeros(len(like)), *angles, torch.tensor([3]), *cache, *weights)
    capacity = {2: Dim("capacity", min=2)}
    shapes = (None, None, None, None, capacity, capacity, (None,) * len(weights))
    program = export(BlockStep(block).eval(), inputs, dynamic_shapes=shapes, strict=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as new:
        save_aoti_package(program, new)
    with atomic_write(path.with_suffix(".json")) as new:
        new.write_text(json.dumps(_environment(), indent=2) + "\n", encoding="utf-8")
    return path


def compile_for_config(cfg: VLMConfig, dtype: torch.dtype, quantize: str | None = None) -> Path:
    """The path of the package for models of a config, compiled now if it is missing; their weights are not needed."""
    block = Block(cfg).to(dtype)
    if quantize:
        quantizer(quantize)(block)
    path = package_path(block)
    return path if path.exists() else compile_block(block)


def load_compiled_decode(decoder: LanguageModel) -> DecodeStep | None:
    """The decode step with the compiled block from the cache, which reads the weights in place; None if there is none.

    A package that does not fit or cannot be loaded is logged with the reason.
    """
    if not is_compilable(decoder):
        return None
    wanted = package_path(decoder.blocks[0])
    path = wanted if wanted.exists() else _with_fewer_threads(wanted)
    if path is None:
        _log_miss(decoder.blocks[0], wanted)
        return None
    if path != wanted:
        logger.info(
            "%s was compiled for another number of threads than %d, but is used; compile again for the full speed",
            path, torch.get_num_threads(),
        )  # fmt: skip
    try:
        package = load_aoti_package(path)
    except (RuntimeError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        logger.warning("%s is not a usable package (%s); decoding goes without it: delete it", path, reason)
        return None
    return DecodeStep(decoder, [_compiled_block(package, block) for block in decoder.blocks])


def _compiled_block(package: Callable[[list[Tensor]], Tensor], block: Block) -> BlockFunction:
    weights = [weight.detach() for weight in block.state_dict().values()]
    return lambda x, cos, sin, position, key, value: package([x, cos, sin, position, key, value, *weights])


def _with_fewer_threads(wanted: Path) -> Path | None:
    """The package like the wanted one, but for the next lower number of threads; a higher one would slow it down."""
    stem, _, threads = wanted.stem.rpartition("-")
    for fewer in range(int(threads.removesuffix("t")) - 1, 0, -1):
        path = wanted.with_name(f"{stem}-{fewer}t.pt2")
        if path.exists():
            return path
    return None


def _log_miss(block: Block, wanted: Path) -> None:
    """If the cache holds packages of this shape that do not fit, say why the one that differs least does not."""
    differences = []
    for path in wanted.parent.glob(f"block-{_shape(block)}-*.json"):
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
        logger.info("no compiled block fits; %s was compiled for %s. `nanovlm compile` makes one", path, reason)
