"""Other engines compute from the same weights what the plain model computes, from files made once.

test_peers.py runs them in a process of their own.
"""

import copy
import importlib.util
import sys

import pytest
import torch

from eval import latency
from eval.lib import command
from eval.lib.command import current_level, levels_here, make_parser, relative_error
from eval.lib.random_model import SHAPES, write_random_model
from eval.peers import PlainEngine, with_head
from eval.peers.llama_cpp_engine import LlamaCppEngine
from eval.peers.openvino_engine import export_graphs
from models.checkpoint import load_config
from models.inference.kernels.load import WITHOUT_BF16_DOT
from nanovlm.captioner import Captioner
from nanovlm.errors import InputError, MissingExtraError
from support.smolvlm import write_folder

pytestmark = pytest.mark.full
LEVEL = current_level()
PACKAGES = {"llama.cpp": ["llama_cpp"], "openvino": ["openvino", "nncf"]}
PRECISIONS = {
    "llama.cpp": ["f32", "bf16", "q8_0"],
    "openvino": ["float32", "int8"] if LEVEL in WITHOUT_BF16_DOT else ["float32", "bfloat16", "int8"],
}
LIMITS = {"float32": 1e-4, "f32": 1e-3, "bfloat16": 0.1, "bf16": 0.1, "int8": 0.5, "q8_0": 0.5}  # of relative errors
needs_onnx = pytest.mark.skipif(not importlib.util.find_spec("onnxscript"), reason="needs onnxscript")
needs_llama_cpp = pytest.mark.skipif(not importlib.util.find_spec("llama_cpp"), reason="needs llama_cpp")


@pytest.fixture(scope="module")
def folders(small_230m, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_random_model(folder / "nanovlm", small_230m)
    write_folder(folder / "smolvlm")
    return {name: folder / name for name in ("nanovlm", "smolvlm")}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def make(folder, files, flags):
    latency.add_flags(parser := make_parser("latency", None))
    args = parser.parse_args(flags.split())
    args.level = args.level or [LEVEL]
    plain = PlainEngine(Captioner.from_pretrained(folder, "cpu", "float32"))
    return {engine.name: engine for engine in latency.make_engines(plain, folder, files, args)}


def test_every_configuration_and_level_is_an_engine(folders, tmp_path):
    cfg = load_config(folders["nanovlm"])
    width, kv = cfg.lm_hidden_dim, cfg.lm_n_kv_heads * cfg.lm_head_dim
    block = width * (2 * width + 2 * kv) + 3 * width * cfg.lm_inter_dim + 2 * width
    layers, head = cfg.lm_n_blocks * block + width, cfg.lm_vocab_size * width
    mixed = pytest.approx((0.625 * layers + head) / (layers + head))  # int4, but the head's eight bits
    for flags, expected in (
        ("--dtype float32 bfloat16 --quantize int8", {
            "plain float32": 4, f"nanovlm float32 {LEVEL}": 4, f"nanovlm float32 int8 {LEVEL}": 1,
            f"nanovlm bfloat16 {LEVEL}": 2, f"nanovlm bfloat16 int8 {LEVEL}": 1,
        }),
        ("--dtype bfloat16 --quantize int4 --baselines", {
            f"nanovlm bfloat16 {LEVEL}": 2, f"nanovlm bfloat16 int4 {LEVEL}": mixed,
        }),
    ):  # fmt: skip
        engines = make(folders["nanovlm"], tmp_path, flags)
        assert {name: engine.weight_bytes for name, engine in engines.items()} == expected
        for name, engine in engines.items():
            assert (engine.dtype == torch.int8) == ("int8" in name and LEVEL != "none")
    assert with_head(0.625, 1, SHAPES["230M"][0]) == pytest.approx(0.70, abs=0.01)
    engines = make(folders["nanovlm"], tmp_path, f"--baselines --level {' '.join(levels_here())}")
    levels = [[name.split()[-1] for name in engines], [engine.network.level for engine in engines.values()]]
    assert levels == [levels_here()] * 2
    assert all(("bfloat16" in name) == name.endswith(("bf16", "amx")) for name in engines)


@pytest.mark.parametrize(
    ("module", "engine"),
    [("llama_cpp", "llama.cpp"), ("openvino", "openvino"), pytest.param("nncf", "openvino", marks=needs_onnx)],
)
def test_a_missing_package_names_its_extra(folders, cache, monkeypatch, module, engine):
    if module == "nncf":
        pytest.importorskip("openvino")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"is missing; pip install 'nanovlm\[peers\]'"):
        make(folders["nanovlm"], cache, f"--baselines {engine} --quantize int8")


@pytest.mark.parametrize(
    ("engine", "layout", "batch_size"),
    [
        *(pytest.param("llama.cpp", "smolvlm", n, marks=needs_llama_cpp) for n in (1, 3)),
        pytest.param("openvino", "nanovlm", 3, marks=needs_onnx),
        pytest.param("openvino", "smolvlm", 1, marks=needs_onnx),
    ],
)
def test_engines_compute_what_the_plain_model_computes(
    folders, cache, results_of, monkeypatch, engine, layout, batch_size
):
    for package in PACKAGES[engine]:
        pytest.importorskip(package)
    monkeypatch.setattr(command, "memory_bandwidth", lambda: 1e10)
    monkeypatch.setattr(command, "matmul_flops", lambda dtype: 1e11)
    flags = "--dtype float32 bfloat16 --quantize int8 --rounds 1 --tokens 12 --stages encode prefill decode first-token"
    flags += f" --model {folders[layout]} --cache {cache / layout} --baselines plain {engine} --batch-size {batch_size}"
    data = results_of(latency.main, flags)
    errors = {(row["stage"], row["engine"]): row["error"] for row in data["results"] if engine in row["engine"]}
    names = [name for stage, name in errors if stage == "prefill"]
    assert names == [f"{engine} {precision}" for precision in PRECISIONS[engine]]
    for (stage, name), error in errors.items():
        if (stage, engine) == ("encode", "openvino") or stage == "prefill":
            assert error < LIMITS[name.split()[-1]]
    expected = data["ids"]["plain float32"]
    assert data["ids"][names[0]] == expected and [*map(len, expected)] == [batch_size] * 13
    assert len({step[0] for step in expected}) > 1, "not one token again and again"


@needs_onnx
def test_graphs_are_written_once_for_the_same_weights(folders, cache):
    model = Captioner.from_pretrained(folders["nanovlm"], "cpu", "float32").model
    graphs = export_graphs(model, cache)
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert export_graphs(model, cache) == export_graphs(copy.deepcopy(model), cache) == graphs
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == written
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.decoder.norm.weight[-1] += 1
    assert export_graphs(other, cache) != graphs, "in a folder of their own"


@needs_llama_cpp
def test_llama_cpp_encodes_the_same_image_runs_every_type_and_refuses_nanovlms_layout(folders, tmp_path):
    with pytest.raises(InputError, match="nanovlm's layout of tiles"):
        make(folders["nanovlm"], tmp_path, "--baselines llama.cpp")
    engines = make(folders["smolvlm"], tmp_path, "--dtype float32 --baselines plain llama.cpp")
    model = engines["plain float32"].model
    for color in ([200, 10, 90], [0, 255, 30]):  # one color: llama.cpp resizes every image
        image = (torch.tensor(color) / 127.5 - 1).view(1, 3, 1, 1).expand(1, 3, *[model.cfg.vit_img_size] * 2)
        expected = engines["plain float32"].encode_image(image)
        assert relative_error(engines["llama.cpp f32"].encode_image(image), expected) < 1e-3
    for gguf_type in ("f32", "f16", "bf16", "q8_0", "q4_0"):
        engine = LlamaCppEngine(engines["plain float32"].captioner, gguf_type, tmp_path)
        assert engine.name == f"llama.cpp {gguf_type}"
        assert 0 <= engine.prefill([[5, 9, 11, 7, 60, 33]])[0] < model.cfg.lm_vocab_size
