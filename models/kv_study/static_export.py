"""The steps of `static_cache` as programs of `torch.export`, which can be saved and run without this code."""

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from models.kv_study.cross_attention import KVPair
from models.kv_study.static_cache import LanguageModelStep, TextDecoderStep, static_cache
from models.kv_study.text_decoder import TextDecoder
from models.language_model import LanguageModel

Programs = dict[str, ExportedProgram]
BATCH = Dim("batch", min=1, max=2**20)  # torch 2.6 refuses a dimension without a limit
EXAMPLE_BATCH = 2  # any other but 1, which export would take as a constant


class CrossProjection(nn.Module):
    """The part of a prefill that depends only on the images: encoded images to each block's keys and values."""

    def __init__(self, decoder: TextDecoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, xa: Tensor) -> list[KVPair]:
        return self.decoder.project_cross_kv(xa)


@torch.no_grad()
def export_language_model(decoder: LanguageModel, capacity: int) -> Programs:
    """Export the LanguageModelSteps `prefill`, of 2 to capacity embeddings, and `decode`, of one id, for any batch."""
    step = LanguageModelStep(decoder).eval()
    cache = static_cache(decoder, EXAMPLE_BATCH, capacity)
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


@torch.no_grad()
def export_text_decoder(decoder: TextDecoder, capacity: int) -> Programs:
    """Export `cross`, a CrossProjection, and TextDecoderSteps: `prefill`, of 2 to capacity ids, and `decode`, of one.

    All take any batch, one sequence per image, and any number of patches.
    """
    step = TextDecoderStep(decoder).eval()
    cache = static_cache(decoder, EXAMPLE_BATCH, capacity)
    xa = cache[0][0].new_zeros(EXAMPLE_BATCH, 5, decoder.positional_embedding.size(1))
    cross_kv = decoder.project_cross_kv(xa)
    start = torch.tensor(0)
    prompt, ids = (torch.zeros(EXAMPLE_BATCH, n, dtype=torch.long) for n in (3, 1))
    batch = {0: BATCH}
    length = Dim("length", min=2, max=capacity)
    patches = Dim("patches", min=1)
    kv = [(batch, batch)] * len(cache)
    cross = [({0: BATCH, 2: patches},) * 2] * len(cache)
    prefill = ({0: BATCH, 1: length}, None, cross, kv)
    return {
        "cross": export(CrossProjection(decoder).eval(), (xa,), dynamic_shapes=({0: BATCH, 1: patches},)),
        "prefill": export(step, (prompt, start, cross_kv, cache), dynamic_shapes=prefill),
        "decode": export(step, (ids, start, cross_kv, cache), dynamic_shapes=(batch, None, cross, kv)),
    }
