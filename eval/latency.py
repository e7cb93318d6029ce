"""Latency of every stage of a caption on the CPU, beside other engines and beside the machine's limits.

    python -m eval.latency                                             # the embedded model, beside plain nanoVLM
    python -m eval.latency --model-size 230M --dtype float32 bfloat16
    python -m eval.latency --model FOLDER --dtype float32 bfloat16 --baselines llama.cpp   # of SmolVLM's layout
    python -m eval.latency --level avx2 vnni bf16 --quantize int8         # the kernels at several levels
    python -m eval.latency --level vnni --baselines openvino --save       # oneDNN held to that level, too

Stages: encode (one preprocessed image), prefill (as many tokens as an image and a short prompt), decode (one token of
every sequence), first-token (from the image) and cold-start (a whole process). All engines read the same weights, which
are random for a published size, and take turns in every round. Figures are milliseconds.

Engines of this project are named by dtype, quantization and level of CPU instructions, by default the highest here. A
single lower level also holds PyTorch and the oneDNN in OpenVINO to it, in a process of its own.

Other engines: "plain" is nanoVLM's computation, float32 and layer by layer. Those of the extra `peers` run exported
files: OpenVINO those of `nanovlm export --onnx`; llama.cpp, for models of SmolVLM's layout, those of `--gguf`. With
--quantize int8 both are also measured in 8 bits, with int4 llama.cpp.

"of roofline" relates a median to the least time in which this machine reads the stage's weights once and does its
operations. "memory" is the largest resident size of a cold-start process. "error" is the root mean square difference
from the plain model's embeddings or logits, over their standard deviation; llama.cpp resizes every image, so its
embeddings have none. "same ids" counts decoded tokens equal to the first engine's. The command fails if an engine in
float32 has an error above 0.001 or decodes other tokens.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from random import Random
from statistics import median

import torch

from eval.lib.accuracy import inexact_engines, stage_errors
from eval.lib.command import add_save_flag, add_threads_flag, make_parser, positive, progress, report, table
from eval.lib.cpu_levels import current_level, level_here, lowering, peers_note
from eval.lib.hardware import environment, matmul_flops, memory_bandwidth, stage_costs
from eval.lib.random_model import random_model_folder
from eval.lib.shapes import SHAPES
from eval.lib.timing import interleave, measure_seconds
from eval.peers.engines import BASELINES, Engine, EngineOptions, ImageEngine, NanoVLMEngine, make_engines, plain_engine
from eval.peers.llama_cpp_engine import LlamaCppEngine
from models.checkpoint import load_config, snapshot_path
from models.config import VLMConfig
from models.formats.base import format_of
from nanovlm import EMBEDDED
from nanovlm.captioner import ImageInput
from nanovlm.cli.main import Parser
from nanovlm.device import DTYPES
from nanovlm.errors import NanoVLMError
from nanovlm.options import QUANTIZATIONS
from nanovlm.processing.image_loading import as_tensor
from nanovlm.synthetic import draw, random_scene

GENERATE = Path(__file__).parent.parent / "generate.py"
STAGES = ("encode", "prefill", "decode", "first-token", "cold-start")
TEXT_TOKENS = 16  # of the prompt, after the image
MAX_IMAGE_SIZE = 2048  # pixels; larger images are reduced
ANSWER_TOKENS = 16
COLUMNS = ("median", "min", "speedup", "of roofline", "memory", "error", "same ids")

Contestants = dict[str, Callable[[], float]]  # name -> a call that returns the seconds it took


@dataclass(frozen=True)
class Result:
    """One contestant in one stage."""

    stage: str
    engine: str
    median_ms: float
    min_ms: float
    roofline_ms: float | None = None  # what the machine needs at least, where known
    error: float | None = None  # relative to the plain model
    memory_bytes: int | None = None  # the largest resident size of a process


@dataclass(frozen=True)
class Inputs:
    """What all engines read."""

    prompts: list[list[int]]  # one per sequence, of equal length
    image: torch.Tensor  # (1, 3, S, S)
    images: Mapping[int, ImageInput]  # by their size in pixels

    @classmethod
    def make(cls, cfg: VLMConfig, image_token_id: int, batch_size: int, image_sizes: Sequence[int]) -> "Inputs":
        generator = torch.Generator().manual_seed(1)
        size = (batch_size, cfg.mp_image_token_length + TEXT_TOKENS)
        prompts = torch.randint(min(1000, cfg.lm_vocab_size), size, generator=generator)
        prompts += prompts == image_token_id  # no image is given with these
        image = as_tensor(draw(random_scene(Random("image")), cfg.vit_img_size, cfg.vit_img_size))[None] / 255
        image = image if format_of(cfg).unit_pixels else image * 2 - 1
        images = {side: draw(random_scene(Random("images")), side, side) for side in image_sizes}
        return cls(prompts.tolist(), image, images)


def model_folder(size: str) -> AbstractContextManager[Path]:
    """The embedded model's folder, or a temporary one with random weights of a published size."""
    if size == "embedded":
        return nullcontext(EMBEDDED)
    changes = {} if SHAPES[size][0].max_img_size is None else {"max_img_size": MAX_IMAGE_SIZE}
    return random_model_folder(size, **changes)


def greedy_ids(engine: Engine, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """The first token of each sequence and `tokens` more, one list per step."""
    steps = [engine.prefill(prompts)]
    for _ in range(tokens):
        steps.append(engine.decode(steps[-1]))
    return steps


def decode_seconds(engine: Engine, prompts: list[list[int]], tokens: int) -> float:
    """Median seconds of a decode step, after an untimed prefill."""
    ids = engine.prefill(prompts)
    return median(measure_seconds(partial(engine.decode, ids)) for _ in range(tokens))


def cold_start(folder: Path) -> dict[str, list[str]]:
    """Command lines of generate.py on the model's folder, and of a process that imports torch only."""
    generate = [str(GENERATE), "--model", str(folder), "--max-new-tokens", str(ANSWER_TOKENS)]
    programs = {"import torch": ["-c", "import torch"], "generate.py": generate}
    return {name: [sys.executable, *argv] for name, argv in programs.items()}


def run_process(argv: Sequence[str]) -> int | None:
    """Run a program that must succeed; its largest resident size in bytes, None where there is no /proc.

    The kernel's ru_maxrss would count this process, from which the program is forked.
    """
    process, peak = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), None
    while process.poll() is None:
        with suppress(OSError):
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            peak = 1024 * int(found[1]) if found else peak
        time.sleep(0.002)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv)
    return peak


def stage_contestants(
    stage: str, engines: Sequence[Engine], inputs: Inputs, tokens: int, folder: Path
) -> Iterator[tuple[str, Contestants]]:
    """Titles and contestants of a stage: one title, or one per image."""

    def timed(calls: Mapping[str, Callable[[], object]]) -> Contestants:
        return {name: partial(measure_seconds, call) for name, call in calls.items()}

    if stage == "encode":
        encoders = [engine for engine in engines if isinstance(engine, ImageEngine)]
        yield stage, timed({engine.name: partial(engine.encode_image, inputs.image) for engine in encoders})
    elif stage == "prefill":
        yield stage, timed({engine.name: partial(engine.prefill, inputs.prompts) for engine in engines})
    elif stage == "decode":
        yield stage, {engine.name: partial(decode_seconds, engine, inputs.prompts, tokens) for engine in engines}
    elif stage == "first-token":
        readers = [engine for engine in engines if isinstance(engine, (NanoVLMEngine, LlamaCppEngine))]
        captioner = next(engine.captioner for engine in readers if isinstance(engine, NanoVLMEngine))
        for side, image in inputs.images.items():
            first = {engine.name: partial(engine.first_token, image) for engine in readers}
            yield f"first token, {side} px, {len(captioner.prepare(image)[0]):,} tokens", timed(first)
    else:
        yield "cold start", timed({name: partial(run_process, argv) for name, argv in cold_start(folder).items()})


def measure(
    stages: Sequence[str], engines: Sequence[Engine], inputs: Inputs, tokens: int, rounds: int, folder: Path
) -> list[Result]:
    """Time every stage in interleaved rounds."""
    costs = stage_costs(load_config(folder), len(inputs.prompts[0]), len(inputs.prompts))
    by_name = {engine.name: engine for engine in engines}
    results = []
    for stage in stages:
        for title, contestants in stage_contestants(stage, engines, inputs, tokens, folder):
            progress(f"{title}: {', '.join(contestants)}")
            for name, seconds in interleave(contestants, rounds, warmup=0 if stage == "cold-start" else 1).items():
                roofline_ms = None
                if title in costs:
                    engine = by_name[name]
                    limits = memory_bandwidth(), matmul_flops(engine.dtype)
                    roofline_ms = 1000 * costs[title].roofline_s(engine.weight_bytes, *limits)
                memory = run_process(cold_start(folder)[name]) if stage == "cold-start" else None
                times = 1000 * median(seconds), 1000 * min(seconds)
                results.append(Result(title, name, *times, roofline_ms, memory_bytes=memory))
    return results


def failures(engines: Sequence[Engine], ids: dict[str, list[list[int]]]) -> list[str]:
    """Engines in float32 that decode other tokens than the first one in float32."""
    exact = [engine.name for engine in engines if engine.weight_bytes == 4 and ids]
    return [f"{name} decodes other tokens than {exact[0]}" for name in exact[1:] if ids[name] != ids[exact[0]]]


def results_table(results: Sequence[Result], ids: dict[str, list[list[int]]]) -> str:
    """A block of lines per stage; speedups are relative to its first contestant."""
    blocks = []
    for stage, group in groupby(results, key=lambda result: result.stage):
        block = list(group)
        rows = {f"  {result.engine}": cells(result, block[0], ids) for result in block}
        columns = [name for name in COLUMNS if any(name in row for row in rows.values())]
        lines = [[name, *(row.get(column, "") for column in columns)] for name, row in rows.items()]
        blocks.append(table([[stage, *columns], *lines]))
    return "\n".join(blocks)


def cells(result: Result, first: Result, ids: dict[str, list[list[int]]]) -> dict[str, str]:
    """What a line says, by column."""
    row = {
        "median": f"{result.median_ms:,.2f} ms",
        "min": f"{result.min_ms:,.2f} ms",
        "speedup": f"{first.median_ms / result.median_ms:.2f}x",
    }
    if result.roofline_ms is not None:
        row["of roofline"] = f"{result.roofline_ms / result.median_ms:.0%}"
    if result.memory_bytes is not None:
        row["memory"] = f"{result.memory_bytes / 2**20:,.0f} MiB"
    if result.error is not None:
        row["error"] = f"{result.error:.1e}" if result.error < 1e-3 else f"{result.error:.3f}"
    if result.stage == "decode":
        pairs = [*zip(chain(*ids[result.engine]), chain(*ids[first.engine]))]
        row["same ids"] = f"{sum(a == b for a, b in pairs)} of {len(pairs)}"
    return row


def make_latency_parser() -> Parser:
    parser = make_parser("latency", __doc__)
    add = parser.add_argument
    which, sizes = parser.add_mutually_exclusive_group().add_argument, ("embedded", *SHAPES)
    which("--model-size", default="embedded", choices=sizes, help="which model (default: embedded)")
    which("--model", metavar="MODEL", help="a folder or a Hub id, instead of --model-size")
    add("--dtype", nargs="+", default=["auto"], choices=("auto", *DTYPES), help="one or several (default: auto)")
    add("--quantize", choices=QUANTIZATIONS, help="also measure quantized weights")
    levels = "avx2, avx2-vnni, vnni, bf16 or amx (default: the highest)"
    add("--level", nargs="+", type=level_here, metavar="LEVEL", help=levels)
    add("--baselines", nargs="*", default=["plain"], choices=BASELINES, help="other engines (default: plain)")
    add("--stages", nargs="+", default=STAGES, choices=STAGES, help=f"(default: {' '.join(STAGES)})")
    add("--image-size", nargs="+", type=positive, default=[512], metavar="N", help="pixels of a side (default: 512)")
    add("--batch-size", type=positive, default=1, metavar="N", help="sequences of prefill and decode (default: 1)")
    add("--tokens", type=positive, default=32, metavar="N", help="decode steps in a round (default: 32)")
    add("--rounds", type=positive, default=5, metavar="N", help="interleaved rounds (default: 5)")
    add("--cache", type=Path, metavar="FOLDER", help="keep the files made for other engines here, and reuse them")
    add_threads_flag(parser)
    add_save_flag(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure in this process, whose libraries the environment variables of `lowering` may hold to a level."""
    options = EngineOptions(args.dtype, args.quantize, args.baselines, args.batch_size, args.level)
    with model_folder(args.model_size) as folder, tempfile.TemporaryDirectory() as temporary:
        folder = folder if args.model is None else snapshot_path(args.model)
        (files := args.cache or Path(temporary)).mkdir(parents=True, exist_ok=True)
        progress("loading engines")
        plain = plain_engine(folder)
        engines = make_engines(plain, folder, files, options)
        inputs = Inputs.make(plain.model.cfg, plain.model.image_token_id, args.batch_size, args.image_size)
        errors = stage_errors(engines, plain, inputs.prompts, inputs.image, args.stages)
        decoding = engines if "decode" in args.stages else []
        ids = {engine.name: greedy_ids(engine, inputs.prompts, args.tokens) for engine in decoding}
        measured = measure(args.stages, engines, inputs, args.tokens, args.rounds, folder)
        results = [replace(result, error=errors.get((result.stage, result.engine))) for result in measured]
    matmuls = {str(dtype): matmul_flops(dtype) for dtype in dict.fromkeys(engine.dtype for engine in engines)}
    speeds = ", ".join(f"{flops / 1e9:,.0f} GFLOP/s in {name} matmuls" for name, flops in matmuls.items())
    where = f"{environment(levels=args.level)}; {peers_note(args.level)}; memory {memory_bandwidth() / 1e9:.1f} GB/s, "
    where += f"{speeds}; medians of {args.rounds} rounds, batch size {args.batch_size}"
    data = {"model_size": args.model_size, "model": args.model, "results": [asdict(result) for result in results]}
    data |= {"ids": ids, "bytes_per_s": memory_bandwidth(), "flops_per_s": matmuls}
    failed = inexact_engines(engines, errors) + failures(engines, ids)
    return report(data, results_table(results, ids), where, args.json, failed, args.save)


def main(argv: Sequence[str] | None = None) -> int:
    parser, argv = make_latency_parser(), sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    try:
        args.level = list(dict.fromkeys(args.level or [current_level()]))
        if (settings := lowering(args.level)).items() <= os.environ.items():
            return run(args)
    except NanoVLMError as error:
        parser.error(str(error))
    return subprocess.run([sys.executable, "-m", "eval.latency", *argv], env=os.environ | settings).returncode


if __name__ == "__main__":
    sys.exit(main())
