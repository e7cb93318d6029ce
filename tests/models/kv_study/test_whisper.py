"""Our Whisper loads the checkpoints of openai-whisper and computes what the package computes."""

import re

import pytest
import torch

from models.common.errors import CheckpointError, InputError
from models.kv_study.hook_cache import install_kv_cache_hooks
from models.kv_study.log_mel import log_mel, mel_filters
from models.kv_study.whisper import DIMENSIONS, Whisper, load_whisper
from support import ROOT, randomize

DIMS = dict(zip(DIMENSIONS, (80, 6, 24, 4, 2, 50, 16, 24, 4, 3)))
AUDIO = torch.randn(2, 2000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.1], [0.001]])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    state = randomize(Whisper(DIMS)).half().state_dict()
    file = tmp_path_factory.mktemp("whisper") / "tiny.pt"
    torch.save({"dims": DIMS, "model_state_dict": state}, file)
    return file


@pytest.fixture(scope="module")
def whisper():
    return pytest.importorskip("whisper", reason="openai-whisper is in the extra `test-all`")


def test_a_checkpoint_is_read_and_its_cache_changes_nothing(checkpoint):
    model, prompt = load_whisper(checkpoint), torch.tensor([[1, 2, 3], [1, 2, 4]])
    mel = model.log_mel(AUDIO)
    assert mel.shape == (2, 80, 12) and not model.training
    ids = model.generate(prompt, mel, max_new_tokens=10)
    assert torch.equal(ids, model.generate(prompt, mel, max_new_tokens=10, use_kv_cache=False)) and ids.shape == (2, 10)
    assert torch.equal(load_whisper(checkpoint.parent).generate(prompt, mel, max_new_tokens=10), ids)


@pytest.mark.full
@pytest.mark.parametrize("n_mels", [80, 128])
def test_log_mel_matches_openai_whisper(whisper, n_mels):
    torch.testing.assert_close(mel_filters(n_mels), whisper.audio.mel_filters("cpu", n_mels), atol=1e-8, rtol=1e-5)
    for row in (*AUDIO, torch.zeros(1600), torch.sin(torch.arange(16_000) / 5)):
        torch.testing.assert_close(log_mel(row, n_mels), whisper.log_mel_spectrogram(row, n_mels), atol=1e-5, rtol=1e-5)
    alone = torch.stack([log_mel(row, n_mels) for row in AUDIO])
    torch.testing.assert_close(log_mel(AUDIO, n_mels), alone)  # each recording has its own loudest moment


@pytest.mark.full
def test_a_checkpoint_computes_what_openai_whisper_computes(whisper, checkpoint):
    theirs, model = whisper.load_model(str(checkpoint), device="cpu").eval(), load_whisper(checkpoint)
    mel = torch.stack([whisper.log_mel_spectrogram(whisper.pad_or_trim(row, 12 * 160)) for row in AUDIO])
    torch.testing.assert_close(model.log_mel(AUDIO), mel, atol=1e-5, rtol=1e-5)
    expected, xa = theirs.embed_audio(mel), model.encode(mel)
    torch.testing.assert_close(xa, expected, atol=1e-4, rtol=1e-4)
    ids = torch.randint(50, (2, 9))
    with install_kv_cache_hooks(model.decoder):
        logits = torch.cat([model.decoder(chunk, xa) for chunk in ids.split([5, 1, 3], 1)], 1)
    with install_kv_cache_hooks(theirs.decoder):
        cached = torch.cat([theirs.decoder(chunk, expected) for chunk in ids[:, :8].split([5, 1, 1, 1], 1)], 1)
        with pytest.raises(InputError, match="2 tokens behind 8: openai-whisper's decoder reads one at a time"):
            theirs.decoder(ids[:, 7:], expected)
    torch.testing.assert_close(logits, theirs.logits(ids, expected), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(cached, logits[:, :8], atol=1e-3, rtol=1e-4)
    ids = prompt = torch.tensor([[1, 2, 3], [1, 2, 4]])
    for _ in range(10):
        ids = torch.cat([ids, theirs.logits(ids, expected)[:, -1:].argmax(-1)], 1)
    assert ids[0, 3:].tolist() != ids[1, 3:].tolist(), "the test needs recordings with different answers"
    assert torch.equal(model.generate(prompt, mel, max_new_tokens=10), ids[:, 3:])


@pytest.mark.full
def test_openai_whispers_own_inference_drives_our_model(whisper, checkpoint):
    theirs, model = whisper.load_model(str(checkpoint), device="cpu").eval(), load_whisper(checkpoint)
    xa, ids = model.encode(model.log_mel(AUDIO[:1])), torch.tensor([[1, 2, 3]] * 2)
    projected = []
    model.decoder.blocks[0].cross_attn.key.register_forward_hook(lambda linear, args, out: projected.append(1))
    inference = whisper.decoding.PyTorchInference(model, initial_token_length=3)
    for new in ([4, 5], [6, 6], [7, 8]):
        logits = inference.logits(ids, xa)
        torch.testing.assert_close(logits[:, -1], theirs.logits(ids, xa)[:, -1], atol=1e-3, rtol=1e-4)
        inference.rearrange_kv_cache([1, 0])
        ids = torch.cat([ids[[1, 0]], torch.tensor(new)[:, None]], 1)
    assert projected == [1]
    inference.cleanup_caching()
    torch.testing.assert_close(model.decoder(ids, xa), theirs.logits(ids, xa), atol=1e-3, rtol=1e-4)


@pytest.mark.full
def test_the_example_of_the_docs_runs(whisper, tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "kv-caching.md").read_text(encoding="utf-8")
    examples = [block for block in re.findall(r"```py\n(.*?)```", page, re.DOTALL) if "load_whisper(" in block]
    torch.manual_seed(0)
    dims = dict(zip(DIMENSIONS, (80, 1500, 16, 2, 1, 51865, 448, 16, 2, 1)))
    torch.save({"dims": dims, "model_state_dict": Whisper(dims).state_dict()}, tmp_path / "tiny.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(whisper, "load_audio", lambda file: AUDIO[0].numpy())
    exec(examples[0], {})
    assert capsys.readouterr().out


def test_other_files_and_other_audio_raise(checkpoint, tmp_path):
    model = load_whisper(checkpoint)
    with pytest.raises(InputError, match=r"mel has shape \(1, 80, 11\), not \(N, 80, 12\); `log_mel` makes it"):
        model.encode(torch.zeros(1, 80, 11))
    assert model.bfloat16().encode(torch.zeros(1, 80, 12)).dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match=r"holds 0 \.pt files"):
        load_whisper(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_whisper(tmp_path / "missing.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_whisper(tmp_path)
    content = torch.load(checkpoint)
    for broken, message in (
        ([1], "no checkpoint of openai-whisper"),
        ({"model_state_dict": {}}, "no checkpoint of openai-whisper: KeyError.*dims"),
        (content | {"dims": {"n_mels": 80}}, "KeyError.*n_audio_ctx"),
        (content | {"model_state_dict": {}}, "Missing key"),
    ):
        torch.save(broken, tmp_path / "text.pt")
        with pytest.raises(CheckpointError, match=message):
            load_whisper(tmp_path / "text.pt")
    (tmp_path / "second.pt").touch()
    with pytest.raises(CheckpointError, match=r"holds 2 \.pt files"):
        load_whisper(tmp_path)
