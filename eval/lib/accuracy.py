"""How far an engine's numbers are from float32's."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eval.peers.engines import Engine, ImageEngine
from eval.peers.llama_cpp_engine import LlamaCppEngine

MAX_FLOAT32_ERROR = 1e-3


def relative_error(values: Tensor, reference: Tensor) -> float:
    """Root mean square difference over the reference's standard deviation."""
    values, reference = values.float(), reference.float()
    return float((values - reference).square().mean().sqrt() / reference.std())


def stage_errors(
    engines: Sequence[Engine], reference: ImageEngine, prompts: list[list[int]], image: Tensor, stages: Sequence[str]
) -> dict[tuple[str, str], float]:
    """Errors by stage and engine: of embeddings for encode, without llama.cpp's, and of logits for prefill."""
    errors = {}
    if "encode" in stages:
        embeddings = reference.encode_image(image)
        for engine in engines:
            if isinstance(engine, ImageEngine) and not isinstance(engine, LlamaCppEngine):  # which resizes the image
                errors["encode", engine.name] = relative_error(engine.encode_image(image), embeddings)
    if "prefill" in stages:
        reference.prefill(prompts)
        logits = reference.logits.clone()
        for engine in engines:
            engine.prefill(prompts)
            errors["prefill", engine.name] = relative_error(engine.logits, logits)
    return errors


def inexact_engines(engines: Sequence[Engine], errors: dict[tuple[str, str], float]) -> list[str]:
    """A line for each engine in float32 whose error is more than rounding."""
    exact = {engine.name for engine in engines if engine.dtype == torch.float32 and engine.weight_bytes == 4}
    return [
        f"{name}: {stage} is {error:.1e} off the plain model, more than {MAX_FLOAT32_ERROR:g}"
        for (stage, name), error in errors.items()
        if name in exact and not error <= MAX_FLOAT32_ERROR  # NaN fails, too
    ]
