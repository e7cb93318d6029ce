"""Write a model under the names and settings of transformers' SmolVLM, which are Idefics3's (Laurençon et al. 2024)."""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from models.checkpoint import CONFIG, TOKENIZER_CONFIG, format_of
from models.checkpoint.format import EMBEDDING, HEAD, MODEL_INPUT_NAMES
from models.common.errors import InputError
from models.config import VLMConfig
from models.formats.backbones import grow, rescaled
from models.formats.base import LLAMA_CONFIG, SIGLIP_CONFIG
from models.formats.smolvlm import GENERATION, IMAGE_SETTINGS, PREPROCESSOR, PROCESSOR, TEMPLATE, TOKENS, SmolVLM
from models.vision_language_model import VisionLanguageModel, empty_model

END_TOKEN = "<end_of_utterance>"
# The layout that SmolVLM-256M-Instruct and its relatives were trained with; it takes plain texts, too.
CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'] is string %}: {{ message['content'] }}{% else %}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"  # by which vLLM knows it
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def smolvlm_tensors(model: VisionLanguageModel) -> dict[str, Tensor]:
    """The model's tensors under SmolVLM's names; of a tied pair only the embedding."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if format_of(model.cfg).unit_pixels:  # of which SmolVLM's processor would drop an image of zeros
        state |= rescaled(state, unit_pixels=False)
    return SmolVLM.tensors(model.cfg, state)


def smolvlm_config(cfg: VLMConfig, image_token_id: int, eos_token_id: int) -> dict:
    """The object for SmolVLM's config.json; InputError for a model that SmolVLM cannot express.

    A negative image_token_id, that of format 1, is written as the first id behind the vocabulary: no token stands for
    an image there.
    """
    if cfg.lm_attn_scaling != 1:
        raise InputError(f"lm_attn_scaling={cfg.lm_attn_scaling}: SmolVLM's attention has no such factor, only 1")
    if SmolVLM.patch_positions(cfg.vit_grid) != list(range(cfg.vit_grid)):
        raise InputError(
            f"{cfg.vit_grid} patches a side (vit_img_size={cfg.vit_img_size} / vit_patch_size={cfg.vit_patch_size}): "
            "transformers' rounding would give two of them the same position; a power of two, as 16 or 32, is exact"
        )
    ends = {"eos_token_id": eos_token_id, "pad_token_id": eos_token_id, "bos_token_id": None}
    vision, text = (
        {theirs: getattr(cfg, ours) for ours, (theirs, _) in names.items()} for names in (SIGLIP_CONFIG, LLAMA_CONFIG)
    )
    return {
        "architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm", **ends,
        "image_token_id": cfg.lm_vocab_size if image_token_id < 0 else image_token_id,
        "scale_factor": cfg.mp_pixel_shuffle_factor, "tie_word_embeddings": cfg.lm_tie_weights,
        "text_config": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", **ends,
            **text, "num_key_value_heads": cfg.lm_n_kv_heads, "head_dim": cfg.lm_head_dim, "hidden_act": "silu",
            "rope_theta": cfg.lm_re_base, "vocab_size": cfg.lm_vocab_size, "attention_bias": False, "mlp_bias": False,
        },
        "vision_config": {
            "model_type": "smolvlm_vision", **vision, "num_channels": 3, "hidden_act": "gelu_pytorch_tanh",
        },
    }  # fmt: skip


def smolvlm_settings(
    cfg: VLMConfig, image_token_id: int, end: str, end_id: int, tokens: Mapping[str, str] | None, images: Mapping = {}
) -> dict[str, dict]:
    """The objects of SmolVLM's JSON files by name; without special tokens, those that need no processor.

    images are the settings of the image processor that differ from `image_processor_settings`.
    """
    tokenizer: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": MODEL_INPUT_NAMES,
        "eos_token": end, "pad_token": end, "padding_side": "left", "clean_up_tokenization_spaces": False,
        "model_max_length": cfg.lm_max_position_embeddings,
    }  # fmt: skip
    objects = {
        CONFIG: smolvlm_config(cfg, image_token_id, end_id),
        GENERATION: {"eos_token_id": end_id, "pad_token_id": end_id},
        TOKENIZER_CONFIG: tokenizer,
    }
    if tokens is not None:
        tokenizer["processor_class"] = "SmolVLMProcessor"
        tokenizer["extra_special_tokens"] = {**tokens, "end_of_utterance_token": end}
        objects[PROCESSOR] = {"processor_class": "SmolVLMProcessor", "image_seq_len": cfg.mp_image_token_length}
        objects[PREPROCESSOR] = image_processor_settings(cfg.vit_img_size, cfg.vit_img_size) | {**images}
    return objects


def image_processor_settings(tile: int, longest_edge: int) -> dict:
    """The object for preprocessor_config.json: images split into tiles, as SmolVLM's were."""
    return {
        "image_processor_type": "SmolVLMImageProcessor",
        "processor_class": "SmolVLMProcessor",
        "do_convert_rgb": True,
        "do_pad": True,
        **{key: default for key, (default, _, _) in IMAGE_SETTINGS.items()},
        "size": {"longest_edge": longest_edge},
        "max_image_size": {"longest_edge": tile},
    }


def layout_tokens(longest_edge: int, tile: int) -> list[str]:
    """The tokens of SmolVLM's layout for images of up to longest_edge pixels, in tiles of `tile`."""
    side = range(1, -(-longest_edge // tile) + 1)
    positions = [f"<row_{row}_col_{column}>" for row in side for column in side] if len(side) > 1 else []
    return [*TOKENS.values(), END_TOKEN, *positions]


def to_smolvlm_layout(
    model: VisionLanguageModel, token_ids: Mapping[str, int], longest_edge: int, rescale: bool = True
) -> VisionLanguageModel:
    """The model in SmolVLM's own layout of images and chats, to be trained in it, in eval mode.

    token_ids are those of the tokenizer, to which `layout_tokens` were added. rescale keeps the answers to pixels: the
    patch convolution of nanoVLM's models reads [0, 1], that of pretrained SigLIP backbones SmolVLM's [-1, 1] already.
    New tokens begin as those that they replace, others as N(0, 0.02), drawn from torch's global generator. Shares
    memory with the given model.
    """
    old = model.cfg
    image_token_id = token_ids[TOKENS["image_token"]]
    images = {"size": {"longest_edge": longest_edge}}
    files = smolvlm_settings(old, image_token_id, END_TOKEN, token_ids[END_TOKEN], TOKENS, images)
    config = files.pop(CONFIG)
    config["text_config"]["vocab_size"] = max(old.lm_vocab_size, max(token_ids.values()) + 1)
    texts = {name: json.dumps(value, indent=2) + "\n" for name, value in files.items()}
    cfg = SmolVLM.read_config(config, texts | {TEMPLATE: CHAT_TEMPLATE})

    state: dict[str, Tensor] = model.state_dict()
    if rescale:
        state |= rescaled(state, unit_pixels=False)
    replaced = {END_TOKEN: old.end_token, TOKENS["global_image_token"]: old.special_tokens.get("global_image_token")}
    for name in (EMBEDDING, HEAD):
        weight = grow(state[name], cfg.lm_vocab_size)
        for new, former in replaced.items():
            if former is not None and former in token_ids and token_ids[new] >= old.lm_vocab_size:
                weight[token_ids[new]] = weight[token_ids[former]]
        state[name] = weight
    if old.lm_tie_weights:
        state[HEAD] = state[EMBEDDING]
    converted = empty_model(cfg, image_token_id)
    converted.load_state_dict(state, assign=True)
    converted.decoder.tie_weights()
    return converted.requires_grad_(True).eval()
