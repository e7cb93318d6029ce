"""Continuous batching (Yu et al. 2022, Orca): answers that begin and end at different times share every step.

Each running answer has a row of a cache of fixed capacity, in which its keys and values stand from 0 on, and masks say
how far. So a row that ends costs nothing, and one that joins is a prompt read and copied into its row.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.decoding import GREEDY, SamplingParams, token_presence_mask
from models.language_model import rope_cos_sin
from models.vision_language_model import VisionLanguageModel

READ = 2048  # tokens, of prompts that are read at once: running answers wait meanwhile
ALIKE = 7 / 8  # of the longest prompt: shorter ones would rather pad than read
GROW = 64  # tokens, by which the cache grows


@dataclass(frozen=True)
class TokenOutput:
    """The next token of a sequence. `finished` is "stop" (the end token itself), "length" or "error" on the last."""

    key: Hashable
    token_id: int
    finished: str | None = None
    error: Exception | None = None  # why the sequence failed; token_id is then -1


class PrefillError(RuntimeError):
    """A prompt that could not be read, for lack of memory, say. It is gone; the others are as they were."""

    def __init__(self, key: Hashable, error: Exception):
        super().__init__(str(error) or type(error).__name__)
        self.key = key


@dataclass(eq=False)
class _Answer:
    """A prompt, and what has become of it."""

    key: Hashable
    input_ids: Tensor  # (T,), on the CPU
    images: Tensor | None
    left: int  # tokens that it may still say
    sampling: SamplingParams
    generator: torch.Generator | None = None
    seen: Tensor | None = None  # (1, vocabulary), for the repetition penalty
    length: int = 0  # of what its row of the cache holds
    last: int = -1  # token said, not yet read


class _RowsKV:
    """A KVCache of one token more a row, each at its own place; the key and value are views of the shared cache."""

    def __init__(self, key: Tensor, value: Tensor, rows: Tensor, places: Tensor):
        self.key, self.value, self.rows, self.places = key, value, rows, places

    def append(self, key: Tensor, value: Tensor) -> "_RowsKV":
        self.key[self.rows, :, self.places] = key[:, :, 0]
        self.value[self.rows, :, self.places] = value[:, :, 0]
        return self


class ContinuousBatch:
    """Answers of many prompts at once: a prompt joins when a row is free, and its row is free when its answer ends.

    An answer is what `model.generate` would say to its prompt alone, up to the rounding of sums in another order.
    For one thread; while a step runs, nothing may be added or cancelled.
    """

    def __init__(self, model: VisionLanguageModel, *, rows: int = 16, eos_token_id: int | None = None):
        if rows < 1:
            raise ValueError(f"rows={rows} is less than 1")
        self.model, self.n_rows, self.eos_token_id = model, rows, eos_token_id
        self._line: dict[Hashable, _Answer] = {}
        self._rows: list[_Answer | None] = []  # None where an answer has ended
        self._cache: Tensor | None = None  # (n_blocks, 2, rows, n_kv_heads, capacity, head_dim)
        self._outputs: list[TokenOutput] = []  # of the current step; an exception leaves them to the next one

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def running(self) -> int:
        return sum(answer is not None for answer in self._rows)

    def add(
        self,
        key: Hashable,
        input_ids: Tensor,
        images: Tensor | None = None,
        *,
        max_new_tokens: int = 64,
        sampling: SamplingParams = GREEDY,
    ) -> None:
        """Put a prompt, ids (T,) and images (N, 3, S, S), in line. ValueError if it can never be read."""
        if key in self._line or any(answer is not None and answer.key == key for answer in self._rows):
            raise ValueError(f"{key!r} has a prompt already that waits or runs")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} is less than 1")
        if input_ids.dim() != 1 or not len(input_ids):
            raise ValueError(f"a prompt is a row of ids (T,), T at least 1, not {tuple(input_ids.shape)}")
        self.model.validate_length(len(input_ids), max_new_tokens)
        self.model.validate_images(input_ids, images)
        self._line[key] = _Answer(key, input_ids.cpu(), images, max_new_tokens, sampling)

    def cancel(self, key: Hashable) -> None:
        """Forget an answer, whether it waits or runs; a key that is not known is none to forget."""
        self._line.pop(key, None)
        self._outputs = [output for output in self._outputs if output.key != key]
        self._rows = [None if answer is not None and answer.key == key else answer for answer in self._rows]

    @torch.inference_mode()
    def step(self) -> list[TokenOutput]:
        """Read prompts for which there are rows, some at a time, then let every running answer say one more token.

        A prompt's first token comes of its prefill, so a step may return two of its tokens. PrefillError names a prompt
        that has been dropped. A sequence that cannot be decoded ends with `finished="error"`; the others continue. Running
        out of memory raises MemoryError or torch.OutOfMemoryError: cancel some sequences and step again. After any of
        these exceptions the batch is intact, and no token is lost.
        """
        self._outputs += self._read(self._next())
        self._close_ranks()
        self._decode(0, len(self._rows))
        outputs, self._outputs = self._outputs, []
        return outputs

    def _next(self) -> list[_Answer]:
        """The first in line and those behind it that are about as long, no more than there is room for."""
        free, chosen, shortest, longest = self.n_rows - self.running, [], 1 << 62, 0
        for answer in self._line.values():
            if len(chosen) == free:
                break
            short, long = min(shortest, len(answer.input_ids)), max(longest, len(answer.input_ids))
            if not chosen or (short >= ALIKE * long and (len(chosen) + 1) * long <= READ):
                chosen.append(answer)
                shortest, longest = short, long
        return chosen

    def _read(self, answers: list[_Answer]) -> list[TokenOutput]:
        """Read prompts into free rows; if several together fail, only the first, and the others stay in line."""
        if not answers:
            return []
        try:
            logits = self._prefill(answers)
        except Exception as error:  # of torch's kernels, or Python's: one prompt is not to stop the others
            if len(answers) == 1:
                del self._line[answers[0].key]
                raise PrefillError(answers[0].key, error) from error
            logits = None
        if logits is None:
            return self._read(answers[:1])
        for answer in answers:
            del self._line[answer.key]
        return self._choose(answers, logits)

    def _prefill(self, answers: list[_Answer]) -> Tensor:
        """Read prompts, padded on the right, where causal attention does not look: the logits after each."""
        model, device = self.model, self.model.device
        lengths = [len(answer.input_ids) for answer in answers]
        free = [row for row, answer in enumerate(self._rows) if answer is None]
        free += range(len(self._rows), len(self._rows) + len(answers) - len(free))
        rows = free[: len(answers)]
        self._reserve(max(rows) + 1, max(lengths))
        pad = int(model.image_token_id == 0)  # any id but that of an image
        ids = torch.nn.utils.rnn.pad_sequence([a.input_ids for a in answers], batch_first=True, padding_value=pad)
        images = [answer.images for answer in answers if answer.images is not None]
        x = model.embed(ids.to(device), torch.cat(images).to(device) if images else None)
        hidden, caches = model.decoder(x)
        index, T = torch.tensor(rows, device=device), x.size(1)
        for block, kv in zip(self._cache, caches):
            block[0][index, :, :T], block[1][index, :, :T] = kv.key, kv.value
        self._cache[:, :, rows, :, T:] = 0  # what others left could reach this one as 0 times infinity
        last = torch.tensor(lengths, device=device) - 1
        logits = model.decoder.head(hidden[torch.arange(len(answers), device=device), last])
        self._rows += [None] * (max(rows) + 1 - len(self._rows))
        for row, answer, length in zip(rows, answers, lengths):
            self._rows[row], answer.length, answer.images = answer, length, None
        return logits

    def _close_ranks(self) -> None:
        """Put the last answers into the rows that have ended, so that steps are for those that run."""
        while None in self._rows:
            last = self._rows.pop()
            if last is not None:
                hole = self._rows.index(None)
                self._rows[hole] = last
                self._cache[:, :, hole] = self._cache[:, :, len(self._rows)]

    def _decode(self, start: int, stop: int) -> None:
        """Decode one token for rows start to stop, all of them running.

        If they fail together, each half is decoded by itself, until only the sequence that causes the failure ends.
        """
        if start == stop:
            return
        answers = self._rows[start:stop]
        try:
            logits = self._decode_logits(answers, start)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if len(answers) == 1:
                self._rows[start] = None
                self._outputs.append(TokenOutput(answers[0].key, -1, "error", error))
            else:
                middle = (start + stop) // 2
                self._decode(start, middle)
                self._decode(middle, stop)
            return
        for answer in answers:
            answer.length += 1
        self._outputs += self._choose(answers, logits)

    def _decode_logits(self, answers: Sequence[_Answer], start: int) -> Tensor:
        """The logits (B, vocabulary) after the last token of each of the answers, which stand in rows from start on."""
        model, n = self.model, len(answers)
        places = torch.tensor([answer.length for answer in answers])
        span = int(places.max()) + 1
        self._reserve(start + n, span)
        places, rows = places.to(model.device), torch.arange(n, device=model.device)
        mask = (torch.arange(span, device=model.device) <= places[:, None])[:, None, None]
        cos, sin = rope_cos_sin(places[:, None, None], model.cfg)
        x = model.decoder.token_embedding(torch.tensor([[answer.last] for answer in answers], device=model.device))
        for block, (key, value) in zip(model.decoder.blocks, self._cache[:, :, start : start + n, :, :span]):
            x, _ = block(x, cos, sin, mask, _RowsKV(key, value, rows, places))
        return model.decoder.head(model.decoder.norm(x[:, -1]))

    def _reserve(self, n_rows: int, n_tokens: int) -> None:
        """Make the cache large enough, and then some, so that it seldom grows; when nobody runs, it may shrink."""
        cfg, old = self.model.cfg, self._cache
        if old is not None and n_rows <= old.size(2) and n_tokens <= old.size(4):
            return
        if keep := old is not None and bool(self._rows):
            n_rows = max(min(2 * n_rows, self.n_rows), old.size(2)) if n_rows > old.size(2) else old.size(2)
            n_tokens = max(n_tokens, old.size(4) * 5 // 4) if n_tokens > old.size(4) else old.size(4)
        capacity = min(-(-n_tokens // GROW) * GROW, cfg.lm_max_position_embeddings)
        weight = self.model.decoder.norm.weight
        new = weight.new_zeros(cfg.lm_n_blocks, 2, n_rows, cfg.lm_n_kv_heads, capacity, cfg.lm_head_dim)
        if keep:
            new[:, :, : old.size(2), :, : old.size(4)] = old
        self._cache = new

    def _choose(self, answers: Sequence[_Answer], logits: Tensor) -> list[TokenOutput]:
        """Each answer's next token of its logits, (B, vocabulary), as `generate_tokens` would choose it."""
        said = []
        for row, (answer, token_id) in enumerate(zip(tuple(answers), GREEDY(logits).tolist())):
            if answer.sampling != GREEDY:
                try:
                    token_id = self._sample(answer, logits[row : row + 1])
                except Exception as error:
                    self._rows[self._rows.index(answer)] = None
                    said.append(TokenOutput(answer.key, -1, "error", error))
                    continue
            answer.last, answer.left = token_id, answer.left - 1
            finished = "stop" if token_id == self.eos_token_id else None if answer.left else "length"
            if finished:
                self._rows[self._rows.index(answer)] = None
            said.append(TokenOutput(answer.key, token_id, finished))
        return said

    def _sample(self, answer: _Answer, logits: Tensor) -> int:
        """The next token of one answer, logits (1, vocabulary)."""
        sampling = answer.sampling
        if sampling.seed is not None and answer.generator is None:
            answer.generator = torch.Generator(logits.device).manual_seed(sampling.seed)
        if sampling.repetition_penalty != 1:
            if answer.seen is None:
                ids = answer.input_ids[None].to(logits.device)
                answer.seen = token_presence_mask(ids, logits.size(-1), ids != self.model.image_token_id)
            logits = sampling.apply_repetition_penalty(logits, answer.seen)
        ids = sampling(logits, answer.generator)
        if answer.seen is not None:
            answer.seen[0, ids] = True
        return int(ids)
