"""Models as large as the published ones: seconds to load, memory beside the file, seconds to the first token.

    python -m eval.real_size

Three checkpoints are written with random weights into a temporary folder, in the format and under the config keys of
their time, with a tokenizer of the right size. A fresh process each loads one, counts its parameters and captions a
drawn photograph of 4032 x 3024 pixels. It fails if a count is not the published one, or if loading took more private
memory than the weights need: nothing where they stay mapped as they are, one copy in the dtype where they are
converted. Just written, the files are read from the system's memory; a cold disk adds its own time to load.
"""

import io
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from random import Random

import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers

from eval.lib.command import make_parser, one_of, positive, progress, report
from eval.lib.hardware import environment
from eval.lib.shapes import SHAPES
from models.checkpoint import WEIGHTS, save_checkpoint
from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from nanovlm import PROMPT
from nanovlm.captioner import Captioner, Stats
from nanovlm.device import DTYPES, choose_dtype
from nanovlm.synthetic import draw, random_scene

STATUS = Path("/proc/self/status")
PHOTOGRAPH = (4032, 3024)
MB = 10**6
SPARE_MB = 128  # for the tokenizer and Python's objects; the smallest model here is 7 times as large


@dataclass(frozen=True)
class RealSize:
    """What one model took. Memory is of the process that loaded it; MB are 10^6 bytes."""

    name: str
    format_version: int
    dtype: str
    parameters: int
    published: int
    file_mb: float
    load_s: float
    peak_mb: float  # resident at most while loading, mapped pages of the file included
    private_mb: float  # of that, what no file stands behind, more than before loading
    needed_mb: float  # the copy of the weights without which there is no model in this dtype
    caption_peak_mb: float  # resident at most, to the end
    images: int
    prompt_tokens: int
    new_tokens: int
    first_token_s: float  # from the bytes of the JPEG
    imports_mb: float  # resident before loading: torch, most of it mapped

    @property
    def failures(self) -> list[str]:
        told = []
        if self.parameters != self.published:
            told.append(f"{self.name} has {self.parameters:,} parameters, the published model {self.published:,}")
        if self.private_mb > self.needed_mb + SPARE_MB:
            told.append(
                f"{self.name} took {self.private_mb:,.0f} MB of private memory to load, more than the "
                f"{self.needed_mb:,.0f} MB that {self.dtype} needs and {SPARE_MB} MB to spare: a second copy of weights"
            )
        return told


def make_tokenizer(cfg: VLMConfig) -> str:
    """A tokenizer.json that fills cfg's vocabulary to the last id: SmolLM2's kind, its merges made up, not learned."""
    base = cfg.lm_base_vocab_size or cfg.lm_vocab_size
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens, merges = special + sorted(pre_tokenizers.ByteLevel.alphabet()), []
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = list(letters)
    for i in count():  # a, b, ... are followed by aa, ab, ..., these by aaa, aab, ...
        if len(tokens) + 26 > base:
            break
        merges += [(words[i], letter) for letter in letters]
        words += [words[i] + letter for letter in letters]
        tokens += words[-26:]
    tokens += [f"<filler_{i}>" for i in range(base - len(tokens))]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special + list((cfg.vlm_extra_tokens or {}).values()))
    return backend.to_str()


def write_model(folder: Path, cfg: VLMConfig) -> None:
    """A checkpoint with random weights, float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_checkpoint(folder, VisionLanguageModel(cfg, image_token_id=-1), make_tokenizer(cfg))


def photograph() -> bytes:
    """A drawn scene as a JPEG of PHOTOGRAPH's size."""
    file = io.BytesIO()
    draw(random_scene(Random("photograph")), *PHOTOGRAPH).save(file, "jpeg", quality=90)
    return file.getvalue()


def resident(kind: str) -> float:
    """MB of this process in memory: VmHWM at most so far, RssAnon now and without a file behind them."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{kind}:"))
    return int(line.split()[1]) * 1024 / MB


@contextmanager
def private_memory(every: float = 0.002) -> Iterator[list[float]]:
    """`with private_memory() as seen:` RssAnon in MB, before, again and again, and at the end; Linux keeps no peak."""
    seen, ended = [resident("RssAnon")], threading.Event()

    def look() -> None:
        while not ended.wait(every):
            seen.append(resident("RssAnon"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()
        seen.append(resident("RssAnon"))


def measure(folder: Path, picture: bytes, dtype: str, max_new_tokens: int) -> dict:
    """Load the model in folder and caption picture; for a process of its own, or memory tells of other things too."""
    imports_mb = resident("VmHWM")
    with private_memory() as seen:
        started = time.perf_counter()
        captioner = Captioner.from_pretrained(folder, "cpu", dtype)
        load_s = time.perf_counter() - started
    peak_mb, model, stats = resident("VmHWM"), captioner.model, Stats()
    for _ in captioner.stream(picture, max_new_tokens=max_new_tokens, stats=stats):
        pass
    parameters = sum(parameter.numel() for parameter in model.parameters())
    places = stats.prompt_tokens - len(captioner.processor.prompt([], PROMPT))
    return {
        "format_version": model.cfg.format_version,
        "dtype": str(model.dtype),
        "parameters": parameters,
        "load_s": round(load_s, 2),
        "peak_mb": round(peak_mb),
        "private_mb": round(max(seen) - seen[0]),
        "needed_mb": 0 if model.dtype == torch.float32 else round(parameters * model.dtype.itemsize / MB),
        "caption_peak_mb": round(resident("VmHWM")),
        "images": places // model.cfg.mp_image_token_length,
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "first_token_s": round(stats.first_token_s, 2),
        "imports_mb": round(imports_mb),
    }


def real_size(name: str, picture: bytes, dtype: str = "float32", max_new_tokens: int = 4) -> RealSize:
    """Write the model of that name and measure it in a fresh process."""
    cfg, published = SHAPES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        progress(f"{name}: writing random weights")
        write_model(folder, cfg)
        progress(f"{name}: loading, captioning")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            measured = process.submit(measure, folder, picture, dtype, max_new_tokens).result()
        return RealSize(name, published=published, file_mb=round((folder / WEIGHTS).stat().st_size / MB, 1), **measured)


def table(results: list[RealSize]) -> str:
    row = "{:5}  {:>11}  {:>8}  {:>6}  {:>8}  {:>12}  {:>13}  {:>11}  {:>15}".format
    heads = ("parameters", "file", "load", "imports", "peak loading", "of it private", "first token", "peak captioning")
    lines = [row("model", *heads)]
    for r in results:
        memory = [f"{mb:,.0f} MB" for mb in (r.file_mb, r.imports_mb, r.peak_mb, r.private_mb, r.caption_peak_mb)]
        times = [f"{seconds:.1f} s" for seconds in (r.load_s, r.first_token_s)]
        lines.append(row(r.name, f"{r.parameters:,}", memory[0], times[0], *memory[1:4], times[1], memory[4]))
    shown = [f"{r.name} reads {r.images} images, {r.prompt_tokens:,} tokens" for r in results]
    return "\n".join([*lines, "; ".join(shown)])


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("real_size", __doc__)
    names = f"any of {', '.join(SHAPES)} (all)"
    parser.add_argument("names", nargs="*", type=one_of(SHAPES), metavar="NAME", help=names)
    parser.add_argument("--dtype", default="float32", choices=("auto", *DTYPES), help="to compute in (float32)")
    parser.add_argument("--max-new-tokens", type=positive, default=4, metavar="N", help="longest answer (4)")
    args = parser.parse_args(argv)
    if not STATUS.exists():
        parser.error(f"memory is read from {STATUS}, which only Linux has")

    where = environment(dtype=choose_dtype(args.dtype, torch.device("cpu")))
    picture, results, failures = photograph(), [], []
    for name in args.names or SHAPES:
        try:
            results.append(real_size(name, picture, args.dtype, args.max_new_tokens))
        except (OSError, ValueError, BrokenProcessPool) as error:  # no room on disk, no room in memory ...
            failures.append(f"{name} could not be measured: {error}")
        else:
            failures += results[-1].failures
    return report({"models": [asdict(r) for r in results]}, table(results), where, args.json, failures)


if __name__ == "__main__":
    sys.exit(main())
