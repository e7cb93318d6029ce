"""eval.serving with a few clients and a server in a process of its own."""

import pytest

pytest.importorskip("openai")

from eval.serving import Answer, failures, main, results_table, summarize

pytestmark = pytest.mark.full

FIGURES = {"answered": 3, "first_text_s": {"median": 0.01, "p95": 0.02}, "requests_per_s": 10.0}


def test_no_request_is_lost_and_every_answer_is_the_single_clients(results_of):
    result = results_of(main, "--clients", "3", "--rounds", "2", "--dtype", "float32")
    assert result["requests"] == result["same"] == result["many"]["answered"] == 6 and result["one"]["answered"] == 3
    assert 0 < result["one"]["first_text_s"]["median"] <= result["one"]["first_text_s"]["p95"]
    assert "0 of 6 lost; 6 answers equal the single client's" in results_table(result)
    none, images, both = result["turns"].values()
    assert none["answers"] == images["answers"] == both["answers"] and len(none["answers"]) == 6
    assert set(none["metrics"].values()) == {0.0}
    assert images["metrics"]["image_cache_hits_total"] == both["metrics"]["image_cache_hits_total"] == 3
    assert images["metrics"]["prefix_cache_hit_tokens_total"] == 0 < both["metrics"]["prefix_cache_hit_tokens_total"]
    assert "3 of 9" in results_table(result)


def test_a_lost_request_is_a_failure():
    result = {"clients": 2, "requests": 4, "same": 3, "one": FIGURES, "many": FIGURES, "turns": {}}
    assert failures(result) == ["1 requests are lost"] and "1 of 4 lost" in results_table(result)
    assert failures(result | {"requests": 3}) == []


def test_quantiles_of_few_answers():
    answers = [Answer("a", float(i)) for i in range(101)]
    figures = summarize(answers, 2.0)
    assert figures == {"answered": 101, "first_text_s": {"median": 50.0, "p95": 95.0}, "requests_per_s": 50.5}
    assert summarize([], 1.0)["first_text_s"] == {"median": 0.0, "p95": 0.0}


def test_a_soak_reports_a_modest_client_beside_others(results_of, tmp_path):
    result = results_of(main, "--minutes", "0.15", "--plot", str(tmp_path / "soak.png"))
    assert result["wrong"] == 0 and len(result["rows"]) == sum(part["answers"] for part in result["modest"].values())
    assert result["modest"]["beside"]["answers"] > 1 and result["rows"][-1]["memory"] > 50
    assert {name.split()[0] for name in result["statuses"]} == {"greedy", "leaving", "malformed"}
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
