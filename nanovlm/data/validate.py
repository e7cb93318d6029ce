"""`train --check-data`: all examples read once, counted, and three of them shown as the model sees them."""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice, pairwise

from nanovlm.console import print_error
from nanovlm.data import Subset
from nanovlm.data.examples import IGNORE_INDEX, EncodedExample, ExampleError, encode_checked
from nanovlm.processor import Processor
from nanovlm.tokenizer import Tokenizer

FROM_ENDLESS = 1000  # examples of a source that has no end, or none that anybody would wait for
SHOWN = 3


def check_data(learned: Sequence[Subset], held: Sequence[Subset], processor: Processor, skip: bool) -> int:
    """Print what the examples are and which cannot be used; 1 if some cannot and are not to be skipped."""
    bad, shown = [], []
    for part in [*learned, *held]:
        examples = pictures = answers = longest = 0
        kept = []
        for example, row in _read(part, processor, bad):
            examples += 1
            pictures += len(example.pictures)
            answers += sum(target != IGNORE_INDEX for target in row.targets)
            longest = max(longest, len(row.ids))
            if len(kept) < SHOWN:
                kept.append((example.name, row))
        shown.append(kept)
        side, most = ", held out" * (part in held), "the first " * part.source.endless
        print(
            f"{part.source.path}{side}: {most}{examples:,} examples, {pictures:,} pictures, {answers:,} answer tokens; "
            f"the longest takes {longest} of {processor.cfg.lm_max_position_embeddings}"
        )
    if bad:
        print(f"\n{len(bad)} cannot be used{' and will be skipped' * skip}:")
        print("".join(f"  {line}\n" for line in bad), end="")
    print("\nAs the model sees them; it learns to say what stands in [[ ]]:")
    turns = [kept[i] for i in range(SHOWN) for kept in shown if i < len(kept)]  # each source before any second
    for name, row in turns[:SHOWN]:
        print(f"\n--- {name}\n{pictured(row)}{spelled(row, processor.tokenizer)}")
    return 1 if bad and not skip else 0


def _read(part: Subset, processor: Processor, bad: list[str]) -> Iterator:
    for n, (name, record) in enumerate(islice(part, FROM_ENDLESS if part.source.endless else None), 1):
        if n % 1000 == 0:
            print_error(f"{part.source.path}: {n:,} read")
        try:
            example = part.source.example(record, name)
            yield example, encode_checked(example, processor)
        except ExampleError as error:
            bad.append(str(error))


def pictured(row: EncodedExample) -> str:
    """A line for each picture: how many images it became."""
    return "".join(
        f"(picture {k}: {len(tiles)} image{'s' * (len(tiles) > 1)} of {tiles.size(-1)} x {tiles.size(-1)})\n"
        for k, tiles in enumerate(row.images, 1)
    )


def spelled(row: EncodedExample, tokenizer: Tokenizer) -> str:
    """What each branch reads after the trunk, special tokens and all; what it is to say stands in [[ ]]."""
    text = _written([(id, False) for id, seen in zip(row.ids, row.mask) if seen == 1], tokenizer)
    for branch in sorted(set(row.mask) - {1}):
        inside = [i for i, seen in enumerate(row.mask) if seen == branch]
        tokens = [(row.ids[inside[0]], False)]  # the first follows the trunk, which asks for nothing
        tokens += [(row.ids[i], row.targets[before] != IGNORE_INDEX) for before, i in pairwise(inside)]
        tokens.append((row.targets[inside[-1]], True))
        text += "\n... " * (branch > 2) + _written(tokens, tokenizer)
    return text


def _written(tokens: Sequence[tuple[int, bool]], tokenizer: Tokenizer) -> str:
    text = ""
    for (is_image, said), run in groupby(tokens, lambda token: (token[0] == tokenizer.image_token_id, token[1])):
        ids = [id for id, _ in run]
        if is_image:
            text += f"<|image|> x {len(ids)} "
        else:
            words = tokenizer.backend.decode(ids, skip_special_tokens=False)
            text += f"[[{words}]]" if said else words
    return text
