"""Ask a model the questions of examples, and score its answers."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from nanovlm.captioner import Captioner
from nanovlm.chat_session import ChatSession
from nanovlm.console import progress_bar
from nanovlm.data import Subset
from nanovlm.data.examples import Example, Question, questions
from nanovlm.errors import DataError, ImageError, InputError
from nanovlm.evaluation.metrics import METRICS, Metric
from nanovlm.processing.image_loading import load_image

MAX_FROM_ENDLESS = 200  # examples to ask of a source that has no end
MAX_PROMPTS = 8  # rows of a table for the prompts of a source; further prompts share a row
OTHER_PROMPTS = "(other prompts)"


@dataclass(frozen=True)
class Answer:
    """What the model answered, and the score by each metric."""

    question: Question
    text: str
    scores: Mapping[str, float]


@dataclass(frozen=True)
class EvaluationOptions:
    """How answers are generated and scored."""

    metrics: Mapping[str, Metric] = field(default_factory=METRICS.copy)
    batch_size: int = 16
    max_new_tokens: int = 64
    skip_errors: bool = False  # leave out examples that cannot be used
    show_progress: bool = True


@dataclass(frozen=True)
class Group:
    """The mean scores of some answers."""

    source: str
    prompt: str | None  # None for all prompts
    questions: int
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Evaluation:
    """All answers with their scores, and why questions were left out."""

    answers: Sequence[Answer]
    skipped: Sequence[str] = ()

    @property
    def scores(self) -> dict[str, float]:
        """The mean of each metric over all answers."""
        return _means(self.answers)

    def groups(self, max_prompts: int = MAX_PROMPTS) -> list[Group]:
        """A group for each source, and for each of its most frequent prompts if it has several."""
        groups = []
        for source in dict.fromkeys(answer.question.source for answer in self.answers):
            answers = [answer for answer in self.answers if answer.question.source == source]
            groups.append(Group(source, None, len(answers), _means(answers)))
            counts = Counter(answer.question.prompt for answer in answers)
            rows: dict[str, list[Answer]] = {prompt: [] for prompt, _ in counts.most_common(max_prompts)}
            rows[OTHER_PROMPTS] = []
            for answer in answers if len(counts) > 1 else ():
                rows.get(answer.question.prompt, rows[OTHER_PROMPTS]).append(answer)
            groups += [Group(source, prompt, len(row), _means(row)) for prompt, row in rows.items() if row]
        return groups

    def worst(self, n: int) -> list[Answer]:
        """The n answers with the lowest mean of all metrics in [0, 1]."""

        def score(answer: Answer) -> float:
            values = [value for name, value in answer.scores.items() if name != "cider" and math.isfinite(value)]
            return sum(values) / max(1, len(values))

        return sorted(self.answers, key=score)[:n]


def _means(answers: Sequence[Answer]) -> dict[str, float]:
    names = answers[0].scores if answers else ()
    return {name: sum(answer.scores[name] for answer in answers) / len(answers) for name in names}


def questions_of(subsets: Sequence[Subset], limit: int | None = None, skip_errors: bool = False) -> "QuestionList":
    """The questions of the examples, at most `limit` examples of each subset."""
    skipped = [error for subset in subsets for error in subset.source.errors]
    asked: list[tuple[str, Example]] = []
    for subset in subsets:
        n = limit or (MAX_FROM_ENDLESS if subset.source.endless else None)
        asked += (
            (subset.source.path, example) for example in islice(subset.usable(skipped if skip_errors else None), n)
        )
    return QuestionList(questions(asked), skipped)


@dataclass(frozen=True)
class QuestionList:
    questions: Sequence[Question]
    skipped: Sequence[str] = ()  # why examples were left out


def evaluate(captioner: Captioner, listed: QuestionList, options: EvaluationOptions) -> Evaluation:
    """Answer all questions, greedily, and score the answers.

    DataError for a question that cannot be used, such as one with a broken image, unless options.skip_errors.
    """
    answers: dict[int, str] = {}  # by the question's number
    skipped = list(listed.skipped)
    with progress_bar(len(listed.questions), "question") if options.show_progress else nullcontext() as bar:
        for numbers in _batches(listed.questions, options.batch_size):
            batch = [listed.questions[i] for i in numbers]
            for i, text in zip(numbers, _answer_batch(captioner, batch, options)):
                if not isinstance(text, DataError):
                    answers[i] = text
                elif options.skip_errors:
                    skipped.append(str(text))
                else:
                    raise text
            if bar is not None:
                bar.update(len(batch))
    answered = [(listed.questions[i], answers[i]) for i in sorted(answers)]
    texts, references = [text for _, text in answered], [question.references for question, _ in answered]
    columns = {name: metric(texts, references) for name, metric in options.metrics.items()}
    scored = [
        Answer(question, text, {name: column[i] for name, column in columns.items()})
        for i, (question, text) in enumerate(answered)
    ]
    return Evaluation(scored, skipped)


def _batches(questions: Sequence[Question], batch_size: int) -> list[list[int]]:
    """The numbers of questions to ask together: later turns of a chat alone, all others batch_size at a time."""
    later_turns = [[i] for i, question in enumerate(questions) if question.history]
    others = [i for i, question in enumerate(questions) if not question.history]
    return [others[i : i + batch_size] for i in range(0, len(others), batch_size)] + later_turns


def _answer_batch(captioner: Captioner, batch: Sequence[Question], options: EvaluationOptions) -> list[str | DataError]:
    """The answer to each question, or in its place the error that prevents one."""
    how: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "temperature": 0.0}  # a score that can be repeated
    try:
        images: list[Any] = [[load_image(image) for image in question.images] for question in batch]
        if batch[0].history:
            session = ChatSession(captioner, images[0])
            session.history = list(batch[0].history)
            return ["".join(session.ask(batch[0].prompt, **how))]
        prompts = [question.prompt for question in batch]
        return list(captioner.captions(images, prompts, batch_size=len(batch), **how))
    except (ImageError, InputError) as error:
        if len(batch) > 1:
            return [answer for question in batch for answer in _answer_batch(captioner, [question], options)]
        message = str(error)
        return [DataError(message if message.startswith(batch[0].name) else f"{batch[0].name}: {message}")]
