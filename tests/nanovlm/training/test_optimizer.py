"""Frozen parts, accumulation, clipping, precision, attention and Muon, each against a plain path or PyTorch's."""

import json
import math
from dataclasses import replace
from itertools import count

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from models.attention import attention
from models.inference.proof import Proof
from models.lora import adapters, merge
from models.lora.files import read_adapters, write_adapters
from nanovlm import device
from nanovlm.errors import TrainingError
from nanovlm.training.config import PARTS, TrainConfig
from nanovlm.training.cpu_ops import matmul_attention
from nanovlm.training.loop import Trainer, TrainingTask
from nanovlm.training.metrics import read_metrics
from nanovlm.training.optimizer import MUON_LR_SCALE, Muon, accelerated, freeze, make_optimizer
from support.training import answer_questions, train

CFG = TrainConfig(
    max_steps=2, lr=1e-3, warmup_steps=0, decay=0, weight_decay=0, dtype="float32", num_workers=0, log_every=9
)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def trainer(tiny_model, make_batch, tmp_path):
    numbers = count()  # of folders, as each of them is locked
    return lambda cfg=CFG: Trainer(tiny_model(), TrainingTask(make_batch, "{}", tmp_path / str(next(numbers))), cfg)


@pytest.fixture
def learn(tiny_model, make_batch, tmp_path):

    def learn(cfg, batch=make_batch):
        model = tiny_model()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        train(model, "{}", batch, cfg, tmp_path)
        return {name: p.detach() - before[name] for name, p in model.named_parameters()}

    return learn


@pytest.mark.parametrize(("frozen", "module"), PARTS.items())
def test_a_frozen_part_has_neither_moments_nor_gradients(learn, trainer, make_batch, tmp_path, frozen, module):
    cfg = replace(CFG, freeze=[frozen], weight_decay=0.1)
    changes = learn(cfg)
    moments = load_file(tmp_path / "checkpoints/step-2/optimizer.safetensors")
    model = (untrained := trainer(cfg)).model
    assert model.vision_encoder(torch.rand(1, 3, 16, 16)).requires_grad == (frozen != "vision"), "keeps no activations"
    untrained.backward([make_batch(0)])
    for name, p in model.named_parameters():
        is_trained = not name.startswith(f"{module}.")
        assert bool(changes[name].any()) == (f"{name}/exp_avg" in moments) == (p.grad is not None) == is_trained, name


def test_a_batch_without_images_leaves_the_projector_and_one_without_answers_is_an_error(learn, trainer, make_batch):
    only = replace(CFG, freeze=["vision", "language"])
    assert not any(delta.any() for delta in learn(only, lambda i: make_batch(i, images=False)).values())
    batch = make_batch(0) | {"targets": make_batch(0)["targets"].fill_(-100)}
    with pytest.raises(TrainingError, match="no answer tokens"):
        trainer().backward([batch])


def test_accumulated_batches_give_the_loss_and_gradients_of_the_whole(tiny_model, trainer, make_batch):
    """The pieces have answers of different lengths, so the mean of their losses would be another number."""
    pieces = [make_batch(i, lengths) for i, lengths in enumerate([(30, 31), (4, 2), (9, 6)])]
    width = max(piece["input_ids"].size(1) for piece in pieces)
    whole = {"images": torch.cat([piece["images"] for piece in pieces])}
    for name, fill in (("input_ids", 0), ("targets", -100), ("attention_mask", 0)):
        whole[name] = torch.cat([nn.functional.pad(p[name], (0, width - p[name].size(1)), value=fill) for p in pieces])
    one, many = tiny_model(), trainer()
    one(**whole)[1].backward()
    loss = many.backward(pieces)
    assert loss == pytest.approx(one(**whole)[1].item(), abs=1e-5)
    assert loss != pytest.approx(sum(one(**piece)[1].item() for piece in pieces) / 3, abs=1e-3)
    torch.testing.assert_close(gradients(many.model), gradients(one), atol=1e-5, rtol=1e-5)


def test_gradients_are_clipped(learn, tmp_path):
    """AdamW's first moment is a tenth of the first gradient."""
    learn(replace(CFG, max_steps=1, max_grad_norm=0.03))
    moments = load_file(tmp_path / "checkpoints/step-1/optimizer.safetensors")
    length = math.sqrt(sum(float(m.square().sum()) for key, m in moments.items() if key.endswith("exp_avg")))
    assert length == pytest.approx(0.003, rel=1e-3)


def test_gradient_checkpointing_changes_memory_and_nothing_else(tiny_model, make_batch):
    found = []
    for checkpointing in (False, True):
        model, sizes = tiny_model(lm_dropout=0.1, vit_dropout=0.1).train(), {}

        def keep(tensor, sizes=sizes):
            sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with accelerated(model, replace(CFG, gradient_checkpointing=checkpointing)):
            torch.manual_seed(0)  # what is dropped, is dropped in both computations
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model(**make_batch(0))[1]
            loss.backward()
        found.append((sum(sizes.values()), loss.item(), gradients(model)))
        assert not any("forward" in vars(block) for block in (*model.vision_encoder.blocks, *model.decoder.blocks))
    (size, loss, plain), (smaller, same, recomputed) = found
    assert smaller < size / 2 and loss == same
    torch.testing.assert_close(recomputed, plain, atol=0, rtol=0)


def test_a_step_in_half_precision_goes_the_same_way(trainer, make_batch):
    found = []
    for name in ("float32", "bfloat16", "float16"):
        run = trainer(replace(CFG, dtype=name))
        run.scaler = torch.amp.GradScaler("cpu", init_scale=256, enabled=name == "float16")
        loss = run.backward([make_batch(0)])
        run.scaler.unscale_(run.optimizer)
        found.append((loss, torch.cat([gradient.flatten() for gradient in gradients(run.model).values()])))
    (exact, a), *others = found
    for loss, b in others:
        assert loss == pytest.approx(exact, rel=0.02) and loss != exact
        assert nn.functional.cosine_similarity(a, b, dim=0) > 0.99
        assert b.norm() / a.norm() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_overflow_in_float16_skips_a_step_and_halves_the_scale(learn, trainer, tmp_path, optimizer):
    """The first scale is 65,536, and this model's gradients times that exceed float16's 65,504."""
    changes = learn(replace(CFG, dtype="float16", max_steps=1, optimizer=optimizer))
    assert not any(delta.any() for delta in changes.values())
    state = json.loads((tmp_path / "checkpoints/step-1/trainer.json").read_text())
    assert state["scaler"]["scale"] == 32768
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["grad_norm"] is None, "JSON has no infinity"
    run = trainer(replace(CFG, dtype="float16"))
    run.scaler = torch.amp.GradScaler("cpu", init_scale=1)
    with pytest.raises(TrainingError, match="training diverged: step 0 has loss 1.0 and gradient norm inf"):
        run._check_finite(1.0, math.inf)  # a scale of 1 gets no lower


FAST = [  # maker and flags of a CPU, and whether bfloat16 is faster there
    ("GenuineIntel", "avx512_bf16 amx_bf16", True), ("GenuineIntel", "avx512_bf16", False),
    ("GenuineIntel", "avx2", False), ("AuthenticAMD", "avx512_bf16", True), ("AuthenticAMD", "avx2", False),
]  # fmt: skip


@pytest.mark.parametrize(("maker", "flags", "fast"), FAST)
def test_a_cpu_learns_in_bfloat16_where_that_is_faster(monkeypatch, maker, flags, fast):
    """And a GPU without bfloat16 learns in float16."""
    assert device.fast_bfloat16(torch.device("cpu"), {"vendor_id": maker, "flags": flags}.__getitem__) == fast
    monkeypatch.setattr(device, "fast_bfloat16", lambda where: fast)
    chosen = [device.choose_training_dtype("auto", torch.device(where)) for where in ("cuda", "cpu")]
    assert chosen == (2 * [torch.bfloat16] if fast else [torch.float16, torch.float32])


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_steps_are_those_of_torch():
    """Of wide, tall and square matrices, two of which are orthogonalized together; the first gradient is zero."""
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.full((n, 56 - n), 0.1)) for n in (16, 16, 40, 28)] for _ in range(2))
    options = {"lr": 0.02, "weight_decay": 0.1}
    muon = Muon([{"params": ours, "orthogonal": True}], fused=True, **options)
    muon.state.update((p, {"momentum": torch.zeros_like(p)}) for p in ours)
    reference = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options)
    for scale in (0, 1, 9):
        for p, q in zip(ours, theirs):
            p.grad = scale * torch.randn(p.shape)
            q.grad = p.grad.clone()
        muon.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)
    assert all((p - 0.1).abs().max() > 0.01 for p in ours)


@pytest.mark.parametrize("kind", ["plain", "causal", "masked"])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_attention_in_bfloat16_matches_float32(kind, groups):
    torch.manual_seed(1)
    q, k, v = (torch.randn(3, heads, 24, 16).bfloat16().requires_grad_() for heads in (4, groups, groups))
    mask = torch.rand(3, 1, 24, 24) < 0.6
    mask[..., 0] = True
    arguments = mask if kind == "masked" else None, kind == "causal"
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    ours, plain = matmul_attention(q, k, v, *arguments), attention(*wide, *arguments)
    assert ours.dtype == torch.bfloat16 and (ours - plain).norm() < 0.02 * plain.norm()
    assert (matmul_attention(q, k, v, *arguments, dropout_p=0.5) - ours).norm() > 0.1 * plain.norm()
    weights = torch.linspace(-1, 1, plain.numel()).view(plain.shape)
    for x, exact in zip((q, k, v), wide):
        (gradient,) = torch.autograd.grad((ours * weights).sum(), x, retain_graph=True)
        (expected,) = torch.autograd.grad((plain * weights).sum(), exact, retain_graph=True)
        assert (gradient - expected).norm() < 0.02 * expected.norm()


def test_answers_between_steps_come_from_the_core_as_it_is_written(tiny_model, make_batch, tmp_path):
    model = tiny_model()
    cfg = replace(CFG, gradient_checkpointing=True, save_every=1)
    with accelerated(model, cfg):
        assert Proof(model).difference()
        assert {block.attn.attend for block in model.decoder.blocks} == {matmul_attention}
        assert all("forward" in vars(block) for block in model.decoder.blocks)
    differences = []

    def answer(model, everything):
        differences.append(Proof(model).difference())
        return answer_questions(model)

    Trainer(model, TrainingTask(make_batch, "{}", tmp_path, answer_questions=answer, metric="f1"), cfg).run()
    assert differences == [""] * 4, "before, after each of two steps, and of the final model"


def test_the_projector_has_a_rate_of_its_own(tiny_model):
    for name in ("adamw", "muon"):
        model = tiny_model()
        groups = make_optimizer(model, replace(CFG, optimizer=name, lr=1e-4, projector_lr=3e-3)).param_groups
        scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
        usual = MUON_LR_SCALE if name == "muon" else 1
        assert [scales.pop(id(p)) for p in model.MP.parameters()] == pytest.approx([30 * usual])
        assert {*scales.values()} == {1, usual}


def test_beside_lora_a_projector_with_a_rate_learns_in_full_and_is_read_back(tiny_model, make_batch, tmp_path):
    model, base = tiny_model(), tiny_model()
    cfg = replace(CFG, lora_rank=2, projector_lr=1e-2, train_embeddings=False, freeze=["vision"])
    freeze(model, cfg)
    assert {name.split(".")[0] for name in adapters(model)} == {"decoder"}
    learned = {name for name, p in model.named_parameters() if p.requires_grad and ".lora_" not in name}
    assert learned == {"MP.proj.weight"}
    optimizer = make_optimizer(model, cfg)
    for i in range(2):
        optimizer.zero_grad()
        model(**make_batch(i))[1].backward()
        optimizer.step()
    assert not torch.equal(model.MP.proj.weight, base.MP.proj.weight)
    write_adapters(tmp_path, model)
    read_adapters(tmp_path, base)
    for (name, ours), theirs in zip(merge(model).state_dict().items(), merge(base).state_dict().values()):
        assert torch.equal(ours, theirs), name


def test_linear_layers_learn_by_muon_and_all_else_by_adamw_and_matrices_decay(tiny_model, make_batch):
    """One step: everything that is no Linear's matrix changes exactly as with AdamW alone."""
    models = {}
    for name in ("muon", "adamw"):
        model = models[name] = tiny_model()
        groups = (optimizer := make_optimizer(model, replace(CFG, optimizer=name, weight_decay=0.1))).param_groups
        assert {group["lr_scale"] for group in groups} == ({1, MUON_LR_SCALE} if name == "muon" else {1})
        layers = [m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
        assert decayed == {id(weight) for weight in layers} - {id(model.decoder.head.weight)}, "the head is tied"
        model(**make_batch(0))[1].backward()
        optimizer.step()
    linear = {f"{name}.weight" for name, module in models["muon"].named_modules() if isinstance(module, nn.Linear)}
    other = dict(models["adamw"].named_parameters())
    assert len(linear) > 5 and len(other) > len(linear) + 4
    for name, weight in models["muon"].named_parameters():
        assert torch.equal(weight, other[name]) == (name not in linear), name
