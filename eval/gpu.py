"""Speed on one GPU: training steps beside stock nanoVLM's loop, and captions at batch 1 and 32, also by CUDA graphs.

    python -m eval.gpu                                      # 222M in bfloat16, some minutes
    python -m eval.gpu --device cpu --model-size embedded   # the same code where there is no GPU
    python -m pytest -m gpu                                 # the tests that need one

Weights are random. A training batch has 8 rows of an image and 128 tokens, half of them answers; the stock loop is
nanoVLM's train.py: autocast, logits of all positions, AdamW, one gradient norm. Medians of 10, after 3 that warm up.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from eval.lib.command import make_parser, measure_seconds, report, synchronize, table
from eval.lib.random_model import SHAPES
from models.checkpoint import load_config
from models.config import VLMConfig
from models.kv_study.static_cache import LanguageModelStep, language_model_cache
from models.vision_language_model import VisionLanguageModel
from nanovlm import EMBEDDED
from nanovlm.training.config import TrainConfig
from nanovlm.training.loop import Trainer, TrainingTask

ROWS = 8
TEXT = 128  # tokens of a training row, behind its image
NEW_TOKENS = 64
WARMUP = 3
REPEATS = 10


def make_model(cfg: VLMConfig, device: torch.device) -> VisionLanguageModel:
    torch.manual_seed(0)
    image_token_id = cfg.lm_vocab_size - 1
    return VisionLanguageModel(replace(cfg, lm_max_position_embeddings=1024), image_token_id).to(device)


def make_batch(model: VisionLanguageModel, rows: int, text: int) -> dict[str, Tensor]:
    """Rows of an image and random text: ids, mask and targets (rows, T), and images (rows, 3, S, S)."""
    cfg = model.cfg
    n_image = (cfg.vit_img_size // cfg.vit_patch_size // cfg.mp_pixel_shuffle_factor) ** 2
    image = torch.full((rows, n_image), model.image_token_id)
    words = torch.randint(1, cfg.lm_vocab_size - 1, (rows, text))
    ids = torch.cat([image, words], 1)
    targets = ids.roll(-1, 1)
    targets[:, : n_image + text // 2] = -100
    images = torch.rand(rows, 3, cfg.vit_img_size, cfg.vit_img_size)
    return {"input_ids": ids, "images": images, "attention_mask": torch.ones_like(ids), "targets": targets}


def own_step(model: VisionLanguageModel, dtype: str) -> float:
    """Seconds of a step of `train.py`'s loop."""
    batch = make_batch(model, ROWS, TEXT)
    times: list[float] = []

    def get_batch(number: int) -> dict[str, Tensor]:
        synchronize(model.device)
        times.append(time.perf_counter())
        return batch

    steps = WARMUP + REPEATS + 1
    cfg = TrainConfig(max_steps=steps, save_every=10 * steps, num_workers=0, dtype=dtype)
    with TemporaryDirectory() as folder:
        Trainer(model, TrainingTask(get_batch, "{}", Path(folder)), cfg).run()
    return median(b - a for a, b in zip(times[WARMUP:], times[WARMUP + 1 :]))


def stock_step(model: VisionLanguageModel, dtype: str) -> float:
    batch = {name: tensor.to(model.device) for name, tensor in make_batch(model, ROWS, TEXT).items()}
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)

    def step() -> None:
        with torch.autocast(model.device.type, getattr(torch, dtype), enabled=dtype != "float32"):
            loss = model(**batch)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return repeat(step, model.device)


def repeat(function: Callable[[], object], device: torch.device) -> float:
    seconds = [measure_seconds(function, device) for _ in range(WARMUP + REPEATS)]
    return median(seconds[WARMUP:])


def caption_seconds(model: VisionLanguageModel, rows: int) -> float:
    """Seconds of captions of NEW_TOKENS tokens, images encoded."""
    batch = make_batch(model, rows, 16)
    del batch["targets"]
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
    inputs["images"] = inputs["images"].to(model.dtype)
    return repeat(lambda: model.generate(**inputs, max_new_tokens=NEW_TOKENS), model.device)


@torch.inference_mode()
def graph_seconds(model: VisionLanguageModel, rows: int) -> float:
    """Seconds of NEW_TOKENS decode steps over a static cache, replayed from a CUDA graph."""
    capacity = 512
    step = LanguageModelStep(model.decoder).eval()
    cache = language_model_cache(model.decoder, rows, capacity)
    mask = torch.ones(rows, capacity, dtype=torch.long, device=model.device)
    ids = torch.ones(rows, 1, dtype=torch.long, device=model.device)
    start = torch.tensor(0, device=model.device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # kernels are chosen before the capture
        for _ in range(WARMUP):
            step(ids, mask, start, cache)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids.copy_(step(ids, mask, start, cache).argmax(-1, keepdim=True))
        start.add_(1)

    def decode() -> None:
        start.fill_(80)
        for _ in range(NEW_TOKENS):
            graph.replay()

    return repeat(decode, model.device)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("gpu", __doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model-size", default="222M", choices=("embedded", *SHAPES))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"no GPU here; with one this measures training steps, captions and CUDA graphs of {args.model_size}")
        return 0
    device = torch.device(args.device)
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    cfg = load_config(EMBEDDED) if args.model_size == "embedded" else SHAPES[args.model_size][0]
    model = make_model(cfg, device)
    ms = {f"training step of {ROWS} rows, stock loop": stock_step(model, dtype)}
    ms[f"training step of {ROWS} rows, here"] = own_step(model, dtype)
    model = model.to(getattr(torch, dtype)).eval()
    for rows in (1, 32):
        ms[f"{rows} captions of {NEW_TOKENS} tokens"] = caption_seconds(model, rows)
        if args.device == "cuda":
            ms[f"{NEW_TOKENS} decode steps of {rows} by a CUDA graph"] = graph_seconds(model, rows)
    lines = [["milliseconds", "median"], *([name, f"{1000 * seconds:.1f}"] for name, seconds in ms.items())]
    where = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    return report(ms, table(lines), f"{where}, {args.model_size}, {dtype}, torch {torch.__version__}", args.json)


if __name__ == "__main__":
    raise SystemExit(main())
