"""The notebooks of docs/: their cells run and print what they promise, and they are stored with their outputs."""

import json
import re
import tempfile

import pytest
import torch

from models.mingpt import GPT, GPTConfig, append_kv
from support import ROOT

NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))


def cells(notebook, kind):
    stored = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in stored if cell["cell_type"] == kind]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs all cells of docs/NAME, and returns what they print; temporary files are below tmp_path."""
    make = tempfile.mkdtemp
    monkeypatch.setattr("tempfile.mkdtemp", lambda *given: make(*given) if given else str(tmp_path))

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
@pytest.mark.parametrize("is_solved", [False, True])
def test_the_kv_caching_exercise_is_checked_with_its_blanks_and_with_its_solutions(capsys, is_solved):
    """Blanks are "not yet", one after the other; solutions in their place, or at the end, are right."""
    sources = ["".join(cell["source"]) for cell in cells(ROOT / "docs/kv-caching.ipynb", "code")]
    solutions = {source.split("\n")[0][-1]: source for source in sources if source.startswith("# solution")}
    assert list(solutions) == list("123456")
    names = {}
    for source in sources:
        exercise = re.match(r"# exercise (\d)", source)
        assert not exercise or "..." in source
        exec(solutions[exercise[1]] if exercise and is_solved else source, names)
    steps = re.findall(r"step (\d): (right|not yet)", capsys.readouterr().out)
    first = "right" if is_solved else "not yet"
    assert steps == [("0", "right"), *((n, first) for n in "123456"), *((n, "right") for n in "123456")]


def test_the_lectures_steps_are_diffs_of_ten_lines_that_keep_the_ids():
    """Each of the page's six diffs applies to the one before, and the last reads the newest token alone."""
    page = (ROOT / "docs/kv-caching.md").read_text("utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    diffs = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    gpt = GPT(GPTConfig("gpt-nano", vocab_size=50, block_size=32)).eval()
    idx, read, tokens = torch.randint(50, (2, 5)), [], []
    expected = gpt.generate(idx, 9)
    gpt.transformer.wte.register_forward_hook(lambda wte, args, out: read.append(out.size(1)))
    for change in ["", *diffs]:
        assert sum(line[0] in "+-" for line in change.splitlines()) <= 10
        lines, at = code.split("\n"), 0
        for sign, text in ((line[0], line[1:]) for line in change.splitlines()):
            if sign == "+":
                lines.insert(at, text)
                at += 1
            elif sign == "-":
                at = lines.index(text, at)
                del lines[at]
            elif sign == " ":
                at = lines.index(text, at) + 1
        code = "\n".join(lines)
        read.clear()
        exec(code, names := {"append_kv": append_kv})
        with torch.inference_mode():
            assert torch.equal(names["generate"](gpt, idx, 9), expected)
        tokens.append(sum(read))
    assert tokens == [sum(range(5, 14))] * 5 + [5 + 8] * 2


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_they_are_stored_with_their_outputs(notebook):
    code = cells(notebook, "code")
    assert all(cell["outputs"] for cell in code) and notebook.stat().st_size < 300_000
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
    text = "".join("".join(cell["source"]) for cell in cells(notebook, "markdown"))
    for link in re.findall(r"\]\(([\w.-]+)\)", text):
        assert (notebook.parent / link).exists(), link
