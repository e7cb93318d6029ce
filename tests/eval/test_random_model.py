"""Random checkpoints have the published models' formats and full tokenizers."""

import json
import os
import signal

import pytest
import tokenizers
import torch

from eval.lib.random_model import SHAPES, make_tokenizer, random_model_folder, write_random_model
from models.checkpoint import checkpoint_dtype, load_config
from models.kv_study.encoder_decoder import EncoderDecoder
from models.vision_language_model import VisionLanguageModel
from support.checkpoints import raw_config, small

EXHAUSTIVE = [pytest.param(name, marks=pytest.mark.full) if "SmolVLM" in name else name for name in SHAPES]


@pytest.mark.parametrize("name", EXHAUSTIVE)
def test_shapes_have_as_many_parameters_as_the_published_models(name):
    cfg, published = SHAPES[name]
    with torch.device("meta"):
        model = VisionLanguageModel(cfg, image_token_id=-1)
        EncoderDecoder(cfg)
    assert sum(parameter.numel() for parameter in model.parameters()) == published


@pytest.mark.parametrize("name", [name for name, (cfg, _) in SHAPES.items() if cfg.format_name == "nanovlm"])
def test_config_and_tokenizer_are_those_of_the_release(name, tmp_path):
    cfg, version = small(SHAPES[name][0], 1000), 1 if name == "222M" else 5
    write_random_model(tmp_path, cfg, torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text()).keys() == raw_config(version).keys()
    assert load_config(tmp_path).format_version == cfg.format_version == version
    assert checkpoint_dtype(tmp_path) == torch.bfloat16
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == cfg.lm_vocab_size == max(tokenizer.get_vocab().values()) + 1
    assert tokenizer.token_to_id("<|im_end|>") == 2
    assert tokenizer.token_to_id("<|image|>") == (None if name == "222M" else 1000)
    assert tokenizer.decode(tokenizer.encode("abba wrote 27 Größen\n").ids) == "abba wrote 27 Größen\n"
    assert len(tokenizer.encode("abab").ids) == 2


@pytest.mark.parametrize("name", ["SmolVLM-256M", *(pytest.param(n, marks=pytest.mark.full) for n in SHAPES)])
def test_full_size_tokenizers_fill_the_vocabulary_with_the_published_ids(name):
    cfg, _ = SHAPES[name]
    tokenizer = tokenizers.Tokenizer.from_str(make_tokenizer(cfg))
    assert tokenizer.get_vocab_size() == cfg.lm_vocab_size == max(tokenizer.get_vocab().values()) + 1
    assert len(tokenizer.encode("\n\n").ids) == 1
    if "SmolVLM" in name:
        assert tokenizer.token_to_id("<image>") == cfg.format.image_token_id
        assert tokenizer.token_to_id("<end_of_utterance>") == cfg.format.end_token_ids[0]


def test_a_temporary_model_is_removed_after_sigterm(monkeypatch):
    monkeypatch.setitem(SHAPES, "222M", (small(SHAPES["222M"][0], 1000), 0))
    with pytest.raises(SystemExit, match="143"), random_model_folder("222M", torch.float32) as folder:
        assert folder.exists()
        os.kill(os.getpid(), signal.SIGTERM)
    assert not folder.exists() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
