"""Give a model SmolVLM's own layout of images and chats, to be trained in it."""

import tokenizers

from models.config import VLMConfig
from models.formats.to_smolvlm import layout_tokens, to_smolvlm_layout
from models.vision_language_model import VisionLanguageModel
from nanovlm.errors import InputError
from nanovlm.processing.processor import Processor
from nanovlm.processing.tokenizer import Tokenizer

TRAINED_FORMATS = ("nanovlm", "smolvlm")
MIN_TILES = 2  # of the longest edge: llama.cpp splits every image, transformers only those of several tiles
ROW_END = "\n\n"  # after the last row of tiles; llama.cpp looks for one token of this text


def check_format(cfg: VLMConfig, format: str) -> None:
    """InputError unless a model can be trained in that format: a SmolVLM cannot become a nanoVLM."""
    if format not in TRAINED_FORMATS:
        raise InputError(f"{format} is none of {', '.join(TRAINED_FORMATS)}", field="format")
    if format == "nanovlm" and cfg.format_name == "smolvlm":
        raise InputError("nanovlm, but this model was trained in SmolVLM's layout; use smolvlm", field="format")


def convert_layout(
    model: VisionLanguageModel, tokenizer: Tokenizer, rescale: bool = True
) -> tuple[VisionLanguageModel, Processor]:
    """The model in SmolVLM's layout, and its processor; see `models.formats.to_smolvlm.to_smolvlm_layout`.

    An image has as many tiles as before, of the size of the vision encoder, but at least MIN_TILES on its longest edge.
    Answers need training in the new layout.
    """
    if model.cfg.format_name == "smolvlm":
        return model, Processor(model.cfg, tokenizer)
    tile = model.cfg.vit_img_size
    longest_edge = max(model.cfg.max_img_size or tile, MIN_TILES * tile)
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    if len(backend.encode(ROW_END, add_special_tokens=False).ids) != 1:
        backend.add_tokens([tokenizers.AddedToken(ROW_END, normalized=False)])
    backend.add_special_tokens(["<|im_start|>", *layout_tokens(longest_edge, tile)])
    converted = to_smolvlm_layout(model, backend.get_vocab(with_added_tokens=True), longest_edge, rescale)
    return converted, Processor(converted.cfg, Tokenizer(backend, converted.cfg))
