"""Loading models of the published sizes: parameter count, load time, memory and time to the first token.

    python -m eval.real_size
    python -m eval.real_size 230M --dtype bfloat16 --quantize int8

The command first counts the parameters of every published config on the meta device. For each size asked for, by
default nanoVLM's, it writes a checkpoint with random weights to a temporary folder, in the format and with the config
keys of its release. A fresh process loads it, counts its parameters and captions a drawn photograph of
4032 x 3024 pixels. The command fails if a count differs from the published one, or if loading needed more private
memory than the weights do: nothing where they stay memory-mapped, one copy where they are converted to another dtype.
Private memory is given at its peak while loading and, as "kept", after it; with --quantize neither is checked.
The files were just written and are in the page cache; a cold disk adds its own time to load.
"""

import io
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from random import Random

import torch

from eval.lib.command import add_save_flag, add_threads_flag, make_parser, one_of, positive, progress, report, table
from eval.lib.hardware import environment
from eval.lib.random_model import random_model_folder
from eval.lib.shapes import SHAPES
from models.checkpoint import WEIGHTS
from models.vision_language_model import VisionLanguageModel, empty_model
from nanovlm import PROMPT
from nanovlm.captioner import Captioner, Stats
from nanovlm.device import DTYPES, choose_dtype
from nanovlm.errors import NanoVLMError
from nanovlm.options import QUANTIZATIONS
from nanovlm.synthetic import draw, random_scene

DEFAULT = ("230M", "460M", "222M")
PROCESS_STATUS = Path("/proc/self/status")
PHOTOGRAPH_SIZE = (4032, 3024)
MB = 10**6
SPARE_MB = 128  # allowed for the tokenizer and Python objects; the smallest model is 7 times as large


def failures_of(result: dict) -> list[str]:
    """Another number of parameters than the published one, or memory for a second copy of the weights."""
    failures, name = [], result["name"]
    if result["parameters"] != result["published"]:
        failures.append(f"{name} has {result['parameters']:,} parameters, the published model {result['published']:,}")
    private, needed = result["private_mb"], result["needed_mb"]
    if not result["quantize"] and private > needed + SPARE_MB:
        failures.append(
            f"{name} took {private:,.0f} MB of private memory to load, more than the {needed:,.0f} MB that "
            f"{result['dtype']} needs plus {SPARE_MB} MB: a second copy of the weights"
        )
    return failures


def photograph() -> bytes:
    """A drawn scene as a JPEG of PHOTOGRAPH_SIZE."""
    file = io.BytesIO()
    draw(random_scene(Random("photograph")), *PHOTOGRAPH_SIZE).save(file, "jpeg", quality=90)
    return file.getvalue()


def process_memory(field: str) -> float:
    """MB of this process: VmHWM is peak resident memory, RssAnon current anonymous memory."""
    line = next(line for line in PROCESS_STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024 / MB


@contextmanager
def sample_private_memory(interval: float = 0.002) -> Iterator[list[float]]:
    """Sample RssAnon in MB from a thread until the block ends; Linux keeps no peak of it."""
    samples, stopped = [process_memory("RssAnon")], threading.Event()

    def sample() -> None:
        while not stopped.wait(interval):
            samples.append(process_memory("RssAnon"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        stopped.set()
        thread.join()
        samples.append(process_memory("RssAnon"))


def measure(folder: Path, image: bytes, dtype: str, quantize: str | None, max_new_tokens: int) -> dict:
    """Load the model in folder and caption image: MB (10^6 bytes) of this process, which must be fresh, and seconds."""
    imports_mb = process_memory("VmHWM")
    with sample_private_memory() as private:
        started = time.perf_counter()
        captioner = Captioner.from_pretrained(folder, "cpu", dtype, quantize=quantize)
        load_s = time.perf_counter() - started
    peak_mb, stats, inference = process_memory("VmHWM"), Stats(), captioner.inference
    model = empty_model(inference.cfg, 0).to(inference.dtype) if quantize else captioner.model
    for _ in captioner.stream(image, max_new_tokens=max_new_tokens, stats=stats):
        pass
    image_tokens = stats.prompt_tokens - len(captioner.processor.encode_prompt([], PROMPT))
    return {
        "format_version": model.cfg.format_version,
        "dtype": str(model.dtype),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "load_s": round(load_s, 2),
        "peak_mb": round(peak_mb),  # resident, while loading, mapped pages of the file included
        "private_mb": round(max(private) - private[0]),  # growth of anonymous memory while loading
        "needed_mb": round(copied_parameters(model) * model.dtype.itemsize / MB),  # 0 if all weights stay mapped
        "caption_peak_mb": round(process_memory("VmHWM")),
        "images": image_tokens // model.cfg.mp_image_token_length,
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "first_token_s": round(stats.first_token_s, 2),  # from the bytes of the JPEG
        "imports_mb": round(imports_mb),  # resident, before loading: mostly torch, memory-mapped
        "kept_mb": round(private[-1] - private[0]),
    }


def copied_parameters(model: VisionLanguageModel) -> int:
    """How many parameters cannot stay mapped to a float32 file: of SmolVLM, whose q, k and v are apart there, those."""
    if model.dtype != torch.float32:
        return sum(parameter.numel() for parameter in model.parameters())
    parameters, to_stored = model.named_parameters(), model.cfg.format.to_stored
    return sum(parameter.numel() for name, parameter in parameters if len(to_stored({name: parameter})) > 1)


def measure_size(name: str, image: bytes, dtype: str, quantize: str | None, max_new_tokens: int) -> dict:
    """Write the model of that name and measure it in a fresh process."""
    with random_model_folder(name) as folder:
        progress(f"{name}: loading, captioning")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            measured = process.submit(measure, folder, image, dtype, quantize, max_new_tokens).result()
        file_mb = round((folder / WEIGHTS).stat().st_size / MB, 1)
        return {"name": name, "published": SHAPES[name][1], "quantize": quantize, "file_mb": file_mb} | measured


def count_parameters() -> tuple[dict[str, int], list[str]]:
    """The parameters of every published config, counted on the meta device, and where they are not the published."""
    counts, failures = {}, []
    for name, (cfg, published) in SHAPES.items():
        counts[name] = sum(parameter.numel() for parameter in empty_model(cfg, image_token_id=0).parameters())
        if counts[name] != published:
            failures.append(f"{name}'s config has {counts[name]:,} parameters, the published model {published:,}")
    return counts, failures


def memory_table(results: list[dict]) -> str:
    columns = {"file": "file", "imports": "imports", "peak loading": "peak", "private": "private", "kept": "kept",
               "peak captioning": "caption_peak"}  # fmt: skip
    rows = [["model", "parameters", *columns, "load", "first token"]]
    for r in results:
        memory = [f"{r[f'{field}_mb']:,.0f} MB" for field in columns.values()]
        rows.append([r["name"], f"{r['parameters']:,}", *memory, f"{r['load_s']:.1f} s", f"{r['first_token_s']:.1f} s"])
    prompts = [f"{r['name']}: prompt of {r['images']} images, {r['prompt_tokens']:,} tokens" for r in results]
    return "\n".join([table(rows), "; ".join(prompts)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("real_size", __doc__)
    names = f"any of {', '.join(SHAPES)} (default: {' '.join(DEFAULT)})"
    parser.add_argument("names", nargs="*", type=one_of(SHAPES), metavar="NAME", help=names)
    parser.add_argument("--dtype", default="float32", choices=("auto", *DTYPES), help="precision (default: float32)")
    parser.add_argument("--quantize", choices=QUANTIZATIONS, help="quantize the weights")
    parser.add_argument("--max-new-tokens", type=positive, default=4, metavar="N", help="caption length (default: 4)")
    add_threads_flag(parser)
    add_save_flag(parser)
    args = parser.parse_args(argv)
    if not PROCESS_STATUS.exists():
        parser.error(f"memory is read from {PROCESS_STATUS}, which only Linux has")

    image, results = photograph(), []
    counts, failures = count_parameters()
    for name in args.names or DEFAULT:
        try:
            results.append(measure_size(name, image, args.dtype, args.quantize, args.max_new_tokens))
        except (NanoVLMError, OSError, MemoryError, BrokenProcessPool) as error:  # such as a full disk
            failures.append(f"{name} could not be measured: {error}")
        else:
            failures += failures_of(results[-1])
    where = environment(dtype=choose_dtype(args.dtype, torch.device("cpu")))
    where += f", {args.quantize}" if args.quantize else ""
    text = "parameters: " + ", ".join(f"{name} {count:,}" for name, count in counts.items())
    document = {"parameters": counts, "models": results}
    return report(document, f"{text}\n{memory_table(results)}", where, args.json, failures, args.save)


if __name__ == "__main__":
    sys.exit(main())
