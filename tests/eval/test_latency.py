"""eval.latency with a small model: every stage is compared, and disagreement in float32 fails."""

import json
import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from eval import latency
from eval.latency import Result, cold_start, failures, lowering, main, results_table, run_process
from eval.lib import command, training_step
from eval.lib.command import current_level, levels_here
from eval.lib.random_model import SHAPES
from eval.peers import PlainEngine
from models.checkpoint import checkpoint_dtype
from nanovlm import EMBEDDED

FAST = "--model-size 230M --rounds 1 --tokens 3 --dtype float32 --stages "
two_levels = pytest.mark.skipif(len(levels_here()) < 2, reason="needs two levels")


@pytest.fixture(autouse=True)
def small_machine(monkeypatch, small_230m):
    """A small model in the place of the published one, and limits that need no measuring."""
    monkeypatch.setitem(SHAPES, "230M", (small_230m, 0))
    monkeypatch.setattr(command, "memory_bandwidth", lambda: 1e10)
    monkeypatch.setattr(command, "matmul_flops", lambda dtype: 1e11)


def test_every_stage_of_every_engine_is_reported(results_of, tmp_path):
    flags = "encode prefill decode first-token --baselines plain --image-size 512 900 --batch-size 3"
    data = results_of(main, FAST + flags, "--save", str(tmp_path))
    results, engines = data["results"], ["plain float32", f"nanovlm float32 {current_level()}"]
    stages = ["encode", "prefill", "decode", "first token", "first token"]
    assert [(row["stage"].partition(",")[0], row["engine"]) for row in results] == [*product(stages, engines)]
    assert [row["stage"][11:19] for row in results[6::2]] == [", 512 px", ", 900 px"]
    assert all(0 < row["min_ms"] <= row["median_ms"] for row in results)
    assert [row["roofline_ms"] is not None for row in results] == [True] * 6 + [False] * 4
    assert [row["error"] is not None for row in results] == [True] * 4 + [False] * 6
    assert list(data["ids"]) == engines and len({json.dumps(ids) for ids in data["ids"].values()}) == 1
    assert data["bytes_per_s"] == 1e10
    table = next(tmp_path.iterdir()).read_text()
    assert table.count(f"level {current_level()}, ") == table.count("; other engines at their best; ") == 1
    for words in ("batch size 3", "medians of 1 rounds", "12 of 12", "1.00x", "of roofline"):
        assert words in table


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_roofline_is_the_longer_of_reading_and_computing_what_theory_counts(
    small_230m, batch_size, results_of, monkeypatch
):
    cfg, T = small_230m, small_230m.mp_image_token_length + latency.TEXT_TOKENS
    width, kv = cfg.lm_hidden_dim, cfg.lm_n_kv_heads * cfg.lm_head_dim
    layers = cfg.lm_n_blocks * (width * (2 * width + 2 * kv) + 3 * width * cfg.lm_inter_dim)
    head = cfg.lm_vocab_size * width  # it is the embedding
    flags = f"encode prefill decode --baselines --batch-size {batch_size}"
    found = []
    for limit in ("memory_bandwidth", "matmul_flops"):
        with monkeypatch.context() as patch:
            patch.setattr(command, limit, lambda *_: 1e3)  # milliseconds are then bytes, or operations
            found.append({row["stage"]: row["roofline_ms"] for row in results_of(main, FAST + flags)["results"]})
    n_bytes, flops = found
    weights = layers + (2 * cfg.lm_n_blocks + 1) * width + head
    assert n_bytes["prefill"] == n_bytes["decode"] == pytest.approx(4 * weights)
    products = 2 * (layers * T + head)  # two operations per weight and token; the head once
    attention = cfg.lm_n_blocks * 4 * T * (T + 1) * width
    assert batch_size * products < flops["prefill"] <= batch_size * (products + attention)
    decode = 2 * (layers + head) + cfg.lm_n_blocks * 4 * (T + 1) * width
    assert flops["decode"] == pytest.approx(batch_size * decode)
    assert n_bytes["encode"] > 0 and flops["encode"] > n_bytes["encode"]


def test_a_training_step_is_measured_beside_nanovlms(results_of, monkeypatch):
    for name, value in {"ROWS": 2, "TEXT": 8, "WARMUP": 1, "STEPS": 1}.items():
        monkeypatch.setattr(training_step, name, value)
    results = results_of(main, FAST + "train")["results"]
    assert [(row["stage"], row["engine"]) for row in results] == [("train", "nanoVLM's loop"), ("train", "train.py")]
    assert all(row["median_ms"] > 0 for row in results)


def test_a_gpu_is_measured_with_a_cuda_graph_and_without_limits_of_the_cpu(results_of, monkeypatch, capsys):
    load = latency.Captioner.from_pretrained
    on_cpu = staticmethod(lambda folder, device, *names, **options: load(folder, "cpu", *names, **options))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(latency.Captioner, "from_pretrained", on_cpu)
    monkeypatch.setattr(latency, "graph_step", lambda model, rows, tokens: 0.001 * rows)
    monkeypatch.setattr(command, "environment", lambda device, levels: device)
    flags = "encode decode --device cuda --batch-size 2"
    results = results_of(main, FAST + flags)["results"]
    assert not any(row["roofline_ms"] for row in results)
    assert results[-1]["engine"].endswith("CUDA graph") and results[-1]["median_ms"] == pytest.approx(2)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(f"{FAST}{flags} --baselines llama.cpp".split())
    assert "--baselines llama.cpp" in capsys.readouterr().err


@pytest.mark.parametrize("dtypes", [["bfloat16"], ["bfloat16", "float32"]])
def test_random_weights_are_stored_in_the_widest_precision_measured(dtypes):
    with latency.model_folder(None, "230M", dtypes) as folder:
        assert checkpoint_dtype(folder) == getattr(torch, dtypes[-1])


@pytest.mark.full
@two_levels
def test_a_lower_level_holds_pytorch_to_it_in_a_process_of_its_own(capfd, tmp_path):
    flags = f"{FAST}decode --level avx2 --model-size embedded --save {tmp_path}"
    with pytest.raises(SystemExit, match="0"):
        main(flags.split())
    out = capfd.readouterr().out
    assert "nanovlm float32 avx2 " in out and "level avx2, " in out and "PyTorch and oneDNN in OpenVINO held to" in out
    (path,) = tmp_path.iterdir()
    line, _, saved = path.read_text().partition("\n")
    assert line == f"$ python -m eval.latency {flags}" and saved.rstrip("\n") == out.rstrip("\n")


@two_levels
def test_several_levels_are_compared_in_one_process(results_of):
    levels = levels_here()[:2]
    data = results_of(main, FAST + "decode --level", *levels, levels[0])
    assert [result["engine"] for result in data["results"][1:]] == [f"nanovlm float32 {level}" for level in levels]
    assert lowering([current_level()]) == lowering(["none"]) == lowering(["avx2", "vnni"]) == {}
    for level in levels_here()[:-1]:
        assert lowering([level])["NANOVLM_CPU_LEVEL"] == level and "ONEDNN_MAX_CPU_ISA" in lowering([level])


@pytest.mark.full
def test_a_cold_start_is_a_whole_process(results_of, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    programs = cold_start(EMBEDDED, "float32", "cpu", None)
    assert [*cold_start(EMBEDDED, "auto", "cpu", "int4").values()][-1][-2:] == ["--quantize", "int4"]
    assert list(programs) == ["import torch", "generate.py"]
    done = subprocess.run(programs["generate.py"], capture_output=True, text=True)
    assert "ring" in done.stdout, "the sample's caption"
    results = results_of(main, FAST + "cold-start")["results"]
    assert [result["engine"] for result in results] == ["import torch", "generate.py"]
    assert all(5e7 < result["memory_bytes"] < 4e9 for result in results)
    with pytest.raises(subprocess.CalledProcessError):
        run_process([sys.executable, "-c", "1 / 0"])


class OtherTokens(PlainEngine):
    name = "other"

    def decode(self, ids):
        return [token ^ 1 for token in super().decode(ids)]


@pytest.mark.parametrize("is_ours", [True, False])
def test_other_tokens_than_the_plain_models_are_our_failure_and_a_peers_rounding(monkeypatch, capsys, is_ours):
    make = latency.make_engines
    monkeypatch.setattr(OtherTokens, "is_ours", is_ours)
    monkeypatch.setattr(
        latency, "make_engines", lambda plain, *rest: [OtherTokens(plain.captioner), *make(plain, *rest)]
    )
    assert main(f"{FAST}decode --baselines".split()) == is_ours
    found = capsys.readouterr()
    line = "other decodes other tokens than plain float32\n"
    assert line in found[is_ours] and line not in found[not is_ours]


def test_errors_in_float32_are_failures_of_those_that_compute_in_it():
    engines = [SimpleNamespace(name=name, weight_bytes=n, is_ours=False) for name, n in (("a", 4), ("b", 4), ("c", 2))]
    rows = [Result("encode", "a", 1.0, 1.0, error=1e-4), Result("decode", "a", 1.0, 1.0)]
    rows += [Result("encode", "c", 1.0, 1.0, error=1.0)]
    rows += [Result("prefill", "b", 1.0, 1.0, error=error) for error in (0.5, float("nan"))]
    assert failures(engines, rows, {}) == [
        f"b: prefill is {error} off the plain model, more than 0.001" for error in ("5.0e-01", "nan")
    ]


def test_the_table_shows_speedups_shares_and_ids():
    results = [Result("decode", "a", 4.0, 3.0, 1.0), Result("decode", "b", 2.0, 1.0, 1.0)]
    results.append(Result("cold start", "c", 9.0, 9.0, None, memory_bytes=2**20))
    lines = results_table(results, {"a": [[1], [2]], "b": [[1], [3]]}).split("\n")
    assert [" ".join(line.split()) for line in lines] == [
        "decode median min speedup of roofline same ids",
        "a 4.00 ms 3.00 ms 1.00x 25% 2 of 2",
        "b 2.00 ms 1.00 ms 2.00x 50% 1 of 2",
        "cold start median min speedup memory",
        "c 9.00 ms 9.00 ms 1.00x 1 MiB",
    ]
