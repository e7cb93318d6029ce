"""Ask a model the questions of examples, and score its answers."""

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
from nanovlm.evaluation.metrics import METRICS, Metric, intervals
from nanovlm.processing.image_loading import load_image

MAX_FROM_ENDLESS = 200  # examples to ask of a source that has no end
MAX_PROMPTS = 8  # rows of a table for the prompts of a source; further prompts share a row
OTHER_PROMPTS = "(other prompts)"
SPARE_TOKENS = 16  # of an answer beyond the longest reference


@dataclass(frozen=True)
class QuestionList:
    questions: Sequence[Question]
    skipped: Sequence[str] = ()  # why examples were left out


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
    max_new_tokens: int | None = None  # by default as many as the longest reference has, and SPARE_TOKENS more
    skip_errors: bool = False  # leave out examples that cannot be used
    show_progress: bool = True


@dataclass(frozen=True)
class Evaluation:
    """Some answers with their scores, and why questions were left out."""

    answers: Sequence[Answer]
    skipped: Sequence[str] = ()

    @property
    def scores(self) -> dict[str, float]:
        """The mean of each metric over all answers."""
        names = self.answers[0].scores if self.answers else ()
        return {name: sum(answer.scores[name] for answer in self.answers) / len(self.answers) for name in names}

    def groups(self, max_prompts: int = MAX_PROMPTS) -> list[tuple[str, str | None, "Evaluation"]]:
        """Source, None and answers of each source; with a prompt for each of its most frequent if it has several."""
        groups: list[tuple[str, str | None, Evaluation]] = []
        for source in dict.fromkeys(answer.question.source for answer in self.answers):
            answers = [answer for answer in self.answers if answer.question.source == source]
            groups.append((source, None, Evaluation(answers)))
            counts = Counter(answer.question.prompt for answer in answers)
            rows: dict[str, list[Answer]] = {prompt: [] for prompt, _ in counts.most_common(max_prompts)}
            for answer in answers if len(counts) > 1 else ():
                name = answer.question.prompt if answer.question.prompt in rows else OTHER_PROMPTS
                rows.setdefault(name, []).append(answer)
            groups += [(source, prompt, Evaluation(row)) for prompt, row in rows.items() if row]
        return groups

    def wrong(self) -> list[Answer]:
        """The answers that equal none of their references, the worst first."""
        found = [answer for answer in self.answers if not _is_right(answer)]
        return sorted(found, key=lambda answer: sum(answer.scores.get(name, 0) for name in ("f1", "anls")))

    def advice(self) -> str | None:
        """What to do if no answer is right."""
        if not self.answers or any(map(_is_right, self.answers)):
            return None
        texts = {answer.text for answer in self.answers}
        if len(texts) == 1 and len(self.answers) > 1:
            return f"no answer is right, and all are {min(texts)!r}: train longer (--epochs), or with another --lr"
        if self.scores.get("f1", 0) > 0.5:
            return "no answer is exactly right, but many words are: for texts as long as these, compare f1 or cider"
        return (
            "no answer is right: compare answers and references, see with --check-data that questions and answers are "
            "what you meant, then train longer (--epochs) or with another --lr"
        )


def _is_right(answer: Answer) -> bool:
    return answer.text.strip() in [reference.strip() for reference in answer.question.references]


def in_words(scores: Mapping[str, float], n: int = 0) -> str:
    """The scores by name, for a line; of n answers, with the interval that holds the true value with 95%."""
    words = {name: f"{name.replace('_', ' ')} {value:.4f}" for name, value in scores.items()}
    for name, (low, high) in intervals(scores, n).items():
        words[name] += f" (95% interval {low:.3f} to {high:.3f})"
    return ", ".join(words.values())


def questions_of(subsets: Sequence[Subset], limit: int | None = None, skip_errors: bool = False) -> QuestionList:
    """The questions of the examples, at most `limit` examples of each subset."""
    skipped = [error for subset in subsets for error in subset.source.errors]
    asked: list[tuple[str, Example]] = []
    for subset in subsets:
        n = limit or (MAX_FROM_ENDLESS if subset.source.endless else None)
        asked += (
            (subset.source.path, example) for example in islice(subset.usable(skipped if skip_errors else None), n)
        )
    return QuestionList(questions(asked), skipped)


def evaluate(captioner: Captioner, listed: QuestionList, options: EvaluationOptions) -> Evaluation:
    """Answer all questions, greedily, and score the answers.

    DataError for a question that cannot be used, such as one with a broken image, unless options.skip_errors.
    """
    limit, encode = options.max_new_tokens, captioner.tokenizer.encode
    if limit is None:
        lengths = (len(encode(text)) for question in listed.questions for text in question.references)
        limit = max(lengths, default=0) + SPARE_TOKENS
    answered: list[tuple[int, str]] = []  # the numbers of questions, and the answers
    skipped = list(listed.skipped)
    with progress_bar(len(listed.questions), "question") if options.show_progress else nullcontext() as bar:
        for numbers in _batches(listed.questions, options.batch_size):
            batch = [listed.questions[i] for i in numbers]
            for i, text in zip(numbers, _answer_batch(captioner, batch, limit)):
                if not isinstance(text, DataError):
                    answered.append((i, text))
                elif options.skip_errors:
                    skipped.append(str(text))
                else:
                    raise text
            if bar is not None:
                bar.update(len(batch))
    pairs = [(listed.questions[i], text) for i, text in sorted(answered)]
    texts, references = [text for _, text in pairs], [question.references for question, _ in pairs]
    columns = {name: metric(texts, references) for name, metric in options.metrics.items()}
    scored = [
        Answer(question, text, {name: column[i] for name, column in columns.items()})
        for i, (question, text) in enumerate(pairs)
    ]
    return Evaluation(scored, skipped)


def _batches(questions: Sequence[Question], batch_size: int) -> list[list[int]]:
    """The numbers of questions to ask together: later turns of a chat alone, all others batch_size at a time."""
    later_turns = [[i] for i, question in enumerate(questions) if question.history]
    others = [i for i, question in enumerate(questions) if not question.history]
    return [others[i : i + batch_size] for i in range(0, len(others), batch_size)] + later_turns


def _answer_batch(captioner: Captioner, batch: Sequence[Question], limit: int) -> list[str | DataError]:
    """The answer of up to `limit` tokens to each question, or in its place the error that prevents one."""
    question = batch[0]
    try:
        images: list[Any] = [[load_image(image) for image in question.images] for question in batch]
        if len(batch) == 1:  # its context may have less room
            used = len(captioner.prepare(images[0], question.prompt)[0])
            used += sum(len(captioner.tokenizer.encode(text)) for pair in question.history for text in pair)
            limit = max(1, min(limit, captioner.processor.cfg.lm_max_position_embeddings - used))
        if question.history:
            session = ChatSession(captioner, images[0])
            session.history = list(question.history)
            return ["".join(session.ask(question.prompt, max_new_tokens=limit, temperature=0.0))]
        prompts = [question.prompt for question in batch]
        greedy: dict[str, Any] = {"max_new_tokens": limit, "temperature": 0.0}  # a score that can be repeated
        return list(captioner.captions(images, prompts, batch_size=len(batch), **greedy))
    except (ImageError, InputError) as error:
        if len(batch) > 1:
            return [answer for question in batch for answer in _answer_batch(captioner, [question], limit)]
        message = str(error)
        return [DataError(message if message.startswith(question.name) else f"{question.name}: {message}")]
