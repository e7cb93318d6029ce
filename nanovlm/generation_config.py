"""Generation defaults that a model's author recommends: generation_config.json, as transformers writes and reads it."""

import json
import logging
from pathlib import Path
from typing import Any

from models.checkpoint import read_object
from nanovlm.errors import CheckpointError, InputError
from nanovlm.options import GenerationOptions

FOLLOWED = {"repetition_penalty", "max_new_tokens"}
SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}  # transformers' defaults, with do_sample only
# Read elsewhere, or without a say in the answer: token ids, what is returned, speed, and settings of beams alone.
OTHERS = {
    "do_sample", "transformers_version", "_from_model_config", "eos_token_id", "bos_token_id", "pad_token_id",
    "decoder_start_token_id", "use_cache", "cache_implementation", "cache_config", "early_stopping", "length_penalty",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size",
    "disable_compile", "compile_config", "prefill_chunk_size", "is_assistant",
}  # fmt: skip

logger = logging.getLogger(__name__)


def read_generation_defaults(folder: Path) -> dict[str, Any]:
    """Fields of `GenerationOptions` from the generation_config.json of a model's folder, if there is one.

    Settings that would change answers but are not computed here are named in one line. CheckpointError for a value out
    of range.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    raw = {key: value for key, value in read_object(path).items() if value is not None}
    defaults = {key: raw[key] for key in raw if key in FOLLOWED}
    if raw.get("do_sample"):
        defaults |= {key: raw.get(key, default) for key, default in SAMPLED.items()}
    try:
        GenerationOptions(**defaults)
    except InputError as error:
        raise CheckpointError(f"{path}: {error}") from None
    ignored = []
    for key in raw.keys() - OTHERS - FOLLOWED - SAMPLED.keys():
        is_one = raw[key] == 1 and raw[key] is not True  # off, for a number of beams or a penalty
        if raw[key] and not (is_one and not key.startswith(("min_", "max_"))):
            ignored.append(f"{key}={json.dumps(raw[key])[:60]}")
    if ignored:
        settings = ", ".join(sorted(ignored))
        logger.warning("note: %s: %s: not supported, answers are generated without", path, settings)
    return defaults
