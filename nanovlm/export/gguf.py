"""Export a SmolVLM-layout model to the two GGUF files that llama.cpp's multimodal tools read; needs the extra `gguf`.

`NAME-f16.gguf` holds the text model, its tokenizer and chat template, `mmproj-NAME-f16.gguf` the vision encoder and the
projector with the image processor's settings. Metadata, names and order of channels follow llama.cpp's
convert_hf_to_gguf.py, conversion/llama.py and conversion/smolvlm.py.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from models.checkpoint import TOKENIZER_CONFIG
from models.common import files
from models.config import VLMConfig
from models.formats.smolvlm import TOKENS, SmolVLM
from models.vision_transformer import position_ids
from nanovlm.captioner import Captioner
from nanovlm.errors import CheckpointError, InputError, needs_extra
from nanovlm.export import GGUF_TYPES
from nanovlm.processing.layouts.smolvlm import MAX_SIDE
from nanovlm.processing.tokenizer import Tokenizer

with needs_extra("gguf", "GGUF files"):
    import gguf
    from gguf import MODEL_ARCH, GGUFWriter, TokenType

BLOCK = 32  # values that share a scale in q8_0 and q4_0; rows of another length are stored in 16 bits
LANCZOS = 1

# Metadata, by the name of GGUFWriter's method add_NAME -> the field of VLMConfig.
TEXT_SIZES = {
    "block_count": "lm_n_blocks", "context_length": "lm_max_position_embeddings", "embedding_length": "lm_hidden_dim",
    "feed_forward_length": "lm_inter_dim", "head_count": "lm_n_heads", "head_count_kv": "lm_n_kv_heads",
    "key_length": "lm_head_dim", "value_length": "lm_head_dim", "rope_dimension_count": "lm_head_dim",
    "rope_freq_base": "lm_re_base", "layer_norm_rms_eps": "lm_rms_eps", "vocab_size": "lm_vocab_size",
}  # fmt: skip
VISION_SIZES = {
    "vision_projection_dim": "lm_hidden_dim", "vision_image_size": "vit_img_size",
    "vision_patch_size": "vit_patch_size", "vision_embedding_length": "vit_hidden_dim",
    "vision_feed_forward_length": "vit_inter_dim", "vision_block_count": "vit_n_blocks",
    "vision_head_count": "vit_n_heads",
    "vision_attention_layernorm_eps": "vit_ln_eps", "vision_projector_scale_factor": "mp_pixel_shuffle_factor",
}  # fmt: skip

# llama.cpp's name -> pre_tokenizer of tokenizer.json, and whether its BPE ignores merges for whole words.
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(regex: str) -> dict:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL | {"use_regex": False}]}


PRE_TOKENIZERS: dict[str, tuple[dict, bool]] = {
    "smollm": ({"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]}, False),
    "gpt-2": (BYTE_LEVEL, False),
    "llama-bpe": (_split(LLAMA3_REGEX.replace("DIGITS", r"\p{N}{1,3}")), True),
    "qwen2": (_split(LLAMA3_REGEX.replace("DIGITS", r"\p{N}")), False),
}

# SmolVLM's template writes no space before an image. llama.cpp passes an image as a text that starts with its marker.
STARTS_WITH_IMAGE = re.compile(r"(message\['content'\]|parts)\[0\]\['type'\] == 'image'")
STARTS_WITH_MARKER = r"(\g<0> or \1[0]['text'][:8] == '<__media')"


def export_gguf(captioner: Captioner, folder: str | Path, name: str, gguf_type: str = "f16") -> tuple[Path, Path]:
    """Write the text model and the mmproj file to folder, matrices in one of GGUF_TYPES; returns their paths.

    Raises InputError for a model that llama.cpp would prompt or compute differently.
    """
    if gguf_type not in GGUF_TYPES:
        raise InputError(f"{gguf_type} is none of {', '.join(GGUF_TYPES)}", field="gguf_type")
    cfg = captioner.model.cfg
    state = captioner.model.state_dict()
    settings = check_llama_cpp_can_run(cfg, captioner.tokenizer)
    names = f"{name}-{gguf_type}.gguf", f"mmproj-{name}-{gguf_type}.gguf"
    with files.filling(folder) as new:
        writer = GGUFWriter(str(new / names[0]), "llama", use_temp_file=True)
        writer.add_type(gguf.GGUFType.MODEL)
        add_sizes(writer, TEXT_SIZES, cfg)
        add_tokenizer(writer, captioner.tokenizer, cfg, settings)
        write_gguf(writer, text_tensors(state, cfg), name, gguf_type)

        writer = GGUFWriter(str(new / names[1]), "clip", use_temp_file=True)
        writer.add_type(gguf.GGUFType.MMPROJ)
        writer.add_clip_has_vision_encoder(True)
        writer.add_clip_projector_type("idefics3")
        add_sizes(writer, VISION_SIZES, cfg)
        writer.add_vision_use_gelu(True)
        writer.add_vision_image_mean(settings.mean)
        writer.add_vision_image_std(settings.std)
        writer.add_vision_preproc_image_size(cast(int, settings.longest_edge))
        write_gguf(writer, vision_tensors(state, cfg), name, gguf_type)
    return Path(folder) / names[0], Path(folder) / names[1]


def check_llama_cpp_can_run(cfg: VLMConfig, tokenizer: Tokenizer) -> SmolVLM:
    """The model's SmolVLM settings; InputError unless llama.cpp lays out images as the model was trained with.

    llama.cpp always splits an image, and knows tiles and special tokens by the names of the published models.
    """
    settings = cfg.format
    tile = cfg.vit_img_size
    if not isinstance(settings, SmolVLM):
        raise InputError(
            f"this model has {cfg.format_name}'s layout of tiles and image tokens, which llama.cpp does not write; "
            "train a model of SmolVLM's layout to export it as GGUF"
        )
    edge = settings.longest_edge or 0
    scale = cfg.mp_pixel_shuffle_factor
    fake = TOKENS["fake_image_token"]
    whole = TOKENS["global_image_token"]
    for key, value, is_supported, only in (
        ("do_image_splitting", settings.split, settings.split, "true"),
        ("size.longest_edge", edge, tile < edge <= MAX_SIDE and edge % tile == 0, f"2, 3, ... tiles of {tile} pixels"),
        ("resample", settings.resample, settings.resample == LANCZOS, "1, Lanczos"),
        ("rescale_factor", settings.rescale_factor, abs(settings.rescale_factor * 255 - 1) < 1e-6, "1/255"),
        ("global_image_token", settings.global_image_token, settings.global_image_token == whole, whole),
        ("fake_image_token", settings.fake_image_token, settings.fake_image_token == fake, fake),
        ("scale_factor", scale, scale > 1, "2 or more"),
    ):
        if not is_supported:
            raise InputError(f"{key}={value}: llama.cpp reads this family's images with {only} only")
    found = {text: len(tokenizer.encode(text)) == 1 for text in ("\n", "\n\n")}
    found |= {token: tokenizer.backend.token_to_id(token) is not None for token in (fake, whole)}
    for token, is_found in found.items():  # SmolVLM-Instruct (2.2B) spells <global-img> in several tokens
        if not is_found:
            raise InputError(f"the tokenizer has no token {token!r}, which llama.cpp writes around tiles")
    return settings


def add_sizes(writer: GGUFWriter, sizes: Mapping[str, str], cfg: VLMConfig) -> None:
    """Add fields of the config by a table of names."""
    for name, field in sizes.items():
        getattr(writer, f"add_{name}")(getattr(cfg, field))


def add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, cfg: VLMConfig, settings: SmolVLM) -> None:
    """Tokens, merges, special tokens and the chat template."""
    raw = json.loads(tokenizer.to_json())
    added = tokenizer.backend.get_added_tokens_decoder()
    tokens = {id: token for token, id in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
    types = dict.fromkeys(tokens, TokenType.NORMAL)
    types |= {id: TokenType.CONTROL if token.special else TokenType.USER_DEFINED for id, token in added.items()}
    ids = range(cfg.lm_vocab_size)  # embeddings without a token are named [PADid]
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(pre_tokenizer_name(raw))
    writer.add_token_list([tokens.get(id, f"[PAD{id}]") for id in ids])
    writer.add_token_types([int(types.get(id, TokenType.UNUSED)) for id in ids])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in raw["model"]["merges"]])
    config = json.loads(settings.files.get(TOKENIZER_CONFIG, "{}"))
    named = {kind: config.get(f"{kind}_token") for kind in ("bos", "eos", "unk", "pad")}
    texts = {kind: token.get("content") if isinstance(token, dict) else token for kind, token in named.items()}
    special = {kind: tokenizer.backend.token_to_id(text) for kind, text in texts.items() if isinstance(text, str)}
    for kind, id in (special | dict(zip(("eos", "eot"), settings.end_token_ids))).items():  # the ends of an answer
        if id is not None:
            getattr(writer, f"add_{kind}_token_id")(id)
    writer.add_add_bos_token(bool(tokenizer.begin([])))  # where not, the chat template writes every special token
    writer.add_add_eos_token(False)
    writer.add_chat_template(STARTS_WITH_IMAGE.sub(STARTS_WITH_MARKER, cfg.lm_chat_template or ""))


def pre_tokenizer_name(raw: dict) -> str:
    """llama.cpp's name of a tokenizer.json's pre-tokenizer; InputError if it has none."""
    model = raw["model"]
    keys = ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
    unsupported = {"model": model["type"] != "BPE", "normalizer": raw.get("normalizer")}
    for key, value in (unsupported | {key: model.get(key) for key in keys}).items():
        if value:
            raise InputError(f"tokenizer.json: {key}={value}: GGUF files are written for plain byte-level BPE only")
    found = _without_offsets(raw.get("pre_tokenizer")), bool(model.get("ignore_merges"))
    for name, definition in PRE_TOKENIZERS.items():
        if definition == found:
            return name
    raise InputError(
        f"tokenizer.json: pre_tokenizer={json.dumps(found[0])} with ignore_merges={json.dumps(found[1])} is none of "
        f"those known for llama.cpp: {', '.join(PRE_TOKENIZERS)}"
    )


def _without_offsets(value: Any) -> Any:
    """A definition without trim_offsets, which does not change the tokens."""
    if isinstance(value, dict):
        return {key: _without_offsets(part) for key, part in value.items() if key != "trim_offsets"}
    return [_without_offsets(part) for part in value] if isinstance(value, list) else value


def write_gguf(writer: GGUFWriter, tensors: Iterable[tuple[str, Tensor]], name: str, gguf_type: str) -> None:
    """Add the tensors and the metadata of every file, write the file and close it."""
    n_parameters = 0
    for key, tensor in tensors:
        kind = stored_type(key, tensor, gguf_type)
        array = tensor.float().contiguous().numpy()
        if kind == "F16" and not torch.isfinite(tensor.half()).all():
            raise CheckpointError(f"{key} has values up to {tensor.abs().max():.3g}, too large for f16; use bf16")
        stored = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(key, gguf.quants.quantize(array, stored), raw_dtype=stored)
        n_parameters += tensor.numel()
    writer.add_name(name)
    writer.add_size_label(gguf.size_label(n_parameters, 0, 0, 0))
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if gguf_type == "f32" else f"MOSTLY_{gguf_type.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_type(name: str, tensor: Tensor, gguf_type: str) -> str:
    """The type of one tensor: vectors and the embeddings of patches and positions stay in float32."""
    if tensor.dim() == 1 or name in ("v.patch_embd.weight", "v.position_embd.weight"):
        return "F32"
    if gguf_type in ("q8_0", "q4_0") and tensor.size(-1) % BLOCK:
        return "F16"
    if gguf_type == "q4_0" and not name.startswith("blk."):
        return "Q8_0"  # embedding, head and mmproj file, as llama.cpp's own quantization of such models
    return gguf_type.upper()


def text_tensors(state: Mapping[str, Tensor], cfg: VLMConfig) -> Iterator[tuple[str, Tensor]]:
    """The decoder's tensors in a state dict of VisionLanguageModel; of a tied pair only the embedding."""
    heads = {"attn_q": cfg.lm_n_heads, "attn_k": cfg.lm_n_kv_heads}
    for name, tensor in _renamed(state, MODEL_ARCH.LLAMA, cfg.lm_n_blocks):
        if kind := next((kind for kind in heads if kind in name), None):
            tensor = to_llama_rope(tensor, heads[kind])
        if not (name == "output.weight" and cfg.lm_tie_weights):
            yield name, tensor


def vision_tensors(state: Mapping[str, Tensor], cfg: VLMConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the vision encoder and the projector in a state dict of VisionLanguageModel.

    llama.cpp numbers patches 0, 1, 2 ...; where Idefics3 does not, the position embeddings are reordered instead.
    """
    for name, tensor in _renamed(state, MODEL_ARCH.MMPROJ, cfg.vit_n_blocks):
        if name == "v.position_embd.weight" and (ids := position_ids(cfg)) is not None:
            tensor = tensor[ids]
        yield name, tensor


def to_llama_rope(weight: Tensor, n_heads: int) -> Tensor:
    """Reorder the rows of a q or k projection: llama.cpp rotates neighboring channels, this project the two halves."""
    return weight.view(n_heads, 2, -1, weight.size(1)).transpose(1, 2).reshape(weight.shape)


def _renamed(state: Mapping[str, Tensor], file: Any, n_blocks: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file under llama.cpp's names, which the gguf package has for transformers'."""
    names = gguf.get_tensor_name_map(file, n_blocks)
    for name, tensor in SmolVLM.to_stored(state).items():
        if name.startswith(("model.text_model.", "lm_head.")) == (file == MODEL_ARCH.LLAMA):
            new = names.get_name(name.replace("text_model.", ""), (".weight", ".bias"))
            yield cast(str, new), tensor.detach()
