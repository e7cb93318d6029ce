"""The notebooks of docs/: their cells run and print what they promise, and they are stored with their outputs."""

import json
import re

import pytest

from support import ROOT

NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))


def cells(notebook, kind):
    stored = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in stored if cell["cell_type"] == kind]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs all cells of docs/NAME, and returns what they print; temporary files are below tmp_path."""
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))

    def run(name):
        names = {}
        for cell in cells(ROOT / "docs" / name, "code"):
            exec("".join(cell["source"]), names)
        return capsys.readouterr().out

    return run


@pytest.mark.full
def test_quickstart_fine_tunes_a_model_and_plots_its_training(run):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    printed = run("quickstart.ipynb")
    assert "40\ncaptions; the first two:" in printed
    tags = re.search(r"^after:  (.*)$", printed, re.MULTILINE)[1].split(", ")
    assert len(tags) == 4 and all(re.fullmatch(r"\w+ \w+", tag) for tag in tags), "no sentence, but tags"
    (axes,) = pyplot.gcf().axes
    assert [line.get_label() for line in axes.lines] == ["loss", "validation loss"]
    assert axes.lines[1].get_ydata()[-1] < axes.lines[1].get_ydata()[0] / 10
    pyplot.close()


@pytest.mark.full
def test_kv_caching_counts_what_is_read_and_held(run, tmp_path):
    printed = run("kv-caching.ipynb")
    uncached, cached = re.findall(r"(\d+) tokens read; .* ids (.*)", printed)
    assert uncached == (str(sum(range(49, 81))), cached[1]) and cached[0] == str(49 + 31)
    used, formula = re.search(r"([\d,]+) bytes used, ([\d,]+) by the formula", printed).groups()
    assert used == formula
    held = {
        name: int(held.replace(",", "")) for name, held in re.findall(r"^(\w+).*%\s+([\d,]+)", printed, re.MULTILINE)
    }
    assert held["whole"] == 3072 and held["heavy"] < 1000 and held["random"] < 1000
    assert "heavy hitters" in (tmp_path / "kv.html").read_text("utf-8")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_they_are_stored_with_their_outputs(notebook):
    code = cells(notebook, "code")
    assert all(cell["outputs"] for cell in code) and notebook.stat().st_size < 300_000
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
    text = "".join("".join(cell["source"]) for cell in cells(notebook, "markdown"))
    for link in re.findall(r"\]\(([\w.-]+)\)", text):
        assert (notebook.parent / link).exists(), link
