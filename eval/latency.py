"""Latency of every stage of a caption, beside other engines and beside the machine's limits.

    python -m eval.latency                                             # the embedded model, beside plain nanoVLM
    python -m eval.latency --model-size 230M --dtype float32 bfloat16
    python -m eval.latency --model FOLDER --dtype float32 bfloat16 --baselines llama.cpp   # of SmolVLM's layout
    python -m eval.latency --level avx2 vnni bf16 --quantize int8         # the kernels at several levels
    python -m eval.latency --level vnni --baselines openvino --save       # oneDNN held to that level, too
    python -m eval.latency --model-size 222M --device cuda --stages train encode prefill decode   # on one GPU

Stages: encode (one preprocessed image), prefill (as many tokens as an image and a short prompt), decode (one token of
every sequence), first-token (from the image) and cold-start (a whole process). All engines read the same weights, for a
published size random ones in the widest precision measured, and take turns in every round. Figures are milliseconds.
Two stages are measured where they are named: train, a training step of 8 images, and proof, the question of a request
whether the kernels may be used (`models.inference.proof`). On a GPU decode is also a CUDA graph's.

Engines of this project are named by dtype, quantization and level of CPU instructions, by default the highest here. A
single lower level also holds PyTorch and the oneDNN in OpenVINO to it, in a process of its own. Other engines: "plain"
is nanoVLM's computation, float32 and layer by layer. Those of the extra `peers` run exported files: OpenVINO those of
`nanovlm export --onnx`; llama.cpp, for models of SmolVLM's layout, those of `--gguf`. With --quantize int8 both are
also measured in 8 bits, with int4 llama.cpp.

"of roofline" relates a median to the least time in which this machine reads the stage's weights once and does its
operations. "memory" is the largest resident size of a cold-start process. "error" is the root mean square difference
from the plain model's embeddings or logits, over their standard deviation; llama.cpp resizes every image, so its
embeddings have none. "same ids" counts decoded tokens equal to the first engine's. The command fails if an engine in
float32 has an error above 0.001, or if this project's decodes other tokens than the plain model. Another engine may
round otherwise where two logits are nearly equal; a line says so.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, groupby
from operator import methodcaller
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from eval.lib import command
from eval.lib.command import measure_seconds, positive, progress, relative_error
from eval.lib.random_model import SHAPES, random_model_folder
from eval.lib.training_step import LOOPS
from eval.peers import Engine, NanoVLMEngine, PlainEngine
from eval.peers.llama_cpp_engine import LlamaCppEngine
from eval.peers.openvino_engine import OpenVINOEngine
from models.checkpoint import format_of, snapshot_path
from models.common.options import QUANTIZATIONS
from models.config import VLMConfig
from models.inference.kernels.load import WITHOUT_BF16_DOT
from models.kv_study.static_cache import LanguageModelStep, language_model_cache
from models.vision_language_model import VisionLanguageModel
from nanovlm import EMBEDDED
from nanovlm.captioner import Captioner
from nanovlm.cli.main import Parser
from nanovlm.console import table
from nanovlm.device import DTYPES, choose_device, choose_dtype
from nanovlm.errors import UsageError
from nanovlm.processing.image_loading import as_tensor
from nanovlm.synthetic import draw, random_scene

GENERATE = Path(__file__).parent.parent / "generate.py"
BASELINES = ("plain", "llama.cpp", "openvino")
GGUF_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", "int8": "q8_0", "int4": "q4_0"}
STAGES = ("encode", "prefill", "decode", "first-token", "cold-start")
TEXT_TOKENS = 16  # of the prompt, after the image
MAX_IMAGE_SIZE = 2048  # pixels; larger images are reduced
ANSWER_TOKENS = 16
GRAPH_CAPACITY = 512  # tokens of the static cache
MAX_FLOAT32_ERROR = 1e-3
ISAS = {  # by level, read once, when oneDNN (in PyTorch and in OpenVINO), MKL and ATen start
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "avx2-vnni": {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "vnni": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
}

Ids = dict[str, list[list[int]]]  # by engine, for each step those of all sequences
Contestants = Mapping[str, Callable[[], float]]  # name -> a call that returns the seconds it took


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


def make_inputs(cfg: VLMConfig, image_token_id: int, batch_size: int) -> tuple[list[list[int]], Tensor]:
    """A prompt of random text for each sequence, and a drawn image (1, 3, S, S)."""
    size = (batch_size, cfg.mp_image_token_length + TEXT_TOKENS)
    prompts = torch.randint(min(1000, cfg.lm_vocab_size), size, generator=torch.Generator().manual_seed(1))
    prompts += prompts == image_token_id  # no image is given with these
    image = as_tensor(draw(random_scene(Random("image")), cfg.vit_img_size, cfg.vit_img_size))[None] / 255
    return prompts.tolist(), image if format_of(cfg).unit_pixels else image * 2 - 1


def model_folder(model: str | None, size: str, dtypes: Sequence[str]) -> AbstractContextManager[Path]:
    """A model's folder: the one named, the embedded one, or a temporary one with random weights of a published size.

    Random weights are stored in the widest of the dtypes that are measured.
    """
    if model is not None or size == "embedded":
        return nullcontext(EMBEDDED if model is None else snapshot_path(model))
    changes = {} if SHAPES[size][0].max_img_size is None else {"max_img_size": MAX_IMAGE_SIZE}
    dtype = max(choose_dtypes(dtypes, None), key=lambda dtype: dtype.itemsize)
    return random_model_folder(size, dtype, **changes)


def choose_dtypes(names: Sequence[str], folder: Path | None, device: str = "cpu") -> list[torch.dtype]:
    """The dtypes for the model in folder, of which auto depends on the device and on the current level."""
    return list(dict.fromkeys(choose_dtype(name, torch.device(device), folder) for name in names))


def make_engines(plain: PlainEngine, folder: Path, files: Path, args: argparse.Namespace) -> list[Engine]:
    """Baselines on the model in folder, and this project in every dtype and at every level; with --quantize in both.

    Other engines' files go to `files`. Raises MissingExtraError if a baseline's package is not installed, InputError
    for a model that llama.cpp cannot run.
    """
    captioner = plain.captioner
    dtypes = choose_dtypes(args.dtype, folder)
    engines: list[Engine] = [plain] if "plain" in args.baselines else []
    if "llama.cpp" in args.baselines:
        types = [GGUF_TYPES[key] for key in (*dtypes, args.quantize) if key]
        engines += [LlamaCppEngine(captioner, name, files, args.batch_size) for name in types]
    if "openvino" in args.baselines:
        if command.current_level() in WITHOUT_BF16_DOT:  # bfloat16 would be float32, but not if oneDNN is held
            dtypes = list(dict.fromkeys(torch.float32 if dtype == torch.bfloat16 else dtype for dtype in dtypes))
        engines += [OpenVINOEngine(captioner, dtype, files) for dtype in dtypes]
        engines += [OpenVINOEngine(captioner, dtypes[-1], files, int8=True)] if args.quantize == "int8" else []
    for level in args.level:
        with command.at_level(level):
            for dtype in choose_dtypes(args.dtype, folder, args.device):
                for quantize in dict.fromkeys((None, args.quantize)):
                    name = str(dtype).removeprefix("torch.")
                    own = Captioner.from_pretrained(folder, args.device, name, quantize=quantize)
                    engines.append(NanoVLMEngine(own, quantize))
    return engines


def stage_costs(plain: PlainEngine, prompts: list[list[int]], image: Tensor) -> dict[str, tuple[int, int]]:
    """Weights that a stage reads once, and its operations, as PyTorch counts them in the plain model."""
    model = plain.model
    first = [0] * len(prompts)
    stages: dict[str, tuple[list[nn.Module], Callable[[], object]]] = {
        "encode": ([model.vision_encoder, model.MP], lambda: plain.encode_image(image)),
        "prefill": ([model.decoder], lambda: plain.prefill(prompts)),
        "decode": ([model.decoder], lambda: plain.decode(first)),
    }
    costs = {}
    for name, (modules, run) in stages.items():
        with command.count_flops() as counter:
            run()
        weights = sum(parameter.numel() for parameter in nn.ModuleList(modules).parameters())  # a tied head once
        costs[name] = weights, counter.get_total_flops()
    return costs


@torch.inference_mode()
def graph_step(model: VisionLanguageModel, rows: int, tokens: int) -> float:
    """Seconds of a decode step over a static cache, replayed from a CUDA graph."""
    step = LanguageModelStep(model.decoder).eval()
    cache = language_model_cache(model.decoder, rows, GRAPH_CAPACITY)
    mask = torch.ones(rows, GRAPH_CAPACITY, dtype=torch.long, device=model.device)
    ids = torch.ones(rows, 1, dtype=torch.long, device=model.device)
    start = torch.tensor(0, device=model.device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # kernels are chosen before the capture
        for _ in range(3):
            step(ids, mask, start, cache)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids.copy_(step(ids, mask, start, cache).argmax(-1, keepdim=True))
        start.add_(1)
    start.fill_(80)
    return median(measure_seconds(graph.replay, model.device) for _ in range(tokens))


def greedy(engine: Engine, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float]:
    """Ids of all sequences by step, `tokens` of them after the prefill's, and the median seconds of a step."""
    steps = [engine.prefill(prompts)]
    seconds = []
    for _ in range(tokens):
        seconds.append(measure_seconds(lambda: steps.append(engine.decode(steps[-1]))))
    return steps, median(seconds)


def cold_start(folder: Path, dtype: str, device: str, quantize: str | None) -> dict[str, list[str]]:
    """Command lines of generate.py on the model's folder, and of a process that imports torch only."""
    flags = ["--model", str(folder), "--max-new-tokens", str(ANSWER_TOKENS), "--dtype", dtype, "--device", device]
    generate = [sys.executable, str(GENERATE), *flags]
    programs = {"import torch": [sys.executable, "-c", "import torch"], "generate.py": generate}
    return programs | ({f"generate.py {quantize}": [*generate, "--quantize", quantize]} if quantize else {})


def run_process(argv: Sequence[str]) -> int | None:
    """Run a program that must succeed; its largest resident size in bytes, None where there is no /proc.

    The kernel's ru_maxrss would count this process, from which the program is forked.
    """
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = None
    while process.poll() is None:
        with suppress(OSError):
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            peak = 1024 * int(found[1]) if found else peak
        time.sleep(0.002)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv)
    return peak


def measure(engines: Sequence[Engine], plain: PlainEngine, folder: Path, args: Any) -> tuple[list[Result], Ids]:
    """Time every stage in interleaved rounds; also the decoded ids."""
    cfg = plain.model.cfg
    results = []
    ids = {}
    prompts, image = make_inputs(cfg, plain.model.image_token_id, args.batch_size)
    device = plain.model.device
    costs = stage_costs(plain, prompts, image) if args.device == "cpu" else {}  # whose limits are measured here
    by_name = {engine.name: engine for engine in engines}
    ours = [engine for engine in engines if isinstance(engine, NanoVLMEngine)]

    def timed(run: Callable[[Any], object], some: Sequence[Engine] = engines) -> Contestants:
        return {engine.name: partial(measure_seconds, partial(run, engine), device) for engine in some}

    def decode(engine: Engine) -> float:
        ids[engine.name], seconds = greedy(engine, prompts, args.tokens)
        return seconds

    def logits(engine: Engine) -> Tensor:
        engine.prefill(prompts)
        return engine.logits

    def add(stage: str, contestants: Contestants, errors: Mapping = {}, memory: Mapping = {}, warmup: int = 1) -> None:
        progress(f"{stage}: {', '.join(contestants)}")
        for name, seconds in command.interleave(contestants, args.rounds, warmup).items():
            least = None
            if stage in costs:  # the roofline (Williams et al. 2009): reading or computing, whichever takes longer
                weights, flops = costs[stage]
                engine = by_name[name]
                reading = weights * engine.weight_bytes / command.memory_bandwidth()
                least = 1000 * max(reading, flops / command.matmul_flops(engine.dtype))
            times = 1000 * median(seconds), 1000 * min(seconds)
            results.append(Result(stage, name, *times, least, errors.get(name), memory.get(name)))

    for stage in args.stages:
        if stage in ("encode", "prefill"):
            compute = methodcaller("encode_image", image) if stage == "encode" else logits
            expected = compute(plain).clone()
            exact = [engine for engine in engines if stage == "prefill" or not engine.resizes_images]
            errors = {engine.name: relative_error(compute(engine), expected) for engine in exact}
            add(stage, timed(compute), errors)
        elif stage == "decode":
            contestants = {engine.name: partial(decode, engine) for engine in engines}
            if args.device == "cuda":
                step = partial(graph_step, ours[-1].captioner.model, args.batch_size, args.tokens)
                contestants[f"{ours[-1].name}, CUDA graph"] = step
            add(stage, contestants)
            if plain.name not in ids:  # the reference, also where its time is not measured
                ids[plain.name], _ = greedy(plain, prompts, args.tokens)
        elif stage == "train":
            (dtype, *_) = choose_dtypes(args.dtype, folder, args.device)
            name = str(dtype).removeprefix("torch.")
            models = {loop: deepcopy(plain.captioner.model) for loop in LOOPS}
            add(stage, {loop: partial(run, models[loop], name) for loop, run in LOOPS.items()}, warmup=0)
        elif stage == "proof":
            add(stage, timed(lambda engine: engine.captioner.inference.network, ours))
        elif stage == "first-token":
            readers = [engine for engine in engines if hasattr(engine, "first_token")]
            for side in args.image_size:
                drawn = draw(random_scene(Random("images")), side, side)
                title = f"first token, {side} px, {len(plain.captioner.prepare(drawn)[0]):,} tokens"
                add(title, timed(methodcaller("first_token", drawn), readers))
        else:
            programs = cold_start(folder, args.dtype[0], args.device, args.quantize)
            memory = {name: run_process(argv) for name, argv in programs.items()}
            starts = {name: partial(measure_seconds, partial(run_process, argv)) for name, argv in programs.items()}
            add("cold start", starts, memory=memory, warmup=0)
    return results, ids


def failures(engines: Sequence[Engine], results: Sequence[Result], ids: Ids) -> list[str]:
    """Engines in float32 whose errors are more than rounding, and this project's that decode other tokens."""
    exact = [engine.name for engine in engines if engine.weight_bytes == 4]
    lines = [
        f"{row.engine}: {row.stage} is {row.error:.1e} off the plain model, more than {MAX_FLOAT32_ERROR:g}"
        for row in results
        if row.engine in exact and row.error is not None and not row.error <= MAX_FLOAT32_ERROR  # NaN fails, too
    ]
    return lines + other_tokens([engine for engine in engines if engine.is_ours], ids)


def other_tokens(engines: Sequence[Engine], ids: Ids) -> list[str]:
    """Lines for the engines in float32 that decode other tokens than the plain model."""
    return [
        f"{engine.name} decodes other tokens than {PlainEngine.name}"
        for engine in engines
        if engine.weight_bytes == 4 and ids and ids[engine.name] != ids[PlainEngine.name]
    ]


def results_table(results: Sequence[Result], ids: Ids) -> str:
    """A block of lines per stage; speedups are relative to its first contestant."""
    blocks = []
    for stage, group in groupby(results, key=lambda result: result.stage):
        block = list(group)
        rows = []
        for result in block:
            row = {
                stage: f"  {result.engine}",
                "median": f"{result.median_ms:,.2f} ms",
                "min": f"{result.min_ms:,.2f} ms",
                "speedup": f"{block[0].median_ms / result.median_ms:.2f}x",
            }
            if result.roofline_ms is not None:
                row["of roofline"] = f"{result.roofline_ms / result.median_ms:.0%}"
            if result.memory_bytes is not None:
                row["memory"] = f"{result.memory_bytes / 2**20:,.0f} MiB"
            if result.error is not None:
                row["error"] = f"{result.error:.1e}" if result.error < 1e-3 else f"{result.error:.3f}"
            if result.engine in ids and stage == "decode":
                pairs = [*zip(chain(*ids[result.engine]), chain(*ids[block[0].engine]))]
                row["same ids"] = f"{sum(a == b for a, b in pairs)} of {len(pairs)}"
            rows.append(row)
        columns = list(dict.fromkeys(chain(*rows)))
        blocks.append(table([columns, *([row.get(column, "") for column in columns] for row in rows)]))
    return "\n".join(blocks)


def lowering(levels: Sequence[str]) -> dict[str, str]:
    """Environment variables that hold all engines that can be held to the level, if it is one below this CPU's best."""
    if len(levels) > 1 or levels[0] not in ISAS or levels[0] == command.levels_here()[-1]:
        return {}
    return {command.LEVEL: levels[0], **ISAS[levels[0]]}


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group().add_argument
    sizes = ("embedded", *SHAPES)
    which("--model-size", default="embedded", choices=sizes, help="which model (default: embedded)")
    which("--model", metavar="MODEL", help="a folder or a Hub id, instead of --model-size")
    add("--dtype", nargs="+", default=["auto"], choices=("auto", *DTYPES), help="one or several (default: auto)")
    add("--quantize", choices=QUANTIZATIONS, help="also measure quantized weights")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="where to compute (default: cpu)")
    levels = "avx2, avx2-vnni, vnni, bf16 or amx (default: the highest)"
    add("--level", nargs="+", type=command.level_here, metavar="LEVEL", help=levels)
    add("--baselines", nargs="*", default=["plain"], choices=BASELINES, help="other engines (default: plain)")
    stages = " ".join(STAGES)
    add("--stages", nargs="+", default=STAGES, choices=("train", "proof", *STAGES), help=f"(default: {stages})")
    add("--image-size", nargs="+", type=positive, default=[512], metavar="N", help="pixels of a side (default: 512)")
    add("--batch-size", type=positive, default=1, metavar="N", help="sequences of prefill and decode (default: 1)")
    add("--tokens", type=positive, default=32, metavar="N", help="decode steps in a round (default: 32)")
    add("--rounds", type=positive, default=5, metavar="N", help="interleaved rounds (default: 5)")
    add("--cache", type=Path, metavar="FOLDER", help="keep the files made for other engines here, and reuse them")
    command.add_threads_flag(parser)


def measure_flags(args: argparse.Namespace, argv: Sequence[str]) -> command.Measured:
    """Measure what the flags, argv, name; held to a lower level, in a process of its own, whose exit code is ours."""
    choose_device(args.device)  # refuses one that is not here
    if args.device == "cuda" and (others := [name for name in args.baselines if name != "plain"]):
        raise UsageError(f"--baselines {' '.join(others)}: measured on the CPU only; omit --device cuda")
    args.level = list(dict.fromkeys(args.level or [command.current_level()]))
    settings = lowering(args.level)
    if not settings.items() <= os.environ.items():  # libraries read them once, when they start
        held = subprocess.run([sys.executable, "-m", "eval.latency", *argv], env=os.environ | settings)
        raise SystemExit(held.returncode)
    folders = model_folder(args.model, args.model_size, args.dtype), tempfile.TemporaryDirectory()
    with folders[0] as folder, folders[1] as temporary:
        (files := args.cache or Path(temporary)).mkdir(parents=True, exist_ok=True)
        progress("loading engines")
        with command.at_level("none"):
            plain = PlainEngine(Captioner.from_pretrained(folder, args.device, "float32"))
        engines = make_engines(plain, folder, files, args)
        results, ids = measure(engines, plain, folder, args)
    data: dict[str, Any] = {"model_size": args.model_size, "model": args.model, "ids": ids}
    data["results"] = [asdict(result) for result in results]
    where = command.environment(args.device, levels=args.level)
    if args.device == "cpu":
        flops = {str(dtype): command.matmul_flops(dtype) for dtype in dict.fromkeys(one.dtype for one in engines)}
        data |= {"bytes_per_s": command.memory_bandwidth(), "flops_per_s": flops}
        speeds = ", ".join(f"{speed / 1e9:,.0f} GFLOP/s in {name} matmuls" for name, speed in flops.items())
        held_to = "other engines"
        if settings:
            held_to = f"PyTorch and oneDNN in OpenVINO held to {args.level[0]}, the rest of OpenVINO and llama.cpp"
        where += f"; {held_to} at their best; memory {data['bytes_per_s'] / 1e9:.1f} GB/s, {speeds}"
    where += f"; medians of {args.rounds} rounds, batch size {args.batch_size}"
    peers = [engine for engine in engines if not engine.is_ours]
    text = "\n".join([results_table(results, ids), *other_tokens(peers, ids)])
    return data, text, where, failures(engines, results, ids)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return command.run("latency", __doc__, add_flags, partial(measure_flags, argv=argv), argv)


if __name__ == "__main__":
    sys.exit(main())
