"""Export a model to the folder layout of transformers' SmolVLM, tokenizer and processor settings included.

transformers' processor is given our special tokens. It shares one image layout with ours: a picture resized to one
image, with `<|global_image|>` in front. Tiles are not exported: transformers lays them out as Idefics3 does, which
nanoVLM models were not trained with.
"""

import json
from pathlib import Path

from safetensors.torch import save_file

from models.checkpoint import CONFIG, TOKENIZER, WEIGHTS, atomic_dir
from models.config import VLMConfig
from models.convert.smolvlm import smolvlm_config, smolvlm_tensors
from nanovlm.captioner import Captioner

# Jinja that joins a content of several parts to one string, images first as in our chats; the model's template follows.
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
{%- for part in message['content'] if part['type'] == 'text' -%}
{%- set turn.content = turn.content + part['text'] -%}
{%- endfor -%}
{%- set chat.messages = chat.messages + [{'role': message['role'], 'content': turn.content}] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = chat.messages %}"""


def export_smolvlm(captioner: Captioner, folder: str | Path) -> None:
    """Write the model in its own dtype, and every file that transformers' AutoProcessor reads."""
    model, tokenizer = captioner.model, captioner.tokenizer
    objects = {
        CONFIG: smolvlm_config(model.cfg, tokenizer.image_token_id, tokenizer.eos_token_id),
        "generation_config.json": {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id},
        **processor_files(model.cfg),
    }
    with atomic_dir(folder) as new:
        tensors = {name: tensor.contiguous() for name, tensor in smolvlm_tensors(model).items()}
        save_file(tensors, new / WEIGHTS, {"format": "pt"})
        (new / TOKENIZER).write_text(tokenizer.to_json(), encoding="utf-8")
        (new / "chat_template.jinja").write_text(chat_template(model.cfg), encoding="utf-8")
        for name, settings in objects.items():
            (new / name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def chat_template(cfg: VLMConfig) -> str:
    """The model's chat template, extended to contents that are lists of {'type': 'image'} and {'type': 'text'}."""
    return JOIN_PARTS.replace("IMAGE", repr(cfg.special_tokens["image_token"])) + (cfg.lm_chat_template or "")


def processor_files(cfg: VLMConfig) -> dict[str, dict]:
    """File name to content: the settings of transformers' tokenizer, image processor and processor."""
    tokens, tile_size = cfg.special_tokens, {"longest_edge": cfg.vit_img_size}
    special_tokens = {
        "image_token": tokens["image_token"],
        "global_image_token": tokens["global_image_token"],
        "fake_image_token": "",  # our layout has no token around an image
        "end_of_utterance_token": cfg.end_token,
    }
    return {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": "SmolVLMProcessor",
            "eos_token": cfg.end_token,
            "pad_token": cfg.end_token,
            "padding_side": "left",
            "model_max_length": cfg.lm_max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "extra_special_tokens": special_tokens,
        },
        "preprocessor_config.json": {
            "image_processor_type": "SmolVLMImageProcessor",
            "processor_class": "SmolVLMProcessor",
            "do_convert_rgb": True,
            "do_image_splitting": False,
            "do_resize": False,  # it would keep the aspect ratio; max_image_size resizes to one tile, as ours does
            "size": tile_size,
            "max_image_size": tile_size,
            "resample": 2,  # bilinear
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "do_pad": True,
        },
        "processor_config.json": {
            "processor_class": "SmolVLMProcessor",
            "image_seq_len": cfg.mp_image_token_length,
        },
    }


def export_notes(cfg: VLMConfig) -> list[str]:
    """What a user of the exported folder must know, one sentence each."""
    notes = [
        "pass pictures upright and as RGB on white: transformers applies no EXIF orientation and fills no transparency",
        "programs that write SmolVLM's own tokens around a picture, as llama.cpp does, need these replaced: this model "
        f"was trained with {cfg.special_tokens['global_image_token']} before an image and nothing after it",
    ]
    if cfg.max_img_size is not None and cfg.max_img_size > cfg.vit_img_size:
        notes.insert(
            0,
            f"transformers' processor resizes each picture to one image of {cfg.vit_img_size} x {cfg.vit_img_size}, as "
            f"it has no layout for this model's tiles; to use pictures of up to {cfg.max_img_size}, pass the model the "
            "ids of nanovlm.processor.Processor and its images, scaled to [-1, 1] (times 2 minus 1)",
        )
    return notes
