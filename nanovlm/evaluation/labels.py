"""Find labels in the data that may be wrong: the model finds another one more probable."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from nanovlm.captioner import Captioner
from nanovlm.console import progress_bar
from nanovlm.data.examples import Question
from nanovlm.data.mixture import are_labels


@dataclass(frozen=True)
class Doubt:
    """A label that the model finds less probable than another one."""

    question: Question
    label: str
    probability: float  # of the label, among all labels
    better: str  # the model's label


def doubtful_labels(captioner: Captioner, questions: Iterable[Question]) -> list[Doubt]:
    """Doubts about the answers to prompts that have few different answers; the least probable label comes first."""
    groups: dict[tuple[str, str], list[Question]] = defaultdict(list)
    for question in questions:
        places = [None] * len(question.images)
        if places and [[*turn.parts] for turn in question.chat] == [[*places, question.prompt]]:
            groups[question.source, question.prompt].append(question)
    doubts = []
    for (_, prompt), asked in groups.items():
        labels = sorted({label for question in asked for label in question.references})
        if len(labels) < 2 or not are_labels(len(labels), len(asked)):
            continue
        with progress_bar(len(asked), "label") as bar:
            images = (question.images for question in asked)
            for question, ranked in zip(asked, captioner.classify_each(images, labels, prompt)):
                probability = {choice.text: choice.probability for choice in ranked}
                wrong = [label for label in dict.fromkeys(question.references) if label != ranked[0].text]
                doubts += [Doubt(question, label, probability[label], ranked[0].text) for label in wrong]
                bar.update()
    return sorted(doubts, key=lambda doubt: doubt.probability)
