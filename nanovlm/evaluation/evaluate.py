"""Ask a model the questions of examples, and score its answers."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from models.inference.continuous_batching import Request
from nanovlm.captioner import Captioner
from nanovlm.console import progress_bar
from nanovlm.data import Source
from nanovlm.data.examples import Example, Question, questions
from nanovlm.data.mixture import are_labels
from nanovlm.errors import DataError, ImageError, InputError
from nanovlm.evaluation.metrics import METRICS, Metric, exact_match, intervals, is_same_by_f1
from nanovlm.options import GenerationOptions, generation_options
from nanovlm.processing.conversation import with_images
from nanovlm.processing.image_loading import load_image

MAX_FROM_ENDLESS = 200  # examples to ask of a source that has no end
MAX_PROMPTS = 8  # rows of a table for the prompts of a source; further prompts share a row
OTHER_PROMPTS = "(other prompts)"
SPARE_TOKENS = 16  # of an answer beyond the longest reference


@dataclass(frozen=True)
class Answer:
    """The model's answer, and its score by each metric."""

    question: Question
    text: str
    scores: Mapping[str, float]

    @property
    def is_right(self) -> bool:
        """True if it is one of the references."""
        return exact_match(self.text, self.question.references) == 1


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of an evaluation: how answers are generated and scored."""

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

    def to_choose_by(self, metric: str) -> float:
        """The mean of a metric by which models are chosen: in f1, texts that differ in signs alone are no match."""
        scores = [
            0.0
            if metric == "f1" and score == 1 and not is_same_by_f1(answer.text, answer.question.references)
            else score
            for answer in self.answers
            if (score := answer.scores.get(metric)) is not None
        ]
        return sum(scores) / len(scores) if scores else math.nan

    def groups(self, max_prompts: int = MAX_PROMPTS) -> list[tuple[str, str | None, "Evaluation"]]:
        """(source, None, answers) of each source; of one with several prompts also (source, prompt, answers)."""
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
        found = [answer for answer in self.answers if not answer.is_right]
        return sorted(found, key=lambda answer: sum(answer.scores.get(name, 0) for name in ("f1", "anls")))

    def advice(self) -> str | None:
        """Advice if no answer is right."""
        if len(self.wrong()) < max(1, len(self.answers)):
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


def in_words(scores: Mapping[str, float], n: int = 0) -> str:
    """Scores by name, as a text for one line; with n, the number of answers, also their 95% intervals."""
    words = {name: f"{name.replace('_', ' ')} {value:.4f}" for name, value in scores.items()}
    for name, (low, high) in intervals(scores, n).items():
        words[name] += f" (95% interval {low:.3f} to {high:.3f})"
    return ", ".join(words.values())


def questions_of(
    sources: Sequence[Source], limit: int | None = None, errors: list[str] | None = None
) -> list[Question]:
    """The questions of the examples, at most `limit` examples of each source; errors as in `Source.usable`."""
    asked: list[tuple[str, Example]] = []
    for source in sources:
        n = limit or (MAX_FROM_ENDLESS if source.endless else None)
        asked += ((source.path, example) for example in islice(source.usable(errors), n))
    return questions(asked)


def evaluate(
    captioner: Captioner, asked: Sequence[Question], options: EvaluationOptions, skipped: Sequence[str] = ()
) -> Evaluation:
    """Answer all questions, greedily and without an early end, and score the answers.

    skipped says why examples were left out before. DataError for a question that cannot be used, such as one with a
    broken image, unless options.skip_errors.
    """
    limit = options.max_new_tokens
    if limit is None:
        longest = captioner.inference.cfg.lm_max_position_embeddings * captioner.tokenizer.longest_token
        cut = (text[:longest] for question in asked for text in question.references)
        lengths = (len(captioner.tokenizer.encode(text)) for text in cut)
        limit = max(lengths, default=0) + SPARE_TOKENS
    # a score that can be repeated; and an answer may repeat itself, as a reference may
    changes = {"max_new_tokens": limit, "temperature": 0.0, "repetition_detection": (0, 0, 0)}
    how = generation_options(None, changes, captioner.defaults)
    answered: list[tuple[Question, str]] = []
    skipped = list(skipped)
    requests = (_request(captioner, question, how) for question in asked)
    with progress_bar(len(asked), "question", is_hidden=not options.show_progress) as bar:
        for question, request in zip(asked, captioner.run(requests, options.batch_size)):
            if options.skip_errors and isinstance(request.error, DataError):
                skipped.append(str(request.error))
            else:
                answered.append((question, captioner.answer(request)))
            bar.update()
    texts = [text for _, text in answered]
    references = [question.references for question, _ in answered]
    columns = {name: metric(texts, references) for name, metric in options.metrics.items()}
    scores = [{name: column[i] for name, column in columns.items()} for i in range(len(texts))]
    return Evaluation([Answer(*pair, score) for pair, score in zip(answered, scores)], skipped)


def _request(captioner: Captioner, question: Question, options: GenerationOptions) -> Request:
    """A request for an answer that fits the context; its error says why the question cannot be asked."""
    try:
        texts = [*question.references, *(turn.text for turn in question.chat)]
        captioner.processor.check_bytes(texts, len(question.images))
        images = captioner.processor.prepare([load_image(image) for image in question.images])
        return captioner.chat_request(with_images(question.chat, images), options)
    except (ImageError, InputError) as error:
        message = str(error)
        message = message if message.startswith(question.name) else f"{question.name}: {message}"
        return Request((), error=DataError(message))


def doubtful_labels(captioner: Captioner, asked: Iterable[Question]) -> list[tuple[Question, str]]:
    """Questions whose label may be wrong, as another is more probable, with a line; the least probable label first."""
    groups: dict[tuple[str, str], list[Question]] = defaultdict(list)
    for question in asked:
        places = [None] * len(question.images)
        if places and [[*turn.parts] for turn in question.chat] == [[*places, question.prompt]]:
            groups[question.source, question.prompt].append(question)
    doubts: list[tuple[float, Question, str]] = []
    for (_, prompt), group in groups.items():
        labels = sorted({label for question in group for label in question.references})
        if len(labels) < 2 or not are_labels(len(labels), len(group)):
            continue
        with progress_bar(len(group), "label") as bar:
            images = (question.images for question in group)
            for question, ranked in zip(group, captioner.classify_each(images, labels, prompt)):
                probability = {choice.text: choice.probability for choice in ranked}
                for label in dict.fromkeys(question.references):
                    if label != ranked[0].text:
                        line = f"{label} (probability {probability[label]:.2g}), the model's: {ranked[0].text}"
                        doubts.append((probability[label], question, line))
                bar.update()
    return [(question, line) for _, question, line in sorted(doubts, key=lambda doubt: doubt[0])]
