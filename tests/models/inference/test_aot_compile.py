"""The decode step for a compiler computes what the blocks compute; a package takes the weights as inputs."""

import json
import logging

import pytest
import torch

from models.errors import CompileError
from models.inference import aot_compile
from models.inference.aot_compile import compile_block, compile_for_config, load_compiled_decode, package_path
from models.inference.compiled_ops import can_compile_ops, library_path
from models.inference.decode_step import DecodeStep
from models.inference.inference_model import InferenceModel
from models.inference.quantization import quantize_int8
from models.lora import adapt

IDS, IMAGES = (
    torch.tensor([[5, 3, 3, 3, 3, 7, 9]]),
    torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1)),
)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty cache of packages."""
    monkeypatch.setenv("NANOVLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("changes", [{}, {"lm_tie_weights": False}, {"lm_attn_scaling": 0.5}, {"lm_n_kv_heads": 6}])
@pytest.mark.parametrize("int8", [False, True])
@torch.inference_mode()
def test_the_decode_step_matches_the_blocks(tiny_model, changes, int8):
    model = tiny_model(**changes)
    if int8:
        quantize_int8(model.decoder)
    step = DecodeStep(model.decoder)
    logits, prefix = model.prefill(IDS, IMAGES)
    for _ in range(20):
        ids = logits.argmax(-1)
        caches = [
            kv.append(torch.zeros_like(kv.key[:, :, :1]), torch.zeros_like(kv.key[:, :, :1])) for kv in prefix.kv_cache
        ]
        keys, values = [kv.key.clone() for kv in caches], [kv.value.clone() for kv in caches]
        got = step(ids, torch.tensor([prefix.length]), keys, values)
        logits, prefix = model.decode(ids, prefix)
        torch.testing.assert_close(got, logits, **CLOSE)
    for kv, key, value in zip(prefix.kv_cache, keys, values):
        torch.testing.assert_close(kv.key, key, **CLOSE)
        torch.testing.assert_close(kv.value, value, **CLOSE)


def continuations(model, starts=(3, 7)):
    return [model.generate(torch.arange(4, 4 + start)[None], max_new_tokens=50) for start in starts]


def test_a_block_is_compiled_once_and_follows_the_weights(tiny_model, cache, monkeypatch, caplog):
    model, plain, other = tiny_model(), tiny_model(), tiny_model(seed=1, lm_n_blocks=3, lm_vocab_size=50)
    assert load_compiled_decode(model.decoder) is None
    inference = InferenceModel(model, compile=True)
    path = package_path(model.decoder.blocks[0])
    library = [library_path()] if can_compile_ops() else []
    assert set(cache.iterdir()) == {path.with_suffix(".json"), path, *library}
    for got, wanted in zip(continuations(inference), continuations(plain)):  # the code takes caches of any capacity
        assert torch.equal(got, wanted)

    monkeypatch.setattr(aot_compile, "save_aoti_package", lambda *_: pytest.fail("it is compiled already"))
    for compile in (True, None):  # weights, the number of blocks and the vocabulary do not matter
        got = InferenceModel(other, compile=compile)
        assert load_compiled_decode(got.network.decoder) is not None
        assert all(torch.equal(a, b) for a, b in zip(continuations(got), continuations(other)))
    with torch.no_grad():
        model.decoder.blocks[1].mlp.down_proj.weight.mul_(-3)
    _, prefix = inference.prefill(IDS, IMAGES)
    _, plain_prefix = model.prefill(IDS, IMAGES)
    wanted = model.decode(torch.tensor([8]), plain_prefix)[0]
    torch.testing.assert_close(inference.decode(torch.tensor([8]), prefix)[0], wanted, **CLOSE)
    follow_new_weights(inference, tiny_model(seed=2))
    public_loader_works(inference, monkeypatch)

    path.write_bytes(b"no package")
    with caplog.at_level(logging.WARNING, "models"):
        fresh = InferenceModel(tiny_model())
    assert "is not a usable package" in caplog.text and "delete it" in caplog.text
    assert torch.equal(fresh.generate(IDS, IMAGES, max_new_tokens=20), plain.generate(IDS, IMAGES, max_new_tokens=20))
    monkeypatch.setattr(aot_compile, "save_aoti_package", lambda program, path: path.write_bytes(b""))
    with pytest.raises(CompileError):
        InferenceModel(tiny_model(), compile=True)


@torch.inference_mode()
def test_compiled_int8_blocks_match_the_step_without_a_compiler(tiny_model):
    """The same arithmetic in the same precisions, once by the compiler and once by torch's operations."""
    model = tiny_model().bfloat16()
    quantize_int8(model.decoder)
    _, prefix = model.prefill(IDS, IMAGES.bfloat16())
    compile_block(model.decoder.blocks[0])
    outputs = []
    for step in (load_compiled_decode(model.decoder), DecodeStep(model.decoder)):
        caches = [kv.reserve(1) for kv in prefix.kv_cache]
        keys, values = zip(*([tensor.clone() for tensor in kv.buffer] for kv in caches))
        outputs.append([step(torch.tensor([8]), torch.tensor([prefix.length]), keys, values), *keys, *values])
    for got, wanted in zip(*outputs):
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)


def follow_new_weights(inference, other):
    """Loaded with assign or in another precision, the next token comes from the new weights."""
    inference.model.load_state_dict(other.state_dict(), assign=True)
    inference.model.decoder.tie_weights()
    for got, wanted in zip(continuations(inference), continuations(other)):
        assert torch.equal(got, wanted)
    inference.model.double()
    for got, wanted in zip(continuations(inference), continuations(other)):
        assert torch.equal(got, wanted)
    inference.model.float()


def public_loader_works(inference, monkeypatch):
    """The same package, loaded by torch's public function."""
    wanted = continuations(inference)
    with monkeypatch.context() as patch:
        patch.setenv("NANOVLM_NO_PRIVATE_KERNELS", "1")
        assert load_compiled_decode(inference.network.decoder) is not None
        again = InferenceModel(inference.model)
    assert all(torch.equal(a, b) for a, b in zip(continuations(again), wanted))


def test_a_package_is_for_one_shape_precision_and_thread_count(tiny_model, monkeypatch):
    models = [tiny_model(), tiny_model().bfloat16(), tiny_model(lm_n_kv_heads=6), tiny_model(lm_rms_eps=0.1)]
    models.append(tiny_model().bfloat16())
    quantize_int8(models[-1].decoder)
    paths = {package_path(model.decoder.blocks[0]) for model in models}
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    paths.add(package_path(models[0].decoder.blocks[1]))
    assert len(paths) == len(models) + 1
    assert package_path(tiny_model(lm_n_blocks=3, lm_re_base=200, lm_tie_weights=False).decoder.blocks[2]) in paths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantize", [None, "int8", "int8-weights"])
def test_a_config_is_enough_to_compile_what_a_model_uses(tiny_model, monkeypatch, dtype, quantize):
    monkeypatch.setattr(aot_compile, "compile_block", package_path)
    model = tiny_model().to(dtype)
    used = InferenceModel(model, quantize=quantize).network.decoder.blocks[0]
    assert compile_for_config(model.cfg, dtype, quantize) == package_path(used)


@pytest.fixture
def compiled(cache, tiny_model, monkeypatch):
    """Puts a package for this many threads into the cache, which cannot be loaded."""

    def make(threads, **environment):
        monkeypatch.setattr("torch.get_num_threads", lambda: threads)
        path = package_path(tiny_model().decoder.blocks[0])
        cache.mkdir(exist_ok=True)
        path.write_bytes(b"")
        path.with_suffix(".json").write_text(json.dumps(aot_compile._environment() | environment))
        return path

    return make


def test_a_package_for_fewer_threads_is_used_and_logged(tiny_model, compiled, monkeypatch, caplog):
    loaded = []
    monkeypatch.setattr(aot_compile, "load_aoti_package", loaded.append)
    one, three = compiled(1), compiled(3)
    with caplog.at_level(logging.INFO, "models"):
        for threads, path in ((2, one), (3, three), (8, three)):
            monkeypatch.setattr("torch.get_num_threads", lambda: threads)  # noqa: B023
            load_compiled_decode(tiny_model().decoder)
            assert loaded.pop() == path
    assert len(caplog.records) == 2 and "compile again for the full speed" in caplog.text


def test_a_miss_is_logged_with_its_reason(tiny_model, compiled, monkeypatch, caplog, cache):
    compiled(4)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    with caplog.at_level(logging.INFO, "models"):
        assert load_compiled_decode(tiny_model().decoder) is None
    assert "was compiled for 4 threads instead of 2" in caplog.text
    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr("torch.__version__", "1.0")
        with caplog.at_level(logging.INFO, "models"):
            assert load_compiled_decode(tiny_model().decoder) is None
    assert f"torch {torch.__version__} instead of 1.0" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "models"):
        assert load_compiled_decode(tiny_model(lm_n_kv_heads=6).decoder) is None
    assert not caplog.records, "packages of other shapes are no news"


def test_without_a_compiler_it_says_so(tiny_model, tmp_path, cache):
    without = torch._inductor.config.patch({"cpp.cxx": (str(tmp_path / "c++"),)})
    with without, pytest.raises(CompileError, match="needs a C\\+\\+ compiler: install g\\+\\+"):
        compile_block(tiny_model().decoder.blocks[0])
    assert not cache.exists()


def test_adapters_are_not_compiled_and_not_ignored(tiny_model, compiled, monkeypatch):
    adapt(model := tiny_model(), 2, 4, ("decoder",))
    compiled(torch.get_num_threads())
    monkeypatch.setattr(aot_compile, "load_aoti_package", lambda *_: pytest.fail("it knows no adapters"))
    assert load_compiled_decode(model.decoder) is None
    with pytest.raises(CompileError, match="LoRALinear modules cannot be compiled; merge adapters first"):
        InferenceModel(model, compile=True)
