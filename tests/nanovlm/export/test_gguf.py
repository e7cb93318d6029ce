"""GGUF files, read by the gguf package, and by llama.cpp's tokenizer; tests/eval/peer_checks.py compares logits."""

import ctypes
import importlib.util
import sys
from dataclasses import replace
from random import Random

import pytest
import torch
from PIL import Image

from models.formats.visionpsy import VisionPsy
from models.vision_language_model import VisionLanguageModel
from nanovlm import Captioner
from nanovlm.cli.main import main
from nanovlm.errors import CheckpointError, InputError
from nanovlm.processing.convert import convert_layout
from support.smolvlm import write_folder

pytestmark = pytest.mark.full

gguf = pytest.importorskip("gguf")
from nanovlm.export import gguf as ours  # noqa: E402 - it needs the package

needs_llama_cpp = pytest.mark.skipif(not importlib.util.find_spec("llama_cpp"), reason="needs llama_cpp")
PROMPT = "Describe it."
TYPE_ERRORS = {"f32": 0, "f16": 1e-3, "bf16": 1e-2, "q8_0": 1e-2, "q4_0": 0.13}  # of a weight, as a part of the largest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf") / "tiny-vlm"
    text = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 400, "bos_token_id": 1}
    vision = {"hidden_size": 32, "intermediate_size": 64}
    write_folder(folder, image_size=32, patch_size=8, longest_edge=128, text=text, vision=vision)
    return folder


@pytest.fixture(scope="module")
def captioner(folder):
    return Captioner.from_pretrained(folder, "cpu", "float32")


def read(path):
    """Metadata and tensors, dequantized, of a GGUF file."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {
        t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()).view(*reversed(t.shape.tolist()))
        for t in reader.tensors
    }
    return fields, tensors


@pytest.fixture(scope="module")
def exported(captioner, tmp_path_factory):
    return [read(path) for path in ours.export_gguf(captioner, tmp_path_factory.mktemp("out"), "tiny-vlm")]


def test_the_files_say_sizes_types_of_tokens_and_how_images_are_prepared(exported, captioner):
    (text, _), (vision, _) = exported
    for fields, prefix, expected in (
        (text, "llama.", {
            "block_count": 3, "context_length": 4096, "embedding_length": 64, "feed_forward_length": 128,
            "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
            "attention.value_length": 16, "rope.freq_base": 100000.0, "rope.dimension_count": 16,
            "attention.layer_norm_rms_epsilon": pytest.approx(1e-5), "vocab_size": 400,
        }),
        (vision, "clip.", {
            "has_vision_encoder": True, "projector_type": "idefics3", "use_gelu": True, "vision.projection_dim": 64,
            "vision.image_size": 32, "vision.patch_size": 8, "vision.embedding_length": 32,
            "vision.feed_forward_length": 64, "vision.block_count": 2, "vision.attention.head_count": 2,
            "vision.attention.layer_norm_epsilon": pytest.approx(1e-6), "vision.projector.scale_factor": 2,
            "vision.image_mean": [0.5] * 3, "vision.image_std": [0.5] * 3, "vision.preproc_image_size": 128,
        }),
    ):  # fmt: skip
        assert {name.removeprefix(prefix): v for name, v in fields.items() if name.startswith(prefix)} == expected
    kinds = [(fields["general.architecture"], fields["general.type"]) for fields in (text, vision)]
    assert kinds == [("llama", "model"), ("clip", "mmproj")]
    assert text["general.file_type"] == gguf.LlamaFileType.MOSTLY_F16
    (fields, _), _ = exported
    found = {name.removeprefix("tokenizer."): value for name, value in fields.items()}
    kinds = dict(zip(found["ggml.tokens"], found["ggml.token_type"], strict=True))
    assert kinds["<image>"] == kinds["<end_of_utterance>"] == kinds["<row_1_col_1>"] == gguf.TokenType.CONTROL
    assert kinds["a"] == gguf.TokenType.NORMAL and kinds["[PAD399]"] == gguf.TokenType.UNUSED
    assert (found["ggml.model"], found["ggml.pre"], found["ggml.add_bos_token"]) == ("gpt2", "smollm", False)
    ids = [found[f"ggml.{kind}_token_id"] for kind in ("bos", "eos", "padding")]
    assert ids == [1, captioner.tokenizer.eos_token_id, 2]


@pytest.mark.parametrize("folded", [False, True])
def test_positions_are_stored_in_the_order_of_patches(tmp_path, folded):
    """llama.cpp adds row i to patch i; our encoder may pick another row, for a grid of 19 (folded) one twice."""
    write_folder(tmp_path, **({"image_size": 76, "scale_factor": 1, "longest_edge": 152} if folded else {}))
    model = VisionLanguageModel.from_pretrained(tmp_path)
    embedding, S = model.vision_encoder.patch_embedding, model.cfg.vit_img_size
    stored = dict(ours.vision_tensors(model.state_dict(), model.cfg))["v.position_embd.weight"]
    torch.testing.assert_close(stored, embedding(torch.zeros(1, 3, S, S))[0] - embedding.conv.bias)
    assert torch.equal(stored, embedding.position_embedding[0]) is not folded


def test_channels_that_are_rotated_together_are_neighbors_and_parts_of_blocks_have_16_bits(captioner):
    """Here channels i and i + D/2 of a head are rotated together."""
    rows = torch.arange(3 * 8).view(-1, 1)  # of 3 heads of 8 channels
    assert torch.equal(ours.to_llama_rope(rows, 3).view(3, 4, 2), rows.view(3, 2, 4).mT)
    state = captioner.model.state_dict()
    stored = dict(ours.text_tensors(state, captioner.model.cfg))
    for name, n_heads in (("q", 4), ("k", 2)):
        weight = state[f"decoder.blocks.1.attn.{name}_proj.weight"]
        assert torch.equal(stored[f"blk.1.attn_{name}.weight"], ours.to_llama_rope(weight, n_heads))
    for gguf_type in ("q8_0", "q4_0"):
        assert ours.stored_type("blk.0.ffn_up.weight", torch.ones(4, 33), gguf_type) == "F16"
        assert ours.stored_type("blk.0.ffn_up.weight", torch.ones(4, 64), gguf_type) == gguf_type.upper()
        assert ours.stored_type("token_embd.weight", torch.ones(4, 64), gguf_type) == "Q8_0"


@pytest.mark.parametrize("gguf_type", ours.GGUF_TYPES)
def test_tensors_are_the_models(captioner, tmp_path, gguf_type):
    files = [read(path)[1] for path in ours.export_gguf(captioner, tmp_path, "tiny-vlm", gguf_type)]
    state, cfg = captioner.model.state_dict(), captioner.model.cfg
    written = map(dict, (ours.text_tensors(state, cfg), ours.vision_tensors(state, cfg)))
    for found, expected in zip(files, written, strict=True):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            exact = tensor.dim() == 1 or name in ("v.patch_embd.weight", "v.position_embd.weight")
            error = 0 if exact else TYPE_ERRORS[gguf_type]
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=error * tensor.abs().max().item())


OTHER_LAYOUTS = {  # words of the error -> changes of the format's settings, or of the config
    "do_image_splitting=False": {"split": False}, "size.longest_edge=100": {"longest_edge": 100},
    "size.longest_edge=32: .* 2, 3, ... tiles of 32 pixels only": {"longest_edge": 32},
    "size.longest_edge=0": {"longest_edge": None}, "resample=3": {"resample": 3},
    "rescale_factor=1.0": {"rescale_factor": 1.0}, "fake_image_token=": {"fake_image_token": ""},
    "global_image_token=<global>": {"global_image_token": "<global>"},
    "scale_factor=1: .* 2 or more only": {"mp_pixel_shuffle_factor": 1, "mp_image_token_length": 16},
    "has nanovlm's layout .* train a model of SmolVLM's layout": {"format": None},
    "this model has visionpsy's layout of tiles and image tokens": {"format": VisionPsy()},
}  # fmt: skip


def test_a_layout_that_llama_cpp_would_prompt_in_another_way_is_refused(captioner):
    cfg = captioner.model.cfg
    ours.check_llama_cpp_can_run(cfg, captioner.tokenizer)
    for words, changes in OTHER_LAYOUTS.items():
        is_top = changes.keys() <= vars(cfg).keys()
        changed = replace(cfg, **changes) if is_top else replace(cfg, format=replace(cfg.format, **changes))
        with pytest.raises(InputError, match=words):
            ours.check_llama_cpp_can_run(changed, captioner.tokenizer)


def test_tokens_that_llama_cpp_looks_for_must_be_one(captioner, embedded, tmp_path):
    """The embedded model has two tokens for an empty line; SmolVLM-2.2B spells the whole image in several."""
    with pytest.raises(InputError, match=r"no token '\\n\\n', which llama.cpp writes around tiles"):
        ours.check_llama_cpp_can_run(captioner.model.cfg, embedded.tokenizer)
    write_folder(tmp_path / "model", "Idefics3", added=["<fake_token_around_image>", "<image>", "<end_of_utterance>"])
    with pytest.raises(InputError, match="no token '<global-img>', which llama.cpp writes around tiles"):
        ours.export_gguf(Captioner.from_pretrained(tmp_path / "model", "cpu", "float32"), tmp_path / "out", "model")
    assert not (tmp_path / "out").exists()


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPLIT = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}
LLAMA_BPE = {"type": "Sequence", "pretokenizers": [SPLIT, BYTE_LEVEL | {"use_regex": False}]}


def tokenizer_json(pre_tokenizer, **model):
    return {"pre_tokenizer": pre_tokenizer, "normalizer": None, "model": {"type": "BPE", "merges": [], **model}}


PRE_TOKENIZERS = [  # tokenizer.json, and llama.cpp's name of its pre-tokenizer or words of the error
    (tokenizer_json(BYTE_LEVEL), "gpt-2"),
    (tokenizer_json(BYTE_LEVEL, ignore_merges=False, byte_fallback=False), "gpt-2"),
    (tokenizer_json(LLAMA_BPE, ignore_merges=True), "llama-bpe"),
    (tokenizer_json(BYTE_LEVEL | {"add_prefix_space": True}), '"add_prefix_space": true.* is none of'),
    (tokenizer_json(BYTE_LEVEL, ignore_merges=True), "ignore_merges=true is none of"),
    (tokenizer_json({"type": "Metaspace"}), "Metaspace.* is none of"),
    (tokenizer_json(None), "pre_tokenizer=null.* is none of"),
    (tokenizer_json(BYTE_LEVEL, type="Unigram"), "model=True: GGUF files"),
    (tokenizer_json(BYTE_LEVEL) | {"normalizer": {"type": "NFC"}}, "normalizer={'type': 'NFC'}: GGUF files"),
    (tokenizer_json(BYTE_LEVEL, byte_fallback=True), "byte_fallback=True: GGUF files"),
]


@pytest.mark.parametrize(("raw", "name"), PRE_TOKENIZERS)
def test_a_pre_tokenizer_has_llama_cpps_name_or_is_refused(raw, name):
    if " " not in name:
        assert ours.pre_tokenizer_name(raw) == name
        return
    with pytest.raises(InputError, match=name):
        ours.pre_tokenizer_name(raw)


def test_weights_beyond_float16_are_refused(folder, tmp_path):
    captioner = Captioner.from_pretrained(folder, "cpu", "float32")
    captioner.model.MP.proj.weight.data[0, 0] = 1e5
    with pytest.raises(CheckpointError, match=r"mm.model.fc.weight has values up to 1e\+05, .* use bf16"):
        ours.export_gguf(captioner, tmp_path / "out", "model")
    assert not (tmp_path / "out").exists()
    assert ours.export_gguf(captioner, tmp_path / "out", "model", "bf16")[1].exists()


def test_a_missing_package_names_its_extra(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "nanovlm.export.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["export", str(folder), "--gguf", "--out", str(tmp_path / "out")]) == 2
    assert "gguf is missing; pip install 'nanovlm[gguf]'" in capsys.readouterr().err


def token_ids(engine, chunks, image_token_id):
    mtmd, ids = engine.mtmd, []
    for i in range(mtmd.mtmd_input_chunks_size(chunks)):
        chunk = mtmd.mtmd_input_chunks_get(chunks, i)
        if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n := ctypes.c_size_t()))
            ids += [tokens[j] for j in range(n.value)]
        else:
            ids += [image_token_id] * mtmd.mtmd_input_chunk_get_n_tokens(chunk)
    return ids


@needs_llama_cpp
@pytest.mark.parametrize("model", ["SmolVLM", "embedded"])
def test_llama_cpp_writes_the_same_prompts(captioner, embedded, tmp_path, model):
    from eval.peers.llama_cpp_engine import LlamaCppEngine

    if model == "embedded":
        captioner = Captioner(*convert_layout(embedded.model, embedded.tokenizer))
    engine, rng = LlamaCppEngine(captioner, "f16", tmp_path), Random(0)
    prompts = [PROMPT, "A cat  and 12 dogs.\n\nReally?\n\n\nYes, 3333 \tit's ünïcode 🚀 \n ok", "1,234.56 'quoted' <b>"]
    for i in range(60):
        sizes = [(rng.randint(10, 300), rng.randint(10, 300)) for _ in range(rng.randint(1, 3))]
        images = [Image.effect_noise(size, 50).convert("RGB") for size in sizes]
        expected, _ = captioner.prepare(images, prompts[i % len(prompts)])
        with engine.tokenized(images, prompts[i % len(prompts)]) as chunks:
            assert token_ids(engine, chunks, captioner.tokenizer.image_token_id) == expected
