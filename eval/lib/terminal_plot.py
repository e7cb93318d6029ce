"""The measured curves of eval.speedup, drawn with characters; needs plotext (the extra plot)."""

from eval.lib.cache_timing import StudyResult
from nanovlm.errors import MissingExtraError

WIDTH, HEIGHT = 90, 24  # characters


def draw_in_terminal(result: StudyResult) -> str:
    """One model's milliseconds against new tokens, both axes logarithmic, as lines of text without colors."""
    try:
        import plotext as plt
    except ImportError:
        raise MissingExtraError('--plot needs plotext: pip install "nanovlm[plot]"') from None
    plt.clear_figure()
    plt.theme("clear")
    plt.plotsize(WIDTH, HEIGHT)
    plt.title(f"{result.model}: ms from pixels to the last token")
    plt.xscale("log")
    plt.yscale("log")
    plt.xticks(result.lengths, [str(n) for n in result.lengths])
    for curve, marker in zip(result.curves, "ox+*#%&@"):
        plt.plot(result.lengths, curve.total_ms, label=curve.design, marker=marker)
    plt.xlabel("new tokens")
    return "\n".join(line.rstrip() for line in plt.uncolorize(plt.build()).splitlines())
