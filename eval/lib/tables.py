"""Text tables."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], gap: int = 2) -> str:
    """Rows of cells as lines: first column to the left, others to the right, each as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = "".join(f"{'':{gap}}{cell:>{width}}" for cell, width in zip(others, widths[1:]))
        lines.append(f"{first:{widths[0]}}{cells}".rstrip())
    return "\n".join(lines)
