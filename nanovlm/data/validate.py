"""`train --check-data`: read every example once, count them, and show three as the model sees them."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, pairwise

from nanovlm.data.examples import IGNORE_INDEX, EncodedExample, Example, ExampleError, encode_checked
from nanovlm.data.mixture import Subset
from nanovlm.processing.processor import Processor
from nanovlm.processing.tokenizer import Tokenizer

MAX_FROM_ENDLESS = 1000  # examples to read of a source that has no end
N_SHOWN = 3
PROGRESS_EVERY = 1000  # examples between two progress lines

logger = logging.getLogger(__name__)


@dataclass
class Summary:
    """Counts over a subset, its first examples, and the messages of those that cannot be used."""

    examples: int = 0
    images: int = 0
    answer_tokens: int = 0
    longest: int = 0
    errors: list[str] = field(default_factory=list)
    first: list[tuple[str, EncodedExample]] = field(default_factory=list)

    def add(self, example: Example, row: EncodedExample) -> None:
        self.examples += 1
        self.images += len(example.images)
        self.answer_tokens += sum(target != IGNORE_INDEX for target in row.targets)
        self.longest = max(self.longest, len(row.ids))
        if len(self.first) < N_SHOWN:
            self.first.append((example.name, row))


def check_data(train: Sequence[Subset], held_out: Sequence[Subset], processor: Processor, skip_errors: bool) -> int:
    """Print the number of examples, those that cannot be used and why, and a few encoded ones.

    Returns the exit code: 1 if some cannot be used and are not to be skipped.
    """
    summaries = []
    for subset in [*train, *held_out]:
        summary = summarize(subset, processor)
        summaries.append(summary)
        role = ", held out" if subset in held_out else ""
        limit = "the first " if subset.source.endless else ""
        print(
            f"{subset.source.path}{role}: {limit}{summary.examples:,} examples, {summary.images:,} images, "
            f"{summary.answer_tokens:,} answer tokens; the longest takes {summary.longest} of "
            f"{processor.cfg.lm_max_position_embeddings}"
        )
    errors = [line for summary in summaries for line in summary.errors]
    if errors:
        print(f"\n{len(errors)} cannot be used{' and will be skipped' if skip_errors else ''}:")
        print("".join(f"  {line}\n" for line in errors), end="")
    print("\nAs the model sees them; it is trained on the text in [[ ]]:")
    shown = [summary.first[i] for i in range(N_SHOWN) for summary in summaries if i < len(summary.first)]
    for name, row in shown[:N_SHOWN]:
        print(f"\n--- {name}\n{describe_images(row)}{decode_continuations(row, processor.tokenizer)}")
    return 1 if errors and not skip_errors else 0


def summarize(subset: Subset, processor: Processor) -> Summary:
    """Encode every example of a subset, of an endless one the first MAX_FROM_ENDLESS."""
    summary = Summary()
    limit = MAX_FROM_ENDLESS if subset.source.endless else None
    for n, (name, record) in enumerate(islice(subset, limit), start=1):
        if n % PROGRESS_EVERY == 0:
            logger.info("%s: %s examples read", subset.source.path, f"{n:,}")
        try:
            example = subset.source.make_example(record, name)
            summary.add(example, encode_checked(example, processor))
        except ExampleError as error:
            summary.errors.append(str(error))
    return summary


def describe_images(row: EncodedExample) -> str:
    """A line for each image: the number of tiles that the model sees of it, and their size."""
    return "".join(
        f"(image {k}: {len(tiles)} tile{'s' if len(tiles) > 1 else ''} of {tiles.size(-1)} x {tiles.size(-1)})\n"
        for k, tiles in enumerate(row.images, 1)
    )


def decode_continuations(row: EncodedExample, tokenizer: Tokenizer) -> str:
    """The text of the shared prefix and of each continuation, with special tokens; what is learned is in [[ ]]."""
    text = _decode([(id, False) for id, segment in zip(row.ids, row.mask) if segment == 1], tokenizer)
    for segment in sorted(set(row.mask) - {1}):
        if segment > 2:
            text += "\n... "
        text += _decode(_continuation(row, segment), tokenizer)
    return text


def _continuation(row: EncodedExample, segment: int) -> Iterator[tuple[int, bool]]:
    """Each id of a continuation, and whether it is learned: an id is input at t and target at the position before."""
    positions = [i for i, value in enumerate(row.mask) if value == segment]
    yield row.ids[positions[0]], False  # follows the shared prefix, which has no targets
    for before, i in pairwise(positions):
        yield row.ids[i], row.targets[before] != IGNORE_INDEX
    yield row.targets[positions[-1]], True


def _decode(tokens: Iterable[tuple[int, bool]], tokenizer: Tokenizer) -> str:
    text = ""
    for (is_image, learned), run in groupby(tokens, lambda token: (token[0] == tokenizer.image_token_id, token[1])):
        ids = [id for id, _ in run]
        if is_image:
            text += f"<|image|> x {len(ids)} "
        else:
            decoded = tokenizer.backend.decode(ids, skip_special_tokens=False)
            text += f"[[{decoded}]]" if learned else decoded
    return text
