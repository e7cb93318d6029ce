"""The steps of `static_cache` as programs of `torch.export`, which can be saved and run without this code."""

import torch
from torch.export import Dim, ExportedProgram, export

from models.kv_study.static_cache import LanguageModelStep, language_model_cache
from models.language_model import LanguageModel

BATCH = Dim("batch", min=1, max=2**20)  # torch 2.6 refuses a dimension without a limit
EXAMPLE_BATCH = 2  # any other but 1, which export would take as a constant


@torch.no_grad()
def export_language_model(decoder: LanguageModel, capacity: int) -> dict[str, ExportedProgram]:
    """Export the LanguageModelSteps `prefill`, of 2 to capacity embeddings, and `decode`, of one id, for any batch."""
    step = LanguageModelStep(decoder).eval()
    cache = language_model_cache(decoder, EXAMPLE_BATCH, capacity)
    mask = torch.ones(EXAMPLE_BATCH, capacity, dtype=torch.long)
    start = torch.tensor(0)
    x = cache[0][0].new_zeros(EXAMPLE_BATCH, 3, decoder.cfg.lm_hidden_dim)
    ids = torch.zeros(EXAMPLE_BATCH, 1, dtype=torch.long)
    batch = {0: BATCH}
    length = Dim("length", min=2, max=capacity)
    kv = [(batch, batch)] * len(cache)
    return {
        "prefill": export(step, (x, mask, start, cache), dynamic_shapes=({0: BATCH, 1: length}, batch, None, kv)),
        "decode": export(step, (ids, mask, start, cache), dynamic_shapes=(batch, batch, None, kv)),
    }
