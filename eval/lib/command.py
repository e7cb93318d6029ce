"""Shared by the evaluation commands: flags, the machine, timing in turns, and the report with its exit code."""

import argparse
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from models.inference.kernels.load import FOR_TESTS, available_levels, chosen_level, cpu_info, load_library
from nanovlm.cli.main import Parser
from nanovlm.console import print_error
from nanovlm.device import DTYPES
from nanovlm.errors import NanoVLMError, exit_code
from nanovlm.options import DEVICES

RESULTS = Path(__file__).parent.parent / "results"  # CPU.txt, a file for each processor
LEVEL = "NANOVLM_CPU_LEVEL"
PACKAGES = {"llama_cpp": "llama-cpp-python", "openvino": "openvino"}  # named in `environment` once imported
CPU = torch.device("cpu")

Measured = tuple[dict, str, str, Sequence[str]]  # see `report`


def make_parser(name: str, doc: str | None) -> Parser:
    """The parser of `python -m eval.NAME`; its help text is the module's docstring."""
    parser = Parser(prog=f"eval.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print all results as one JSON object")
    return parser


def add_threads_flag(parser: Parser, default: str | None = None) -> None:
    """--threads, which takes effect when the flags are parsed, here and in processes that are started later."""
    what = f"CPU threads (default: {default or 'as many as PyTorch chooses'})"
    parser.add_argument("--threads", type=use_threads, default=default, metavar="N", help=what)


def use_threads(text: str) -> int:
    """argparse type: make PyTorch use that many threads, and return their number."""
    threads = positive(text)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = text
    return threads


def add_device_flags(parser: Parser, dtype: str = "auto") -> None:
    """--device, --dtype and --threads."""
    add_threads_flag(parser)
    parser.add_argument("--device", default="auto", choices=DEVICES, help="where to compute (default: auto)")
    parser.add_argument("--dtype", default=dtype, choices=("auto", *DTYPES), help=f"precision (default: {dtype})")


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    if (n := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{n} must be 1 or more")
    return n


def progress(line: str) -> None:
    """Print a progress line on stderr; results alone go to stdout."""
    print(line, file=sys.stderr, flush=True)


def levels_here() -> list[str]:
    """The kernels' levels on this CPU, lowest first; empty where there are no kernels or no compiler."""
    levels = [level for level in available_levels() if level not in FOR_TESTS]
    return levels if levels and load_library(levels[-1]) is not None else []


def level_here(text: str) -> str:
    """argparse type: one of `levels_here`."""
    if text not in (levels := levels_here()):
        raise argparse.ArgumentTypeError(f"this CPU has no level {text}; use {', '.join(levels) or 'another one'}")
    return text


def current_level() -> str:
    """The level of an InferenceModel made now; "none" is PyTorch's own operations."""
    level = chosen_level()
    return level if level is not None and load_library(level) is not None else "none"


def at_level(level: str) -> AbstractContextManager[Any]:
    """Make InferenceModels at a level, or with "none" of plain modules."""
    return patch.dict(os.environ, {LEVEL: level})


def cpu_name() -> str:
    """The processor's model name, or where that is unknown its architecture."""
    return cpu_info("model name") or platform.machine()


def environment(
    device: str | torch.device = "cpu", dtype: torch.dtype | None = None, levels: Sequence[str] = ()
) -> str:
    """One line: processor, levels of its instructions, threads, versions of loaded engines, precision, device."""
    device = torch.device(device)
    parts = [cpu_name(), f"level {' '.join(levels or [current_level()])}", f"{torch.get_num_threads()} threads"]
    parts += [f"torch {torch.__version__}"]
    parts += [f"{package} {version(package)}" for module, package in PACKAGES.items() if module in sys.modules]
    parts += [str(dtype)] if dtype else []
    return ", ".join([*parts, torch.cuda.get_device_name(device) if device.type == "cuda" else device.type])


@cache
def memory_bandwidth(size: int = 2**29) -> float:
    """Bytes per second at which all threads together read `size` bytes that are in no cache."""
    tensor = torch.ones(size // 4)
    return size / _fastest(tensor.amax)


@cache
def matmul_flops(dtype: torch.dtype, n: int = 2048) -> float:
    """Operations per second of an n x n matmul by PyTorch, in dtype or, where that is faster, in float32."""
    a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
    matmuls = [partial(torch._int_mm if dtype == torch.int8 else linear, a, b)]
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        matmuls.append(partial(linear, a.to_mkldnn(), b.to_mkldnn()))  # oneDNN; MKL is slow on AMD's processors
    with torch.inference_mode():
        flops = 2 * n**3 / min(map(_fastest, matmuls))
    return flops if dtype == torch.float32 else max(flops, matmul_flops(torch.float32, n))


def _fastest(function: Callable[[], object]) -> float:
    """Seconds of the fastest of five calls: the speed without interference from other programs."""
    return min(measure_seconds(function) for _ in range(5))


@contextmanager
def count_flops() -> Iterator[FlopCounterMode]:
    """Count the operations of matmuls and attention, as PyTorch does.

    Within the context attention is computed by matmuls: torch 2.14 does not count its fused form on a CPU.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on an accelerator has finished; a CPU queues none."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_seconds(function: Callable[[], object], device: torch.device = CPU) -> float:
    """Seconds of one call, work queued on the device included."""
    synchronize(device)
    started = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - started


def interleave(contestants: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Call every contestant once per round, after `warmup` rounds that do not count; the seconds of each round.

    A busy machine so slows all alike. A contestant returns the seconds it took, so that it can prepare untimed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(-warmup, rounds):
        for name, run in contestants.items():
            elapsed = run()
            if turn >= 0:
                seconds[name].append(elapsed)
    return seconds


def relative_error(values: Tensor, reference: Tensor) -> float:
    """Root mean square difference over the reference's standard deviation."""
    values = values.float()
    reference = reference.float()
    return float((values - reference).square().mean().sqrt() / reference.std())


def run(
    name: str, doc: str | None, add_flags: Callable[[Parser], None],
    measure: Callable[[argparse.Namespace], Measured], argv: Sequence[str] | None = None,
) -> int:  # fmt: skip
    """Run a whole command: measure returns what `report` prints. A NanoVLMError is one line and its exit code."""
    parser = make_parser(name, doc)
    add_flags(parser)
    what = "append the output to FOLDER/CPU.txt (default: eval/results)"
    parser.add_argument("--save", nargs="?", type=Path, const=RESULTS, metavar="FOLDER", help=what)
    args = parser.parse_args(argv)
    try:
        measured = measure(args)
    except NanoVLMError as error:
        print_error(f"{parser.prog}: {error}")
        parser.exit(exit_code(error))
    return report(*measured, args.json, args.save)


def report(
    results: dict, text: str, environment: str, failures: Sequence[str], as_json: bool, save: Path | None = None
) -> int:
    """Print results as JSON or as text, the environment once, and failed checks on stderr; 1 if there are some, else 0.

    The command line and the text are also appended to the processor's file in the folder `save`.
    """
    output = f"{text}\n{environment}"
    if save:
        save.mkdir(parents=True, exist_ok=True)
        name = file_name([cpu_name(), cpu_info("cpu family"), *levels_here()[-1:]])
        path = save / f"{name}.txt"
        with path.open("a", encoding="utf-8") as file:
            file.write(f"$ {shlex.join(['python', *sys.orig_argv[1:]])}\n{output}\n\n")
        progress(f"appended to {path}")
    if as_json:
        output = json.dumps(results | {"failures": [*failures], "environment": environment}, indent=2)
    print(output)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def file_name(names: Sequence[str]) -> str:
    """A processor's model name, family and highest level, as several share a name: amd-epyc-26-bf16 is Zen 5."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", " ".join(names).lower())).strip("-")
