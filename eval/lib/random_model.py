"""Published models' shapes, and checkpoints of such a shape with random weights and a tokenizer of the right size."""

import json
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
from models.checkpoint import save_checkpoint
from models.config import VLMConfig
from models.formats.smolvlm import GENERATION, PREPROCESSOR, TEMPLATE, SmolVLM
from models.formats.to_smolvlm import CHAT_TEMPLATE, image_processor_settings, layout_tokens
from models.vision_language_model import VisionLanguageModel

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SMOLLM2_VOCABULARY = 49152
ALPHABET = "abcdefghijklmnopqrstuvwxyz"

SMOLLM2_135M: dict[str, Any] = {
    "lm_hidden_dim": 576, "lm_inter_dim": 1536, "lm_n_blocks": 30, "lm_n_heads": 9, "lm_n_kv_heads": 3,
    "lm_model_type": "HuggingFaceTB/SmolLM2-135M-Instruct", "lm_tokenizer": "HuggingFaceTB/SmolLM2-135M-Instruct",
}  # fmt: skip
MAY_2025: dict[str, Any] = SMOLLM2_135M | {
    "vit_img_size": 224, "vit_model_type": "google/siglip-base-patch16-224", "mp_pixel_shuffle_factor": 2,
    "lm_vocab_size": 49152, "lm_max_length": 79,
    "lm_model_type": "HuggingFaceTB/SmolLM2-135M", "lm_tokenizer": "HuggingFaceTB/cosmo2-tokenizer",
    "lm_base_vocab_size": None, "extra_token_amount": None, "vlm_extra_tokens": None, "lm_chat_template": None,
    "mp_image_token_length": None, "max_img_size": None, "resize_to_max_side_len": None,
    "unknown": {
        "lm_eos_token_id": 0, "IMAGE_TOKEN_LENGTH": 49, "TOTAL_SEQUENCE_LENGTH": 128,
        "lm_rope_factor": 1.0, "lm_beta_fast": 32, "lm_beta_slow": 1,
    },
}  # fmt: skip
# The keys of SmolVLM's config.json that transformers' defaults do not give.
SIGLIP_B16 = {"hidden_size": 768, "image_size": 512, "num_attention_heads": 12, "patch_size": 16}
SIGLIP_SO400M = {
    "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "num_attention_heads": 16,
    "num_hidden_layers": 27, "patch_size": 14,
}  # fmt: skip
SMOLVLM_135M = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_hidden_layers": 30,
    "num_key_value_heads": 3, "rope_theta": 100000, "max_position_embeddings": 8192, "vocab_size": 49280,
}  # fmt: skip
SMOLVLM_360M = SMOLVLM_135M | {
    "hidden_size": 960, "intermediate_size": 2560, "num_attention_heads": 15, "num_hidden_layers": 32,
    "num_key_value_heads": 5,
}  # fmt: skip
SMOLVLM_1700M = SMOLVLM_135M | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 24,
    "num_key_value_heads": 32, "vocab_size": 49155,
}  # fmt: skip  # its tokenizer has no tokens for rows, columns and the whole image: they are text


def smolvlm(vision: dict, text: dict, scale_factor: int = 4, **top: Any) -> VLMConfig:
    """The config of a published SmolVLM, whose images have a longest edge of four tiles."""
    config = {"model_type": "idefics3", "scale_factor": scale_factor, "image_token_id": 49190} | top
    objects = {
        PREPROCESSOR: image_processor_settings(vision["image_size"], 4 * vision["image_size"]),
        GENERATION: {"eos_token_id": text["vocab_size"] - 1},
    }
    files = {name: json.dumps(value) for name, value in objects.items()} | {TEMPLATE: CHAT_TEMPLATE}
    return SmolVLM.read_config(config | {"vision_config": vision, "text_config": text}, files)


SHAPES = {  # name: (config, parameters of the published model)
    "230M": (VLMConfig(**SMOLLM2_135M), 228_063_936),
    "460M": (VLMConfig(), 460_113_984),
    "222M": (VLMConfig(**MAY_2025), 222_081_600),
    "SmolVLM-256M": (smolvlm(SIGLIP_B16, SMOLVLM_135M), 256_484_928),
    "SmolVLM-500M": (smolvlm(SIGLIP_B16, SMOLVLM_360M), 507_482_304),
    "SmolVLM-2.2B": (smolvlm(SIGLIP_SO400M, SMOLVLM_1700M, 3, image_token_id=49153), 2_246_272_880),
}


def make_tokenizer(cfg: VLMConfig) -> str:
    """A byte-level BPE tokenizer.json, as SmolLM2's, that fills cfg's vocabulary; its merges are made up."""
    base = SMOLLM2_VOCABULARY if isinstance(cfg.format, SmolVLM) else cfg.lm_base_vocab_size or cfg.lm_vocab_size
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]  # Ċ is a line break
    words = list(ALPHABET)  # llama.cpp looks for a token of two
    merges = [("Ċ", "Ċ")]
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
    extra = list(cfg.special_tokens.values())
    if isinstance(cfg.format, SmolVLM):  # in an order that puts the image token and the end of an answer at cfg's ids
        names = {cfg.format.image_token_id: "<image>", cfg.format.end_token_ids[0]: "<end_of_utterance>"}
        others = [token for token in layout_tokens(6, 1) if token not in names.values()]
        others += [f"<reserved_{i}>" for i in range(cfg.lm_vocab_size - base)]
        extra = [names[id] if id in names else others.pop(0) for id in range(base, cfg.lm_vocab_size)]
    backend.add_special_tokens(SPECIAL_TOKENS + extra)
    return backend.to_str()


def write_random_model(folder: Path, cfg: VLMConfig, dtype: torch.dtype = torch.float32) -> None:
    """Save a checkpoint in dtype with random weights, the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_checkpoint(folder, VisionLanguageModel(cfg, image_token_id=-1), make_tokenizer(cfg), dtype)


@contextmanager
def random_model_folder(size: str, dtype: torch.dtype, **changes: Any) -> Iterator[Path]:
    """A temporary checkpoint in dtype of a published size with random weights; changes are fields of its config."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it is removed, too
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:  # Windows keeps mapped files
            progress(f"{size}: writing random weights in {dtype}")
            write_random_model(folder := Path(temporary, "model"), replace(SHAPES[size][0], **changes), dtype)
            yield folder
    finally:
        signal.signal(signal.SIGTERM, before)
