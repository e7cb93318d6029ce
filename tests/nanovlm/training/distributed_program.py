"""Program of test_distributed.py: groups of processes, and in each the runs of a JSON argument."""

import json
import os
import signal
import socket
import sys
from pathlib import Path

import torch

from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from nanovlm.data.examples import EncodedExample, collate
from nanovlm.errors import TrainingError
from nanovlm.training.config import TrainConfig
from nanovlm.training.loader import TrainingInterrupted
from support import TINY, randomize
from support.logs import log_lines
from support.training import before_batch, train

DEFAULTS = {
    "warmup_steps": 0, "decay": 0, "lr": 1e-3, "num_workers": 0, "log_every": 1, "dtype": "float32",
    "max_steps": 4, "save_every": 2,
}  # fmt: skip
TOKENIZER = json.dumps({"added_tokens": [{"content": "<|image|>", "id": 3}], "model": {"vocab": {}}})
N_VALIDATION = 48  # the first row of the held-out batches


def row(i: int) -> EncodedExample:
    draw = torch.Generator().manual_seed(i)
    n_images = (1, 0, 5, 0, 0, 1)[i % 6]  # text only, many images, text only in both processes
    ids = [3] * 4 * n_images + torch.randint(4, 40, (5 + i % 7,), generator=draw).tolist()
    answers = 1 + i % 4
    targets = [-100] * (len(ids) - answers) + torch.randint(4, 40, (answers,), generator=draw).tolist()
    images = [torch.rand(n_images, 3, 16, 16, generator=draw)] if n_images else []
    return EncodedExample(ids, targets, [1] * len(ids), images)


def run(folder, settings=(), rows=1, stop_at=None, kill_at=None, apart=False):
    """Train, and return the lines logged; SIGTERM arrives with batch stop_at, SIGKILL, but once, with kill_at."""
    if apart:
        folder = folder / os.environ["RANK"]

    def kill():
        if not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def get_batch(i: int) -> dict:
        return collate([row(i * rows + j) for j in range(rows)])

    cfg = TrainConfig(**DEFAULTS | dict(settings))
    batch = before_batch(stop_at, lambda: os.kill(os.getpid(), signal.SIGTERM), before_batch(kill_at, kill, get_batch))
    # the initial weights of other processes must not count; adapters start from the model as it is
    torch.manual_seed(0 if cfg.lora_rank else int(os.environ.get("RANK", 0)))
    model = randomize(VisionLanguageModel(VLMConfig(**TINY), 3))
    held_out = {"validation": lambda i: get_batch(N_VALIDATION // rows + i), "n_validation": 8 // rows}
    with log_lines() as lines:
        try:
            train(model, TOKENIZER, batch, cfg, folder, **held_out)
        except TrainingInterrupted as error:
            lines.append(f"exit code {error.code}")
        except TrainingError as error:
            lines.append(f"error: {error}")
    return lines


def run_all(folder: Path, runs: list) -> int:
    """Run one after another as one of several processes, in one process group; returns the exit code."""
    torch.set_num_threads(1)
    if os.environ["WORLD_SIZE"] != "1" and len(runs) > 1:
        torch.distributed.init_process_group("gloo")  # one group for all runs
    failed = False
    for name, options in runs:
        lines = run(folder / name, **options)
        failed |= any(line.startswith("error: ") for line in lines)
        if torch.distributed.is_initialized() and not failed:
            torch.distributed.barrier()  # the main process may still be writing
        (folder / f"{name}.{os.environ['RANK']}.log").open("a").write("\n".join(lines) + "\n")
    return int(failed)


def run_groups(folder: Path, groups: list) -> None:
    """Run [number of processes, runs] of each group in processes that are forks of this one: only it imports torch."""
    for world_size, runs in groups:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        children = []
        for rank in range(world_size):
            if child := os.fork():
                children.append(child)
                continue
            os.environ |= {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ["RANK"] = str(rank)
            os._exit(run_all(folder, runs))
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        (folder / "exit_codes").open("a").write(f"{codes}\n")


if __name__ == "__main__":
    folder, groups = Path(sys.argv[1]), json.loads(sys.argv[2])
    if "WORLD_SIZE" in os.environ:  # under torchrun
        sys.exit(run_all(folder, groups[0][1]))
    import torch.distributed.nn  # once for all

    run_groups(folder, groups)
