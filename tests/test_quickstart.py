"""docs/quickstart.ipynb: its cells run, from an image to a fine-tuned model and the plot of its training."""

import json
import re

import pytest

from support import ROOT

NOTEBOOK = ROOT / "docs/quickstart.ipynb"


@pytest.fixture(scope="module")
def cells():
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


@pytest.mark.full
def test_the_cells_run(cells, tmp_path, monkeypatch, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert "40\ncaptions; the first two:" in printed
    tags = re.search(r"^after:  (.*)$", printed, re.MULTILINE)[1].split(", ")
    assert len(tags) == 4 and all(re.fullmatch(r"\w+ \w+", tag) for tag in tags), "no sentence, but tags"
    (axes,) = pyplot.gcf().axes
    assert [line.get_label() for line in axes.lines] == ["loss", "validation loss"]
    assert axes.lines[1].get_ydata()[-1] < axes.lines[1].get_ydata()[0] / 10
    pyplot.close()


def test_it_is_stored_with_its_outputs(cells):
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert sum(bool(cell["outputs"]) for cell in code) == len(code) and NOTEBOOK.stat().st_size < 300_000
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for link in re.findall(r"\]\(([\w.]+)\)", text):
        assert (NOTEBOOK.parent / link).exists(), link
