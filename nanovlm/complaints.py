"""What a person reads when something is wrong: one line on standard error."""

import sys


class UsageError(Exception):
    """Wrong use: its one line, and exit code 2."""


def complain(message: str) -> None:
    print(" ".join(message.split("\n")), file=sys.stderr, flush=True)
