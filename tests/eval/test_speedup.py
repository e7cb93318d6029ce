"""The report on caching: its designs say the same, its theory counts what is computed, and its table tells both."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from eval.lib import cache_variants as designs
from eval.lib import flops
from eval.lib.cache_timing import Curve, StudyResult, exponent, time_designs, timeline
from eval.lib.cache_variants import UNCACHED
from eval.lib.shapes import SHAPES
from eval.speedup import failures, main, table
from models.kv_study.encoder_decoder import EncoderDecoder, TextPrefillState
from models.vision_language_model import VisionLanguageModel

QUICK = ["--lengths", "3", "6", "--rounds", "1", "--device", "cpu", "--no-export", "--no-sort-task"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def subjects(tiny_model, encoder_decoder):
    image = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[5, 3, 3, 3, 3, 7, 9]])
    return [
        designs.language_model(tiny_model(), ids, image, 12),
        designs.encoder_decoder(encoder_decoder, torch.tensor([[20, 21, 22]]), image, 12),
    ]


def test_every_design_says_the_same_and_is_timed_token_by_token(subjects):
    names = [[design.name for design in subject.designs] for subject in subjects]
    assert names == [
        [UNCACHED, "per-block cache", "static cache", "static, exported"],
        [UNCACHED, "hooks", "cross-attention once", "static cache", "static, exported"],
    ]
    for subject in subjects:
        said = [timeline(design, 12, CPU) for design in subject.designs]
        assert all(torch.equal(ids, said[0][0]) for ids, _ in said)
        assert len(set(said[0][0].tolist())) > 1, "not one word again and again"
        assert all(times == sorted(times) and len(times) == 12 for _, times in said)


def test_a_study_tells_lengths_spreads_and_shared_ids(subjects):
    found = time_designs(subjects[1], [4, 8, 12], 2, CPU, log=lambda line: None)
    assert [curve.same_ids for curve in found.curves] == [12] * 5
    for curve in found.curves:
        assert curve.total_ms == sorted(curve.total_ms) and len(curve.spread_ms) == 3 and curve.token_ms > 0
    uncached, *cached = found.curves
    assert all(curve.flops[-1] < uncached.flops[-1] / 2 for curve in cached)
    text = table(found)
    assert text.count("times faster") == 4 and "12 of 12" in text and "±" in text


def test_ids_count_as_the_same_up_to_the_first_that_differs(subjects):
    right, wrong = subjects[0].designs[:2]

    def mistaken(n):
        for i, ids in enumerate(wrong.stream(n)):
            yield ids + (i == 5)

    subject = replace(subjects[0], designs=[right, replace(wrong, stream=mistaken)])
    found = time_designs(subject, [4, 8], 1, CPU, log=lambda line: None)
    assert [curve.same_ids for curve in found.curves] == [8, 5]


@pytest.mark.parametrize("past", [0, 6])
def test_theory_counts_the_products_that_are_computed(tiny_model, past):
    """Against torch's own counter, which counts matrix products; attention is written out for it, its square whole."""
    model, n = tiny_model(lm_n_heads=4), 5
    cfg, x = model.cfg, torch.randn(1, past + n, model.cfg.lm_hidden_dim)
    with torch.no_grad():
        cache = model.decoder(x[:, :past])[1] if past else None
        with FlopCounterMode(display=False) as counter:
            hidden, _ = model.decoder(x[:, past:], kv_cache=cache, start_pos=past)
            model.decoder.head(hidden[:, -1])
    linears = sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm"))
    attention = sum(4 * cfg.lm_hidden_dim * (i + 1) for i in range(past, past + n)) * cfg.lm_n_blocks
    assert flops.language_model(cfg)(past, past + n) == linears + attention


@pytest.mark.parametrize("past", [0, 6])
def test_theory_counts_the_encoder_decoders_products(encoder_decoder, past):
    decoder, n, xa = encoder_decoder.decoder, 5, torch.randn(1, 16, encoder_decoder.cfg.lm_hidden_dim)
    ids = torch.randint(40, (1, past + n))
    with torch.no_grad():
        prefix = (
            None
            if not past
            else decoder.forward_cached(ids[:, :past], TextPrefillState(decoder.project_cross_kv(xa)))[1]
        )
        with FlopCounterMode(display=False) as counter:
            prefix = prefix or TextPrefillState(decoder.project_cross_kv(xa))
            decoder.logits(decoder.forward_cached(ids[:, past:], prefix)[0][:, -1])
    linears = sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm"))
    seen = sum(i + 1 + 16 for i in range(past, past + n))
    cfg = encoder_decoder.cfg
    attention = 4 * cfg.lm_hidden_dim * seen * cfg.lm_n_blocks
    assert flops.text_decoder(cfg, 16)(past, past + n) == linears + attention


def test_theory_grows_as_it_should():
    """n^2 in the end without a cache, n^1 with one, where no attention and no prompt blur it."""

    def read(start, stop):
        return stop - start

    lengths = [1000, 2000]
    for cached, wanted in ((False, 2), (True, 1)):
        costs = [flops.generation(read, 1, n, cached) - flops.generation(read, 1, 1, cached) for n in lengths]
        assert abs(exponent(lengths, costs) - wanted) <= 0.01


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_as_many_parameters_as_the_published_models(name):
    cfg, published = SHAPES[name]
    with torch.device("meta"):
        model = VisionLanguageModel(cfg, image_token_id=-1)
        EncoderDecoder(cfg)
    assert sum(parameter.numel() for parameter in model.parameters()) == published


def test_the_script_reports_and_draws(tmp_path, capsys):
    assert main([*QUICK, "--plot", str(tmp_path / "plot.png")]) == 0
    out, err = capsys.readouterr()
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "6 of 6" in out and "1.38x" in out and "torch" in out and "hooks" in out and "round 1/1" in err


def test_the_script_reports_as_json(capsys):
    assert main([*QUICK, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [len(one["curves"]) for one in record["studies"]] == [3, 4]
    assert all(curve["same_ids"] == 6 for one in record["studies"] for curve in one["curves"])
    assert record["published_speedup"] == 1.38 and "torch" in record["environment"]


def test_a_cache_that_changes_what_is_said_is_a_fault():
    curve = Curve("hooks", [1.0, 2.0], [0.0, 0.0], 1.0, 1.0, [1, 2], 1.0, same_ids=3)
    found = StudyResult("model", 1, 1, 1.0, 1.0, [4, 8], [curve])
    assert failures([found], None, torch.float32) == ["model: hooks differs from no cache after 3 tokens"]
    assert failures([found], None, torch.bfloat16) == [], "rounding may choose another of two nearly equal"
    assert failures([replace(found, curves=[replace(curve, same_ids=8)])], None, torch.float32) == []


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--lengths", "8"], "--lengths 8"),
        (["--lengths", "8", "4"], "rising"),
        (["--lengths", "4", "2000"], "lm_max_position_embeddings=1024"),
        (["--rounds", "0"], "--rounds: 0 must be 1 or more"),
        (["--shape", "7B"], "7B"),
        (["--plot", "nowhere/plot.png"], "no folder nowhere"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(flags, told, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


def test_without_matplotlib_a_plot_names_its_extra(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        main(["--plot", "plot.png"])
    assert "nanovlm[eval]" in capsys.readouterr().err
