"""nanovlm: images and text in, text out.

>>> from nanovlm import Captioner
>>> captioner = Captioner.from_pretrained()
>>> captioner.caption("image.png")
"""

import os
import sys

if (
    sys.argv[:1] == ["-m"]
    and not sys.flags.safe_path
    and not os.path.samefile(sys.path[0] or ".", os.path.dirname(os.path.dirname(__file__)))
):
    sys.path.pop(0)  # the current folder: `python -m nanovlm` imports no json.py or torch.py that lies beside images

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from nanovlm.embedded import EMBEDDED, PROMPT, SAMPLE

if TYPE_CHECKING:
    from models.common.options import SamplingParams
    from nanovlm.captioner import Captioner
    from nanovlm.chat_session import ChatSession
    from nanovlm.processing.processor import Processor

__version__ = "0.1.0"
__all__ = [
    "EMBEDDED", "PROMPT", "SAMPLE", "Captioner", "ChatSession", "GenerationOptions", "ModelOptions", "Processor",
    "SamplingParams",
]  # fmt: skip


def _check_models_package() -> None:
    """Raise ImportError if Python would import another package named `models`, such as one in the working directory."""
    spec = importlib.util.find_spec("models")
    expected = Path(__file__).resolve().parent.parent / "models"
    found = "no package" if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()))
    if Path(found).resolve().parent != expected:
        raise ImportError(
            f"nanovlm needs its own package `models` in {expected}, but `import models` finds {found}; "
            "run from another directory, or put nanovlm's folder first in PYTHONPATH"
        )


_check_models_package()

from models import imported_on_use  # noqa: E402 (of the package that was checked)

__getattr__ = imported_on_use(
    __name__,
    {
        "Captioner": "nanovlm.captioner",
        "ChatSession": "nanovlm.chat_session",
        "GenerationOptions": "nanovlm.options",
        "ModelOptions": "nanovlm.options",
        "Processor": "nanovlm.processing.processor",
        "SamplingParams": "models.common.options",
    },
)
