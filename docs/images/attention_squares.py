"""Draw what one more token adds to causal attention: from 5 x 5 to 6 x 6 query-key pairs.

python docs/images/attention_squares.py docs/images/attention_squares.png    # extra: eval
"""

import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

COMPUTED, CACHED, MASKED = "#e07a3f", "#4f7cac", "#eeeeee"


def draw(axes: Axes, n: int, title: str, cached: bool) -> None:
    """One square per query (row) and key (column) of n tokens; with a cache, only the last row is computed."""
    for query in range(n):
        for key in range(n):
            color = MASKED if key > query else CACHED if cached and query < n - 1 else COMPUTED
            axes.add_patch(Rectangle((key, n - 1 - query), 0.94, 0.94, color=color))
    axes.set(xlim=(-0.1, 6.1), ylim=(-0.1, 6.1), title=title, xlabel="keys", ylabel="queries", aspect="equal")
    axes.set_xticks([])
    axes.set_yticks([])


def main(path: str) -> None:
    figure, panels = pyplot.subplots(1, 3, figsize=(9.6, 3.9))
    draw(panels[0], 5, "5 tokens", cached=False)
    draw(panels[1], 6, "the 6th without a cache", cached=False)
    draw(panels[2], 6, "the 6th with a cache", cached=True)
    legend = {"computed in this step": COMPUTED, "not needed again": CACHED, "masked: later tokens": MASKED}
    figure.legend(
        handles=[Patch(color=color, label=text) for text, color in legend.items()], loc="lower center", ncols=3
    )
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(sys.argv[1])
