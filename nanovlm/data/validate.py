"""`train --check-data`: read every example once, count them, and show three as the model sees them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice

from nanovlm.console import count, print_text
from nanovlm.data.examples import IGNORE_INDEX, EncodedExample, ExampleError, encode_checked
from nanovlm.data.mixture import Subset
from nanovlm.processing.processor import Processor
from nanovlm.processing.tokenizer import Tokenizer

MAX_FROM_ENDLESS = 1000  # examples to read of a source that has no end
N_SHOWN = 3
PROGRESS_EVERY = 1000  # examples between two progress lines

logger = logging.getLogger(__name__)


@dataclass
class Summary:
    """Counts over a subset, its first examples by name, and the messages of those that cannot be used."""

    examples: int = 0
    images: int = 0
    answer_tokens: int = 0
    longest: int = 0
    errors: list[str] = field(default_factory=list)
    first: list[tuple[str, EncodedExample]] = field(default_factory=list)


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
        examples, images = count(summary.examples, "example"), count(summary.images, "image")
        print_text(
            f"{subset.source.path}{role}: {limit}{examples}, {images}, "
            f"{count(summary.answer_tokens, 'answer token')}; the longest takes {summary.longest} of "
            f"{processor.cfg.lm_max_position_embeddings}"
        )
    errors = [line for summary in summaries for line in summary.errors]
    if errors:
        print_text(f"\n{len(errors)} cannot be used{' and will be skipped' if skip_errors else ''}:")
        print_text("".join(f"  {line}\n" for line in errors), end="")
    print_text("\nAs the model sees them; it is trained on the text in [[ ]]:")
    shown = [summary.first[i] for i in range(N_SHOWN) for summary in summaries if i < len(summary.first)]
    for name, row in shown[:N_SHOWN]:
        print_text(f"\n--- {name}")
        for k, tiles in enumerate(row.images, 1):
            print_text(f"(image {k}: {count(len(tiles), 'tile')} of {tiles.size(-1)} x {tiles.size(-1)})")
        print_text(decode(row, processor.tokenizer))
    return 1 if errors and not skip_errors else 0


def summarize(subset: Subset, processor: Processor) -> Summary:
    """Encode every example of a subset, of an endless one the first MAX_FROM_ENDLESS."""
    summary = Summary()
    limit = MAX_FROM_ENDLESS if subset.source.endless else None
    for n, (name, record) in enumerate(islice(subset, limit), start=1):
        if n % PROGRESS_EVERY == 0:
            logger.info("%s: %s examples read", subset.source.path, f"{n:,}")
        try:
            row = encode_checked(subset.source.make_example(record, name), processor)
        except ExampleError as error:
            summary.errors.append(str(error))
            continue
        summary.examples += 1
        summary.images += len(row.images)
        summary.answer_tokens += sum(target != IGNORE_INDEX for target in row.targets)
        summary.longest = max(summary.longest, len(row.ids))
        if len(summary.first) < N_SHOWN:
            summary.first.append((name, row))
    return summary


def decode(row: EncodedExample, tokenizer: Tokenizer) -> str:
    """The text of the shared prefix and of each continuation, with special tokens; what is learned is in [[ ]]."""
    text, image_token_id = "", tokenizer.image_token_id
    for segment in sorted(set(row.mask)):
        text += "\n... " if segment > 2 else ""
        positions = [i for i, value in enumerate(row.mask) if value == segment]
        # an id is input at a position and the target of the one before; the last answer's last id is a target only
        ids = [*(row.ids[i] for i in positions), row.targets[positions[-1]]]
        learned = [False, *(row.targets[i] != IGNORE_INDEX for i in positions)]
        tokens = [(id, is_learned) for id, is_learned in zip(ids, learned) if id != IGNORE_INDEX]
        for (is_image, is_learned), run in groupby(tokens, lambda token: (token[0] == image_token_id, token[1])):
            run_ids = [id for id, _ in run]
            decoded = tokenizer.backend.decode(run_ids, skip_special_tokens=False)
            text += f"<|image|> x {len(run_ids)} " if is_image else f"[[{decoded}]]" if is_learned else decoded
    return text
