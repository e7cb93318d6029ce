"""How far a long run is: a bar on a terminal, a line now and then anywhere else."""

import os
import shutil
import sys
import time

EVERY = 30.0  # seconds between lines where there is no terminal
WIDTH = 20  # of the bar


class Progress:
    """On standard error, `total` things to do; `show` is cheap and may be called after each."""

    def __init__(self, total: int):
        self.total, self.started = total, time.perf_counter()
        self.bar = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.shown = 0.0 if self.bar else self.started

    def show(self, done: int, note: str = "") -> None:
        now = time.perf_counter()
        if sys.stderr is None or (now - self.shown < (0.1 if self.bar else EVERY) and done < self.total):
            return
        self.shown = now
        line = f"{self.line(done, now - self.started)}{f'  {note}' if note else ''}"
        if self.bar:
            full = WIDTH * done // self.total
            line = f"\r[{'#' * full}{'-' * (WIDTH - full)}] {line}"
            columns = shutil.get_terminal_size().columns  # a line that wraps could not be drawn over
            print(f"{line[:columns]}\033[K", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def line(self, done: int, seconds: float) -> str:
        """Done, rate and time left, after so many seconds."""
        rate = done / seconds if seconds else 0.0
        if not rate:
            return f"{done}/{self.total}"
        left = round((self.total - done) / rate)
        clock = (
            f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}" if left >= 3600 else f"{left // 60}:{left % 60:02}"
        )
        return f"{done}/{self.total}  {60 * rate:,.0f} a minute  {clock} left"

    def clear(self) -> None:
        """Make room for a line of another kind; the next `show` draws the bar again."""
        if self.bar:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self.shown = 0.0
