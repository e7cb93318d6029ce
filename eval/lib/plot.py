"""The generations of eval.speedup as one figure (extra eval)."""

from collections.abc import Sequence
from pathlib import Path

from eval.lib.cache_study import Study


def draw(studies: Sequence[Study], environment: str, path: Path) -> None:
    """Write path as PNG: a column per model, measured times above counted operations, all axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(studies), 8), dpi=100, layout="constrained")
    axes = figure.subplots(2, len(studies), squeeze=False)
    for (above, below), study in zip(axes.T, studies):
        lengths = study.sizes.lengths
        for i, row in enumerate(study.rows):
            style = {"color": f"C{i}", "marker": ".", "linestyle": "-" if i == 0 else "--" if i % 2 else ":"}
            seconds, spread = ([ms / 1000 for ms in values] for values in (row.total_ms, row.spread_ms))
            label = f"{row.design}: $n^{{{row.exponent:.2f}}}$"
            above.errorbar(lengths, seconds, spread, label=label, capsize=2, **style)
            if i < 2:  # almost all cache designs compute the same
                label = f"{'with a cache' if i else row.design}: $n^{{{row.flops_exponent:.2f}}}$"
                below.plot(lengths, [value / 1e9 for value in row.flops], label=label, **style)
        above.set(title=study.model, ylabel="seconds, from pixels to the last token")
        below.set(ylabel="GFLOP, as PyTorch counts them", xlabel="new tokens n")
        for axis in (above, below):
            axis.set(xscale="log", yscale="log")
            axis.set_xticks(lengths, map(str, lengths))
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.legend(title="grows in the end as", fontsize="small", title_fontsize="small")
    figure.suptitle(environment, fontsize="small")
    figure.savefig(path, format="png")
