"""The ONNX graphs compute what the model does, under the names that SmolVLM's consumers feed; files beside fit them."""

import json
import logging
import sys

import numpy as np
import pytest
import torch

from models.attention import attention
from nanovlm import Captioner
from nanovlm.errors import InputError, MissingExtraError
from nanovlm.export.onnx import check_onnx_extra, export_onnx, write_onnx
from nanovlm.export.transformers import export_smolvlm
from support import Package, noise_image
from support.onnx import NAMES, OnnxModel, image_inputs, onnxruntime_graphs, openvino_graphs
from support.smolvlm import write_folder

onnx = Package("onnx")
pytestmark = pytest.mark.full

N_TOKENS = 8


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """The model's graphs in float32 and int8."""
    write_onnx(model, folder := tmp_path_factory.mktemp("onnx"), ("float32", "int8"))
    return folder


@pytest.fixture(scope="module")
def ours(model, folder):
    return OnnxModel(onnxruntime_graphs(folder), model.cfg, model.image_token_id)


@pytest.fixture(scope="module")
def batch():
    """Two rows: one of three images, and a shorter one of one image with padding on the left."""
    rng = torch.Generator().manual_seed(0)
    rows = [[3] * 12 + torch.randint(4, 40, (5,), generator=rng).tolist(), [3] * 4 + [9, 8, 7]]
    length = max(len(row) for row in rows)
    ids = torch.tensor([[5] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    images = torch.rand(4, 3, 16, 16, generator=rng)
    return ids, mask, images


@torch.inference_mode()
def greedy(model, ids, mask, images) -> tuple[np.ndarray, np.ndarray]:
    """The model's own greedy ids, and the logits they were taken from."""
    logits, state = model.prefill(ids, images, mask)
    all_logits = [logits]
    for _ in range(N_TOKENS - 1):
        logits, state = model.decode(logits.argmax(-1), state)
        all_logits.append(logits)
    stacked = torch.stack(all_logits, dim=1)
    return stacked.argmax(-1).numpy(), stacked.numpy()


def assert_same_generation(ours, model, batch, tolerance=1e-4, **options):
    ids, mask, images = batch
    expected_ids, expected_logits = greedy(model, ids, mask, images)
    images = image_inputs(images.numpy(), [3, 1])
    got_ids, got_logits = ours.generate(ids.numpy(), mask.numpy(), images, N_TOKENS, **options)
    np.testing.assert_array_equal(got_ids, expected_ids)
    np.testing.assert_allclose(got_logits, expected_logits, atol=tolerance, rtol=tolerance)


def test_names_and_operators_are_those_of_smolvlms_files(folder, model):
    inputs, outputs = {}, {}
    for name in NAMES:
        graph = onnx.load(folder / f"{name}.onnx").graph
        inputs[name] = {value.name: dimensions(value) for value in graph.input}
        outputs[name] = {value.name: dimensions(value) for value in graph.output}
    past = [f"{i}.{part}" for i in range(2) for part in ("key", "value")]
    batch, sequence = "batch_size", "sequence_length"
    images, hidden = [batch, "num_images"], model.cfg.lm_hidden_dim
    cache = [batch, 2, "past_sequence_length", model.cfg.lm_head_dim]
    mask, decoder = [batch, "total_sequence_length"], {"inputs_embeds": [batch, sequence, hidden]}
    decoder |= {"attention_mask": mask, "position_ids": [batch, sequence]}
    assert inputs == {
        "vision_encoder": {"pixel_values": [*images, 3, 16, 16], "pixel_attention_mask": [*images, 16, 16]},
        "embed_tokens": {"input_ids": [batch, sequence]},
        "decoder_model_merged": decoder | {f"past_key_values.{part}": cache for part in past},
    }
    assert outputs["vision_encoder"] == {"image_features": ["num_real_images", 4, hidden]}
    assert outputs["embed_tokens"] == {"inputs_embeds": [batch, sequence, hidden]}
    assert list(outputs["decoder_model_merged"]) == ["logits", *(f"present.{part}" for part in past)]
    assert outputs["decoder_model_merged"]["logits"] == [batch, sequence, model.cfg.lm_vocab_size]
    for path in folder.glob("*.onnx"):
        proto = onnx.load(path)
        onnx.checker.check_model(proto, full_check=True)
        assert not any(entry.domain for entry in proto.opset_import)
    nodes = onnx.load(folder / "decoder_model_merged.onnx").graph.node
    assert sum(node.op_type == "Expand" for node in nodes) < 2 * model.cfg.lm_n_blocks
    assert all(block.attn.attend is attention for block in model.decoder.blocks)


def dimensions(value) -> list[str | int]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_padded_batch_with_images_gives_the_same_ids_and_logits(folder, model, batch, engine):
    pytest.importorskip(engine)
    graphs = onnxruntime_graphs(folder) if engine == "onnxruntime" else openvino_graphs(folder)
    assert_same_generation(OnnxModel(graphs, model.cfg, model.image_token_id), model, batch)


def relative_error(smaller: OnnxModel, model, batch) -> float:
    """Of the logits after the prompt."""
    ids, mask, images = batch
    _, expected = greedy(model, ids, mask, images)
    _, logits = smaller.generate(ids.numpy(), mask.numpy(), image_inputs(images.numpy(), [3, 1]), 2)
    assert logits.dtype == np.float32
    return np.linalg.norm(logits[:, 0] - expected[:, 0]) / np.linalg.norm(expected[:, 0])


def test_int8_is_smaller_and_close(folder, model, batch):
    smaller = OnnxModel(onnxruntime_graphs(folder, "_quantized"), model.cfg, model.image_token_id)
    assert relative_error(smaller, model, batch) < 0.1
    weights = onnx.load(folder / "decoder_model_merged_quantized.onnx").graph.initializer
    matrices = [weight for weight in weights if len(weight.dims) == 2]
    assert matrices and {weight.data_type for weight in matrices} == {onnx.TensorProto.INT8}


@pytest.mark.slow
def test_float16_is_half_as_large_and_close(tmp_path, model, batch):
    kept = tmp_path / "vision_encoder.onnx"
    kept.touch()
    write_onnx(model, tmp_path, ["float16"])
    assert {path.name for path in tmp_path.iterdir()} == {kept.name, *(f"{name}_fp16.onnx" for name in NAMES)}
    smaller = OnnxModel(onnxruntime_graphs(tmp_path, "_fp16"), model.cfg, model.image_token_id, np.float16)
    assert relative_error(smaller, model, batch) < 0.005


def test_the_model_cards_loop_gives_the_same_ids(ours, model, batch):
    """It counts positions from 1 and passes a mask of the new token alone; without padding both make no difference."""
    ids, _, images = batch
    ids, images, mask = ids[:1], images[:3], torch.ones(1, ids.size(1), dtype=torch.long)
    expected, _ = greedy(model, ids, mask, images)
    shifted = OnnxModel(ours.graphs, ours.cfg, ours.image_token_id)
    shifted.forward = lambda embeds, mask, positions, cache: ours.forward(embeds, mask, positions + 1, cache)
    got, _ = shifted.generate(ids.numpy(), mask.numpy(), image_inputs(images.numpy(), [3]), N_TOKENS, short_mask=True)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
def test_a_model_in_bfloat16_leaves_with_its_own_values_and_nothing_else_changes(
    tmp_path, tiny_model, batch, capfd, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("nanovlm"), "handlers", [])  # of another test
    half, root = tiny_model().bfloat16().train(), logging.getLogger()
    before, handlers, level = {name: t.clone() for name, t in half.state_dict().items()}, root.handlers[:], root.level
    write_onnx(half, tmp_path, ["float32", "int8"])
    assert half.training and half.decoder.training
    assert all(torch.equal(before[name], tensor) for name, tensor in half.state_dict().items())
    assert (root.handlers, root.level) == (handlers, level) and capfd.readouterr() == ("", "")
    exported = OnnxModel(onnxruntime_graphs(tmp_path), half.cfg, half.image_token_id)
    assert_same_generation(exported, half.float().eval(), batch)


def transformers_js_config(folder) -> dict:
    return json.loads((folder / "config.json").read_text())["transformers.js_config"]


def test_the_settings_that_transformers_js_reads_are_there(onnx_folder):
    expected = {"kv_cache_dtype": {"fp16": "float16"}, "use_external_data_format": {}}
    assert transformers_js_config(onnx_folder) == expected
    tokenizer_config = json.loads((onnx_folder / "tokenizer_config.json").read_text())
    assert tokenizer_config["chat_template"] == (onnx_folder / "chat_template.jinja").read_text()


def test_a_smolvlms_graphs_and_settings(tmp_path, monkeypatch):
    """Its encoder reads pixels as its processor normalizes them; weights beyond a file's limit lie beside it."""
    monkeypatch.setattr("nanovlm.export.onnx.MAX_FILE_BYTES", 512)
    _, processor = write_folder(tmp_path / "model")
    captioner = Captioner.from_pretrained(tmp_path / "model", "cpu", "float32")
    export_smolvlm(captioner, folder := tmp_path / "out")
    export_onnx(captioner, folder)
    found = json.loads((folder / "preprocessor_config.json").read_text())
    assert found["processor_class"] == type(processor).__name__ and found["image_mean"] == [0.5, 0.5, 0.5]
    assert Captioner.from_pretrained(folder, "cpu", "float32").model.cfg.format_name == "smolvlm"
    second_files = {f"{name}.onnx": 1 for name in NAMES}
    assert transformers_js_config(folder)["use_external_data_format"] == second_files
    assert {path.name for path in (folder / "onnx").glob("*_data")} == {f"{name}_data" for name in second_files}
    again = type(processor).from_pretrained(folder)
    assert again.chat_template == processor.chat_template == again.tokenizer.chat_template

    inputs = processor(text=["<image>a"], images=[[noise_image(90, 40)]], return_tensors="pt")
    pixels = inputs["pixel_values"]
    mask = np.ones((*pixels.shape[:2], *pixels.shape[3:]), bool)
    encode = onnxruntime_graphs(folder / "onnx")["vision_encoder"]
    features = encode({"pixel_values": pixels.numpy(), "pixel_attention_mask": mask})[0]
    np.testing.assert_allclose(features, captioner.model.encode_images(pixels[0]).detach().numpy(), atol=1e-4)


def test_other_types_models_without_weights_and_missing_packages_are_one_line(tmp_path, model, monkeypatch):
    with pytest.raises(InputError, match="no ONNX graphs in int4; use float32, float16, int8"):
        write_onnx(model, tmp_path, ["float32", "int4"])
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="were released"):
        export_onnx(Captioner.from_pretrained(quantize="int8"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"ONNX files need onnxscript: pip install 'nanovlm\[onnx\]'"):
        check_onnx_extra()
