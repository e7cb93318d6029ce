"""The configs of published nanoVLM models, as in their config.json, and their parameter counts."""

from typing import Any

from models.config import VLMConfig

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
SHAPES = {  # name: (config, parameters of the published model)
    "230M": (VLMConfig(**SMOLLM2_135M), 228_063_936),
    "460M": (VLMConfig(), 460_113_984),
    "222M": (VLMConfig(**MAY_2025), 222_081_600),
}
