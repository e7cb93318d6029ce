"""Export a model to the folder layout of transformers' SmolVLM, tokenizer and processor settings included.

transformers' processor is given our special tokens. It shares one image layout with ours: an image resized to one
image, with `<|global_image|>` in front. Tiles are not exported: transformers lays them out as Idefics3 does, which
nanoVLM models were not trained with. Formats 1 to 4 are exported without a processor.
"""

import json
from collections.abc import Container
from pathlib import Path

from safetensors.torch import save_file

from models.checkpoint import TOKENIZER, WEIGHTS, format_of
from models.common import files
from models.config import VLMConfig
from models.formats.smolvlm import TEMPLATE, SmolVLM
from models.formats.to_smolvlm import smolvlm_settings, smolvlm_tensors
from nanovlm.captioner import Captioner
from nanovlm.processing.layouts import layout_of

# Jinja that joins a content of several parts to one string, images first as in our chats; the model's template follows.
# By the loop over message['content'] vLLM knows that contents may have parts.
JOIN_PARTS = """{%- set chat = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message['content'] is string -%}
{%- set chat.messages = chat.messages + [message] -%}
{%- else -%}
{%- set images = message['content'] | selectattr('type', 'equalto', 'image') | list -%}
{%- set turn = namespace(content='') -%}
{%- for image in images -%}
{%- set turn.content = turn.content + ('<image: ' ~ loop.index0 ~ '>' if images | length > 1 else '') + IMAGE -%}
{%- endfor -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{%- set turn.content = turn.content + part['text'] -%}{%- endif -%}
{%- endfor -%}
{%- set chat.messages = chat.messages + [{'role': message['role'], 'content': turn.content}] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = chat.messages %}"""

ONE_TILE = {
    "do_image_splitting": False,
    "do_resize": False,  # it would keep the aspect ratio; max_image_size resizes to one tile, as ours does
    "resample": 2,  # bilinear
}


def export_smolvlm(captioner: Captioner, folder: str | Path) -> None:
    """Write the model in its own dtype, and for format 5 every file that transformers' AutoProcessor reads.

    Formats 1 to 4 have no processor in transformers: config, weights and tokenizer are written. A model that is in
    SmolVLM's layout already is written with the files that it was read with. InputError for a model that SmolVLM
    cannot express.
    """
    cfg = captioner.model.cfg
    tokenizer = captioner.tokenizer
    if isinstance(cfg.format, SmolVLM):
        captioner.save_pretrained(folder)
        return remove_stale(Path(folder), cfg.format.files)
    captioner.note_edits()
    raw = json.loads(tokenizer.to_json())
    tokens = None
    texts = {}
    if layout_of(cfg).has_processor:
        raw["post_processor"] = None  # our template writes all tokens; their processor would add its own
        texts[TEMPLATE] = chat_template(cfg)
        # Our layout has no token around an image.
        tokens = {name: cfg.special_tokens[name] for name in ("image_token", "global_image_token")}
        tokens["fake_image_token"] = ""
    objects = smolvlm_settings(cfg, tokenizer.image_token_id, cfg.end_token, tokenizer.eos_token_id, tokens, ONE_TILE)
    texts |= {name: json.dumps(settings, indent=2) + "\n" for name, settings in objects.items()}
    texts[TOKENIZER] = json.dumps(raw, ensure_ascii=False)
    with files.filling(folder) as new:
        tensors = {name: tensor.contiguous() for name, tensor in smolvlm_tensors(captioner.model).items()}
        save_file(tensors, new / WEIGHTS, {"format": "pt"})
        for name, text in texts.items():
            files.replace(new / name, text)
    remove_stale(Path(folder), texts)


def remove_stale(folder: Path, written: Container[str]) -> None:
    """Remove files of an earlier export, which readers would take for part of this one."""
    for name in SmolVLM.other_files:
        if name not in written:
            files.remove(folder / name)


def chat_template(cfg: VLMConfig) -> str:
    """The model's chat template, extended to contents that are lists of {'type': 'image'} and {'type': 'text'}."""
    return JOIN_PARTS.replace("IMAGE", repr(cfg.special_tokens["image_token"])) + (cfg.lm_chat_template or "")


def export_notes(cfg: VLMConfig) -> list[str]:
    """Notes for a user of the exported folder, one sentence each: of the layout of prompts, and of patches."""
    if format_of(cfg).for_transformers:
        return []
    ours = "the ids of nanovlm.processing.processor.Processor and its images, scaled to [-1, 1] (times 2 minus 1)"
    if not layout_of(cfg).has_processor:
        note = f"no processor is exported, as transformers has none for format {cfg.format_version}: pass {ours}"
        if not cfg.special_tokens:
            note += f"; as inputs_embeds, the image's {cfg.mp_image_token_length} first, without the ids of -1"
    else:
        note = (
            "transformers' processor resizes each image, which must be upright and RGB on white, to one image of "
            f"{cfg.vit_img_size} x {cfg.vit_img_size} after {cfg.special_tokens['global_image_token']}"
        )
        if cfg.max_img_size is None or cfg.max_img_size <= cfg.vit_img_size:
            note += "; programs that write SmolVLM's own tokens around an image, as llama.cpp does, find none here"
        else:
            note += f", without this model's tiles of up to {cfg.max_img_size}: for these pass {ours}"
    if not cfg.vit_grid & (cfg.vit_grid - 1):  # a power of two
        return [note]
    return [
        note,
        f"{cfg.vit_grid} patches a side keep their positions in transformers 5 in float32; vLLM and transformers 4 "
        "round in another way and may give two patches the same position; powers of two, as 16 or 32, are exact",
    ]
