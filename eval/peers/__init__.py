"""Other engines behind one interface, to measure beside ours."""

import importlib
from typing import Any

from nanovlm.errors import MissingExtraError


def import_peer(module: str, name: str) -> Any:
    """A module of the extra peers, for what users call `name`; MissingExtraError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError(f'{name} needs the extra peers: pip install "nanovlm[peers]"') from None
