"""Questions of data sets, the model's answers, against the Captioner asked one by one; and the page of a run."""

import base64
import io
import json
import os
import re
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image, ImageColor

from nanovlm import EMBEDDED
from nanovlm.chat_session import ChatSession
from nanovlm.choices import Choice
from nanovlm.cli import main as cli
from nanovlm.cli.evaluate import training_run
from nanovlm.data import ReadOptions, open_data
from nanovlm.evaluation import Evaluation, EvaluationOptions, evaluate, questions_of
from nanovlm.evaluation.evaluate import Answer, Question, doubtful_labels
from nanovlm.evaluation.report import write_report
from nanovlm.processing.conversation import dialogue
from support import noise_image
from support.data import write
from support.training import answer_questions

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


def test_answers_are_those_of_the_captioner_and_scores_means_of_each_source_and_prompt(embedded):
    result = ask(embedded, "cards", "chat.json", "coco.json", batch_size=2)
    alone = [embedded.caption(f"cards/{i}.png", max_new_tokens=8) for i in (0, 1)]
    session = ChatSession(embedded, ["cards/0.png"])
    session.history = [("What is it?", "Noise.")]
    first = embedded.caption("cards/0.png", "What is it?", max_new_tokens=8)
    second = "".join(session.ask("How many objects are there?", max_new_tokens=8))
    assert [answer.text for answer in result.answers] == [*alone, first, second, alone[0]]
    assert list(result.answers[-1].question.references) == ["One.", "Two."]
    metrics = {"length": lambda answers, references: [float(len(truths[0])) for truths in references]}
    result = ask(embedded, "cards", "chat.json", metrics=metrics)
    groups = {(source, prompt): (len(g.answers), g.scores["length"]) for source, prompt, g in result.groups()}
    assert groups == {
        ("cards", None): (2, 7), ("chat.json", None): (2, 5),
        ("chat.json", "What is it?"): (1, 6), ("chat.json", "How many objects are there?"): (1, 4),
    }  # fmt: skip
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
    assert all(request.sampling.repetition_detection == (0, 0, 0) for request in asked), "a table may repeat itself"
    assert {request.sampling.temperature for request in asked} == {0}


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


ASKED = [  # data of the run, what it held out, --validation and --data of the command, answers if known, words
    ("mine", 3, "", "mine", 3, None), ("mine", 0.4, "", "mine", None, None),
    ("mine@0.5 more", 5, "", "mine more", 5, None), ("mine@0.5 more", 5, "", "more", None, None),
    ("mine", "cards", "", "mine", 2, None), ("mine", 3, "3", "mine", 3, None),
    ("mine", 3, "10", "mine", 10, "held out 3, not 10: it may have learned"),
    ("mine", 3, "0.5", "mine", None, "held out 3, not 0.5"), ("mine", 3, "cards", "mine", 2, "held out 3, not cards"),
    ("mine", "cards", "./cards", "mine", 2, None),
    ("mine", 0, "", "mine", 0, "nothing of these data is held out; the model was trained on all of them"),
    ("mine", 3, "", "mine more", 0, "not trained on more; ask that apart"),
    ("mine", 3, "", "more", 0, "nothing of these data is held out"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "held_out", "given", "asked", "n", "word"), ASKED)
def test_validation_asks_what_the_run_held_out(capsys, trained, data, held_out, given, asked, n, word):
    data, given, asked = data.split(), given.split(), asked.split()
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


BROKEN = [  # contents of run.json, and words of the error
    (b'{"data": ["mi', "out/run.json cannot be read: "), (["mine"], "out/run.json holds list, not an object"),
    (b"\xff", "out/run.json is not UTF-8"),
    ({"data": "mine", "validation": 3}, "run.json: data=mine and validation=3 are no flags of a training"),
    ({"data": ["mine"], "validation": [3]}, "are no flags of a training; correct or remove it"),
]  # fmt: skip


def test_a_broken_run_json_is_named_rather_than_its_training_examples_asked(capsys, trained):
    for content, words in BROKEN:
        write("out/run.json", content)
        for flags in (["--validation"], []):
            assert cli.main(["evaluate", "--model", "out", "--data", "mine", "--device", "cpu", *flags]) == 2
            out, err = capsys.readouterr()
            assert out == "" and err.count("\n") == 1 and words in err


def test_a_model_that_is_never_right_is_told_what_to_do():
    for texts, f1, words in (
        (["a", "a"], 0, "no answer is right, and all are 'a'"),
        (["a", "b"], 0, "no answer is right: compare answers and references"),
        (["a", "b"], 0.6, "no answer is exactly right, but many words are"),
        (["a", " r\n"], 0, ""),
    ):
        answers = [Answer(Question("s", "n", [], dialogue(["q"]), ["r "]), text, {"f1": f1}) for text in texts]
        advice = Evaluation(answers).advice() or ""
        assert advice.startswith(words) and bool(advice) == bool(words)
    assert Evaluation([]).advice() is None


METRICS = [{"step": step, "loss": 4.0 - step} for step in range(1, 4)]
METRICS += [{"step": step, "validation_loss": 5.0, "validation_f1": None, "validation_anls": 0.5} for step in (0, 3)]


def written(path, *args, **options):
    write_report(path / "report.html", *args, **options)
    return (path / "report.html").read_text(encoding="utf-8")


def test_the_page_shows_loss_and_one_metric_and_wrong_answers_first(tmp_path):
    page = written(tmp_path, "mine", answer_questions(None), "anls", METRICS, ["a fact"], best=3)
    texts = [unescape(text) for text in re.findall(r">([^<]+)<", page)]
    assert page.count("<svg") == 2 and any(text.startswith("anls of held-out answers") for text in texts)
    wrong, right = page.partition("Wrong: 2 of 4 answers")[2].split("Right: 2 of 4 answers")
    for part, answers in ((wrong, ["$\\frac{1}$ <b>", "gray"]), (right, ["gray", "red"])):
        assert [unescape(text) for text in re.findall(r"answer: ([^\n]+?)<br>", part)] == answers
        pixels = [Image.open(io.BytesIO(base64.b64decode(data))) for data in re.findall(r"base64,([^\"]+)", part)]
        assert [image.size for image in pixels] == [(40, 30)] * 2
    assert "reference: blue" in wrong and "reference: blue" not in right
    (points,) = re.findall(r'<polyline points="([^"]*)" stroke-width="1"', page)[:1]
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert heights == sorted(heights) and len(heights) == 3, "a falling loss"
    assert "http" not in page and "stroke-dasharray" in page and "width=device-width" in page and "light dark" in page


def test_a_table_says_what_was_taken_for_what_if_answers_recur(tmp_path):
    page = written(tmp_path, "mine", answer_questions(None))
    rows = [re.findall(r"<t[hd][^>]*>([^<]*)</t", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    assert rows[0] == ["", "blue", "gray", "red", "others"]
    assert rows[1:] == [["blue", "", "1", "", ""], ["gray", "", "1", "", ""], ["red", "", "", "1", "1"]]
    for n, has_table in ((3, False), (80, True), (82, False)):
        texts = range(n) if n == 3 else [i // 2 for i in range(n)]
        answers = [Answer(Question("s", "n", [], dialogue(["q"]), [str(i)]), "a", {}) for i in texts]
        page = written(tmp_path, "mine", Evaluation(answers))
        assert ("<table" in page) == has_table, "at most 40 different ones"
        assert page.count("<article>") == min(n, 60) and (", the first 60" in page) == (n > 60)


def test_a_report_is_a_page_whatever_names_and_texts_hold(tmp_path):
    name, hostile = "a\udcff\"'>.png", ["</script><img src=x onerror=alert(1)>"]
    question = Question("s", name, [], dialogue(["q\0\x1b[31m"]), hostile)
    page, tags = written(tmp_path, "t\udcff", Evaluation([Answer(question, "a", {})])), set()
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.add(tag)
    parser.feed(page)
    assert "article" in tags and not tags & {"img", "script"}
    assert all(c.isprintable() or c == "\n" for c in page) and "q\ufffd\ufffd[31m" in page


class Classifier:
    """A captioner that knows colors by name, and finds all labels of another color equally probable."""

    def classify_each(self, images, labels, prompt):
        for (image,) in images:
            scores = {label: 1.0 + 9 * (ImageColor.getrgb(label) == image.getpixel((0, 0))) for label in labels}
            ranked = [Choice(label, score / sum(scores.values()), 0.0) for label, score in scores.items()]
            yield sorted(ranked, key=lambda choice: -choice.probability)


def question(color, label, *earlier, source="mine"):
    chat = dialogue([*earlier, "What color?"], [None])
    return Question(source, f"{color} as {label}", [Image.new("RGB", (8, 8), color)], chat, [label])


def test_wrong_labels_come_first(tmp_path):
    """Of labels alone: a chat, and a source of as many answers as questions, have none."""
    asked = [question(color, color) for color in ("red", "blue", "green") * 4]
    wrong = [question("red", "blue"), question("green", "red"), question((1, 2, 3), "green")]
    others = [question("red", "blue", "Hi", "Ho"), *(question("red", label, source="b") for label in ("blue", "red"))]
    doubts = doubtful_labels(Classifier(), [*asked, *wrong, *others])
    assert [question.name for question, _ in doubts] == ["red as blue", "green as red", "(1, 2, 3) as green"]
    page = unescape(written(tmp_path, "mine", Evaluation([]), doubts=doubts))
    assert re.findall(r"<p>([^<]* \(probability [^<]*)<br>", page) == [
        "blue (probability 0.083), the model's: red",
        "red (probability 0.083), the model's: green",
        "green (probability 0.33), the model's: blue",
    ]
    assert page.count("base64,") == 3 and doubtful_labels(Classifier(), []) == []
