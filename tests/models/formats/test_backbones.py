"""A new model from a pretrained SigLIP and a pretrained Llama in transformers' files."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoint import load_config
from models.common.errors import CheckpointError, InputError
from models.config import extra_tokens
from models.formats.backbones import find_backbones, from_backbones
from models.formats.base import LLAMA_CONFIG, SIGLIP_CONFIG
from nanovlm import EMBEDDED, Captioner
from nanovlm.processing.tokenizer import Tokenizer
from support import ROOT, Package, randomize
from support.backbones import FOLD, SEES, TEXT, llama, siglip

transformers = Package("transformers")
pytestmark = pytest.mark.full


def edit(folder: Path, **changes) -> Path:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("backbones")
    siglip().save_pretrained(folder / "siglip")
    llama().save_pretrained(folder / "llama")
    return folder / "siglip", folder / "llama"


@pytest.fixture
def copies(pair, tmp_path) -> tuple[Path, Path]:
    return tuple(Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in pair)


@torch.no_grad()
def assert_same(model, sees=None, says=None):
    """The features of pixels in [0, 1] are SigLIP's of the same pixels in [-1, 1], and the logits Llama's."""
    images, ids = torch.rand(3, 3, model.cfg.vit_img_size, model.cfg.vit_img_size), torch.randint(40, (2, 50))
    if sees is not None:
        expected = sees(2 * images - 1, interpolate_pos_encoding=True).last_hidden_state
        torch.testing.assert_close(model.vision_encoder(images), expected, atol=1e-5, rtol=1e-5)
    if says is not None:
        torch.testing.assert_close(model(ids)[0][..., :40], says(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "n_heads", "n_kv_heads"),
    [((2, 2, 16), 6, 2), ((1, 1, 16), 6, 6), ((4, 3, 32), 6, 1), ((2, 2, 8), 12, 4), ((2, 2, 16), 2, 1)],
)
@pytest.mark.parametrize(("tied", "shards"), [(True, "5GB"), (False, "4KB")])
def test_both_backbones_compute_as_in_transformers(tmp_path, sizes, n_heads, n_kv_heads, tied, shards):
    sees = siglip(**dict(zip(("num_attention_heads", "num_hidden_layers", "image_size"), sizes)))
    says = llama(num_attention_heads=n_heads, num_key_value_heads=n_kv_heads, tie_word_embeddings=tied)
    sees.save_pretrained(tmp_path / "siglip", max_shard_size=shards)
    says.save_pretrained(tmp_path / "llama", max_shard_size=shards)
    assert (tmp_path / "llama" / "model.safetensors.index.json").exists() == (shards == "4KB")
    model = from_backbones(tmp_path / "siglip", tmp_path / "llama", **FOLD)
    assert not model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert (model.decoder.head.weight is model.decoder.token_embedding.weight) == tied
    assert_same(model, sees, says)


def test_missing_keys_take_transformers_defaults(tmp_path, pair):
    siglip().save_pretrained(tmp_path / "siglip")
    (tmp_path / "siglip" / "config.json").write_text('{"model_type": "siglip", "vision_config": {"image_size": 512}}')
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    cfg = find_backbones(tmp_path / "siglip", tmp_path / "llama").cfg
    sees, says = transformers.SiglipVisionConfig(image_size=512), transformers.LlamaConfig()
    for theirs, names in ((sees, SIGLIP_CONFIG), (says, LLAMA_CONFIG)):
        assert {ours: getattr(cfg, ours) for ours in names} == {
            ours: getattr(theirs, key) for ours, (key, _) in names.items()
        }
    assert (cfg.lm_n_kv_heads, cfg.lm_re_base) == (says.num_key_value_heads, says.rope_parameters["rope_theta"])


def siglip2(folder):
    theirs = randomize(transformers.SiglipModel(transformers.SiglipConfig(vision_config=SEES, text_config=TEXT))).eval()
    theirs.save_pretrained(folder)
    return theirs.vision_model


def written(prefix="vision_model.", **changes):
    """Write a SigLIP whose tensors have a prefix, beside others that are not used."""

    def write(folder):
        (theirs := siglip(**changes)).save_pretrained(folder)
        state = {f"{prefix}{name.removeprefix('vision_model.')}": x for name, x in theirs.state_dict().items()}
        rest = {"logit_scale": torch.ones(1), "text_model.head.weight": torch.ones(2, 2)}
        save_file(state | rest, folder / "model.safetensors")
        return theirs

    return write


@pytest.mark.parametrize(
    ("write", "side"),
    [
        (siglip2, 16),
        *((written(prefix), 16) for prefix in ("", "model.vision_model.", "vision_tower.vision_model.")),
        *((written(), side) for side in (8, 24, 32)),  # positions are interpolated
        (written(image_size=18), 16),  # so400m-patch14-384 has 27 x 27 positions: 378 pixels, of which none is lost
    ],
)
def test_every_file_and_size_of_a_siglip_is_read(tmp_path, pair, write, side):
    theirs = write(tmp_path)
    model = from_backbones(tmp_path, pair[1], vit_img_size=side, **FOLD)
    assert model.cfg.max_img_size == 3 * side and model.cfg.mp_image_token_length == (side // 8) ** 2
    assert_same(model, sees=theirs)


def test_llama_without_head_and_prefix_and_of_an_older_spelling_is_read(tmp_path, pair):
    theirs = llama(tie_word_embeddings=True)
    theirs.model.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    edit(tmp_path, rope_parameters=None, rope_theta=100.0)
    assert_same(from_backbones(pair[0], tmp_path, **FOLD), says=theirs)


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_and_projector_follow_the_callers_seed(tmp_path, pair, tied):
    llama(tie_word_embeddings=tied).save_pretrained(tmp_path)
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(from_backbones(pair[0], tmp_path, **FOLD).state_dict())
    drawn = {"MP.proj.weight", "decoder.token_embedding.weight", "decoder.head.weight"}
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert {name for name in states[0] if not torch.equal(states[0][name], states[2][name])} == drawn
    head, embedding = states[0]["decoder.head.weight"], states[0]["decoder.token_embedding.weight"]
    assert torch.equal(head[40:], embedding[40:]) == tied
    assert abs(embedding[40:].std() - 0.02) < 1e-3 and abs(embedding[40:].mean()) < 1e-3


UNSUPPORTED = (  # settings of SigLIP and of Llama
    {"hidden_act": "quick_gelu", "num_channels": 1, "model_type": "clip_vision_model", "image_size": [16, 16]},
    {
        "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "model_type": "mistral", "sliding_window": 4096,
        "rope_interleaved": True, "partial_rotary_factor": 0.5, "quantization_config": {"bits": 4}, "head_dim": 8,
        "rope_scaling": {"type": "linear", "factor": 2.0}, "num_hidden_layers": "three",
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0},
    },
)  # fmt: skip


def changed(part, **settings):
    return lambda *folders: edit(folders[part], **settings)


def without_norm(sees, says):
    state = load_file(says / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, says / "model.safetensors")


REFUSED = [  # what is done to the folders, the arguments, and words of the message
    *(
        (changed(part, **{key: value}), {}, f"{('siglip', 'llama')[part]}/config.json: {key}={value!r}")
        for part, table in enumerate(UNSUPPORTED) for key, value in table.items()
    ),
    (changed(0, num_patches=16), {}, "with num_patches=16 is NaFlex"),
    (changed(0, model_type="siglip2"), {}, "model_type='siglip2' with num_patches=256 is NaFlex"),
    (changed(0, vision_config=5), {}, "model_type=5 is not SigLIP's"),
    (changed(0, image_size=18), {}, "vit_img_size=18 is not a multiple of vit_patch_size=4"),
    (
        changed(0, image_size=20), {"vit_img_size": 16},
        "position_embedding.weight is (16, 16), but config.json asks for (25, 16)",
    ),
    (
        without_norm, {},
        "llama/model.safetensors lacks 1 tensors that config.json asks for, first model.text_model.norm.weight",
    ),
    (changed(0), {"lm_vocab_size": 39}, "lm_vocab_size=39 is less than the 40 tokens"),
    (changed(0), {"color": 1}, "make no model: "),
    (changed(0), {"vlm_extra_tokens": None}, "make no model: "),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "changes", "words"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_makes_no_model_is_one_line(copies, damage, changes, words):
    damage(*copies)
    with pytest.raises(CheckpointError) as error:
        from_backbones(*copies, **FOLD | changes)
    assert words in str(error.value) and "\n" not in str(error.value), error.value


def test_the_documented_call_makes_a_model_folder_with_a_tokenizer(tmp_path, monkeypatch):
    page = ROOT / "docs/python.md"
    blocks = re.findall(r"```py\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = (block for block in blocks if "from_backbones" in block)
    vision, language = re.findall(r'"([\w-]+/[\w.-]*\d[\w.-]*)"', block)
    monkeypatch.chdir(tmp_path)
    siglip().save_pretrained(vision)
    llama(vocab_size=601, max_position_embeddings=1024).save_pretrained(language)
    shutil.copy(EMBEDDED / "tokenizer.json", language)  # knows two of the extra tokens already
    exec(block, {})
    cfg = load_config(tmp_path / "out" / "new")
    assert (cfg.vit_model_type, cfg.lm_tokenizer, cfg.mp_pixel_shuffle_factor) == (vision, language, 4)
    made = Captioner.from_backbones(vision, language, **FOLD)
    tokenizer = made.tokenizer
    assert made.model.image_token_id == tokenizer.image_token_id == 599
    assert [tokenizer.special_id(f"<row_1_col_{i}>") for i in (1, 2)] == [601, 602]
    assert len(tokenizer) == 601 + 64 <= made.model.cfg.lm_vocab_size


def test_each_backbone_is_read_at_its_revision(hub, pair, copies):
    shutil.copy(EMBEDDED / "tokenizer.json", edit(copies[1], num_hidden_layers=2))
    hub |= {("some/siglip", "abc"): pair[0], ("some/llama", None): pair[1], ("some/llama", "v1"): copies[1]}
    for revision, n_blocks in ((None, 3), ("v1", 2)):
        cfg = find_backbones("some/siglip", "some/llama", "abc", revision, lm_vocab_size=700, **FOLD).cfg
        names = (cfg.vit_model_type, cfg.lm_model_type, cfg.lm_tokenizer)
        assert (cfg.lm_n_blocks, *names) == (n_blocks, "some/siglip", *["some/llama"] * 2)
    assert Tokenizer.from_backbone("some/llama", cfg, "v1").image_token_id == 599
    assert [call[:2] for call in hub.calls[1::2]] == [("some/llama", None), ("some/llama", "v1")]
    hub.calls.clear()
    with pytest.raises(InputError, match="format=zzz is none of nanovlm, smolvlm"):
        Captioner.from_backbones("some/siglip", "some/llama", format="zzz")
    assert not hub.calls


def test_without_a_tokenizer_the_image_token_follows_the_base_vocabulary(pair):
    tokens = {"before": "<x>", "image_token": "<|image|>"}
    assert from_backbones(*pair, vlm_extra_tokens=tokens, **FOLD).image_token_id == 41
    tokens = extra_tokens(0)
    model = from_backbones(*pair, dtype=torch.bfloat16, vlm_extra_tokens=tokens, max_img_size=16, **FOLD)
    assert (model.image_token_id, model.cfg.lm_vocab_size) == (40, 42)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
