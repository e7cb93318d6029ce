"""The step that is written for a compiler says what the blocks say, and packages hold it without weights."""

import pytest
import torch

from models.inference import aot_compile
from models.inference.aot_compile import build_package, load_package, package_path, use_package
from models.inference.cpu_kernels import OneDNNLinear, use_onednn
from models.inference.decode_step import DecodeStep
from models.inference.fused_decode_step import JoinedStep, join, use_joined, use_step
from models.inference.quantization import Int8Linear, use_int8
from models.vision_language_model import VisionLanguageModel

IDS, IMAGES = (
    torch.tensor([[5, 3, 3, 3, 3, 7, 9]]),
    torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1)),
)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(params=[DecodeStep, JoinedStep])
def stepping(request):
    def use(model):
        use_step(model, request.param(model.decoder))
        return model

    return use


@pytest.mark.parametrize("changes", [{}, {"lm_tie_weights": False}, {"lm_attn_scaling": 0.5}, {"lm_n_kv_heads": 6}])
def test_the_step_is_the_blocks(tiny_model, stepping, changes):
    model, usual = stepping(tiny_model(**changes)), tiny_model(**changes)
    with torch.inference_mode():
        (logits, prefix), (wanted, past) = (m.prefill(IDS, IMAGES) for m in (model, usual))
        for _ in range(30):
            ids = wanted.argmax(-1)
            logits, prefix = model.decode(ids, prefix)
            wanted, past = usual.decode(ids, past)
            torch.testing.assert_close(logits, wanted, **CLOSE)
    for kv, past_kv in zip(prefix.kv_cache, past.kv_cache):
        torch.testing.assert_close(kv.key, past_kv.key, **CLOSE)
        torch.testing.assert_close(kv.value, past_kv.value, **CLOSE)
    assert torch.equal(*(m.generate(IDS, IMAGES, max_new_tokens=40) for m in (model, usual)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_mean_the_same_to_both(tiny_model, stepping, dtype):
    model, usual = (tiny_model().to(dtype) for _ in range(2))
    use_int8(model.decoder), use_int8(usual.decoder)
    stepping(model)
    with torch.inference_mode():
        (logits, prefix), (wanted, past) = (m.prefill(IDS, IMAGES.to(dtype)) for m in (model, usual))
        for _ in range(10):
            ids = wanted.argmax(-1)
            (logits, prefix), (wanted, past) = model.decode(ids, prefix), usual.decode(ids, past)
            tolerance = CLOSE if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.15}
            torch.testing.assert_close(logits.float(), wanted.float(), **tolerance)


def test_what_is_joined_is_held_once(tiny_model, monkeypatch):
    monkeypatch.setattr("models.inference.cpu_kernels.LARGE", 0)
    for change, kind in ((lambda m: m, torch.nn.Linear), (use_onednn, OneDNNLinear), (use_int8, Int8Linear)):
        model, usual = change(tiny_model().decoder), change(tiny_model().decoder)
        step = JoinedStep(model)
        for block, (_, _, qkv_proj, _, gate_up_proj, _) in zip(model.blocks, step.blocks):
            for part, product in ((block.attn.v_proj, qkv_proj), (block.mlp.up_proj, gate_up_proj)):
                whole = product.keywords["weight"] if kind is not Int8Linear else product.__self__.weight
                assert part.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), usual.state_dict().values()))
    a, b = torch.nn.Linear(8, 3, bias=False), torch.nn.Linear(8, 5, bias=False)
    x = torch.randn(2, 8)
    torch.testing.assert_close(join(a, b)(x), torch.cat([a(x), b(x)], dim=-1))


def test_weights_that_may_be_mapped_are_not_joined(tiny_model):
    for model, joined in ((tiny_model(), False), (tiny_model().bfloat16(), True)):
        use_joined(model)
        assert ("decode" in vars(model)) == joined
        attn = model.decoder.blocks[0].attn
        whole = attn.q_proj.weight.untyped_storage().data_ptr() == attn.k_proj.weight.untyped_storage().data_ptr()
        assert whole == joined


def test_one_prefix_is_continued_twice_and_by_both_ways_in_turn(tiny_model, stepping):
    model = stepping(tiny_model())
    with torch.inference_mode():
        _, prefix = model.prefill(IDS, IMAGES)
        once, first = model.decode(torch.tensor([8]), prefix)
        model.decode(torch.tensor([11]), first)
        other, _ = model.decode(torch.tensor([9]), prefix)
        _, eager = VisionLanguageModel.decode(model, torch.tensor([8]), prefix)
        for begun in (first, eager):
            torch.testing.assert_close(
                model.decode(torch.tensor([12]), begun)[0],
                VisionLanguageModel.decode(model, torch.tensor([12]), begun)[0],
                **CLOSE,
            )
        torch.testing.assert_close(once, model.decode(torch.tensor([8]), prefix)[0], **CLOSE)
        assert not torch.allclose(once, other)


def test_batches_padding_and_gradients_go_the_usual_way(tiny_model):
    model, usual = tiny_model(), tiny_model()
    use_step(model, lambda *inputs: pytest.fail("one sequence without padding only"))
    two, mask = IDS.repeat(2, 1), torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    assert torch.equal(*(m.generate(two, IMAGES.repeat(2, 1, 1, 1), max_new_tokens=5) for m in (model, usual)))
    words = torch.tensor([[0, 0, 8, 9, 10, 11, 12]])
    assert torch.equal(*(m.generate(words, None, mask, max_new_tokens=5) for m in (model, usual)))
    _, prefix = model.prefill(IDS, IMAGES)
    logits, _ = model.decode(torch.tensor([8]), prefix)
    logits.sum().backward()


def test_a_model_goes_back_to_its_own_way(tiny_model):
    model, usual = tiny_model(), tiny_model()
    use_step(model, lambda *inputs: pytest.fail("it was taken back"))
    use_step(model, None)
    assert torch.equal(*(m.generate(IDS, IMAGES, max_new_tokens=5) for m in (model, usual)))


def test_no_step_beyond_the_models_positions(tiny_model, stepping):
    model = stepping(tiny_model())
    with torch.inference_mode():
        _, prefix = model.prefill(torch.randint(4, 40, (1, 63)))
        _, prefix = model.decode(torch.tensor([8]), prefix)
        with pytest.raises(ValueError, match="65 tokens exceed lm_max_position_embeddings=64"):
            model.decode(torch.tensor([8]), prefix)


def test_a_package_is_made_once_and_reads_the_weights_where_they_are(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOVLM_CACHE", str(tmp_path))
    model, usual, other = tiny_model(), tiny_model(), tiny_model(seed=1)
    assert not use_package(model) and model.decode.__func__ is VisionLanguageModel.decode
    assert use_package(model, build=True)
    path = package_path(model.decoder)
    assert list(tmp_path.iterdir()) == [path]
    for start in (3, 7):  # the graph takes caches of any capacity
        ids = torch.randint(4, 40, (1, start))
        assert torch.equal(*(m.generate(ids, max_new_tokens=50) for m in (model, usual)))

    monkeypatch.setattr(aot_compile, "build_package", lambda *_: pytest.fail("it is there"))
    assert use_package(other, build=True) and package_path(other.decoder) == path  # weights do not matter
    assert torch.equal(*(m.generate(IDS, IMAGES, max_new_tokens=20) for m in (other, tiny_model(seed=1))))
    with torch.no_grad():
        model.decoder.norm.weight.zero_()
    with torch.inference_mode():
        _, prefix = model.prefill(IDS, IMAGES)
        assert not model.decode(torch.tensor([8]), prefix)[0].any()

    fresh = tiny_model()
    path.write_bytes(b"no package")
    with pytest.warns(UserWarning, match="is no package .* delete it"):
        assert not use_package(fresh)
    assert torch.equal(*(m.generate(IDS, IMAGES, max_new_tokens=20) for m in (fresh, usual)))
    monkeypatch.setattr(aot_compile, "build_package", lambda decoder, path: path.write_bytes(b""))
    with pytest.raises(RuntimeError):
        use_package(fresh, build=True)


def test_a_package_is_for_one_shape_and_precision(tiny_model):
    models = [tiny_model(), tiny_model().bfloat16(), tiny_model(lm_n_blocks=1), tiny_model(lm_re_base=200)]
    models.append(tiny_model().bfloat16())
    use_int8(models[-1].decoder)
    assert len({package_path(model.decoder) for model in models}) == len(models)


def test_without_a_compiler_it_says_so(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (str(tmp_path / "c++"),))
    with pytest.raises(RuntimeError, match="needs a C\\+\\+ compiler"):
        build_package(tiny_model().decoder, tmp_path / "cache" / "step.pt2")
    assert not list(tmp_path.iterdir())


def test_a_package_of_other_weights_is_refused(tiny_model, tmp_path):
    path = tmp_path / "step.pt2"
    path.write_bytes(b"")
    with pytest.raises(RuntimeError):
        load_package(tiny_model().decoder, path)
