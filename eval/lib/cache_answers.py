"""What cache designs cost in answers: exact captions and exact answers of a model with less of its cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from eval.lib.accuracy import relative_error
from eval.lib.cache_designs import Run, Start, blocks, evicting
from eval.lib.command import progress, table
from eval.lib.scene_splits import make_splits
from models.decoding import GREEDY, MAX_NEW_TOKENS, TokenSampler, collect_tokens, generate_tokens
from models.kv_study.eviction import POLICIES
from models.kv_study.quantized_cache import QuantizedKV
from nanovlm.captioner import Captioner

SHARES = (1.0, 0.75, 0.5, 0.25, 0.12)  # of the tokens read
SPLITS = ("captions", "questions")
BATCH_SIZE = 64
PROBED, KIVI_GROUP = 16, 32  # tokens: whose logits are compared; that share a key's scale


@dataclass(frozen=True)
class Batch:
    """Prompts of one length, ids (B, T) and images, and the right answers."""

    split: str
    ids: Tensor
    images: Tensor
    truths: Sequence[str]


@dataclass(frozen=True)
class Answers:
    """Results of one design: right answers of each split from 0 to 1, and bytes held at the end by tokens read."""

    design: str
    setting: str
    right: dict[str, float]
    bytes_per_token: float
    logit_error: float | None = None  # root mean square, by the standard deviation of the full cache's logits


def make_batches(captioner: Captioner, n_scenes: int, seed: str = "answers") -> list[Batch]:
    """A caption and a question about each of n_scenes drawn scenes, prompts of equal length together: no padding."""
    examples, batches = make_splits(n_scenes, 1, seed), []
    for split in SPLITS:
        prepared = [(captioner.prepare(example.image, example.prompt), example.truth) for example in examples[split]]
        for length in sorted({len(prompt[0]) for prompt, _ in prepared}):
            same = [(prompt, truth) for prompt, truth in prepared if len(prompt[0]) == length]
            for i in range(0, len(same), BATCH_SIZE):
                prompts, truths = zip(*same[i : i + BATCH_SIZE])
                device = captioner.model.device
                ids = torch.tensor([ids for ids, _ in prompts], device=device)
                images = torch.cat([tile for _, tiles in prompts for tile in tiles]).to(device)
                batches.append(Batch(split, ids, images, truths))
    return batches


@torch.inference_mode()
def answer(captioner: Captioner, design: str, setting: str, start: Start, batches: Sequence[Batch]) -> Answers:
    """Greedy answers of a design to all batches."""
    progress(f"answers: {design} {setting}")
    torch.manual_seed(0)
    right, held, read = dict.fromkeys(SPLITS, 0), 0, 0
    eos = captioner.tokenizer.eos_token_id
    for batch in batches:
        run: Run = start(batch.ids, batch.images)
        stream = generate_tokens(run.logits, run.step, TokenSampler(GREEDY, eos), MAX_NEW_TOKENS)
        ids = collect_tokens(stream, len(batch.ids), batch.ids)
        held += run.bytes_used()
        read += len(ids) * (batch.ids.size(1) + ids.size(1) - 1)  # the last token is not read
        texts = [captioner.tokenizer.decode(row[: (row + [eos]).index(eos)]) for row in ids.tolist()]
        right[batch.split] += sum(text == truth for text, truth in zip(texts, batch.truths))
    of = {split: sum(len(batch.truths) for batch in batches if batch.split == split) for split in SPLITS}
    return Answers(design, setting, {split: right[split] / of[split] for split in SPLITS}, held / read)


def eviction_answers(captioner: Captioner, batches: Sequence[Batch]) -> list[Answers]:
    """Every policy at every share of the cache, and the product's cache."""
    model, rows = captioner.model, []
    plain: Start = partial(blocks, model, None)
    rows.append(answer(captioner, "per-block cache", "", plain, batches))
    for name, policy in POLICIES.items():
        for share in SHARES:
            start: Start = partial(evicting, model, policy, share)
            rows.append(answer(captioner, name, f"{share:.0%}", start, batches))
    return rows


@torch.inference_mode()
def logits_after(start: Start, batch: Batch, ids: Tensor) -> Tensor:
    """Logits (T_new, B, V) after a batch's prompts and after each of ids (B, T_new) but the last."""
    run, logits = start(batch.ids, batch.images), []
    for new in ids.unbind(1):
        logits.append(run.logits)
        run.logits = run.step(new)
    return torch.stack(logits)


def quantized_answers(captioner: Captioner, batches: Sequence[Batch]) -> list[Answers]:
    """The product's cache in float32, and quantized caches with scales per token and as KIVI's, by bits."""
    model, probe = captioner.model, batches[0]
    plain: Start = partial(blocks, model, None)
    ids = model.generate(probe.ids, probe.images, max_new_tokens=PROBED)
    exact = logits_after(plain, probe, ids)
    rows = [answer(captioner, "per-block cache", "", plain, batches)]
    for name, group in (("scale per token", 1), ("KIVI", KIVI_GROUP)):
        for bits in (8, 4, 2):
            start: Start = partial(blocks, model, partial(QuantizedKV, bits, group))
            error = relative_error(logits_after(start, probe, ids), exact)
            rows.append(replace(answer(captioner, name, f"{bits} bits", start, batches), logit_error=error))
    return rows


def answers_table(title: str, rows: Sequence[Answers]) -> str:
    cells = [[title, "", *(f"exact {split}" for split in SPLITS), "bytes/token", "logit error"]]
    for row in rows:
        exact = [f"{row.right[split]:.1%}" for split in SPLITS]
        error = "" if row.logit_error is None else f"{row.logit_error:.1%}"
        cells.append([row.design, row.setting, *exact, f"{row.bytes_per_token:,.0f}", error])
    return table(cells)
