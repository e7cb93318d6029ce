"""`models.inference.eager_ops` in C: attention, and operations in one pass over their rows instead of up to fifteen.

A prefill of few tokens spends as much time on starting PyTorch's operations as on its products. `nanovlm compile` and
InferenceModel(compile=True) build a library with the system's C compiler, which takes a second, and keep it in the
cache beside the compiled blocks. Without it the operations are PyTorch's.
"""

import ctypes
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from models.checkpoint import atomic_write
from models.errors import CompileError
from models.inference.compile_cache import cache_folder, digest
from models.inference.cpu_kernels import cpu_info, fast_linear
from models.inference.eager_ops import Codes, EagerOps, Rows

logger = logging.getLogger(__name__)

SOURCES = [Path(__file__).with_name(name) for name in ("compiled_ops.h", "compiled_ops.c", "compiled_products.c")]
MAX_COLUMNS = 112  # of a compiled product; with more, reading the weight is a small part
MIN_TILE_COLUMNS = 17  # fewer fill one of two tiles
MIN_WEIGHT_ROWS = 32  # as many as the product computes at a time
MAX_KEYS = 4096  # of compiled attention: the scores of a block of queries leave the processor's cache beyond
FLAGS = [
    "-O3", "-march=native", "-mprefer-vector-width=512", "-ffast-math", "-fopenmp", "-shared", "-fPIC",
    "-Wl,--as-needed",
    "-nostartfiles",  # those of -ffast-math make the whole process flush denormal numbers to zero
]  # fmt: skip
POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
SIGNATURES = {  # the result, then the arguments
    "has_tiles": (INT,),
    "attention": (None, *[POINTER] * 4, *[LONG * 3] * 3, INT, INT, *[LONG] * 6, INT),
    "product": (None, POINTER, POINTER, LONG, *[POINTER] * 3, INT, INT, LONG, LONG, INT),
    "quantize_rows": (None, POINTER, INT, FLOAT, POINTER, POINTER, LONG, LONG, INT),
    "quantize_tensor": (FLOAT, POINTER, INT, POINTER, LONG, LONG, INT),
    "add_rms_norm": (None, *[POINTER] * 4, FLOAT, *[POINTER] * 3, LONG, LONG, INT),
    "add_layer_norm": (FLOAT, *[POINTER] * 4, FLOAT, *[POINTER] * 2, LONG, LONG, INT),
    "add_rows": (None, *[POINTER] * 4, LONG, LONG, INT),
    "swiglu": (None, POINTER, INT, *[POINTER] * 3, LONG, LONG, INT),
    "silu_mul": (None, *[POINTER] * 2, INT, LONG, LONG, INT),
    "add_gelu": (None, *[POINTER] * 2, LONG, LONG, INT),
    "layer_norm": (None, *[POINTER] * 3, INT, FLOAT, POINTER, LONG, LONG, INT),
    "rope": (None, *[POINTER] * 7, INT, *[LONG] * 5, INT),
    "int8_gemv": (None, POINTER, INT, *[POINTER] * 3, LONG, LONG, INT),
    "rms_norm_columns": (None, *[POINTER] * 2, FLOAT, POINTER, INT, LONG, LONG, INT),
    "rope_columns": (None, *[POINTER] * 6, INT, *[LONG] * 5, INT),
}


def can_compile_ops() -> bool:
    """Whether this processor is of the kind that the library is written for: x86-64 with AVX512, on Linux."""
    return {"avx512f", "avx512bw", "avx512vl"} <= set(cpu_info("flags").split())


def library_path() -> Path:
    """The path of the library for this source, processor and PyTorch, whose OpenMP it shares."""
    made_of = [source.read_text("utf-8") for source in SOURCES], FLAGS, cpu_info("flags"), torch.__version__
    return cache_folder() / f"ops-{digest(made_of)}.so"


def compile_ops() -> Path:
    """Compile the library unless that was done before, and return its path. CompileError if that is not possible."""
    path = library_path()
    if path.exists():
        return path
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise CompileError("compiling needs a C compiler: install gcc, or leave compile away")
    openmp = [str(library) for library in Path(torch.__file__).with_name("lib").glob("libgomp*.so*")]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as new:
        command = [*compiler.split(), *FLAGS, "-o", str(new), *map(str, SOURCES[1:]), *openmp, "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if result.returncode:
            raise CompileError(f"{compiler} cannot compile {SOURCES[0].parent}: {result.stderr.strip()[:500]}")
    return path


def load_ops(compile: bool | None = None) -> EagerOps:
    """The operations: compiled now if need be and compile is True, PyTorch's if it is False; None: if in the cache."""
    if compile is False or not can_compile_ops():
        return EagerOps()
    path = compile_ops() if compile else library_path()
    try:
        return CompiledOps(path) if path.exists() else EagerOps()
    except (OSError, AttributeError) as error:  # damaged, or of another system
        logger.warning("%s is not a usable library (%s); int8 goes without it: delete it", path, error)
        return EagerOps()


@cache
def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, (result, *arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class CompiledOps(EagerOps):
    def __init__(self, path: Path):
        self._library = _load(path)
        self._product_dtypes = {torch.float32} | ({torch.bfloat16} if self._library.has_tiles() else set())

    def __reduce__(self) -> tuple:
        return load_ops, ()

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        (B, H, T, D), (_, H_kv, S, _) = q.shape, k.shape
        if mask is not None or T == 1 or D % 2 or S > MAX_KEYS or q.dtype not in self._product_dtypes:
            return super().attention(q, k, v, mask, causal)
        out, half = q.new_empty(B, T, H * D), q.dtype == torch.bfloat16
        strides = [(LONG * 3)(*x.stride()[:3]) for x in (q, k, v)]
        pointers, sizes = [x.data_ptr() for x in (q, k, v, out)], (B, H, H_kv, T, S, D)
        self._library.attention(*pointers, *strides, half, causal, *sizes, torch.get_num_threads())
        return out

    def product(self, weights: Sequence[Tensor], x: Tensor, residual: Tensor | None = None) -> Tensor:
        if not self._can_multiply(weights, x):
            return super().product(weights, x, residual)
        (n, depth), by_rows, half = x.shape, x.is_contiguous(), x.dtype == torch.bfloat16
        rows = (LONG * len(weights))(*map(len, weights))
        out, pointers = x.new_empty(sum(rows), n), (POINTER * len(weights))(*[weight.data_ptr() for weight in weights])
        added = 0 if residual is None else _at(residual)
        sizes = half, by_rows, depth, n, torch.get_num_threads()
        self._library.product(pointers, rows, len(weights), x.data_ptr(), added, _at(out), *sizes)
        return out

    def _can_multiply(self, weights: Sequence[Tensor], x: Tensor) -> bool:
        (n, depth), adjacent = x.shape, x.is_contiguous() or x.t().is_contiguous()
        fits_tiles = x.dtype != torch.bfloat16 or (depth % 32 == 0 and n >= MIN_TILE_COLUMNS)
        fits = adjacent and n <= MAX_COLUMNS and fits_tiles and x.dtype in self._product_dtypes
        return fits and all(len(weight) >= MIN_WEIGHT_ROWS and weight.is_contiguous() for weight in weights)

    def layer_norm(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        if x.dtype != torch.bfloat16 or norm.weight.dtype != x.dtype:  # in float32 PyTorch's is as fast
            return super().layer_norm(x, norm)
        out, rows = torch.empty_like(x), x.flatten(0, -2)
        self._library.layer_norm(_at(x), _at(norm.weight), _at(norm.bias), True, norm.eps, _at(out), *_size(rows))
        return out

    def linear_gelu(self, x: Tensor, linear: nn.Linear) -> Tensor:
        if x.dtype != torch.float32 or linear.bias is None:  # in bfloat16 oneDNN's own is as fast
            return super().linear_gelu(x, linear)
        y = fast_linear(x, linear.weight, None)
        self._library.add_gelu(_at(y), _at(linear.bias), *_size(y.flatten(0, -2)))
        return y

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        self._library.silu_mul(_at(gate), _at(up), gate.dtype == torch.bfloat16, *_size(gate))
        return gate

    def quantize_rows(self, x: Tensor, lowest: float | None = None) -> Rows:
        codes, scale = _rows_like(x)
        half, smallest = x.dtype == torch.bfloat16, -(lowest or 0)
        self._library.quantize_rows(_at(x), half, smallest, _at(codes), _at(scale), *_size(x))
        return codes, scale

    def quantize_tensor(self, x: Tensor) -> Codes:
        codes = torch.empty(x.shape, dtype=torch.uint8)
        return codes, self._library.quantize_tensor(_at(x), x.dtype == torch.bfloat16, _at(codes), *_size(x))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Rows:
        codes, scale = _rows_like(x)
        self._library.add_rms_norm(_at(x), 0, 0, _at(weight), eps, 0, _at(codes), _at(scale), *_size(x))
        return codes, scale

    def add_rms_norm(self, x: Tensor, y: Tensor, scale: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Rows]:
        total, rows = torch.empty_like(x), _rows_like(x)
        pointers = [_at(tensor) for tensor in (total, *rows)]
        self._library.add_rms_norm(_at(x), _at(y), _at(scale), _at(weight), eps, *pointers, *_size(x))
        return total, rows

    def swiglu(self, gate_up: Tensor, scale: Tensor) -> Rows:
        codes, new_scale = _rows_like(gate_up, gate_up.size(1) // 2)
        half = gate_up.dtype == torch.bfloat16
        self._library.swiglu(_at(gate_up), half, _at(scale), _at(codes), _at(new_scale), *_size(codes))
        return codes, new_scale

    def rope(
        self, heads: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, n_heads: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        (n_q, n_kv), (T, D), M = n_heads, cos.shape, len(heads)
        q, k, v = (torch.empty(M, n, D, dtype=dtype) for n in (n_q, n_kv, n_kv))
        pointers = [_at(tensor) for tensor in (heads, scale, cos, sin, q, k, v)]
        self._library.rope(*pointers, dtype == torch.bfloat16, M, T, n_q, n_kv, D, torch.get_num_threads())
        return q, k, v

    def int8_gemv(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        y, half = x.new_empty(1, len(weight)), x.dtype == torch.bfloat16
        self._library.int8_gemv(_at(x), half, _at(weight), _at(scale), _at(y), *_size(weight))
        return y

    def rms_norm_columns(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, half = torch.empty_like(x), x.dtype == torch.bfloat16
        self._library.rms_norm_columns(_at(x), _at(weight), eps, _at(out), half, *_size(x))
        return out

    def rope_columns(
        self, heads: Tensor, cos: Tensor, sin: Tensor, n_heads: tuple[int, int], batch_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = (angle.reshape(-1, angle.size(-1)) for angle in (cos, sin))  # of T rows, or of B * T
        (n_q, n_kv), (T, D), M = n_heads, cos.shape, heads.size(1)
        q, k, v = (heads.new_empty(batch_size, M // batch_size, n, D) for n in (n_q, n_kv, n_kv))
        pointers, half = [_at(tensor) for tensor in (heads, cos, sin, q, k, v)], heads.dtype == torch.bfloat16
        self._library.rope_columns(*pointers, half, M, T, n_q, n_kv, D, torch.get_num_threads())
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def layer_norm_codes(self, x: Tensor, norm: nn.LayerNorm) -> Codes:
        return self._layer_norm(x, 0, norm)

    def add_layer_norm(self, x: Tensor, y: Tensor, norm: nn.LayerNorm) -> Codes:
        return self._layer_norm(x, _at(y), norm)

    def _layer_norm(self, x: Tensor, y: int, norm: nn.LayerNorm) -> Codes:
        codes, normalized = torch.empty(x.shape, dtype=torch.uint8), torch.empty_like(x)
        weights = _at(norm.weight), _at(norm.bias), norm.eps
        return codes, self._library.add_layer_norm(_at(x), y, *weights, _at(normalized), _at(codes), *_size(x))

    def add_rows(self, x: Tensor, y: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self._library.add_rows(_at(x), _at(y), _at(scale), 0 if bias is None else _at(bias), *_size(x))


def _at(x: Tensor) -> int:
    assert x.is_contiguous()
    return x.data_ptr()


def _size(x: Tensor) -> tuple[int, int, int]:
    """Rows, columns and the number of threads: the last arguments of most functions."""
    return (*x.shape, torch.get_num_threads())


def _rows_like(x: Tensor, width: int | None = None) -> Rows:
    return torch.empty(len(x), width or x.size(1), dtype=torch.uint8), torch.empty(len(x), 1)
