"""`nanovlm caption --ray` refuses what makes no sense on a cluster before it connects to one."""

import pytest

from nanovlm.cli import main as cli


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ray photos --out out", "photos is no address"),
        ("photos --ray --out a.jsonl", "--out a.jsonl with --ray must be a folder"),
        ("photos --ray --out out --limit 0", "--limit 0 is less than 1"),
        ("photos --ray --out out --existing overwrite", "--existing is for one machine"),
        ("photos --ray --out out --prompt a --prompt b", "one caption"),
        ("- --ray --out out", "needs names"),
        ("photos --ray --out out --cpus-per-worker 0", "cpus per worker 0 is less than 1"),
        ("photos --cpus-per-worker 3", "--cpus-per-worker is for captions on a cluster: add --ray"),
        ("photos --ray --out nowhere://bucket/out", "cannot be opened"),
        (". --ray 127.0.0.1:1 --out out", "Ray cluster 127.0.0.1:1: "),
    ],
)
def test_wrong_use_is_refused_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").touch()
    assert cli.main(["caption", *arguments.split()]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
