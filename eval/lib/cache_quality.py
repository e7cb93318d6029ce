"""Exact answers with smaller caches, and tokens per step with guesses: the tables of `eval.speedup --quality`.

The embedded model answers about freshly drawn scenes. Its draft is a text model of one block and width 64, trained here
on captions and answers about other scenes, which does not see the image. Models that share their cache are trained
here, too, on minGPT's sorting task.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eval.lib.cache_designs import Start, blocks, evicting
from eval.lib.command import progress, relative_error
from eval.lib.scenes import make_splits
from eval.sort_task import splits
from models.common.options import GREEDY, MAX_NEW_TOKENS
from models.config import VLMConfig
from models.decoding import TokenSampler, collect_tokens, generate_tokens
from models.kv_study.eviction import POLICIES
from models.kv_study.quantized_cache import QuantizedKV
from models.kv_study.sharing import CrossLayerModel, LatentAttention
from models.kv_study.speculative import DraftModel, Guess, Read, prompt_lookup, read_lm, read_vlm, speculate
from models.language_model import LanguageModel
from models.vision_language_model import IGNORE_INDEX, PrefillState
from nanovlm import PROMPT, SAMPLE
from nanovlm.captioner import Captioner
from nanovlm.console import table
from nanovlm.processing.conversation import dialogue
from nanovlm.processing.image_loading import load_image
from nanovlm.synthetic import caption, questions, random_scene

SHARES = (1.0, 0.75, 0.5, 0.25, 0.12)  # of the tokens read
ASKED = ("captions", "questions")
BATCH_SIZE = 64
PROBED = 16  # tokens: whose logits are compared; that share a key's scale
KIVI_GROUP = 32
DIGITS = 6  # of the sorting task
LEARNING_RATE = 3e-3
MAX_STEPS = 1200  # of the models that share: steps, seeds, right held-out inputs
SEEDS = 3
ENOUGH = 0.995
SHARED = ["MHA", "GQA, 2 of 4 heads", "MQA, 1 of 4 heads", "CLA", "CLA and MQA", "MLA, latent of 12"]

Row = dict[str, Any]  # results of one design
PrefillCall = tuple[list[int], Callable[[], tuple[Tensor, PrefillState]]]  # ids, and their prefill
Pairs = Sequence[tuple[list[int], list[int]]]  # ids of prompts and answers


@dataclass(frozen=True)
class Batch:
    """Prompts of one length, ids (B, T) and images, and the right answers."""

    split: str
    ids: Tensor
    images: Tensor
    truths: Sequence[str]


def make_batches(captioner: Captioner, n_scenes: int, seed: str = "eval answers") -> list[Batch]:
    """A caption and a question about each of n_scenes drawn scenes, prompts of equal length together: no padding."""
    examples = make_splits(n_scenes, 1, seed)
    batches = []
    device = captioner.model.device
    for split in ASKED:
        prepared = [(*captioner.prepare(example.image, example.prompt), example.truth) for example in examples[split]]
        for length in sorted({len(ids) for ids, _, _ in prepared}):
            same = [row for row in prepared if len(row[0]) == length]
            for i in range(0, len(same), BATCH_SIZE):
                ids, tiles, truths = zip(*same[i : i + BATCH_SIZE])
                images = torch.cat([tile for row in tiles for tile in row]).to(device)
                batches.append(Batch(split, torch.tensor(ids, device=device), images, truths))
    return batches


@torch.inference_mode()
def answer(captioner: Captioner, start: Start, batches: Sequence[Batch]) -> Row:
    """Answer all batches greedily with a design: the share of right answers by split, and bytes held per token read."""
    torch.manual_seed(0)
    right = dict.fromkeys(ASKED, 0)
    of = dict.fromkeys(ASKED, 0)
    held = 0
    read = 0
    eos = captioner.tokenizer.eos_token_id
    for batch in batches:
        run = start(batch.ids, batch.images)
        stream = generate_tokens(run.logits, run.step, TokenSampler(GREEDY, eos), MAX_NEW_TOKENS)
        ids = collect_tokens(stream, len(batch.ids), batch.ids)
        held += run.bytes_used()
        read += len(ids) * (batch.ids.size(1) + ids.size(1) - 1)  # the last token is not read
        texts = [captioner.tokenizer.decode(row[: (row + [eos]).index(eos)]) for row in ids.tolist()]
        right[batch.split] += sum(text == truth for text, truth in zip(texts, batch.truths))
        of[batch.split] += len(texts)
    return {"right": {split: right[split] / of[split] for split in ASKED}, "bytes_per_token": held / read}


@torch.inference_mode()
def logits_after(start: Start, batch: Batch, ids: Tensor) -> Tensor:
    """Logits (T_new, B, V) after a batch's prompts and after each of ids (B, T_new) but the last."""
    torch.manual_seed(0)  # for designs that forget at random
    run = start(batch.ids, batch.images)
    logits = []
    for new in ids.unbind(1):
        logits.append(run.logits)
        run.logits = run.step(new)
    return torch.stack(logits)


def smaller_caches(kind: str, captioner: Captioner, batches: Sequence[Batch]) -> list[Row]:
    """Answers with the product's cache, and with caches of a kind: "evict" forgets tokens, "bits" rounds them.

    "logit_error" is over the first tokens of the first batch, given the same tokens.
    """
    model = captioner.model
    probe = batches[0]
    designs: dict[tuple[str, str], Start] = {("per-block cache", ""): partial(blocks, model, None)}
    ids = model.generate(probe.ids, probe.images, max_new_tokens=PROBED)
    exact = logits_after(designs["per-block cache", ""], probe, ids)
    for name, policy in POLICIES.items() if kind == "evict" else ():
        designs |= {(name, f"{share:.0%}"): partial(evicting, model, policy, share) for share in SHARES}
    for name, group in (("scale per token", 1), ("KIVI", KIVI_GROUP)) if kind == "bits" else ():
        caches = {bits: partial(QuantizedKV, bits, group) for bits in (8, 4, 2)}
        designs |= {(name, f"{bits} bits"): partial(blocks, model, make) for bits, make in caches.items()}
    rows = []
    for (design, setting), start in designs.items():
        progress(f"answers: {design} {setting}")
        error = relative_error(logits_after(start, probe, ids), exact)
        rows.append({"design": design, "setting": setting, "logit_error": error} | answer(captioner, start, batches))
    return rows


def answers_table(title: str, rows: Sequence[Row]) -> str:
    cells = [[title, "", *(f"exact {split}" for split in ASKED), "bytes/token", "logit error"]]
    for row in rows:
        exact = [f"{row['right'][split]:.1%}" for split in ASKED]
        figures = [f"{row['bytes_per_token']:,.0f}", f"{row['logit_error']:.1%}"]
        cells.append([row["design"], row["setting"], *exact, *figures])
    return table(cells)


def small_config(vocabulary: int, width: int, n_heads: int, n_blocks: int) -> VLMConfig:
    """Sizes of a language model that reads ids."""
    return VLMConfig(lm_use_tokens=True, lm_vocab_size=vocabulary, lm_hidden_dim=width, lm_inter_dim=2 * width,
                     lm_n_heads=n_heads, lm_n_kv_heads=n_heads, lm_n_blocks=n_blocks,
                     lm_max_position_embeddings=512)  # fmt: skip


def train(decoder: LanguageModel, rows: Pairs, steps: int, is_done: Callable[[], bool] = lambda: False) -> int:
    """Learn to continue prompts with answers, for steps or until is_done, asked every 100; returns the steps taken."""
    rng = Random(0)
    torch.nn.init.normal_(decoder.token_embedding.weight, std=0.02)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / steps)
        batch = rng.choices(rows, k=64)
        ids = [torch.tensor(prompt + answer) for prompt, answer in batch]
        targets = [torch.tensor([IGNORE_INDEX] * len(prompt) + answer)[1:] for prompt, answer in batch]
        logits, _ = decoder(pad_sequence(ids, True)[:, :-1], use_cache=False)
        loss = F.cross_entropy(logits.flatten(0, 1), pad_sequence(targets, True, IGNORE_INDEX).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 100 == 0 and is_done():
            return step + 1
    return steps


def train_decoder(rows: Pairs, steps: int, cfg: VLMConfig) -> LanguageModel:
    """A new language model that has learned rows."""
    torch.manual_seed(0)
    train(decoder := LanguageModel(cfg), rows, steps)
    return decoder.eval()


def caption_draft(captioner: Captioner, n_scenes: int = 3000, steps: int = 400) -> LanguageModel:
    """A draft of the embedded model, of its vocabulary and prompts."""
    rng = Random("draft")
    processor = captioner.processor
    tokenizer = captioner.tokenizer
    shown = processor.prepare([load_image(SAMPLE)])
    rows = []
    for _ in range(n_scenes):
        scene = random_scene(rng)
        for question, answer in ((PROMPT, caption(scene)), questions(scene, rng)[0]):
            rows.append((processor.encode(dialogue([question], shown)), tokenizer.encode_answer(answer)))
    return train_decoder(rows, steps, small_config(captioner.model.cfg.lm_vocab_size, 64, 2, 1))


@torch.inference_mode()
def speculation(
    task: str, prompts: Sequence[PrefillCall], read: Read, guesses: dict[str, Guess], eos: int, max_new_tokens: int
) -> list[Row]:
    """Answer all prompts without guesses and by each way to guess.

    Tokens per step and milliseconds per token count after the prefill's token. "identical" counts answers that equal
    plain decoding's.
    """
    nothing: Guess = lambda ids: []  # noqa: E731
    ways = {"no guess": nothing, **guesses}
    answers: dict[str, list[list[int]]] = {name: [] for name in ways}
    steps = dict.fromkeys(ways, 0)
    seconds = dict.fromkeys(ways, 0.0)
    progress(f"speculation: {task}")
    for prompt, prefill in prompts:
        for name, guess in ways.items():
            logits, state = prefill()
            started = time.perf_counter()
            chosen = speculate(logits, state, read, guess, prompt, max_new_tokens, eos)
            seconds[name] += time.perf_counter() - started
            steps[name] += len(chosen) - 1
            answers[name].append([token for step in chosen for token in step])
    rows = []
    for name, given in answers.items():
        tokens = sum(map(len, given)) - len(given)
        same = sum(a == b for a, b in zip(given, answers["no guess"]))
        figures = {"tokens_per_step": tokens / steps[name], "ms_per_token": 1000 * seconds[name] / tokens}
        rows.append({"task": task, "guess": name, **figures, "identical": same, "answers": len(given)})
    return rows


def measure_speculation(captioner: Captioner, batches: Sequence[Batch]) -> list[Row]:
    """Captions and questions of the embedded model, and the sorting task's held-out inputs."""
    model = captioner.model
    eos = captioner.tokenizer.eos_token_id
    results: list[Row] = []
    progress("speculation: training drafts")
    guesses: dict[str, Guess] = {"prompt lookup": prompt_lookup, "draft model": DraftModel(caption_draft(captioner))}
    for task in ASKED:
        prompts: list[PrefillCall] = []
        for batch in batches:
            for ids, image in zip(batch.ids, batch.images) if batch.split == task else ():
                prompts.append((ids.tolist(), partial(model.prefill, ids[None], image[None])))
        results += speculation(task, prompts, read_vlm(model), guesses, eos, MAX_NEW_TOKENS)
    data, test = splits(DIGITS, 3)
    rows = [(row.tolist(), row.sort().values.tolist()) for row in data]
    sorter = train_decoder(rows, 1500, small_config(3, 48, 3, 3))
    draft = train_decoder(rows, 300, small_config(3, 24, 3, 1))

    def prefill(row: Tensor) -> tuple[Tensor, PrefillState]:
        logits, kv_cache = sorter(row[None])
        return logits[:, -1], PrefillState(kv_cache)

    inputs: list[PrefillCall] = [(row.tolist(), partial(prefill, row)) for row in test]
    guesses["draft model"] = DraftModel(draft)
    return results + speculation("sorting task", inputs, read_lm(sorter), guesses, -1, DIGITS)


def speculation_table(title: str, rows: Sequence[Row]) -> str:
    cells = [[title, "guess", "tokens/step", "ms/token", "identical"]]
    for row in rows:
        same = f"{row['identical']} of {row['answers']}"
        cells.append([row["task"], row["guess"], f"{row['tokens_per_step']:.2f}", f"{row['ms_per_token']:.2f}", same])
    return table(cells)


@torch.inference_mode()
def sort_cached(model: LanguageModel, inputs: Tensor) -> tuple[float, float]:
    """The share of inputs (n, DIGITS) that greedy decoding with a cache sorts, and the cache's bytes/token."""
    logits, kv_cache = model(inputs)
    answer = [logits[:, -1:].argmax(-1)]
    for i in range(DIGITS - 1):
        logits, kv_cache = model(answer[-1], None, kv_cache, DIGITS + i)
        answer.append(logits.argmax(-1))
    right = (torch.cat(answer, 1) == inputs.sort(1).values).all(1).float().mean()
    return float(right), sum(kv.bytes_used for kv in kv_cache) / (len(inputs) * (2 * DIGITS - 1))


def make_shared_model(design: str) -> LanguageModel:
    """A model of four blocks, four heads and width 48, whose cache is that of one of SHARED."""
    kv_heads = {"GQA, 2 of 4 heads": 2, "MQA, 1 of 4 heads": 1, "CLA and MQA": 1}.get(design, 4)
    cfg = replace(small_config(4, 48, 4, 4), lm_n_kv_heads=kv_heads)
    model = CrossLayerModel(cfg) if design.startswith("CLA") else LanguageModel(cfg)
    for block in model.blocks if design.startswith("MLA") else ():
        block.add_module("attn", LatentAttention(cfg, 12))
    return model


def measure_sharing(max_steps: int = MAX_STEPS, seeds: int = SEEDS) -> list[Row]:
    """Train every design from each seed, until ENOUGH of the held-out inputs are sorted."""
    data, test = splits(DIGITS, 4)
    pairs = [(row.tolist(), row.sort().values.tolist()) for row in data]
    results = []
    for design in SHARED:
        steps = []
        right = []
        held = 0.0
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = make_shared_model(design)
            is_done = partial(lambda model: sort_cached(model, test)[0] >= ENOUGH, model)
            steps.append(train(model, pairs, max_steps, is_done))
            share, held = sort_cached(model.eval(), test)
            right.append(share)
            progress(f"sharing: {design}, seed {seed}: {steps[-1]} steps, {share:.1%}")
        parameters = sum(parameter.numel() for parameter in model.parameters())
        row = {"design": design, "parameters": parameters, "bytes_per_token": held, "steps": steps, "right": right}
        results.append(row)
    return results


def sharing_table(title: str, rows: Sequence[Row]) -> str:
    cells = [["sorting task", "parameters", "bytes/token", "steps by seed", "sorted by seed"]]
    for row in rows:
        steps = " ".join(map(str, row["steps"]))
        right = " ".join(f"{share:.1%}" for share in row["right"])
        cells.append([row["design"], f"{row['parameters']:,}", f"{row['bytes_per_token']:,.0f}", steps, right])
    return table(cells)
