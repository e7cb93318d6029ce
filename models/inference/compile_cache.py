"""The folder of compiled code, and names for what code was compiled from."""

import hashlib
import os
from pathlib import Path


def cache_folder() -> Path:
    """$NANOVLM_CACHE, or nanovlm in $XDG_CACHE_HOME or ~/.cache."""
    given = os.environ.get("NANOVLM_CACHE")
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nanovlm"))


def digest(value: object) -> str:
    """Twelve hexadecimal digits that differ for values of another repr."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]
