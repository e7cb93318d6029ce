"""Write a model under the names and settings of transformers' SmolVLM, which are Idefics3's (Laurençon et al. 2024).

The network is the same; only the scale of the pixels differs, which the patch convolution absorbs.
"""

from torch import Tensor

from models.config import VLMConfig
from models.errors import InputError
from models.smolvlm import patch_positions, to_smolvlm
from models.vision_language_model import VisionLanguageModel


def smolvlm_tensors(model: VisionLanguageModel) -> dict[str, Tensor]:
    """The model's tensors under SmolVLM's names; of a tied pair only the embedding.

    Our encoder reads pixels x in [0, 1], SmolVLM's reads y = 2x - 1, as SigLIP does, and its processor would drop an
    image of zeros. Since W x + b = (W / 2) y + (b + sum W / 2), the patch convolution is rescaled.
    """
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model.cfg.lm_tie_weights:
        del state["decoder.head.weight"]
    conv = "vision_encoder.patch_embedding.conv"
    weight = state[f"{conv}.weight"] / 2
    state |= {f"{conv}.weight": weight, f"{conv}.bias": state[f"{conv}.bias"] + weight.sum((1, 2, 3))}
    return to_smolvlm(state)


def smolvlm_config(cfg: VLMConfig, image_token_id: int, eos_token_id: int) -> dict:
    """The object for SmolVLM's config.json; InputError for a model that SmolVLM cannot express.

    A negative image_token_id, that of format 1, is written as the first id behind the vocabulary: no token stands for
    an image there.
    """
    if cfg.lm_attn_scaling != 1:
        raise InputError(f"lm_attn_scaling={cfg.lm_attn_scaling}: SmolVLM's attention has no such factor, only 1")
    if not patches_keep_their_positions(cfg.vit_grid):
        raise InputError(
            f"{cfg.vit_grid} patches a side (vit_img_size={cfg.vit_img_size} / vit_patch_size={cfg.vit_patch_size}): "
            "transformers' rounding would give two of them the same position; a power of two, as 16 or 32, is exact"
        )
    ends = {"eos_token_id": eos_token_id, "pad_token_id": eos_token_id, "bos_token_id": None}
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "image_token_id": cfg.lm_vocab_size if image_token_id < 0 else image_token_id,
        "scale_factor": cfg.mp_pixel_shuffle_factor,
        "tie_word_embeddings": cfg.lm_tie_weights,
        **ends,
        "text_config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": cfg.lm_hidden_dim,
            "intermediate_size": cfg.lm_inter_dim,
            "num_hidden_layers": cfg.lm_n_blocks,
            "num_attention_heads": cfg.lm_n_heads,
            "num_key_value_heads": cfg.lm_n_kv_heads,
            "head_dim": cfg.lm_head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": cfg.lm_rms_eps,
            "rope_theta": cfg.lm_re_base,
            "max_position_embeddings": cfg.lm_max_position_embeddings,
            "vocab_size": cfg.lm_vocab_size,
            "tie_word_embeddings": cfg.lm_tie_weights,
            "attention_bias": False,
            "mlp_bias": False,
            **ends,
        },
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": cfg.vit_hidden_dim,
            "intermediate_size": cfg.vit_inter_dim,
            "num_hidden_layers": cfg.vit_n_blocks,
            "num_attention_heads": cfg.vit_n_heads,
            "num_channels": 3,
            "image_size": cfg.vit_img_size,
            "patch_size": cfg.vit_patch_size,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": cfg.vit_ln_eps,
        },
    }


def patches_keep_their_positions(grid: int) -> bool:
    """Whether Idefics3's position ids are exact for this grid in transformers 5, which buckets fractions of a side.

    Other programs round the same fractions in another way: transformers up to 4.54 and vLLM compute them by
    torch.arange, whose rounding depends on PyTorch's build. See `is_exact_in_every_rounding`.
    """
    return patch_positions(grid) == list(range(grid))


def is_exact_in_every_rounding(grid: int) -> bool:
    """Whether grid is a power of two: then every fraction of a side is exact, and so is every position id."""
    return grid & (grid - 1) == 0
