"""Questions of data sets and the model's answers to them, against the Captioner asked one by one."""

import json
import os
import shutil
from pathlib import Path

import pytest

from nanovlm import EMBEDDED
from nanovlm.chat_session import ChatSession
from nanovlm.cli import main as cli
from nanovlm.cli.evaluate import training_run
from nanovlm.data import ReadOptions, open_data
from nanovlm.evaluation import Evaluation, EvaluationOptions, evaluate, questions_of
from nanovlm.evaluation.evaluate import Answer, Question
from nanovlm.processing.conversation import dialogue
from support import noise_image
from support.data import write

FLAGS = ["--model", str(EMBEDDED), "--device", "cpu", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch):
    """A folder `cards` with two captioned images and a chat about the first, chat.json."""
    monkeypatch.chdir(tmp_path)
    Path("cards").mkdir()
    for i in range(2):
        noise_image(96, 96, seed=i).save(f"cards/{i}.png")
        Path(f"cards/{i}.txt").write_text(f"Card {i}.")
    turns = [("human", "What is it?"), ("gpt", "Noise."), ("human", "How many objects are there?"), ("gpt", "One.")]
    chat = [{"from": role, "value": text} for role, text in turns]
    write("chat.json", [{"image": "cards/0.png", "conversations": chat}])
    captions = [{"image_id": 1, "caption": text} for text in ("One.", "Two.")]
    write("coco.json", {"images": [{"id": 1, "file_name": "cards/0.png"}], "annotations": captions})


def ask(embedded, *paths, max_new_tokens=8, **options):
    read = ReadOptions(on_error="skip" if options.get("skip_errors") else "stop")
    sources, _ = open_data(paths, read, 0)
    errors = [error for source in sources for error in source.errors]
    asked = questions_of(sources, errors=errors if read.skip_errors else None)
    return evaluate(embedded, asked, EvaluationOptions(max_new_tokens=max_new_tokens, **options), errors)


def test_answers_are_those_of_the_captioner_asked_one_by_one(embedded):
    result = ask(embedded, "cards", "chat.json", "coco.json", batch_size=2)
    alone = [embedded.caption(f"cards/{i}.png", max_new_tokens=8) for i in (0, 1)]
    session = ChatSession(embedded, ["cards/0.png"])
    session.history = [("What is it?", "Noise.")]
    first = embedded.caption("cards/0.png", "What is it?", max_new_tokens=8)
    second = "".join(session.ask("How many objects are there?", max_new_tokens=8))
    assert [answer.text for answer in result.answers] == [*alone, first, second, alone[0]]
    assert list(result.answers[-1].question.references) == ["One.", "Two."]


def test_scores_are_means_for_each_source_and_prompt(embedded):
    metrics = {"length": lambda answers, references: [float(len(truths[0])) for truths in references]}
    result = ask(embedded, "cards", "chat.json", metrics=metrics)
    groups = {(source, prompt): (len(g.answers), g.scores["length"]) for source, prompt, g in result.groups()}
    assert groups == {
        ("cards", None): (2, 7),
        ("chat.json", None): (2, 5),
        ("chat.json", "What is it?"): (1, 6),
        ("chat.json", "How many objects are there?"): (1, 4),
    }
    assert result.scores == {"length": 6}
    _, prompt, folded = result.groups(max_prompts=1)[-1]
    assert (prompt, len(folded.answers)) == ("(other prompts)", 1)


def test_an_unusable_example_is_named_or_skipped(embedded):
    Path("cards/1.png").write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"^cards/1\.png: not an image"):
        ask(embedded, "cards")
    result = ask(embedded, "cards", skip_errors=True)
    assert len(result.answers) == 1 and result.skipped[0].startswith("cards/1.png: not an image")
    Path("cards/1.txt").write_text("\n")
    assert "has an empty answer" in ask(embedded, "cards", skip_errors=True).skipped[0], "as in training"


def test_the_command_prints_a_table_or_json_and_writes_a_report(capsys):
    assert cli.main(["evaluate", "--data", "cards", "chat.json", *FLAGS, "--report", "report.html"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["cards", "chat.json", "What", "How", "all", "95%"]
    assert "no answer is right" in err and err.startswith("cards: 2 examples, 2 different images\n")
    assert Path("report.html").read_text(encoding="utf-8").count("base64,") == 4
    Path("mine.py").write_text("def short(answer, _):\n    return len(answer) < 1000\nnan = lambda *_: float('nan')\n")
    flags = ["--metric", "mine:short", "--metric", "mine:nan", "--metric", "anls", "--validation", "1", "--json"]
    assert cli.main(["evaluate", "--data", "cards", *FLAGS, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["questions"] == 1 and found["answers"][0]["scores"].keys() == {"short", "nan", "anls"}
    for scores in (found["scores"], found["groups"][0]["scores"], found["answers"][0]["scores"]):
        assert (scores["short"], scores["nan"]) == (1, None)
    (_, held_out) = open_data(["cards"], ReadOptions(), 1)
    assert found["answers"][0]["name"] == next(iter(held_out[0])).name


@pytest.mark.parametrize(("n_words", "limit"), [(150, None), (150, 9), (1, 9999)])
def test_answers_are_as_long_as_the_longest_reference_and_a_bit(embedded, monkeypatch, n_words, limit):
    """A perfect model of long captions would be wrong by a limit; but no answer is longer than the context."""
    asked = []

    def run(requests, batch_size):
        for request in requests:
            asked.append(request)
            yield request

    reference = " ".join(["word"] * n_words)
    Path("cards/0.txt").write_text(reference)
    monkeypatch.setattr(embedded, "run", run)
    ask(embedded, "cards", max_new_tokens=limit)
    wanted, context = limit or len(embedded.tokenizer.encode(reference)) + 16, 1024
    rooms = [context - len(request.ids) + 1 for request in asked]
    assert [request.max_new_tokens for request in asked] == [min(wanted, room) for room in rooms]
    assert (wanted > max(rooms)) == (limit == 9999)


@pytest.mark.parametrize(
    "text",
    ["| a | b |\n" + "| 0 | 0 |\n" * 12, "1, 2, 3, 4, " * 8 + "5", "ha" * 40, "<td>0</td>" * 9, "no " * 50 + "."],
)
def test_an_answer_that_repeats_itself_as_its_reference_does_is_right(embedded, monkeypatch, text):
    def run(requests, batch_size):
        for request in requests:
            assert request.sampling.repetition_detection == (0, 0, 0), "or the engine would end it"
            request.output = [*embedded.tokenizer.encode(text), embedded.tokenizer.eos_token_id]
            yield request

    write("table.json", [{"image": "cards/0.png", "text": text}])
    monkeypatch.setattr(embedded, "run", run)
    result = ask(embedded, "table.json", max_new_tokens=None)
    assert result.answers[0].text.strip() == text.strip() and result.scores["exact_match"] == 1


@pytest.fixture
def trained():
    """The embedded model in `out`, as a run on 12 pictures wrote it that held out what run.json says."""
    for name in ("mine", "more"):
        Path(name).mkdir()
        for i in range(12):
            noise_image(32, 32, seed=i + 50 * (name == "more")).save(f"{name}/{i}.png")
            Path(f"{name}/{i}.txt").write_text(f"Picture {i}.")
    shutil.copytree(EMBEDDED, "out")
    return lambda data, validation: write("out/run.json", {"data": data, "validation": validation})


@pytest.mark.parametrize(
    ("data", "held_out", "given", "asked", "n", "word"),
    [
        (["mine"], 3, [], ["mine"], 3, None),
        (["mine"], 0.4, [], ["mine"], None, None),
        (["mine@0.5", "more"], 5, [], ["mine", "more"], 5, None),
        (["mine@0.5", "more"], 5, [], ["more"], None, None),
        (["mine"], "cards", [], ["mine"], 2, None),
        (["mine"], 3, ["3"], ["mine"], 3, None),
        (["mine"], 3, ["10"], ["mine"], 10, "held out 3, not 10: it may have learned"),
        (["mine"], 3, ["0.5"], ["mine"], None, "held out 3, not 0.5"),
        (["mine"], 3, ["cards"], ["mine"], 2, "held out 3, not cards"),
        (["mine"], "cards", ["./cards"], ["mine"], 2, None),
        (["mine"], 0, [], ["mine"], 0, "nothing of these data is held out; the model was trained on all of them"),
        (["mine"], 3, [], ["mine", "more"], 0, "not trained on more; ask that apart"),
        (["mine"], 3, [], ["more"], 0, "nothing of these data is held out"),
    ],
)
def test_validation_asks_what_the_run_held_out(capsys, trained, data, held_out, given, asked, n, word):
    trained([os.path.abspath(path) for path in data], held_out)
    assert training_run(Path("out/checkpoints/step-7"), asked) == training_run(Path("out"), asked)
    flags = ["--data", *asked, "--validation", *given, "--max-new-tokens", "1", "--device", "cpu", "--json"]
    code = cli.main(["evaluate", "--model", "out", *flags])
    out, err = capsys.readouterr()
    assert code == (2 if n == 0 else 0), err
    assert (word is None and "it may have learned" not in err) or word in err
    if n != 0:
        _, held = open_data(data, ReadOptions(), held_out if not given else given[0])
        names = [example.name for subset in held for example in subset.usable()]
        if held_out != "cards":
            names = [name for name in names if name.split("/")[0] in asked or given == ["cards"]]
        answers = json.loads(out)["answers"]
        assert sorted(answer["name"].split("/")[-2:] for answer in answers) == sorted(n.split("/")[-2:] for n in names)
        assert n in (None, len(answers)) and answers


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"data": ["mi', "out/run.json cannot be read: "),
        (["mine"], "out/run.json holds list, not an object"),
        (b"\xff", "out/run.json is not UTF-8"),
        ({"data": "mine", "validation": 3}, "run.json: data=mine and validation=3 are no flags of a training"),
        ({"data": ["mine"], "validation": [3]}, "are no flags of a training; correct or remove it"),
    ],
)
def test_a_broken_run_json_is_named_rather_than_its_training_examples_asked(capsys, trained, content, words):
    write("out/run.json", content)
    for flags in (["--validation"], []):
        assert cli.main(["evaluate", "--model", "out", "--data", "mine", "--device", "cpu", *flags]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and words in err


@pytest.mark.parametrize(
    ("texts", "f1", "words"),
    [
        (["a", "a"], 0, "no answer is right, and all are 'a'"),
        (["a", "b"], 0, "no answer is right: compare answers and references"),
        (["a", "b"], 0.6, "no answer is exactly right, but many words are"),
        (["a", " r\n"], 0, None),
    ],
)
def test_a_model_that_is_never_right_is_told_what_to_do(texts, f1, words):
    answers = [Answer(Question("s", "n", [], dialogue(["q"]), ["r "]), text, {"f1": f1}) for text in texts]
    advice = Evaluation(answers).advice()
    assert advice is None if words is None else advice.startswith(words)
    assert Evaluation([]).advice() is None
