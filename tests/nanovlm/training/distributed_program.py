"""What test_distributed.py runs in each of several processes: the runs of a JSON file, in one process group."""

import json
import os
import sys
from pathlib import Path

import torch

from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from nanovlm.data.examples import EncodedExample, collate
from nanovlm.training.config import TrainConfig
from nanovlm.training.distributed import DistributedContext, run_and_exit
from nanovlm.training.loop import Trainer, TrainingTask
from nanovlm.training.signals import TrainingInterrupted
from support import TINY, randomize
from support.logs import log_lines

DEFAULTS = {
    "warmup_steps": 0,
    "decay": 0,
    "lr": 1e-3,
    "num_workers": 0,
    "log_every": 1,
    "dtype": "float32",
    "max_steps": 4,
    "validate_every": 2,
}
N_VALIDATION = 48  # the first row of the held-out batches


def row(i: int) -> EncodedExample:
    draw = torch.Generator().manual_seed(i)
    n_images = (1, 0, 5, 0, 0, 1)[i % 6]  # text only, many images, text only in both processes
    ids = [3] * 4 * n_images + torch.randint(4, 40, (5 + i % 7,), generator=draw).tolist()
    answers = 1 + i % 4
    targets = [-100] * (len(ids) - answers) + torch.randint(4, 40, (answers,), generator=draw).tolist()
    images = [torch.rand(n_images, 3, 16, 16, generator=draw)] if n_images else []
    return EncodedExample(ids, targets, [1] * len(ids), images)


def run(
    folder: Path, settings: dict, rows: int = 1, stop_at: int | None = None, bucket: int | None = None
) -> list[str]:
    """Train on batches of so many rows and return the lines logged; SIGTERM arrives with batch `stop_at`."""

    def get_batch(i: int) -> dict:
        if i == stop_at:
            os.kill(os.getpid(), 15)
        return collate([row(i * rows + j) for j in range(rows)])

    # the initial weights of other processes must not count; adapters start from the model as it is
    torch.manual_seed(0 if settings.get("lora_rank") else int(os.environ.get("RANK", 0)))
    model = randomize(VisionLanguageModel(VLMConfig(**TINY), 3))
    context = DistributedContext(model.device, **({"max_bucketed_bytes": bucket} if bucket else {}))
    task = TrainingTask(get_batch, "{}", folder, validation=lambda i: get_batch(N_VALIDATION // rows + i))
    with log_lines() as lines:
        try:
            Trainer(model, task, TrainConfig(**DEFAULTS | settings), context).run()
        except TrainingInterrupted as error:
            lines.append(f"exit code {error.code}")
    return lines


def main() -> int:
    torch.set_num_threads(1)
    folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
    if "WORLD_SIZE" in os.environ and len(runs) > 1:
        torch.distributed.init_process_group("gloo")  # one group for all runs
    for name, options in runs:
        lines = run(folder / name, **options)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # the main process may still be writing
        (folder / f"{name}.{os.environ.get('RANK', 0)}.log").open("a").write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    run_and_exit(main)
