"""The studies of eval.speedup as one picture: what was measured above, what theory counts below."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from eval.lib.cache_timing import StudyResult


def draw(studies: Sequence[StudyResult], environment: str, path: Path) -> None:
    """Write path as PNG: a column per study, time over operations, both axes logarithmic."""
    figure = Figure(figsize=(6.4 * len(studies), 8), dpi=100, layout="constrained")
    axes = figure.subplots(2, len(studies), squeeze=False)
    for (above, below), time_designs in zip(axes.T, studies):
        for i, curve in enumerate(time_designs.curves):
            style = {"color": f"C{i}", "marker": ".", "linestyle": "-" if i == 0 else "--" if i % 2 else ":"}
            above.errorbar(
                time_designs.lengths,
                [ms / 1000 for ms in curve.total_ms],
                [ms / 1000 for ms in curve.spread_ms],
                label=f"{curve.design}: $n^{{{curve.exponent:.2f}}}$",
                capsize=2,
                **style,
            )
            if i < 2:  # theory knows two: reading everything again, and reading each token once
                name = "with any cache" if i else curve.design
                operations = [value / 1e9 for value in curve.flops]
                below.plot(
                    time_designs.lengths, operations, label=f"{name}: $n^{{{curve.flops_exponent:.2f}}}$", **style
                )
        above.set(title=time_designs.model, ylabel="seconds, from pixels to the last token")
        below.set(ylabel="theory: GFLOP of the language model", xlabel="new tokens n")
        for axis in (above, below):
            axis.set(xscale="log", yscale="log")
            axis.set_xticks(time_designs.lengths, map(str, time_designs.lengths))
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.legend(title="grows in the end as", fontsize="small", title_fontsize="small")
    figure.suptitle(environment, fontsize="small")
    figure.savefig(path, format="png")
