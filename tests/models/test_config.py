"""VLMConfig reads and writes nanoVLM's config.json, and rejects values that do not fit, naming them."""

import json
import warnings
from dataclasses import asdict, fields

import pytest

from models.common.errors import InputError, shortened
from models.config import VLMConfig
from support.checkpoints import read_nanovlm

CURRENT_KEYS = """
vit_hidden_dim vit_inter_dim vit_patch_size vit_img_size vit_n_heads vit_dropout vit_n_blocks vit_ln_eps vit_cls_flag
vit_model_type lm_hidden_dim lm_inter_dim lm_rms_eps lm_re_base lm_max_position_embeddings lm_base_vocab_size
extra_token_amount lm_vocab_size lm_n_heads lm_n_kv_heads lm_dropout lm_n_blocks lm_attn_scaling lm_max_length
lm_use_tokens lm_tie_weights lm_model_type lm_tokenizer lm_chat_template mp_pixel_shuffle_factor mp_image_token_length
max_img_size resize_to_max_side_len vlm_extra_tokens vlm_load_backbone_weights vlm_checkpoint_path hf_repo_name
"""


def test_a_config_goes_through_json_with_nanovlms_keys(tiny_config):
    names = {f.name for f in fields(VLMConfig)} - {"unknown", "format"}
    assert VLMConfig().to_dict().keys() == names == set(CURRENT_KEYS.split())
    tokens = {"image_token": "i", "global_image_token": "g"}
    cfg = tiny_config(lm_dropout=0.1, lm_tie_weights=False, hf_repo_name="œuvre", vlm_extra_tokens=tokens)
    assert read_nanovlm(json.loads(json.dumps(cfg.to_dict()))) == cfg
    assert cfg.to_dict() | {"unknown": {}, "format": None} == asdict(cfg)


def test_unknown_keys_are_kept_and_named_in_one_warning():
    raw = VLMConfig().to_dict() | {"vit_flavour": [1, {"sweet": None}], "unknown": 5, "lm_eos_token_id": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        cfg = read_nanovlm(raw | {"is_flash": False, "resize_min_side_len": None})
    assert cfg.to_dict().items() >= raw.items()
    assert [str(one.message).partition(": ")[2] for one in caught] == [
        "vit_flavour, unknown, is_flash, resize_min_side_len"
    ]
    with pytest.raises(InputError, match="resize_min_side_len=512 may change how images are read"):
        read_nanovlm(raw | {"resize_min_side_len": 512})


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"vit_n_heads": 5}, ["vit_hidden_dim=16", "vit_n_heads=5"]),
        ({"vit_img_size": 18}, ["vit_img_size=18", "vit_patch_size=4"]),
        ({"lm_n_heads": 7}, ["lm_hidden_dim=24", "lm_n_heads=7"]),
        ({"lm_n_kv_heads": 4}, ["lm_n_heads=6", "lm_n_kv_heads=4"]),
        ({"max_img_size": 40}, ["max_img_size=40", "vit_img_size=16"]),
        ({"lm_n_heads": 8}, ["lm_hidden_dim=24", "lm_n_heads=8", "of 3;"]),
        ({"mp_pixel_shuffle_factor": 3}, ["4 patches", "mp_pixel_shuffle_factor=3"]),
        ({"mp_image_token_length": 5}, ["mp_image_token_length=5", "4 embeddings"]),
        ({"lm_dropout": 1.0}, ["lm_dropout=1.0", "[0, 1)"]),
        ({"lm_vocab_size": 2**31}, ["lm_vocab_size=2147483648", "2147483648)"]),
        ({"lm_re_base": float("nan")}, ["lm_re_base=nan"]),
        ({"vit_cls_flag": True}, ["vit_cls_flag=true"]),
        ({"vit_n_blocks": True}, ["vit_n_blocks=True is not of type int"]),
        ({"lm_tie_weights": 1}, ["lm_tie_weights=1 is not of type bool"]),
        ({"lm_rms_eps": "1e-5"}, ["lm_rms_eps='1e-5' is not of type float"]),
        *(
            ({"vlm_extra_tokens": tokens}, [f"vlm_extra_tokens={tokens}", words])
            for tokens, words in (
                ({"global_image_token": "g"}, "names no image_token"), ({}, "names no image_token"),
                (5, "is not a table"), (["image_token"], "is not a table"), ({"image_token": 1}, "is not a table"),
                (None, "means nothing"),
            )
        ),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_are_named(tiny_config, changes, parts):
    with pytest.raises(InputError) as error:
        read_nanovlm(tiny_config().to_dict() | changes)
    assert all(part in str(error.value) for part in parts) and "\n" not in str(error.value), error.value


def test_a_long_message_is_one_line_without_its_middle():
    assert shortened("a\nb" + "x" * 1000 + "c") == "a b" + "x" * 297 + " ... " + "x" * 299 + "c"
