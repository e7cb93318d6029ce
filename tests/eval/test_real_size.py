"""The benchmark of real sizes, opened with small ones: what it writes, what it counts, and when it complains."""

import json
import time
from dataclasses import replace
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap

import pytest
import tokenizers

import eval.real_size as door
from eval.real_size import SHAPES, RealSize, main, make_tokenizer, private_memory, write_model
from models.checkpoint import load_config, load_model
from models.config import VLMConfig
from support.checkpoints import raw_config, small


def size(cfg: VLMConfig, tmp_path) -> int:
    write_model(tmp_path / "counted", cfg)
    model = load_model(tmp_path / "counted", load_config(tmp_path / "counted"), -1)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture
def models(monkeypatch, tmp_path):
    """Small ones take the published models' places, the photograph stays."""
    shrunk = {name: small(SHAPES[name][0], 1000) for name in ("230M", "222M")}
    monkeypatch.setattr(door, "SHAPES", {name: (cfg, size(cfg, tmp_path)) for name, cfg in shrunk.items()})
    monkeypatch.setattr(door, "progress", lambda line: None)


@pytest.mark.parametrize("name", SHAPES)
def test_config_and_tokenizer_are_those_of_the_models_time(name, tmp_path):
    cfg = small(SHAPES[name][0], 1000)
    write_model(tmp_path, cfg)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw.keys() == raw_config(1 if name == "222M" else 5).keys()
    assert load_config(tmp_path).format_version == cfg.format_version == (1 if name == "222M" else 5)
    words = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert words.get_vocab_size() == cfg.lm_vocab_size == max(words.get_vocab().values()) + 1
    assert words.token_to_id("<|im_end|>") == 2 and words.token_to_id("<|image|>") == (None if "222" in name else 1000)
    assert words.decode(words.encode("abba wrote 27 Größen\n").ids) == "abba wrote 27 Größen\n"
    assert len(words.encode("abab").ids) == 2


def test_the_real_tokenizers_are_full():
    for cfg, _ in SHAPES.values():
        words = tokenizers.Tokenizer.from_str(make_tokenizer(cfg))
        assert words.get_vocab_size() == cfg.lm_vocab_size == max(words.get_vocab().values()) + 1


def test_a_model_is_loaded_and_speaks_in_a_process_of_its_own(models, capsys):
    assert main(["--json", "--max-new-tokens", "3"]) == 0
    today, may = json.loads(capsys.readouterr().out)["models"]
    assert (today["name"], today["format_version"], may["name"], may["format_version"]) == ("230M", 5, "222M", 1)
    assert (today["images"], may["images"]) == (10, 1), "3 x 3 tiles and the whole; one"
    for record in (today, may):
        assert record["parameters"] == record["published"] and record["new_tokens"] == 3
        assert record["prompt_tokens"] > record["images"] * (64 if record is today else 49)
        assert 0 < record["imports_mb"] <= record["peak_mb"]
        assert 0 <= record["private_mb"] < record["peak_mb"] <= record["caption_peak_mb"]
        assert record["needed_mb"] == 0 and record["dtype"] == "torch.float32"


def test_a_second_copy_of_the_weights_is_a_fault_and_the_one_that_is_needed_is_none():
    took = RealSize("x", 5, "torch.float32", 7, 7, 900.0, 1.0, 1500, 60, 0, 2000, 10, 700, 4, 2.0, 600)
    assert took.failures == []
    (told,) = replace(took, private_mb=960).failures
    assert "960 MB of private memory" in told and "the 0 MB that torch.float32 needs" in told
    assert replace(took, private_mb=510, needed_mb=450, dtype="torch.bfloat16").failures == []


def test_private_memory_is_seen_even_if_it_is_given_back():
    """Fresh pages of the system: malloc may hand out old ones."""
    size = 64 * 2**20
    with private_memory() as seen, mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS) as pages:
        for start in range(0, size, PAGESIZE):
            pages[start] = 1
        time.sleep(0.1)  # long enough for a thread that looks every few milliseconds
    assert max(seen) - seen[0] > 60


def test_what_is_wrong_is_a_sentence_and_exit_code_1(models, capsys, monkeypatch):
    write, (cfg, published) = door.write_model, door.SHAPES["222M"]

    def fails(folder, cfg):
        if cfg.format_version == 5:
            raise OSError("No space left on device")
        write(folder, cfg)

    monkeypatch.setattr(door, "write_model", fails)
    monkeypatch.setattr(door, "SHAPES", door.SHAPES | {"222M": (cfg, published + 1)})
    assert main(["--dtype", "bfloat16"]) == 1
    out, err = capsys.readouterr()
    assert "230M" not in out and f"{published:,}" in out and "torch.bfloat16" in out
    assert err.splitlines() == [
        "230M could not be measured: No space left on device",
        f"222M has {published:,} parameters, the published model {published + 1:,}",
    ]


@pytest.mark.parametrize("flags", [["7B"], ["230M", "--max-new-tokens", "0"], ["--dtype", "int8"]])
def test_wrong_flags_are_one_line_and_exit_code_2(capsys, flags):
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert capsys.readouterr().err.count("\n") == 1
