"""eval.benchmark: the table's exact form, and what each side of the comparison reads."""

import re

import pytest
import torch

from eval import benchmark
from eval.benchmark import MismatchError, attribute, attribution_table, main, make_models, time_steps

TINY = ["--sizes", "gpt-nano", "gpt-micro", "--contexts", "3", "64", "128", "--rounds", "3", "--vocabulary", "5000"]
CPU = torch.device("cpu")


def table_of(size, width, n_layers):
    """Pattern of a size's table, with groups for the numbers of its rows; all parameters count, the head's included."""
    parameters = (5000 + 2048 + 5000 + 2) * width + n_layers * (12 * width + 13) * width
    rows = "".join(rf"{n:>10}([\d ]{{11}}\.\d\d)([\d ]{{11}}\.\d\d)([\d ]{{7}}\.\d\d)x\n" for n in (3, 64, 128))
    head = r" Context T    no KV \(ms\)       KV \(ms\)    speedup"
    return rf"{size}  \({parameters / 1e6:.1f}M params\)\n{head}\n-{{50}}\n{rows}"


def test_the_table_has_exactly_its_form_and_speedups_are_ratios(tmp_path, capsys):
    assert benchmark.VOCAB_SIZE == 128, "the homework's"
    (path := tmp_path / "results.txt").write_text("old\n" * 1000)
    assert main([*TINY, "--device", "cpu", "--out", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out == path.read_text() and "torch" in err and list(tmp_path.iterdir()) == [path]
    found = re.fullmatch(f"device: cpu\n\n{table_of('gpt-nano', 48, 3)}\n{table_of('gpt-micro', 128, 4)}", out)
    numbers = [float(number) for number in found.groups()]
    for slow, fast, speedup in zip(numbers[::3], numbers[1::3], numbers[2::3]):
        assert (slow - 0.006) / (fast + 0.006) - 0.01 <= speedup <= (slow + 0.006) / (fast - 0.006) + 0.01


def test_one_side_reads_all_tokens_and_the_other_the_last():
    gpt, gpt_kv = make_models("gpt-nano", CPU, vocab_size=40)
    assert all(p.data_ptr() == q.data_ptr() for p, q in zip(gpt.parameters(), gpt_kv.parameters()))
    idx = torch.randint(40, (1, 9), generator=torch.Generator().manual_seed(0))
    tokens, lengths, unchanged = [], [], []
    gpt.transformer.wte.register_forward_hook(lambda m, args, out: lengths.append(out.size(1)))
    gpt_kv.transformer.wte.register_forward_hook(lambda m, args, out: tokens.append(args[0].tolist()[0]))

    def check_cache(attn, args, out):
        if args[0].size(1) == 1 and args[1][0].size(1) == 8:
            (k_before, v_before), (k, v) = args[1], out[1]
            unchanged.append(torch.equal(k[:, :8], k_before) and torch.equal(v[:, :8], v_before))
            assert k.data_ptr() == k_before.data_ptr() and v.data_ptr() == v_before.data_ptr() and k.size(1) == 9

    gpt_kv.transformer.h[0].attn.register_forward_hook(check_cache)
    time_steps(gpt, gpt_kv, idx, 4, ("explicit", "cached"))
    ids = idx[0].tolist()
    assert lengths == [9] * 5
    assert tokens == [ids[:7]] + [[ids[7]], [ids[8]]] * 5
    assert unchanged == [True] * 5


def test_models_that_compute_different_logits_are_not_compared(tmp_path, capsys, monkeypatch):
    def make_different_models(size, device, vocab_size):
        gpt, gpt_kv = make_models(size, device, vocab_size)
        gpt_kv.lm_head.weight = torch.nn.Parameter(-gpt.lm_head.weight)
        return gpt, gpt_kv

    monkeypatch.setattr(benchmark, "make_models", make_different_models)
    assert main([*TINY, "--out", str(tmp_path / "results.txt")]) == 1
    out, err = capsys.readouterr()
    assert out.endswith(f"{benchmark.LINE}\n"), "the header is printed before the first step"
    assert "the cached step's logits after 3 tokens differ from minGPT's" in err
    assert not list(tmp_path.iterdir())
    with pytest.raises(MismatchError, match="fused step"):
        time_steps(*make_different_models("gpt-nano", CPU, 50), torch.arange(8)[None], rounds=1)


def test_the_factors_of_minGPTs_speedup_multiply_to_the_whole():
    rows = attribute(CPU, (6, 24), "gpt-nano", rounds=2, vocab=50)
    assert [row["context"] for row in rows] == [6, 24] and min(row["cached_ms"] for row in rows) > 0
    row = {"context": 24, "explicit_ms": 12.0, "fused_ms": 6.0, "last_position_ms": 2.0, "cached_ms": 0.5}
    assert rows[0].keys() == row.keys()
    title, header, line = attribution_table([row]).split("\n")
    assert "cache alone" in header and "vocabulary of 50,257" in title
    assert line.split() == ["24", "12.00", "0.50", "2.00x", "3.00x", "4.00x", "24.00x"]
