"""Comparison with transformers' SmolVLM."""

import torch


@torch.no_grad()
def assert_same_logits(model, theirs, ids, images, tolerance=1e-5):
    """Ours on pixels in [0, 1], theirs on [-1, 1]; to a part of the largest logit."""
    ours, _ = model(ids, images)
    pixels = (images * 2 - 1)[None]
    expected = theirs(input_ids=ids, pixel_values=pixels, pixel_attention_mask=torch.ones_like(pixels[:, :, 0])).logits
    assert (ours - expected).abs().max() <= tolerance * ours.abs().max()
