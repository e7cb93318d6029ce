"""eval.speedup: its report, its plots and its flags."""

import shutil

import pytest

from eval.lib.scene_splits import make_splits
from eval.speedup import main, write_page
from models.checkpoint import load_config
from nanovlm import EMBEDDED
from nanovlm.captioner import Captioner

QUICK = ["--lengths", "2", "3", "--rounds", "1", "--device", "cpu", "--no-export", "--no-sort-task"]
QUICK += ["--no-table", "--no-attribute"]


def test_the_report_is_one_json_object_and_the_printed_one_is_kept_and_on_the_page(results_of, tmp_path):
    page, kept = tmp_path / "kv.html", tmp_path / "kept"
    results = results_of(main, *QUICK, "--save", str(kept), "--html", str(page))
    assert [len(study["rows"]) for study in results["studies"]] == [6, 4] and results["failures"] == []
    assert "torch" in results["environment"]
    table, text = next(kept.iterdir()).read_text(), page.read_text("utf-8")
    assert "3 of 3" in table and "1.38x" in table and "hooks" in table and "medians of 1 rounds" in table
    assert results["environment"] in text and "VALUES" not in text and "http" not in text, "it needs no network"


@pytest.mark.full
def test_exact_answers_are_those_of_the_captioner_where_the_whole_cache_is_held(results_of):
    plain, *rows = results_of(main, "--quality", "evict", "--scenes", "6", "--device", "cpu")["evict"]
    captioner = Captioner.from_pretrained(EMBEDDED, "cpu", "float32")
    for split, examples in make_splits(6, 1, "answers").items():
        if split in plain["right"]:
            right = [captioner.caption(e.image, e.prompt) == e.truth for e in examples]
            assert plain["right"][split] == sum(right) / 6
    assert all(row["right"] == plain["right"] for row in rows if row["setting"] == "100%") and len(rows) == 20
    assert plain["bytes_per_token"] == 3072 and all(row["bytes_per_token"] < 1000 for row in rows[4::5])


@pytest.mark.full
def test_fewer_bits_take_fewer_bytes_and_make_larger_errors(results_of):
    plain, *rows = results_of(main, "--quality", "bits", "--scenes", "4", "--device", "cpu")["bits"]
    for one in (rows[:3], rows[3:]):
        assert plain["bytes_per_token"] > one[0]["bytes_per_token"] > one[2]["bytes_per_token"]
        assert 0 < one[0]["logit_error"] < 0.01 < one[1]["logit_error"] < one[2]["logit_error"]
    assert rows[0]["right"] == rows[3]["right"] == plain["right"] and rows[0]["bytes_per_token"] == 960


def test_the_page_follows_its_sliders(tmp_path):
    sync_api, chromium = pytest.importorskip("playwright.sync_api"), shutil.which("chromium")
    if chromium is None:
        pytest.skip("no Chromium here; apt-get install chromium")
    write_page(tmp_path / "kv.html", cfg := load_config(EMBEDDED), "tables")
    with sync_api.sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page()
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto((tmp_path / "kv.html").as_uri())
        page.locator("#step").fill("6")
        captions = page.locator("figcaption").all_text_contents()
        assert ["21 pairs" in caption for caption in captions] == [True, *[False] * 11] and "6 pairs" in captions[1]
        page.locator("[name=tokens]").fill("1024")
        n_bytes = 2 * cfg.lm_n_blocks * cfg.lm_n_kv_heads * cfg.lm_head_dim * 1024 * 2
        assert page.locator("#bytes").text_content().startswith(f"1,024 tokens: {n_bytes / 2**20:.1f} MiB")
        assert not problems
