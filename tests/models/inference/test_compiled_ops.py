"""Each operation in C gives what PyTorch's gives, codes and scales included; networks use it once it is compiled."""

import copy
import os
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.errors import CompileError
from models.inference import compiled_ops
from models.inference.compiled_ops import CompiledOps, can_compile_ops, compile_ops, library_path, load_ops
from models.inference.cpu_kernels import has_int8_activations
from models.inference.eager_ops import EagerOps
from models.inference.inference_model import InferenceModel

LARGER = {"vit_img_size": 32, "mp_image_token_length": 16, "lm_max_position_embeddings": 256}  # 64 patches an image
IDS, IMAGES = torch.tensor([[5, *[3] * 16, 7, 9, 4]]), torch.rand(1, 3, 32, 32)
CLOSE = {"rtol": 1e-5, "atol": 1e-3}  # sums of numbers up to some thousands
SIZES = pytest.mark.parametrize("size", [(1, 8), (7, 40), (70, 96)])

pytestmark = pytest.mark.skipif(not can_compile_ops(), reason="the library is for other CPUs")
needs_int8 = pytest.mark.skipif(not has_int8_activations(), reason="this CPU or torch has no int8 products")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOVLM_CACHE", str(folder))
        path = compile_ops()
    assert path.parent == folder
    return path


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def compiled(library, request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield CompiledOps(library)
    torch.set_num_threads(before)


@pytest.fixture
def in_cache(library, monkeypatch):
    monkeypatch.setenv("NANOVLM_CACHE", str(library.parent))


def rows(size, seed=0):
    """Rows of which one is zero and one far larger than the others."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    x[-1] *= 1000
    if len(x) > 1:
        x[0] = 0
    return x


def check_same(got, wanted):
    """Codes within one step, as a value may lie between two, and scales within rounding."""
    (codes, scale), (wanted_codes, wanted_scale) = got, wanted
    assert codes.dtype == torch.uint8 and codes.shape == wanted_codes.shape
    assert (codes.int() - wanted_codes.int()).abs().max() <= 1
    assert (codes != wanted_codes).sum() <= 1 + 0.01 * codes.numel()
    torch.testing.assert_close(torch.as_tensor(scale), torch.as_tensor(wanted_scale), rtol=1e-4, atol=1e-30)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 40, 6])
@pytest.mark.parametrize("n_heads", [(1, 1), (6, 2)])
@pytest.mark.parametrize(("length", "past", "causal"), [(77, 0, False), (2, 5, False), (97, 0, True), (33, 0, True)])
def test_attention(compiled, dtype, dim, n_heads, length, past, causal):
    """Of rows far apart, as in the vision encoder, and near; the last sequence's scores are far from each other."""
    (n_q, n_kv), total = n_heads, length + past
    packed = torch.randn(2, total, n_q + 2 * n_kv, dim)
    packed[-1] *= 5
    q, k, v = packed.to(dtype).transpose(1, 2).split([n_q, n_kv, n_kv], dim=1)
    q = q[:, :, past:]
    mask = torch.ones(length, total, dtype=torch.bool).tril(past) if causal else None
    wide = (x.double() for x in (q, k, v))
    wanted = F.scaled_dot_product_attention(*wide, attn_mask=mask, enable_gqa=True).transpose(1, 2).flatten(2)
    limit = wanted.norm(dim=(1, 2)) * (1e-5 if dtype == torch.float32 else 4e-3)
    for keys, values in ((k, v), (k.contiguous(), v.contiguous())):
        got = compiled.attention(q, keys, values, causal=causal)
        assert got.dtype == dtype
        assert ((got.double() - wanted).norm(dim=(1, 2)) < limit).all()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_beside_other_code_that_multiplies_in_tiles(compiled, dtype):
    q, x = torch.randn(1, 3, 70, 64, dtype=dtype), torch.randn(70, 200, dtype=dtype)
    attended, product = compiled.attention(q, q, q), x @ x.t()
    for _ in range(3):
        assert torch.equal(compiled.attention(q, q, q), attended)
        assert torch.equal(x @ x.t(), product)


@torch.inference_mode()
def test_attention_that_the_library_does_not_compute(compiled, monkeypatch):
    """Masks, one token, odd sizes, other precisions and more keys than fit the cache."""
    q = torch.randn(2, 4, 5, 6)
    mask = torch.tensor([True, False, True, True, True]).expand(2, 1, 5, 5)
    for x, visible in ((q, mask), (q[:, :, :1], None), (q[..., :5], None), (q.double(), None)):
        wanted = F.scaled_dot_product_attention(x, x, x, attn_mask=visible).transpose(1, 2).flatten(2)
        torch.testing.assert_close(compiled.attention(x, x, x, visible), wanted)
    monkeypatch.setattr(compiled_ops, "MAX_KEYS", 4)
    monkeypatch.setattr(compiled, "_library", None)
    torch.testing.assert_close(compiled.attention(q, q, q, causal=True), EagerOps().attention(q, q, q, causal=True))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_rows", [[64], [40, 96, 33], [8, 32]])
@pytest.mark.parametrize("depth", [64, 40])
@pytest.mark.parametrize("n", [1, 16, 70, compiled_ops.MAX_COLUMNS + 1])
def test_product(compiled, dtype, n_rows, depth, n):
    """Of inputs in rows and in columns; rows of a weight need not fill blocks, and may be too few."""
    weights, x = [torch.randn(n_out, depth).to(dtype) for n_out in n_rows], torch.randn(n, depth).to(dtype)
    wanted = torch.cat(weights).double() @ x.double().t()
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.1}
    for ops in (compiled, EagerOps()):
        for same in (x, x.t().contiguous().t()):
            got = ops.product(weights, same)
            assert got.dtype == dtype and got.is_contiguous()
            torch.testing.assert_close(got.double(), wanted, **tolerance)
        residual = torch.randn(n_rows[0], n).to(dtype)
        got = ops.product(weights[:1], x, residual).double()
        torch.testing.assert_close(got, wanted[: n_rows[0]] + residual.double(), **tolerance)


@SIZES
@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_gelu_of_a_product(compiled, size, dtype, bias):
    x, linear = torch.randn(2, *size).to(dtype), nn.Linear(size[1], 40, bias=bias).to(dtype)
    got, wanted = (ops.linear_gelu(x, linear) for ops in (compiled, EagerOps()))
    assert got.dtype == dtype
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(
        got, F.gelu(linear(x), approximate="tanh"), atol=0.02 if dtype == torch.bfloat16 else 1e-5, rtol=0.02
    )


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_times_another(compiled, size, dtype):
    gate, up = rows(size).to(dtype), rows(size, 1).to(dtype)
    torch.testing.assert_close(compiled.silu_mul(gate.clone(), up), F.silu(gate.float()).mul_(up).to(dtype))
    torch.testing.assert_close(EagerOps().silu_mul(gate.clone(), up), F.silu(gate).mul_(up))


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantization(compiled, size, dtype):
    x = rows(size).to(dtype)
    check_same(compiled.quantize_rows(x), EagerOps().quantize_rows(x.clone()))
    positive = x.abs() - 0.1
    check_same(compiled.quantize_rows(positive, -0.17), EagerOps().quantize_rows(positive.clone(), -0.17))
    check_same(compiled.quantize_tensor(x), EagerOps().quantize_tensor(x.clone()))


@SIZES
def test_rms_norm_after_a_scaled_sum(compiled, size):
    x, y, scale, weight = rows(size), rows(size, 1), torch.rand(size[0], 1), torch.randn(size[1])
    before = x.clone()
    check_same(compiled.rms_norm(x, weight, 1e-5), EagerOps().rms_norm(x, weight, 1e-5))
    total, got = compiled.add_rms_norm(x, y, scale, weight, 1e-5)
    wanted_total, wanted = EagerOps().add_rms_norm(x, y, scale, weight, 1e-5)
    torch.testing.assert_close(total, wanted_total, **CLOSE)
    check_same(got, wanted)
    assert torch.equal(x, before)


@SIZES
@torch.no_grad()
def test_layer_norm_after_a_sum(compiled, size):
    norm = nn.LayerNorm(size[1])
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x, y = rows(size), rows(size, 1)
    check_same(compiled.layer_norm_codes(x, norm), EagerOps().layer_norm_codes(x, norm))
    got, wanted = x.clone(), x.clone()
    check_same(compiled.add_layer_norm(got, y, norm), EagerOps().add_layer_norm(wanted, y, norm))
    torch.testing.assert_close(got, wanted, **CLOSE)


@SIZES
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm(compiled, size, dtype):
    norm = nn.LayerNorm(size[1])
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x, norm = torch.stack([rows(size), rows(size, 1) + 5]).to(dtype), norm.to(dtype)
    torch.testing.assert_close(compiled.layer_norm(x, norm), norm(x))


@SIZES
@pytest.mark.parametrize("bias", [False, True])
def test_scaled_rows_are_added_in_place(compiled, size, bias):
    x, y, scale, offset = rows(size), rows(size, 1), torch.rand(size[0], 1), torch.randn(size[1]) if bias else None
    got, wanted = x.clone(), x.clone()
    compiled.add_rows(got, y, scale, offset)
    EagerOps().add_rows(wanted, y, scale, offset)
    torch.testing.assert_close(got, wanted, **CLOSE)


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu(compiled, size, dtype):
    gate_up, scale = rows((size[0], 2 * size[1])).to(dtype), torch.rand(size[0], 1)
    check_same(compiled.swiglu(gate_up, scale), EagerOps().swiglu(gate_up, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("n_angles", [5, 15])
def test_rope(compiled, dtype, n_heads, n_angles):
    heads, scale = torch.randn(15, (n_heads[0] + 2 * n_heads[1]) * 8), torch.rand(15, 1)
    cos, sin = torch.randn(2, n_angles, 8)  # not of angles: a channel has its own
    got = compiled.rope(heads, scale, cos, sin, n_heads, dtype)
    for part, wanted in zip(got, EagerOps().rope(heads.clone(), scale, cos, sin, n_heads, dtype)):
        assert part.dtype == dtype
        torch.testing.assert_close(part, wanted)


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_gemv(compiled, size, dtype):
    weight, scale, x = torch.randint(-127, 128, size, dtype=torch.int8), torch.rand(size[0]), torch.randn(1, size[1])
    scale, x = scale.to(dtype), x.to(dtype)
    wanted = (x.double() @ weight.double().t() * scale.double()).to(dtype)
    for ops in (compiled, EagerOps()):
        torch.testing.assert_close(ops.int8_gemv(x, weight, scale), wanted, rtol=0.01, atol=0.05 * size[1] ** 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(8, 1), (40, 7), (96, 130)])
def test_rms_norm_of_columns(compiled, dtype, size):
    x, weight = rows(size[::-1]).t().contiguous().to(dtype), torch.randn(size[0]).to(dtype)
    got, wanted = (ops.rms_norm_columns(x, weight, 1e-5) for ops in (compiled, EagerOps()))
    assert got.dtype == dtype
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_rope_of_columns(compiled, dtype, n_heads, per_sequence):
    heads = torch.randn((n_heads[0] + 2 * n_heads[1]) * 8, 2 * 17).to(dtype)
    cos, sin = torch.randn(2, 2, 1, 17, 8) if per_sequence else torch.randn(2, 17, 8)
    before = heads.clone()
    got, wanted = (ops.rope_columns(heads, cos, sin, n_heads, 2) for ops in (compiled, EagerOps()))
    for part, exact in zip(got, wanted):
        assert part.dtype == dtype and part.shape == exact.shape
        torch.testing.assert_close(part, exact)
    assert torch.equal(heads, before)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_prefill_without_quantization(in_cache, tiny_model, dtype, batch_size):
    model = tiny_model(**LARGER).to(dtype)
    eager, compiled = InferenceModel(model, compile=False), InferenceModel(model)
    assert type(compiled.network.decoder.blocks[0].ops) is CompiledOps
    ids, images = IDS.repeat(batch_size, 1), IMAGES.repeat(batch_size, 1, 1, 1).to(dtype)
    mask = None if batch_size == 1 else torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)
    (wanted, other), (got, state) = (each.prefill(ids, images, mask) for each in (eager, compiled))
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    assert (got.float() - wanted.float()).norm() < tolerance * wanted.float().norm()
    assert state.kv_cache[0].bytes_allocated == other.kv_cache[0].bytes_allocated
    more = torch.tensor([[8, 6]] * batch_size)
    got, wanted = (each.prefill(more, None, None, prefix)[0] for each, prefix in ((compiled, state), (eager, other)))
    assert (got.float() - wanted.float()).norm() < tolerance * wanted.float().norm()


@needs_int8
@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_network_uses_what_is_in_the_cache(in_cache, tiny_model, dtype):
    model = tiny_model(**LARGER).to(dtype)
    eager = InferenceModel(model, quantize="int8", compile=False)
    compiled = InferenceModel(model, quantize="int8")
    assert [type(each.network.decoder.blocks[0].ops) for each in (eager, compiled)] == [EagerOps, CompiledOps]
    assert type(compiled.network.vision_encoder.blocks[0].ops) is type(compiled.network.MP.ops) is CompiledOps
    images = IMAGES.to(dtype)
    wanted = eager.encode_images(images).float()
    assert (compiled.encode_images(images).float() - wanted).norm() < 0.02 * wanted.norm()
    got, state = compiled.prefill(IDS, images)
    wanted, other = eager.prefill(IDS, images)
    assert (got.float() - wanted.float()).norm() < 0.03 * wanted.float().norm()
    for more in (torch.tensor([[8]]), torch.tensor([[8, 6]])):  # after a prefix
        got, wanted = (one.prefill(more, None, None, prefix)[0] for one, prefix in ((compiled, state), (eager, other)))
        assert (got.float() - wanted.float()).norm() < 0.03 * wanted.float().norm()


@needs_int8
@torch.inference_mode()
def test_a_sequence_does_not_depend_on_its_batch(in_cache, tiny_model):
    model = InferenceModel(tiny_model(**LARGER), quantize="int8")
    ids, mask = torch.tensor([[0, 0, 0, 5, 6, 8], [4, 9, 8, 7, 6, 5]]), torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])
    logits = model.prefill(ids, attention_mask=mask)[0]
    for row, length in ((0, 3), (1, 6)):
        alone = model.prefill(ids[row : row + 1, -length:])[0]
        torch.testing.assert_close(logits[row : row + 1], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_find_the_library_or_do_without(in_cache, monkeypatch, tmp_path, duplicate):
    ops = load_ops()
    assert type(duplicate(ops)) is CompiledOps
    monkeypatch.setenv("NANOVLM_CACHE", str(tmp_path))
    assert type(duplicate(ops)) is EagerOps


def test_the_process_keeps_denormal_numbers(compiled):
    assert (torch.tensor([1e-40]) * 2).item() > 0 and 1e-310 * 0.5 > 0


def test_without_a_compiler_or_a_sound_library(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("NANOVLM_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    with pytest.raises(CompileError, match="false cannot compile"):
        load_ops(compile=True)
    assert not os.listdir(tmp_path)
    monkeypatch.delenv("CC")
    monkeypatch.setattr(compiled_ops.shutil, "which", lambda name: None)
    with pytest.raises(CompileError, match="needs a C compiler: install gcc, or leave compile away"):
        load_ops(compile=True)
    library_path().write_bytes(b"not a library")
    assert type(load_ops()) is EagerOps
    assert "is not a usable library" in caplog.text
