"""`train --check-data`: encode every example once, count them, and show three as they are learned."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice

from nanovlm.console import count, print_text, progress_bar
from nanovlm.data.examples import IGNORE_INDEX, ExampleError, encode
from nanovlm.data.mixture import MAX_LABELS, source_lines
from nanovlm.data.source import Source
from nanovlm.processing.processor import Processor

MAX_FROM_ENDLESS = 1000  # examples to read of a source that has no end
N_SHOWN = 3


def check_data(train: Sequence[Source], held_out: Sequence[Source], processor: Processor, skip_errors: bool) -> int:
    """Print what was read of each source, what cannot be used and why, and some examples; returns the exit code."""
    errors = [error for source in [*train, *held_out] for error in source.errors]
    for line in source_lines(train, held_out):
        print_text(line)
    shown: list[str] = []
    for source in [*train, *held_out]:
        labels: Counter[str] = Counter()
        lengths = []
        n_tokens = 0
        total = MAX_FROM_ENDLESS if source.endless else len(source)
        with progress_bar(total, "example", source.path, delay=2, leave=False) as bar:
            for example in islice(source.usable(errors), total):
                bar.update()
                try:
                    row = encode(example, processor)
                except ExampleError as error:
                    errors.append(str(error))
                    continue
                lengths.append(len(row.ids))
                n_tokens += sum(target != IGNORE_INDEX for target in row.targets)
                labels.update(example.answers())
                if len(shown) < N_SHOWN and source in train:
                    shown.append(f"\n--- {example.name}: {count(len(row.images), 'image')}, {len(row.ids)} tokens")
                    for turn in chain.from_iterable(example.chats):
                        learned = "learned:" if turn.learned else "not learned:"
                        role = {"user": "asked:  ", "assistant": learned}.get(turn.role, f"{turn.role}: ")
                        shown[-1] += f"\n    {role} {turn.text}"
        role = "held out" if source in held_out else "the first" if source.endless else "trained on"
        print_text(
            f"{source.path}: {role} {count(len(lengths), 'example')}, {count(n_tokens, 'answer token')}; "
            f"the longest takes {max(lengths, default=0)} of {processor.cfg.lm_max_position_embeddings}"
        )
        if len(labels) <= MAX_LABELS and labels.total() > len(labels):
            print_text("  by answer: " + ", ".join(f"{label} {k:,}" for label, k in labels.most_common()))
    if errors:
        errors = list(dict.fromkeys(errors))
        print_text(f"\n{len(errors)} cannot be used{' and will be skipped' if skip_errors else ''}:")
        print_text("".join(f"  {line}\n" for line in errors), end="")
    print_text("\nAs they are learned:")
    for text in shown:
        print_text(text)
    return 1 if errors and not skip_errors else 0
