"""Tokens per step of speculative decoding: captions, questions and the sorting task.

The embedded model answers as in eval/lib/cache_answers.py. Its draft is a text model of one block and width 64, trained
here on captions and answers about other scenes, which does not see the image. The sorting task's model and draft are
trained here, too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eval.lib.cache_answers import Batch
from eval.lib.command import progress, table
from eval.sort_task import splits
from models.config import VLMConfig
from models.decoding import MAX_NEW_TOKENS
from models.kv_study.speculative import DraftModel, Guess, Read, prompt_lookup, read_lm, read_vlm, speculate
from models.language_model import LanguageModel
from models.vision_language_model import IGNORE_INDEX, PrefillState
from nanovlm import PROMPT, SAMPLE
from nanovlm.captioner import Captioner
from nanovlm.processing.image_loading import load_image
from nanovlm.synthetic import caption, questions, random_scene

DIGITS, VALUES = 6, 3  # of the sorting task
LEARNING_RATE = 3e-3
Rows = Sequence[tuple[list[int], list[int]]]  # ids of prompts and answers
Prefill = Callable[[], tuple[Tensor, PrefillState]]
Prompt = tuple[list[int], Prefill]


@dataclass(frozen=True)
class Speculation:
    """Results of one way to guess on one task."""

    task: str
    guess: str
    tokens_per_step: float  # after the prefill's token; 1 without guesses
    ms_per_token: float  # likewise, guessing included
    identical: int  # answers that equal plain decoding's
    answers: int

    @property
    def is_exact(self) -> bool:
        return self.identical == self.answers


def small_config(vocabulary: int, width: int, n_heads: int, n_blocks: int) -> VLMConfig:
    """Sizes of a language model that reads ids."""
    return VLMConfig(lm_use_tokens=True, lm_vocab_size=vocabulary, lm_hidden_dim=width, lm_inter_dim=2 * width,
                     lm_n_heads=n_heads, lm_n_kv_heads=n_heads, lm_n_blocks=n_blocks,
                     lm_max_position_embeddings=512)  # fmt: skip


def train_decoder(rows: Rows, steps: int, cfg: VLMConfig) -> LanguageModel:
    """A small language model that continues the prompts of rows with their answers."""
    torch.manual_seed(0)
    decoder = LanguageModel(cfg)
    train(decoder, rows, steps)
    return decoder.eval()


def train(decoder: LanguageModel, rows: Rows, steps: int, is_done: Callable[[], bool] = lambda: False) -> int:
    """Train on batches of rows, for steps or until is_done, asked every 100 steps; returns the steps taken."""
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


def caption_draft(captioner: Captioner, n_scenes: int = 3000, steps: int = 400) -> LanguageModel:
    """A draft of the embedded model, of its vocabulary and prompts."""
    rng, processor, tokenizer = Random("draft"), captioner.processor, captioner.tokenizer
    _, grid = processor.preprocess(load_image(SAMPLE))
    rows = []
    for _ in range(n_scenes):
        scene = random_scene(rng)
        for question, answer in ((PROMPT, caption(scene)), questions(scene, rng)[0]):
            rows.append((processor.encode_prompt([grid], question), tokenizer.encode_answer(answer)))
    return train_decoder(rows, steps, small_config(captioner.model.cfg.lm_vocab_size, 64, 2, 1))


@torch.inference_mode()
def speculation(
    task: str, prompts: Sequence[Prompt], read: Read, guesses: dict[str, Guess], eos: int, max_new_tokens: int
) -> list[Speculation]:
    """Answers to all prompts without guesses, and then by each way to guess."""
    nothing: Guess = lambda ids: []  # noqa: E731
    ways = {"no guess": nothing, **guesses}
    answers: dict[str, list[list[int]]] = {name: [] for name in ways}
    steps, seconds = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
    progress(f"speculation: {task}")
    for prompt, prefill in prompts:
        for name, guess in ways.items():
            logits, state = prefill()
            started = time.perf_counter()
            chosen = speculate(logits, state, read, guess, prompt, max_new_tokens, eos)
            seconds[name] += time.perf_counter() - started
            steps[name] += len(chosen) - 1
            answers[name].append([token for step in chosen for token in step])
    results = []
    for name, given in answers.items():
        tokens, same = sum(map(len, given)) - len(given), sum(a == b for a, b in zip(given, answers["no guess"]))
        results.append(Speculation(task, name, tokens / steps[name], 1000 * seconds[name] / tokens, same, len(given)))
    return results


def measure_speculation(captioner: Captioner, batches: Sequence[Batch]) -> list[Speculation]:
    """Captions and questions of the embedded model, and the sorting task's held-out inputs."""
    model, eos = captioner.model, captioner.tokenizer.eos_token_id
    results: list[Speculation] = []
    progress("speculation: training drafts")
    guesses: dict[str, Guess] = {"prompt lookup": prompt_lookup, "draft model": DraftModel(caption_draft(captioner))}
    for task in ("captions", "questions"):
        prompts: list[Prompt] = []
        for batch in batches:
            for ids, image in zip(batch.ids, batch.images) if batch.split == task else ():
                prompts.append((ids.tolist(), partial(model.prefill, ids[None], image[None])))
        results += speculation(task, prompts, read_vlm(model), guesses, eos, MAX_NEW_TOKENS)
    train, test = splits(DIGITS, VALUES)
    rows = [(row.tolist(), row.sort().values.tolist()) for row in train]
    sorter = train_decoder(rows, 1500, small_config(VALUES, 48, 3, 3))
    draft = train_decoder(rows, 300, small_config(VALUES, 24, 3, 1))

    def prefill(row: Tensor) -> tuple[Tensor, PrefillState]:
        logits, kv_cache = sorter(row[None])
        return logits[:, -1], PrefillState(kv_cache)

    inputs: list[Prompt] = [(row.tolist(), partial(prefill, row)) for row in test]
    guesses = {"prompt lookup": prompt_lookup, "draft model": DraftModel(draft)}
    sorted_ones = speculation("sorting task", inputs, read_lm(sorter), guesses, -1, DIGITS)
    progress(f"speculation: the sorting model is right on {sort_cached(sorter, test)[0]:.1%}")
    return results + sorted_ones


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


def speculation_table(title: str, rows: Sequence[Speculation]) -> str:
    cells = [[title, "guess", "tokens/step", "ms/token", "identical"]]
    for row in rows:
        figures = f"{row.tokens_per_step:.2f}", f"{row.ms_per_token:.2f}", f"{row.identical} of {row.answers}"
        cells.append([row.task, row.guess, *figures])
    return table(cells)
