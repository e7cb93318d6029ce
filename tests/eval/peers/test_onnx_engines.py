"""ONNX Runtime and OpenVINO compute what the plain model computes, from files that are made once."""

import copy
import importlib.util
import sys

import pytest
import torch

from eval.latency import greedy_ids
from eval.lib.accuracy import relative_error
from eval.lib.cpu_levels import current_level
from eval.lib.random_model import write_random_model
from eval.peers.engines import EngineOptions, make_engines, plain_engine
from eval.peers.onnx_engine import export_graphs
from models.inference.kernels.load import WITHOUT_BF16_DOT
from nanovlm.errors import MissingExtraError
from support.smolvlm import write_folder

pytestmark = pytest.mark.full
needs_onnx = pytest.mark.skipif(not importlib.util.find_spec("onnxscript"), reason="needs onnxscript")
PEERS = {"onnxruntime": ["float32", "int8"], "openvino": ["float32", "bfloat16", "int8"]}
if current_level() in WITHOUT_BF16_DOT:
    PEERS["openvino"] = ["float32", "int8"]


@pytest.fixture(scope="module", params=["nanovlm", "smolvlm"])
def folder(request, small_230m, tmp_path_factory):
    """A small model in either layout."""
    folder = tmp_path_factory.mktemp("models") / request.param
    write_folder(folder) if request.param == "smolvlm" else write_random_model(folder, small_230m)
    return folder


@pytest.fixture(scope="module")
def plain(folder):
    return plain_engine(folder)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def make(plain, folder, cache, peer, **options):
    engines = make_engines(plain, folder, cache, EngineOptions(baselines=[peer], **options))
    return {engine.name: engine for engine in engines if engine.name.startswith(peer)}


@needs_onnx
@pytest.mark.parametrize("peer", PEERS)
def test_every_precision_computes_what_the_plain_model_computes(plain, folder, cache, peer):
    pytest.importorskip(peer)
    if peer == "openvino":
        pytest.importorskip("nncf")
    engines = make(plain, folder, cache, peer, dtypes=["float32", "bfloat16"], quantize="int8")
    assert list(engines) == [f"{peer} {precision}" for precision in PEERS[peer]]
    size = plain.model.cfg.vit_img_size
    image = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    prompts = [[5, 9, 11, 7, 60, 33], [8, 2, 40, 41, 6, 5]]
    expected, embeddings = greedy_ids(plain, prompts, 6), plain.encode_image(image)
    plain.prefill(prompts)
    for name, engine in engines.items():
        limit = {"float32": 1e-4, "bfloat16": 0.1, "int8": 0.5}[name.split()[-1]]
        assert relative_error(engine.encode_image(image), embeddings) < limit
        assert engine.prefill(prompts) == engine.logits.argmax(-1).tolist()
        assert engine.logits.shape == (2, plain.model.cfg.lm_vocab_size)
        assert relative_error(engine.logits, plain.logits) < limit
        if "float32" in name:
            assert greedy_ids(engine, prompts, 6) == expected
            assert greedy_ids(engine, prompts[:1], 6) == [step[:1] for step in expected], (
                "a prefill starts with an empty cache"
            )


@needs_onnx
def test_files_are_written_once_for_the_same_weights(plain, cache):
    model = plain.captioner.model
    graphs = export_graphs(model, cache)
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert export_graphs(model, cache) == export_graphs(copy.deepcopy(model), cache) == graphs
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == written
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.decoder.norm.weight[-1] += 1
    assert export_graphs(other, cache) != graphs, "in a folder of their own"


@needs_onnx
def test_int8_without_nncf_names_the_extra(plain, folder, cache, monkeypatch):
    pytest.importorskip("openvino")
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(MissingExtraError, match=r"int8 in OpenVINO needs the extra peers"):
        make(plain, folder, cache, "openvino", quantize="int8")
