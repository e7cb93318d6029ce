"""The page of a run or an evaluation: curves, what was taken for what, and a gallery of answers, wrong ones first."""

import base64
import io
import re
from html import unescape
from html.parser import HTMLParser

from PIL import Image, ImageColor

from nanovlm.choices import Choice
from nanovlm.evaluation import Evaluation
from nanovlm.evaluation.evaluate import Answer, Question, doubtful_labels
from nanovlm.evaluation.report import write_report
from nanovlm.processing.conversation import dialogue
from support.training import answer_questions

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
    question = Question(
        "s", "a\udcff\"'>.png", [], dialogue(["q\0\x1b[31m"]), ["</script><img src=x onerror=alert(1)>"]
    )
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
