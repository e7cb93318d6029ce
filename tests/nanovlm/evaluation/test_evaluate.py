"""Questions of data sets and the model's answers to them, against the Captioner asked one by one."""

import json
from pathlib import Path

import pytest

from nanovlm import EMBEDDED
from nanovlm.chat_session import ChatSession
from nanovlm.cli import main as cli
from nanovlm.data import ReadOptions, open_data
from nanovlm.evaluation import Evaluation, EvaluationOptions, evaluate, questions_of
from nanovlm.evaluation.evaluate import Answer, Question
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
    subsets, _ = open_data(paths, read, 0)
    asked = questions_of(subsets, skip_errors=options.get("skip_errors", False))
    return evaluate(embedded, asked, EvaluationOptions(max_new_tokens=max_new_tokens, **options))


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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--metric", "bleu"], ["bleu", "exact_match"]),
        (["--limit", "0"], ["--limit 0"]),
        (["--validation"], ["nothing of these data is held out"]),
        (["--validation", "1.5"], ["--validation 1.5", "must be a whole number"]),
        (["--report", "x.jpg"], ["--report x.jpg", ".html"]),
        (["--report", "nowhere/x.html"], ["nowhere is no folder that can be written"]),
        (["--model", "nowhere"], ["nowhere", "Hub id"]),
        (["--stream"], ["--stream has no effect on cards"]),
    ],
)
def test_wrong_use_is_one_line(capsys, flags, words):
    assert cli.main(["evaluate", "--data", "cards", "--device", "cpu", *flags]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and all(word in err for word in words), err


@pytest.mark.parametrize(
    ("reference", "limit", "expected"),
    [
        (" ".join(["word"] * 150), None, lambda n, room: n + 16),
        (" ".join(["word"] * 150), 9, lambda n, room: 9),
        ("a", 9999, lambda n, room: room),
    ],
)
def test_answers_are_as_long_as_the_longest_reference_and_a_bit(embedded, monkeypatch, reference, limit, expected):
    """A perfect model of long captions would be wrong by a limit; but no answer is longer than the context."""
    limits = []

    def run(requests, batch_size):
        for request in requests:
            limits.append(
                (request.max_new_tokens, embedded.processor.cfg.lm_max_position_embeddings - len(request.ids) + 1)
            )
            yield request

    Path("cards/0.txt").write_text(reference)
    monkeypatch.setattr(embedded, "run", run)
    ask(embedded, "cards", max_new_tokens=limit)
    assert [asked for asked, _ in limits] == [
        expected(len(embedded.tokenizer.encode(reference)), room) for _, room in limits
    ]


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
    answers = [Answer(Question("s", "n", [], "q", ["r "]), text, {"f1": f1}) for text in texts]
    advice = Evaluation(answers).advice()
    assert advice is None if words is None else advice.startswith(words)
    assert Evaluation([]).advice() is None
