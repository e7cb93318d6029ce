"""Levels of CPU instructions: this project's kernels at any of them, and other engines held to the same one."""

import argparse
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from models.inference.kernels.load import FOR_TESTS, available_levels, chosen_level, load_library

VARIABLE = "NANOVLM_CPU_LEVEL"
PEERS = {  # read once, when oneDNN (in PyTorch and in OpenVINO), MKL and ATen start
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "avx2-vnni": {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "vnni": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
}


def levels_here() -> list[str]:
    """The levels of this CPU, lowest first; empty where there are no kernels or no compiler to build them."""
    levels = [level for level in available_levels() if level not in FOR_TESTS]
    return levels if levels and load_library(levels[-1]) is not None else []


def level_here(text: str) -> str:
    """argparse type: one of `levels_here`."""
    if text not in (levels := levels_here()):
        raise argparse.ArgumentTypeError(f"this CPU has no level {text}; use {', '.join(levels) or 'another one'}")
    return text


def current_level() -> str:
    """The level of an InferenceModel made now; "none" is PyTorch's own operations."""
    level = chosen_level()
    return level if level is not None and load_library(level) is not None else "none"


def at_level(level: str) -> AbstractContextManager[Any]:
    """Make InferenceModels at a level, or with "none" of plain modules."""
    return patch.dict(os.environ, {VARIABLE: level})


def lowering(levels: Sequence[str]) -> dict[str, str]:
    """Environment variables that hold all engines that can be held to the level, if it is one below this CPU's best."""
    if len(levels) > 1 or levels[0] not in PEERS or levels[0] == levels_here()[-1]:
        return {}
    return {VARIABLE: levels[0], **PEERS[levels[0]]}


def peers_note(levels: Sequence[str]) -> str:
    """Which engines a run at these levels held to them."""
    if not lowering(levels):
        return "other engines at their best"
    held = f"PyTorch and oneDNN in OpenVINO held to {levels[0]}"
    return f"{held}, the rest of OpenVINO and llama.cpp at their best"
