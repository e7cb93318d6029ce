"""Metrics: functions of answers and the references of each, which return a score for each; the mean is the result."""

import importlib
import math
import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from nanovlm.errors import InputError

Metric = Callable[[Sequence[str], Sequence[Sequence[str]]], list[float]]
PairMetric = Callable[[str, Sequence[str]], float]  # of one answer and its references

PUNCTUATION = re.escape(string.punctuation)
ARTICLES = re.compile(rf"(?<![{PUNCTUATION}])\b(a|an|the)\b(?![{PUNCTUATION}])")  # not the A of A-5
THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(,\d{2,3})*,\d{3}(?![\d,])")  # 1,000 and India's 1,00,000
CURRENCIES = "$€£¥₹"
SIGNS = re.compile(r"[^\w\s.,;:!?'\"()\[\]{}]")
DASHES = re.compile(rf"[‐-–−﹣－](?=[.{CURRENCIES}]*\d)|(?<=\d)[‐-–−﹣－]")  # a minus or a hyphen, not the long dash
AROUND_NUMBERS = {"Sc", "So", "Pi", "Pf", "Ps", "Pe", "Po"}  # categories of what may stand at one, as in “€5”
Z_95 = 1.96  # standard deviations to either side that hold 95% of a normal distribution
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBERS = {"none": 0} | {word: i for i, word in enumerate(DIGITS)}
VQA_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
ANLS_THRESHOLD = 0.5
MAX_NGRAM = 4
CIDER_SIGMA = 6.0


def intervals(scores: Mapping[str, float], n: int) -> dict[str, tuple[float, float]]:
    """95% intervals (Wilson 1927) of the means of n scores in [0, 1], wider than needed if some are between the two."""
    found = {}
    for name, share in scores.items() if n else ():
        if name not in ("loss", "cider") and 0 <= share <= 1:
            spread = Z_95**2 / n
            center = (share + spread / 2) / (1 + spread)
            half = Z_95 * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
            found[name] = max(0.0, center - half), min(1.0, center + half)
    return found


def for_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values for JSON, which has finite numbers only: None for others."""
    is_finite = {name: not isinstance(value, float) or math.isfinite(value) for name, value in values.items()}
    return {name: value if is_finite[name] else None for name, value in values.items()}


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if the answer is one of the references, character for character but for white space around it."""
    return float(answer.strip() in [reference.strip() for reference in references])


def token_f1(answer: str, references: Sequence[str]) -> float:
    """SQuAD's F1 (Rajpurkar et al. 2016): the overlap of words, without case, punctuation, articles; the best one.

    Unlike SQuAD's, signs and points stand beside digits: 2.5cm is not 25cm, -5 is not 5. A text of punctuation or of
    articles alone keeps them.
    """
    words, *truths = map(_squad_words, (answer, *references))
    overlaps = [2 * (words & truth).total() / max(1, words.total() + truth.total()) for truth in truths]
    return 1.0 if not words and Counter() in truths else max(overlaps)


def is_same_by_f1(answer: str, references: Sequence[str]) -> bool:
    """True if F1 takes the answer for a reference with the same signs: A- and A+ differ in these alone."""
    signs = SIGNS.findall(_plain_numbers(answer))
    alike = (text for text in references if SIGNS.findall(_plain_numbers(text)) == signs)
    return any(token_f1(answer, [text]) == 1 for text in alike)


def _squad_words(text: str) -> Counter[str]:
    text = _plain_numbers(text.lower())
    marks = {i for i, mark in enumerate(text) if mark in string.punctuation and not _is_part_of_number(text, i)}
    for word in re.finditer(r"\S+", text):
        if any(map(str.isnumeric, word[0])):
            around = range(*word.span())
            marks.update(
                i for i in around if unicodedata.category(text[i]) in AROUND_NUMBERS and not _is_part_of_number(text, i)
            )
    words = "".join(char for i, char in enumerate(text) if i not in marks).split() or text.split()
    return Counter(ARTICLES.sub(" ", " ".join(words)).split() or words)


def _plain_numbers(text: str) -> str:
    """The text with 1000 for 1,000, and the hyphen for every minus and dash at a number."""
    return DASHES.sub("-", THOUSANDS.sub(lambda number: number[0].replace(",", ""), text))


def _is_part_of_number(text: str, i: int) -> bool:
    """Check whether a number would change if the mark at i were dropped."""
    before, after = text[i - 1 : i], text[i + 1 : i + 2]
    if before.isnumeric() and after.isnumeric():
        return True
    match text[i]:
        case ".":
            return after.isnumeric() and before != "."
        case "+" | "-":  # also those of -$5 and -.5
            return before.isnumeric() or text[i + 1 : i + 4].lstrip(f".{CURRENCIES}")[:1].isnumeric()
        case "/":
            return before.isnumeric() or after.isnumeric()
    return text[i] in "<>" and after.isnumeric()


def vqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """VQA accuracy (Antol et al. 2015): the mean over all references but one of min(1, matches / 3).

    Meant for ten human answers; with fewer than four references one match is enough. Articles, case and punctuation,
    which "$%&:*#" are not, do not count, and number words are digits, as in the official script (vqaEval.py). Its table
    of contractions is not here: apostrophes are dropped. Unlike there, signs and points stand beside digits, and a text
    of punctuation or of articles alone keeps them.
    """
    answer = _vqa_normalize(answer)
    truths = [_vqa_normalize(reference) for reference in references]
    if len(truths) < 4:
        return float(answer in truths)
    others = combinations(truths, len(truths) - 1)
    return sum(min(1.0, others_.count(answer) / 3) for others_ in others) / len(truths)


def _vqa_normalize(text: str) -> str:
    text = re.sub(r"'(?!\d)|(?<!\d)'", "", text.strip())
    has_thousands = re.search(r"\d,+\d", text)  # as 1,000
    text = _plain_numbers(text)
    outside = {mark for mark in VQA_PUNCTUATION if has_thousands or f"{mark} " in text or f" {mark}" in text}
    kept = [
        char if char not in VQA_PUNCTUATION or _is_part_of_number(text, i) else "" if char in outside else " "
        for i, char in enumerate(text)
    ]
    plain = re.sub(r"\.(?!\d)", "", "".join(kept)).lower().split()  # a decimal point stays
    words = plain or text.lower().split()
    words = [word for word in words if word not in ("a", "an", "the")] or words
    return " ".join(str(NUMBERS.get(word, word)) for word in words)


def anls(answer: str, references: Sequence[str]) -> float:
    """ANLS (Biten et al. 2019): 1 - edit distance / length of the longer text, 0 where that is below one half."""
    text, *truths = (" ".join(words.lower().split()) for words in (answer, *references))
    distance = min(edit_distance(text, truth) / max(len(text), len(truth), 1) for truth in truths)
    return 1 - distance if distance < ANLS_THRESHOLD else 0.0


def edit_distance(a: str, b: str) -> int:
    """The number of insertions, deletions and substitutions from a to b (Levenshtein 1966)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        previous = row[0]
        row[0] = i
        for j, y in enumerate(b, start=1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def cider(answers: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """CIDEr-D (Vedantam et al. 2015), as coco-caption computes it, but of lower-case words without Java's tokenizer.

    From 0 to 10: n-grams weighted by how rare they are among all references, so a single example scores 0.
    """
    counts = [[_ngrams(text) for text in truths] for truths in references]
    document_frequency = Counter(ngram for truths in counts for ngram in set().union(*chain(*truths)))
    log_size = math.log(max(1, len(counts)))

    def similarity(ours: list[Counter], truth: list[Counter]) -> float:
        """The cosine of clipped tf-idf vectors, averaged over n, with a Gaussian penalty for another length."""
        total = 0.0
        for a, b in zip(map(vector, ours), map(vector, truth)):
            norms = math.prod(math.sqrt(sum(x**2 for x in weights.values())) for weights in (a, b))
            total += sum(min(value, b.get(ngram, 0.0)) * b.get(ngram, 0.0) for ngram, value in a.items()) / (norms or 1)
        difference = ours[1].total() - truth[1].total()  # coco-caption's length is the number of bigrams
        return total / MAX_NGRAM * math.exp(-(difference**2) / (2 * CIDER_SIGMA**2))

    def vector(ngrams: Counter) -> dict[tuple[str, ...], float]:
        return {n: count * (log_size - math.log(max(1, document_frequency[n]))) for n, count in ngrams.items()}

    pairs = zip(map(_ngrams, answers), counts)
    similar = [[similarity(ours, truth) for truth in truths] for ours, truths in pairs]
    return [10 * sum(of_truths) / len(of_truths) for of_truths in similar]


def _ngrams(text: str) -> list[Counter[tuple[str, ...]]]:
    """The sequences of 1 word, of 2 words, up to MAX_NGRAM words, and how often each occurs."""
    words = re.findall(r"\w+(?:'\w+)*", text.lower())
    return [Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1)) for n in range(1, MAX_NGRAM + 1)]


def _each(score: PairMetric, answers: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    return [score(answer, truths) for answer, truths in zip(answers, references)]


METRICS: dict[str, Metric] = {
    "exact_match": partial(_each, exact_match),
    "f1": partial(_each, token_f1),
    "vqa_accuracy": partial(_each, vqa_accuracy),
    "anls": partial(_each, anls),
    "cider": cider,
}


def load_metric(name: str) -> tuple[str, Metric]:
    """Name and function of one of METRICS, or of the user's module:function(answer, references) -> number.

    A minus before it says that it is an error rate, which changes no score.
    """
    name = name.removeprefix("-")
    if name in METRICS:
        return name, METRICS[name]
    module_name, _, function_name = name.partition(":")
    if not function_name:
        raise InputError(f"{name} is none of {', '.join(METRICS)}, nor my_module:my_function", field="metric")
    if str(Path.cwd()) not in sys.path:  # the program nanovlm does not search the current folder
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{name}: {error}; name a function as my_module:my_function", field="metric") from None

    def score(answer: str, references: Sequence[str]) -> float:
        try:
            return float(function(answer, list(references)))
        except Exception as error:
            raise InputError(
                f"metric={name} failed for the answer {answer!r} and the references {references!r}: "
                f"{type(error).__name__}: {error}"
            ) from error

    return function_name, partial(_each, score)
