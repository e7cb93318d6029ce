"""On a GPU models compute what they compute on the CPU; `eval.latency` measures both."""

import pytest
import torch

from eval import latency
from nanovlm import SAMPLE, Captioner
from nanovlm.training.config import TrainConfig
from support.training import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_stages_are_measured(capsys):
    flags = ["--device", "cuda", "--stages", "train", "encode", "prefill", "decode", "--rounds", "1", "--tokens", "3"]
    assert latency.main(flags) == 0
    assert "CUDA graph" in capsys.readouterr().out


def test_ids_and_captions_are_those_of_the_cpu(tiny_model):
    ids, images = torch.randint(4, 40, (2, 9)), torch.rand(2, 3, 16, 16)
    ids[:, 2:6] = 3
    model = tiny_model()
    expected = model.generate(ids, images, max_new_tokens=20)
    assert torch.equal(model.cuda().generate(ids.cuda(), images.cuda(), max_new_tokens=20).cpu(), expected)
    model.cpu()
    captions = [Captioner.from_pretrained(device=device, dtype="float32").caption(SAMPLE) for device in ("cpu", "cuda")]
    assert captions[0] == captions[1]


def test_training_steps_are_those_of_the_cpu(tiny_model, make_batch, tmp_path):
    cfg = TrainConfig(max_steps=5, num_workers=0, dtype="float32")
    cpu, cuda = [
        train(tiny_model(seed=1).to(device), "{}", make_batch, cfg, tmp_path / device) for device in ("cpu", "cuda")
    ]
    for name, weight in cpu.state_dict().items():
        torch.testing.assert_close(cuda.state_dict()[name].cpu(), weight, atol=1e-3, rtol=1e-2)
