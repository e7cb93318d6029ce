"""The training loops of other projects on the model and the data of a `TrainingSetup`: upstream nanoVLM's and trl's."""

import importlib
import json
import math
import queue
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from eval.lib.training_race import TrainingSetup
from models.checkpoint import CONFIG, TOKENIZER
from nanovlm import PROMPT
from nanovlm.captioner import Captioner
from nanovlm.device import choose_training_dtype
from nanovlm.errors import MissingExtraError, UsageError
from nanovlm.export.transformers import export_smolvlm

NANOVLM_FILES = ("models/vision_language_model.py", "data/collators.py")
NANOVLM_PACKAGES = ("models", "data")
CPU = torch.device("cpu")
HIDDEN = 1e9  # subtracted from the score of a key that must not be seen


def check_nanovlm(path: Path | None) -> Path:
    """The folder of upstream's repository; UsageError if it is missing or is something else."""
    if path is None:
        raise UsageError("--baseline nanovlm needs --nanovlm PATH, a clone of https://github.com/huggingface/nanoVLM")
    for name in NANOVLM_FILES:
        if not (path / name).is_file():
            raise UsageError(f"--nanovlm {path} has no {name}; name a checkout of huggingface/nanoVLM")
    return path


@contextmanager
def imported_from(path: Path) -> Iterator[None]:
    """Let `models` and `data` be the packages of another repository, which has the first name in common with this."""

    def take_out() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] in NANOVLM_PACKAGES]
        return {name: sys.modules.pop(name) for name in names}

    ours = take_out()
    for name in NANOVLM_PACKAGES:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(path / name)]
    try:
        yield
    except ImportError as error:
        raise UsageError(f"--nanovlm {path} cannot be imported: {error}") from error
    finally:
        take_out()
        sys.modules.update(ours)


@contextmanager
def attention_with_mask_and_causal() -> Iterator[None]:
    """Let SDPA take a mask beside is_causal, as upstream calls it; PyTorch 2.15 refuses that on the CPU."""
    sdpa = functional.scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        if attn_mask is None or not options.get("is_causal"):
            return sdpa(q, k, v, attn_mask=attn_mask, **options)
        options["is_causal"] = False
        later = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).triu(1)
        # finite, so that padding, which sees nothing, does not become NaN
        return sdpa(q, k, v, attn_mask=attn_mask.clamp(min=-HIDDEN) - HIDDEN * later, **options)

    functional.scaled_dot_product_attention = attend  # type: ignore[assignment]  # it has more overloads
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = sdpa


def cosine_rate(step: int, peak: float, max_steps: int) -> float:
    """Upstream's schedule: 3% of the steps warm up, then a cosine falls to a tenth of the peak."""
    warmup = 0.03 * max_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (max_steps - warmup))))


class NanoVLMRun:
    """Upstream's model, collator and the steps of its train.py: plain AdamW, autocast, clipping to 1, cosine schedule.

    Examples come encoded, in this project's order. They are padded to the longest one; upstream's default is
    lm_max_length, which would be slower.
    """

    def __init__(self, setup: TrainingSetup, folder: Path, max_steps: int, *, checkout: Path):
        self.setup, self.folder, self.max_steps = setup, folder, max_steps
        ours = replace(setup, augment=0.0).trainer(folder.with_name("settings"), max_steps, ["lr"])
        self.lr, self.batches = ours.cfg.lr, setup.batches(ours)
        self._write_model()
        with imported_from(checkout):
            network = importlib.import_module("models.vision_language_model")
            collators = importlib.import_module("data.collators")
            self.model = network.VisionLanguageModel.from_pretrained(str(folder))
        examples = sum(len(subset) for group in self.batches.mixture.groups for subset in group)
        longest = max(len(self.batches.row(i).ids) for i in range(examples))
        self.collate = collators.VQACollator(self.model.tokenizer, longest)

    def _write_model(self) -> None:
        """Copy the model to where its config names the tokenizer's folder, since upstream reads a Hub id there."""
        shutil.copytree(self.setup.model, self.folder)
        config = json.loads((self.folder / CONFIG).read_text(encoding="utf-8"))
        (self.folder / CONFIG).write_text(json.dumps(config | {"lm_tokenizer": str(self.folder)}), encoding="utf-8")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        (self.folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")

    def losses(self) -> Iterator[float]:
        dtype = choose_training_dtype(self.setup.dtype, CPU)
        parts = [list(part.parameters()) for part in (self.model.MP, self.model.vision_encoder, self.model.decoder)]
        optimizer = torch.optim.AdamW([{"params": part} for part in parts], lr=self.lr)
        self.model.train()
        for step in range(self.max_steps):
            first = step * self.batches.batch_size
            batch = self.collate([self._item(first + i) for i in range(self.batches.batch_size)])
            inputs = {"attention_mask": batch["attention_mask"], "targets": batch["labels"]}
            with attention_with_mask_and_causal(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                _, loss = self.model(batch["input_ids"], batch["images"], **inputs)
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for part in parts for p in part], max_norm=1.0)
            for group in optimizer.param_groups:
                group["lr"] = cosine_rate(step, self.lr, self.max_steps)
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    def _item(self, position: int) -> dict[str, Any]:
        """An example as upstream's data set gives it to the collator."""
        row = self.batches.row(position)
        ids, targets = torch.tensor(row.ids), torch.tensor(row.targets)
        return {"input_ids": ids, "labels": targets, "attention_mask": torch.ones_like(ids), "images": row.images}

    def save(self) -> Path:
        trained = self.folder.with_name(f"{self.folder.name}-trained")
        self.model.save_pretrained(str(trained))
        for name in (CONFIG, TOKENIZER):
            shutil.copy(self.setup.model / name, trained / name)
        return trained


class TrlRun:
    """trl's SFTTrainer on the exported model, in a thread that stops after each step until the next is requested."""

    def __init__(self, setup: TrainingSetup, folder: Path, max_steps: int):
        self.setup, self.folder, self.max_steps = setup, folder, max_steps
        export_smolvlm(Captioner.from_pretrained(setup.model, dtype="float32"), folder)
        self.requests: queue.Queue[None] = queue.Queue()
        self.logged: queue.Queue[float | None] = queue.Queue()
        self.trainer = self._make_trainer(setup.trainer(folder.with_name("settings"), max_steps, ["lr"]).cfg.lr)

    def _make_trainer(self, lr: float) -> Any:
        try:
            from datasets import Dataset, Image
            from transformers import AutoModelForImageTextToText, AutoProcessor, PrinterCallback, TrainerCallback
            from trl import SFTConfig, SFTTrainer
        except ImportError as error:
            raise MissingExtraError(f"--baseline trl needs trl ({error}): pip install 'nanovlm[trl]'") from None
        requests, logged = self.requests, self.logged

        class Turns(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                requests.get()

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                if "loss" in logs:
                    logged.put(float(logs["loss"]))

        config = SFTConfig(
            output_dir=str(self.folder / "run"),
            per_device_train_batch_size=self.setup.batch_size,
            max_steps=self.max_steps,
            learning_rate=lr,
            bf16=choose_training_dtype(self.setup.dtype, CPU) == torch.bfloat16,
            use_cpu=True,
            gradient_checkpointing=False,  # trl's default saves memory for time
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            max_length=None,
        )
        data = Dataset.from_list([*self._examples()]).cast_column("images", [Image()])
        trainer = SFTTrainer(
            model=AutoModelForImageTextToText.from_pretrained(self.folder, dtype=torch.float32),
            args=config,
            train_dataset=data,
            processing_class=AutoProcessor.from_pretrained(self.folder),
            callbacks=[Turns()],
        )
        trainer.remove_callback(PrinterCallback)  # which prints every step
        return trainer

    def _examples(self) -> Iterator[dict[str, Any]]:
        for image in sorted(self.setup.data.glob("*.png")):
            text = image.with_suffix(".txt").read_text(encoding="utf-8").strip()
            yield {
                "images": [str(image)],
                "prompt": [{"role": "user", "content": PROMPT}],
                "completion": [{"role": "assistant", "content": text}],
            }

    def losses(self) -> Iterator[float]:
        threads = torch.get_num_threads()

        def train() -> None:
            torch.set_num_threads(threads)  # a new thread starts with OpenMP's own number
            try:
                self.trainer.train()
            finally:
                self.logged.put(None)

        run = ThreadPoolExecutor(1).submit(train)
        for _ in range(self.max_steps):
            self.requests.put(None)
            if (loss := self.logged.get()) is None:
                break
            yield loss
        run.result()  # raises what ended the run

    def save(self) -> Path:
        trained = self.folder.with_name(f"{self.folder.name}-trained")
        shutil.copytree(self.folder, trained, ignore=shutil.ignore_patterns("run"))
        self.trainer.model.save_pretrained(trained)
        return trained
