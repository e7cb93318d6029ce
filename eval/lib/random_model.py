"""Checkpoints of a given shape with random weights and a tokenizer of the right size."""

from itertools import count
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers

from models.checkpoint import save_checkpoint
from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def make_tokenizer(cfg: VLMConfig) -> str:
    """A byte-level BPE tokenizer.json, as SmolLM2's, that fills cfg's vocabulary; its merges are made up."""
    base = cfg.lm_base_vocab_size or cfg.lm_vocab_size
    tokens = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    words, merges = list(ALPHABET), []
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
    backend.add_special_tokens(SPECIAL_TOKENS + list((cfg.vlm_extra_tokens or {}).values()))
    return backend.to_str()


def write_random_model(folder: Path, cfg: VLMConfig) -> None:
    """Save a float32 checkpoint with random weights, the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_checkpoint(folder, VisionLanguageModel(cfg, image_token_id=-1), make_tokenizer(cfg))
