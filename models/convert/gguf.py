"""The tensors of a SmolVLM-layout model under llama.cpp's names, for its two GGUF files: the text model and mmproj.

Names and order of channels follow llama.cpp's conversion/llama.py and conversion/smolvlm.py.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor

from models.config import VLMConfig
from models.smolvlm import to_smolvlm
from models.transformers_layout import translate
from models.vision_transformer import smolvlm_position_ids

# transformers' name -> llama.cpp's; None stands for a tensor of the other file.
TEXT_NAMES = {
    r"model\.(vision_model|connector)\..*": None,
    r"model\.text_model\.embed_tokens\.weight": "token_embd.weight",
    r"model\.text_model\.norm\.weight": "output_norm.weight",
    r"lm_head\.weight": "output.weight",
    r"model\.text_model\.layers\.(\d+)\.input_layernorm\.weight": r"blk.\1.attn_norm.weight",
    r"model\.text_model\.layers\.(\d+)\.self_attn\.o_proj\.weight": r"blk.\1.attn_output.weight",
    r"model\.text_model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.weight": r"blk.\1.attn_\2.weight",
    r"model\.text_model\.layers\.(\d+)\.post_attention_layernorm\.weight": r"blk.\1.ffn_norm.weight",
    r"model\.text_model\.layers\.(\d+)\.mlp\.(\w+)_proj\.weight": r"blk.\1.ffn_\2.weight",
}
VISION_NAMES = {
    r"model\.text_model\..*|lm_head\.weight": None,
    r"model\.vision_model\.embeddings\.patch_embedding\.(\w+)": r"v.patch_embd.\1",
    r"model\.vision_model\.embeddings\.position_embedding\.weight": "v.position_embd.weight",
    r"model\.vision_model\.encoder\.layers\.(\d+)\.layer_norm([12])\.(\w+)": r"v.blk.\1.ln\2.\3",
    r"model\.vision_model\.encoder\.layers\.(\d+)\.self_attn\.out_proj\.(\w+)": r"v.blk.\1.attn_out.\2",
    r"model\.vision_model\.encoder\.layers\.(\d+)\.self_attn\.([qkv])_proj\.(\w+)": r"v.blk.\1.attn_\2.\3",
    r"model\.vision_model\.encoder\.layers\.(\d+)\.mlp\.fc1\.(\w+)": r"v.blk.\1.ffn_up.\2",
    r"model\.vision_model\.encoder\.layers\.(\d+)\.mlp\.fc2\.(\w+)": r"v.blk.\1.ffn_down.\2",
    r"model\.vision_model\.post_layernorm\.(\w+)": r"v.post_ln.\1",
    r"model\.connector\.modality_projection\.proj\.weight": "mm.model.fc.weight",
}


def text_tensors(state: Mapping[str, Tensor], cfg: VLMConfig) -> Iterator[tuple[str, Tensor]]:
    """The decoder's tensors in a state dict of VisionLanguageModel; of a tied pair only the embedding."""
    heads = {"attn_q": cfg.lm_n_heads, "attn_k": cfg.lm_n_kv_heads}
    for name, tensor in _renamed(state, TEXT_NAMES):
        if kind := next((kind for kind in heads if kind in name), None):
            tensor = to_llama_rope(tensor, heads[kind])
        if not (name == "output.weight" and cfg.lm_tie_weights):
            yield name, tensor


def vision_tensors(state: Mapping[str, Tensor], cfg: VLMConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the vision encoder and the projector in a state dict of VisionLanguageModel.

    llama.cpp numbers patches 0, 1, 2 ...; where Idefics3 does not, the position embeddings are reordered instead.
    """
    for name, tensor in _renamed(state, VISION_NAMES):
        if name == "v.position_embd.weight" and (ids := smolvlm_position_ids(cfg)) is not None:
            tensor = tensor[ids]
        yield name, tensor


def to_llama_rope(weight: Tensor, n_heads: int) -> Tensor:
    """Reorder the rows of a q or k projection: llama.cpp rotates neighboring channels, this project the two halves."""
    return weight.view(n_heads, 2, -1, weight.size(1)).transpose(1, 2).reshape(weight.shape)


def _renamed(state: Mapping[str, Tensor], names: Mapping[str, str | None]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in to_smolvlm(state).items():
        if (new := translate(name, names)) is not None:
            yield new, tensor.detach()
