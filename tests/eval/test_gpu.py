"""On a GPU models compute what they compute on the CPU; `eval.gpu` runs on either."""

import pytest
import torch

from eval import gpu
from nanovlm import SAMPLE, Captioner
from nanovlm.training.config import TrainConfig
from support.training import train

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_every_stage_is_measured_where_there_is_no_gpu(monkeypatch, capsys):
    for name, value in {"ROWS": 2, "TEXT": 8, "NEW_TOKENS": 2, "WARMUP": 1, "REPEATS": 1}.items():
        monkeypatch.setattr(gpu, name, value)
    assert gpu.main(["--device", "cpu", "--model-size", "embedded"]) == 0
    rows = [line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert [name.split()[0] for name, _ in rows] == ["training", "training", "1", "32"]
    assert all(float(ms) > 0 for _, ms in rows)


@pytest.mark.gpu
@needs_gpu
def test_ids_and_captions_are_those_of_the_cpu(tiny_model):
    ids, images = torch.randint(4, 40, (2, 9)), torch.rand(2, 3, 16, 16)
    ids[:, 2:6] = 3
    model = tiny_model()
    expected = model.generate(ids, images, max_new_tokens=20)
    assert torch.equal(model.cuda().generate(ids.cuda(), images.cuda(), max_new_tokens=20).cpu(), expected)
    model.cpu()
    captions = [Captioner.from_pretrained(device=device, dtype="float32").caption(SAMPLE) for device in ("cpu", "cuda")]
    assert captions[0] == captions[1]


@pytest.mark.gpu
@needs_gpu
def test_training_steps_are_those_of_the_cpu(tiny_model, make_batch, tmp_path):
    cfg = TrainConfig(max_steps=5, num_workers=0, dtype="float32")
    cpu, cuda = [
        train(tiny_model(seed=1).to(device), "{}", make_batch, cfg, tmp_path / device) for device in ("cpu", "cuda")
    ]
    for name, weight in cpu.state_dict().items():
        torch.testing.assert_close(cuda.state_dict()[name].cpu(), weight, atol=1e-3, rtol=1e-2)
