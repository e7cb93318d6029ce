"""Checkpoints of a given shape with random weights and a tokenizer of the right size."""

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers

from eval.lib.command import progress
from eval.lib.shapes import SHAPES
from models.checkpoint import save_checkpoint
from models.config import VLMConfig
from models.formats.smolvlm import SmolVLM
from models.formats.to_smolvlm import layout_tokens
from models.vision_language_model import VisionLanguageModel

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SMOLLM2_VOCABULARY = 49152
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def make_tokenizer(cfg: VLMConfig) -> str:
    """A byte-level BPE tokenizer.json, as SmolLM2's, that fills cfg's vocabulary; its merges are made up."""
    base = SMOLLM2_VOCABULARY if isinstance(cfg.format, SmolVLM) else cfg.lm_base_vocab_size or cfg.lm_vocab_size
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]  # Ċ is a line break
    words, merges = list(ALPHABET), [("Ċ", "Ċ")]  # llama.cpp looks for a token of two
    for i in count():  # after a, b, ... come aa, ab, ..., then aaa, aab, ...
        if len(tokens) + len(ALPHABET) > base:
            break
        merges += [(words[i], letter) for letter in ALPHABET]
        words += [words[i] + letter for letter in ALPHABET]
        tokens += words[-len(ALPHABET) :]
    tokens += [f"<filler_{i}>" for i in range(base - len(tokens))]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    extra = smolvlm_tokens(cfg) if isinstance(cfg.format, SmolVLM) else list(cfg.special_tokens.values())
    backend.add_special_tokens(SPECIAL_TOKENS + extra)
    return backend.to_str()


def smolvlm_tokens(cfg: VLMConfig) -> list[str]:
    """The words behind SmolLM2's, in an order that puts the image token and the end of an answer at cfg's ids."""
    assert isinstance(cfg.format, SmolVLM)
    names = {cfg.format.image_token_id: "<image>", cfg.format.end_token_ids[0]: "<end_of_utterance>"}
    others = [token for token in layout_tokens(6, 1) if token not in names.values()]
    others += [f"<reserved_{i}>" for i in range(cfg.lm_vocab_size - SMOLLM2_VOCABULARY)]
    ids = range(SMOLLM2_VOCABULARY, cfg.lm_vocab_size)
    return [names[id] if id in names else others.pop(0) for id in ids]


def write_random_model(folder: Path, cfg: VLMConfig) -> None:
    """Save a float32 checkpoint with random weights, the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_checkpoint(folder, VisionLanguageModel(cfg, image_token_id=-1), make_tokenizer(cfg))


@contextmanager
def random_model_folder(size: str, **changes: Any) -> Iterator[Path]:
    """A temporary checkpoint of a published size with random weights; changes are fields of its config."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it is removed, too
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:  # Windows keeps mapped files
            progress(f"{size}: writing random weights")
            write_random_model(folder := Path(temporary, "model"), replace(SHAPES[size][0], **changes))
            yield folder
    finally:
        signal.signal(signal.SIGTERM, before)
