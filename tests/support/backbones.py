"""A tiny SigLIP and a tiny Llama of transformers."""

from support import Package, randomize

transformers = Package("transformers")

SEES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
SAYS = {
    "vocab_size": 40, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": 1,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
}  # fmt: skip
TEXT = {**{key: SEES[key] for key in list(SEES)[:4]}, "vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2}
FOLD = {"mp_pixel_shuffle_factor": 2}


def siglip(**changes):
    return randomize(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SEES | changes))).eval()


def llama(**changes):
    return randomize(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SAYS | changes))).eval()
