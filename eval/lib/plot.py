"""The results of eval.speedup as one figure: measured times above, theoretical operations below."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from eval.lib.cache_timing import StudyResult


def draw(results: Sequence[StudyResult], environment: str, path: Path) -> None:
    """Write path as PNG: a column per model, both axes logarithmic."""
    figure = Figure(figsize=(6.4 * len(results), 8), dpi=100, layout="constrained")
    axes = figure.subplots(2, len(results), squeeze=False)
    for (above, below), result in zip(axes.T, results):
        for i, curve in enumerate(result.curves):
            linestyle = "-" if i == 0 else "--" if i % 2 else ":"
            style = {"color": f"C{i}", "marker": ".", "linestyle": linestyle}
            above.errorbar(
                result.lengths,
                [ms / 1000 for ms in curve.total_ms],
                [ms / 1000 for ms in curve.spread_ms],
                label=f"{curve.design}: $n^{{{curve.exponent:.2f}}}$",
                capsize=2,
                **style,
            )
            if i < 2:  # in theory, all cache designs cost the same
                name = "with any cache" if i else curve.design
                gflops = [value / 1e9 for value in curve.flops]
                below.plot(result.lengths, gflops, label=f"{name}: $n^{{{curve.flops_exponent:.2f}}}$", **style)
        above.set(title=result.model, ylabel="seconds, from pixels to the last token")
        below.set(ylabel="theory: GFLOP of the language model", xlabel="new tokens n")
        for axis in (above, below):
            axis.set(xscale="log", yscale="log")
            axis.set_xticks(result.lengths, map(str, result.lengths))
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.legend(title="grows in the end as", fontsize="small", title_fontsize="small")
    figure.suptitle(environment, fontsize="small")
    figure.savefig(path, format="png")
