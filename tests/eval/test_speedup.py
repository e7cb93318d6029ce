"""eval.speedup: designs that choose the ids they promise and hold the bytes of their formula; its report."""

from dataclasses import replace

import pytest
import torch

from eval import speedup
from eval.lib import cache_quality
from eval.lib.cache_designs import Sizes, language_model_designs, measure_designs, timeline
from eval.lib.cache_quality import make_shared_model, small_config, sort_cached, speculation, train
from eval.lib.scenes import make_splits
from eval.speedup import main
from models.kv_study.speculative import DraftModel, prompt_lookup, read_lm
from models.vision_language_model import PrefillState
from nanovlm import EMBEDDED
from nanovlm.captioner import Captioner

QUICK = "--lengths 2 3 --rounds 1 --device cpu --no-export --no-sort-task --no-attribute"
SIZES = Sizes((4, 8, 12), window=6, rounds=1)
IDS, TWIN_IDS = torch.tensor([[5, 3, 3, 3, 3, 7, 9]]), torch.tensor([[20, 21, 22]])
IMAGE = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
EXACT = 2 * 2 * 2 * 4 * 4  # keys and values, blocks, kv heads, channels, bytes of float32


@pytest.fixture(scope="module")
def study(tiny_model):
    return measure_designs(tiny_model(), IDS, IMAGE, SIZES, export=False)


@pytest.fixture(scope="module")
def twin_study(encoder_decoder):
    return measure_designs(encoder_decoder, TWIN_IDS, IMAGE, SIZES, export=False)


def test_every_design_chooses_the_ids_that_it_promises(study, twin_study):
    assert [[row.design for row in one.rows] for one in (study, twin_study)] == [
        ["no cache", "per-block cache", "static cache", "paged blocks", "int8 cache", "sliding window, 6"],
        ["no cache", "hooks", "cross-attention once"],
    ]
    assert study.failures == twin_study.failures == []
    wrong = replace(study, rows=[replace(study.rows[1], same_ids=5)])
    assert wrong.failures == ["language model on image and text: per-block cache differs from no cache after 5 tokens"]
    assert replace(study, rows=[replace(wrong.rows[0], is_rounded=True)]).failures == []


def test_ids_are_not_one_token_again_and_again(tiny_model):
    plain = language_model_designs(tiny_model(), 19, 6, export=False)[1]
    with torch.inference_mode():
        ids, times, run = timeline(plain.start, IDS, IMAGE, 12)
    assert len(set(ids)) > 1 and times == sorted(times) and len(times) == 12
    assert ids == tiny_model().generate(IDS, IMAGE, max_new_tokens=12)[0].tolist()
    assert run.bytes_used() == EXACT * (7 + 11), "the last token is not read"


@pytest.mark.full  # exports two graphs
def test_exported_graphs_choose_the_same_ids(tiny_model):
    study = measure_designs(tiny_model(), IDS, IMAGE, SIZES)
    assert [row.same_ids for row in study.rows if row.design == "static, exported"] == [12] and not study.failures


def test_times_operations_and_bytes_grow_with_the_length_by_the_formula(study, twin_study):
    for row in (*study.rows, *twin_study.rows):
        assert row.total_ms == sorted(row.total_ms) and len(row.spread_ms) == 3 and row.token_ms > 0
    assert twin_study.rows[2].flops[-1] < twin_study.rows[0].flops[-1], "the image's keys and values are made once"
    none, full, window = (row.flops[-1] - row.flops[0] for row in (study.rows[0], study.rows[1], study.rows[-1]))
    assert window < full < none / 2
    assert study.rows[1].flops_exponent == pytest.approx(1, abs=0.05) and 1.3 < study.rows[0].flops_exponent < 2
    assert {row.design: row.bytes_per_token for row in study.rows} == {
        "no cache": 0, "per-block cache": EXACT, "static cache": EXACT,
        "paged blocks": round(EXACT * 32 / 18, 1),  # 18 tokens take two blocks of 16
        "int8 cache": EXACT * (4 + 8) / (4 * 4), "sliding window, 6": round(EXACT * 6 / 18, 1),
    }  # fmt: skip
    assert {row.bytes_per_token for row in twin_study.rows[1:]} == {2 * 2 * 24 * 4}
    assert [row.cross_bytes for row in twin_study.rows] == [0, *[2 * 2 * 24 * 16 * 4] * 2]


def test_the_report_is_one_json_object_and_the_printed_one_is_kept(results_of, tmp_path):
    results = results_of(main, f"{QUICK} --save", str(tmp_path / "kept"))
    assert [len(study["rows"]) for study in results["studies"]] == [6, 3] and results["failures"] == []
    assert "torch" in results["environment"] and results["sort_task"] is None and results["attribution"] == []
    table = next((tmp_path / "kept").iterdir()).read_text()
    for cell in ("3 of 3", "1.38x", "hooks", "medians of 1 rounds", "grows as", "bytes/token", "times faster"):
        assert cell in table


@pytest.mark.full
def test_exact_answers_are_those_of_the_captioner_where_the_whole_cache_is_held(results_of):
    plain, *rows = results_of(main, "--quality evict --scenes 6 --device cpu")["evict"]
    captioner = Captioner.from_pretrained(EMBEDDED, "cpu", "float32")
    for split, examples in make_splits(6, 1, "eval answers").items():
        if split in plain["right"]:
            right = [captioner.caption(e.image, e.prompt) == e.truth for e in examples]
            assert plain["right"][split] == sum(right) / 6
    assert all(row["right"] == plain["right"] for row in rows if row["setting"] == "100%") and len(rows) == 20
    assert plain["bytes_per_token"] == 3072 and all(row["bytes_per_token"] < 1000 for row in rows[4::5])


@pytest.mark.full
def test_fewer_bits_take_fewer_bytes_and_make_larger_errors(results_of):
    plain, *rows = results_of(main, "--quality bits --scenes 4 --device cpu")["bits"]
    for one in (rows[:3], rows[3:]):
        assert plain["bytes_per_token"] > one[0]["bytes_per_token"] > one[2]["bytes_per_token"]
        assert 0 < one[0]["logit_error"] < 0.01 < one[1]["logit_error"] < one[2]["logit_error"]
    assert rows[0]["right"] == rows[3]["right"] == plain["right"] and rows[0]["bytes_per_token"] == 960


def test_tokens_per_step_are_counted_after_the_prefill():
    rows = [([0, digit], [digit] * 12) for digit in range(1, 5)]
    model = cache_quality.train_decoder(rows, 80, small_config(5, 16, 2, 1))

    @torch.inference_mode()
    def prefill():
        logits, kv_cache = model(torch.tensor([[0, 3]]))
        return logits[:, -1], PrefillState(kv_cache)

    guesses = {"lookup": prompt_lookup, "itself": DraftModel(model, 3), "wrong": lambda ids: [0, 0]}
    results = speculation("repeat", [([0, 3], prefill)] * 2, read_lm(model), guesses, -1, 9)
    assert all(row["identical"] == row["answers"] == 2 and row["ms_per_token"] > 0 for row in results)
    assert [row["tokens_per_step"] for row in results] == [1, 4, 4, 1], "8 tokens: steps of 6 and 2, of 4 and 4"
    assert "2 of 2" in cache_quality.speculation_table("", results)


def test_guesses_that_change_an_answer_fail_the_command(capsys, monkeypatch):
    row = {"task": "captions", "guess": "draft", "tokens_per_step": 2.0, "ms_per_token": 1.0, "identical": 1}
    rows = [row | {"answers": 1}, row | {"answers": 2}]
    monkeypatch.setitem(speedup.QUALITY, "guess", (lambda *_: rows, cache_quality.speculation_table))
    assert main(["--quality", "guess", "--scenes", "1", "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert "1 of 2" in out and err == "captions, draft: 1 of 2 are plain decoding's\n"


def test_the_bytes_of_models_that_share_are_those_of_each_design():
    inputs = torch.randint(4, (5, 6))
    designs = {"MHA": 4 * 2 * 4 * 12, "MQA, 1 of 4 heads": 4 * 2 * 12, "CLA": 2 * 2 * 4 * 12,
               "CLA and MQA": 2 * 2 * 12, "MLA, latent of 12": 4 * 24}  # fmt: skip
    assert {name: sort_cached(make_shared_model(name).eval(), inputs)[1] for name in designs} == {
        name: 4 * numbers for name, numbers in designs.items()
    }


@pytest.mark.full
def test_models_that_share_are_trained_until_they_sort():
    torch.manual_seed(0)
    inputs = torch.tensor([[digit] * 6 for digit in range(4)])
    rows, model = [(row.tolist(), row.tolist()) for row in inputs], make_shared_model("CLA and MQA")
    steps = train(model, rows, 400, lambda: sort_cached(model, inputs)[0] == 1)
    assert steps in (100, 200, 300) and sort_cached(model, inputs)[0] == 1
    with torch.no_grad():
        model.head.weight.zero_()
    assert sort_cached(model, inputs)[0] == 0.25, "zeros alone"
    results = cache_quality.measure_sharing(max_steps=2, seeds=2)
    assert len(results) == 6 and all(row["steps"] == [2, 2] and len(row["right"]) == 2 for row in results)
    assert "2 2" in cache_quality.sharing_table("", results)
