"""Engines with the same weights decode the same tokens in float32, alone and in a batch, from files made once.

test_peers.py runs them in a process of their own.
"""

import copy
import importlib.util
import sys

import pytest
import torch

from eval import latency
from eval.latency import greedy
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
PROMPT = [5, 9, 11, 7, 60, 33]
OPENVINO_PRECISIONS = ["float32", "int8"] if LEVEL in WITHOUT_BF16_DOT else ["float32", "bfloat16", "int8"]
needs_onnx = pytest.mark.skipif(not importlib.util.find_spec("onnxscript"), reason="needs onnxscript")
needs_llama_cpp = pytest.mark.skipif(not importlib.util.find_spec("llama_cpp"), reason="needs llama_cpp")


@pytest.fixture(scope="module")
def folders(small_230m, tmp_path_factory):
    """A model of nanoVLM's layout, and one of SmolVLM's."""
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


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--dtype float32 bfloat16 --quantize int8", {
            "plain float32": 4, f"nanovlm float32 {LEVEL}": 4, f"nanovlm float32 int8 {LEVEL}": 1,
            f"nanovlm bfloat16 {LEVEL}": 2, f"nanovlm bfloat16 int8 {LEVEL}": 1,
        }),
        ("--dtype bfloat16 --quantize int4 --baselines", {
            f"nanovlm bfloat16 {LEVEL}": 2, f"nanovlm bfloat16 int4 {LEVEL}": None,  # by its head
        }),
    ],
)  # fmt: skip
def test_every_configuration_is_an_engine(folders, tmp_path, flags, expected):
    cfg = load_config(folders["nanovlm"])
    width, kv = cfg.lm_hidden_dim, cfg.lm_n_kv_heads * cfg.lm_head_dim
    block = width * (2 * width + 2 * kv) + 3 * width * cfg.lm_inter_dim + 2 * width
    layers, head = cfg.lm_n_blocks * block + width, cfg.lm_vocab_size * width
    engines = make(folders["nanovlm"], tmp_path, flags)
    mixed = pytest.approx((0.625 * layers + head) / (layers + head))
    assert {name: engine.weight_bytes for name, engine in engines.items()} == {
        name: mixed if n_bytes is None else n_bytes for name, n_bytes in expected.items()
    }
    for name, engine in engines.items():
        assert (engine.dtype == torch.int8) == ("int8" in name and LEVEL != "none")
    assert with_head(0.625, 1, SHAPES["230M"][0]) == pytest.approx(0.70, abs=0.01), "four bits, but the head's eight"


def test_every_level_is_an_engine_with_the_dtype_that_is_best_there(folders, tmp_path):
    levels = levels_here()
    engines = make(folders["nanovlm"], tmp_path, f"--baselines --level {' '.join(levels)}")
    assert [name.split()[-1] for name in engines] == [engine.network.level for engine in engines.values()] == levels
    assert all(("bfloat16" in name) == name.endswith(("bf16", "amx")) for name in engines)


@pytest.mark.parametrize("batch_size", [1, 3])
@needs_llama_cpp
def test_float32_decodes_the_same_tokens_everywhere(folders, tmp_path, batch_size):
    flags = f"--dtype float32 --baselines plain llama.cpp --batch-size {batch_size}"
    engines = make(folders["smolvlm"], tmp_path, flags)
    prompts = [[token + row for token in PROMPT] for row in range(batch_size)]
    ids = {name: greedy(engine, prompts, 12)[0] for name, engine in engines.items()}
    expected = ids["plain float32"]
    assert len(ids) == 3 and list(ids)[1].startswith("llama.cpp")
    assert len(expected) == 13 and all(len(step) == batch_size for step in expected)
    assert len({step[0] for step in expected}) > 1, "not one token again and again"
    assert all(steps == expected for steps in ids.values())
    for engine in engines.values():
        assert greedy(engine, prompts, 12)[0] == expected, "a prefill starts with an empty cache"


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


@needs_onnx
@pytest.mark.parametrize("layout", ["nanovlm", "smolvlm"])
def test_openvino_computes_what_the_plain_model_computes(folders, cache, layout):
    pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    flags = "--dtype float32 bfloat16 --quantize int8 --baselines plain openvino"
    engines = make(folders[layout], cache, flags)
    plain = engines["plain float32"]
    engines = {name: engine for name, engine in engines.items() if name.startswith("openvino")}
    assert list(engines) == [f"openvino {precision}" for precision in OPENVINO_PRECISIONS]
    size = plain.model.cfg.vit_img_size
    image = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    prompts = [PROMPT, [8, 2, 40, 41, 6, 5]]
    (expected, _), embeddings = greedy(plain, prompts, 6), plain.encode_image(image)
    plain.prefill(prompts)
    for name, engine in engines.items():
        limit = {"float32": 1e-4, "bfloat16": 0.1, "int8": 0.5}[name.split()[-1]]
        assert relative_error(engine.encode_image(image), embeddings) < limit
        assert engine.prefill(prompts) == engine.logits.argmax(-1).tolist()
        assert engine.logits.shape == (2, plain.model.cfg.lm_vocab_size)
        assert relative_error(engine.logits, plain.logits) < limit
        if "float32" in name:
            assert greedy(engine, prompts, 6)[0] == expected
            alone, _ = greedy(engine, prompts[:1], 6)
            assert alone == [step[:1] for step in expected], "a prefill starts with an empty cache"


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
def test_llama_cpp_encodes_the_same_image_and_refuses_nanovlms_layout(folders, tmp_path):
    with pytest.raises(InputError, match="nanovlm's layout of tiles"):
        make(folders["nanovlm"], tmp_path, "--baselines llama.cpp")
    engines = make(folders["smolvlm"], tmp_path, "--dtype float32 --baselines plain llama.cpp")
    size = engines["plain float32"].model.cfg.vit_img_size
    for color in ([200, 10, 90], [0, 255, 30]):  # one color: llama.cpp resizes every image
        image = (torch.tensor(color) / 127.5 - 1).view(1, 3, 1, 1).expand(1, 3, size, size)
        expected = engines["plain float32"].encode_image(image)
        assert relative_error(engines["llama.cpp f32"].encode_image(image), expected) < 1e-3


@needs_llama_cpp
@pytest.mark.parametrize("gguf_type", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_llama_cpp_runs_every_type(folders, tmp_path, gguf_type):
    captioner = Captioner.from_pretrained(folders["smolvlm"], "cpu", "float32")
    engine = LlamaCppEngine(captioner, gguf_type, tmp_path)
    assert engine.name == f"llama.cpp {gguf_type}"
    assert 0 <= engine.prefill([PROMPT])[0] < captioner.model.cfg.lm_vocab_size


@needs_llama_cpp
def test_llama_cpp_is_measured_in_every_stage_that_it_has(folders, results_of):
    flags = f"--model {folders['smolvlm']} --baselines llama.cpp --stages decode first-token --quantize int8"
    data = results_of(latency.main, *flags.split(), "--rounds", "1", "--tokens", "3", "--dtype", "float32")
    ours = f"nanovlm float32 {LEVEL}", f"nanovlm float32 int8 {LEVEL}"
    engines = ["llama.cpp f32", "llama.cpp q8_0", *ours]
    assert [result["engine"] for result in data["results"]] == 2 * engines
    assert data["ids"]["llama.cpp f32"] == data["ids"][ours[0]]
