"""nanovlm: images and text in, text out.

>>> from nanovlm import Captioner
>>> captioner = Captioner.from_pretrained()
>>> captioner.caption("picture.png")
"""

import importlib
from typing import TYPE_CHECKING, Any

from nanovlm.embedded import EMBEDDED, PROMPT, SAMPLE

if TYPE_CHECKING:
    from models.decoding import SamplingParams
    from nanovlm.captioner import Captioner
    from nanovlm.chat_session import ChatSession
    from nanovlm.processor import Processor

__version__ = "0.1.0"
__all__ = ["EMBEDDED", "PROMPT", "SAMPLE", "Captioner", "ChatSession", "Processor", "SamplingParams"]

_LAZY = {  # imported on first use: importing torch takes seconds, which `nanovlm --help` should not
    "Captioner": "nanovlm.captioner",
    "ChatSession": "nanovlm.chat_session",
    "Processor": "nanovlm.processor",
    "SamplingParams": "models.decoding",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
