"""eval.real_size with small models: what it measures, and which results fail."""

import time
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from random import Random

import pytest

from eval.lib import random_model
from eval.lib.shapes import SHAPES, SIGLIP_B16, SMOLVLM_135M, smolvlm
from eval.real_size import failures_of, main, measure, memory_table, sample_private_memory
from models.config import VLMConfig
from models.vision_language_model import empty_model
from nanovlm.synthetic import draw, random_scene
from support.checkpoints import small


def count_parameters(cfg: VLMConfig) -> int:
    return sum(parameter.numel() for parameter in empty_model(cfg, -1).parameters())


@pytest.fixture
def small_shapes(monkeypatch):
    """Small models take the places of the published ones; the photograph keeps its size."""
    for name in ("230M", "222M"):
        cfg = small(SHAPES[name][0], 1000)
        monkeypatch.setitem(SHAPES, name, (cfg, count_parameters(cfg)))


def test_a_model_is_loaded_and_captions(small_230m, tmp_path):
    """In this process, whose memory says nothing."""
    random_model.write_random_model(tmp_path, small_230m)
    draw(random_scene(Random("photograph")), 800, 600).save(image := tmp_path / "image.png")
    measured = measure(tmp_path, image.read_bytes(), "float32", None, 2)
    assert measured["parameters"] == count_parameters(small_230m) and measured["new_tokens"] == 2
    assert measured["needed_mb"] == 0 and measured["images"] == 10 and measured["format_version"] == 5
    lines = memory_table([{"name": "230M", "file_mb": 900.0} | measured]).splitlines()
    assert lines[0].split()[:3] == ["model", "parameters", "file"] and "230M: prompt of 10 images" in lines[2]


@pytest.mark.full
def test_each_model_is_measured_in_its_own_process(small_shapes, results_of):
    document = results_of(main, "230M", "222M", "--max-new-tokens", "3")
    newer, older = document["models"]
    assert document["parameters"] == {name: published for name, (_, published) in SHAPES.items()}
    assert (newer["name"], newer["format_version"], older["name"], older["format_version"]) == ("230M", 5, "222M", 1)
    assert (newer["images"], older["images"]) == (10, 1), "3 x 3 tiles and the global view; one image"
    for result in (newer, older):
        assert result["parameters"] == result["published"] and result["new_tokens"] == 3
        assert result["prompt_tokens"] > result["images"] * (64 if result is newer else 49)
        assert 0 < result["imports_mb"] <= result["peak_mb"]
        assert 0 <= result["private_mb"] < result["peak_mb"] <= result["caption_peak_mb"]
        assert result["needed_mb"] == 0 and result["dtype"] == "torch.float32"


@pytest.mark.full
def test_a_quantized_model_is_measured_and_its_parameters_are_the_configs(small_shapes, results_of):
    (result,) = results_of(main, "230M", "--dtype", "bfloat16", "--quantize", "int8", "--max-new-tokens", "1")["models"]
    assert result["parameters"] == result["published"] and result["quantize"] == "int8"
    assert 0 <= result["kept_mb"] <= result["private_mb"]


def test_only_an_unneeded_copy_of_the_weights_is_a_failure():
    result = {"name": "x", "dtype": "torch.float32", "parameters": 7, "published": 7, "quantize": None}
    result |= {"private_mb": 60, "needed_mb": 0}
    assert failures_of(result) == []
    (message,) = failures_of(result | {"private_mb": 960})
    assert "960 MB of private memory" in message and "the 0 MB that torch.float32 needs" in message
    assert failures_of(result | {"private_mb": 510, "needed_mb": 450, "dtype": "torch.bfloat16"}) == []


def test_private_memory_that_is_freed_again_is_seen():
    size = 64 * 2**20
    with sample_private_memory() as samples, mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS) as pages:
        for start in range(0, size, PAGESIZE):  # mmap gives fresh pages, where malloc may reuse old ones
            pages[start] = 1
        time.sleep(0.1)  # long enough for a thread that samples every few milliseconds
    assert max(samples) - samples[0] > 60


@pytest.mark.full
def test_failed_checks_are_sentences_and_exit_code_1(small_shapes, capsys, monkeypatch):
    write, (cfg, published) = random_model.write_random_model, SHAPES["222M"]

    def fail_for_format_5(folder, cfg):
        if cfg.format_version == 5:
            raise OSError("No space left on device")
        write(folder, cfg)

    monkeypatch.setattr(random_model, "write_random_model", fail_for_format_5)
    monkeypatch.setitem(SHAPES, "222M", (cfg, published + 1))
    assert main(["230M", "222M", "--dtype", "bfloat16"]) == 1
    out, err = capsys.readouterr()
    assert "\n230M" not in out and f"{published:,}" in out and "torch.bfloat16" in out
    assert [line for line in err.splitlines() if not line.endswith(("weights", "captioning"))] == [
        f"222M's config has {published:,} parameters, the published model {published + 1:,}",
        "230M could not be measured: No space left on device",
        f"222M has {published:,} parameters, the published model {published + 1:,}",
    ]


@pytest.mark.full
def test_a_smolvlm_of_a_published_vocabulary_is_written_and_measured(monkeypatch, results_of):
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    cfg = smolvlm(SIGLIP_B16 | sizes, SMOLVLM_135M | sizes | {"num_key_value_heads": 1})
    monkeypatch.setitem(SHAPES, "SmolVLM-256M", (cfg, count_parameters(cfg)))
    (result,) = results_of(main, "SmolVLM-256M", "--max-new-tokens", "1")["models"]
    assert (result["format_version"], result["images"]) == (6, 13), "3 x 4 tiles and the whole image"
