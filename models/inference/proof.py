"""Prove, whenever a model is loaded, that the kernels compute what its modules do, and use the modules where not.

An edit of the core's files, a replaced module, a hook or an overridden method then counts in every answer.
"""

import copy
import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from models.errors import NanoVLMError
from models.inference.kernel_network import KernelNetwork, NoKernels
from models.vision_language_model import VisionLanguageModel

logger = logging.getLogger(__name__)

# The largest root mean square difference, over the standard deviation: float32 rounds; bfloat16 modules round every
# activation to 8 bits. The kernels round those of int8 and int4 weights to 8 bits, by the largest of a token: random
# tokens in the first and last block of SmolLM2-135M then differ by 0.16, and wrong weights by 1 or more.
FLOAT_TOLERANCE = 1e-4
BFLOAT_TOLERANCE = 0.1
QUANTIZED_TOLERANCE = 0.5
N_TOKENS = 5  # of the tried prompt; of the vocabulary
MAX_ROWS = 256


def proven_network(model: VisionLanguageModel, source: VisionLanguageModel) -> KernelNetwork | None:
    """The kernels for a model, or None where they are not available or do not compute what its modules do.

    source is the model before quantization: its modules in float32 show the formulas without rounding.
    """
    try:
        network = KernelNetwork(model)
        reason = _why_not(model, source)
    except NoKernels:
        return None
    except NanoVLMError:
        raise
    except Exception as error:  # of a module of another kind: whatever it is, it is no kernel
        reason = f"they cannot be compared ({type(error).__name__}: {error})"
    if not reason:
        return network
    logger.warning("the model's modules are used instead of the faster kernels: %s", reason)
    return None


def _why_not(model: VisionLanguageModel, source: VisionLanguageModel) -> str:
    """Why the kernels do not compute what the model's modules do; "" if they do."""
    if any(module._forward_hooks or module._forward_pre_hooks for module in source.modules()):
        return "a module has hooks, which the kernels do not call"
    for part in ("vision_encoder", "decoder"):
        first, *others = (_make(block) for block in getattr(model, part).blocks)
        for i, other in enumerate(others, 1):
            if other != first:
                return f"{part}.blocks.{i} is not made as the first block"
    trials = [(copy.deepcopy(_excerpt(source)).float(), FLOAT_TOLERANCE)]
    if model is not source or model.dtype != torch.float32:
        trials.append((_excerpt(model), BFLOAT_TOLERANCE if model is source else QUANTIZED_TOLERANCE))
    for tried, tolerance in trials:
        if (error := _largest_difference(tried)) > tolerance:
            return f"they differ by {error:.2g} of the outputs' standard deviation, more than {tolerance:g}"
    return ""


def _make(block: nn.Module) -> list[tuple]:
    """Types, numbers, own functions and shapes of the modules in a block."""
    return [
        (
            name,
            type(module),
            sorted((key, value) for key, value in vars(module).items() if type(value) in (int, float, str)),
            [value for value in vars(module).values() if callable(value) and not isinstance(value, nn.Module)],
            {key: None if p is None else p.shape for key, p in module._parameters.items()},
        )
        for name, module in block.named_modules()
    ]


def _excerpt(model: VisionLanguageModel) -> VisionLanguageModel:
    """The model's first and last blocks, few words and small images, with its own modules and weights."""
    cfg = model.cfg
    encoder = model.vision_encoder
    decoder = model.decoder
    side = min(2 * cfg.mp_pixel_shuffle_factor, cfg.vit_grid)
    n_rows = min(MAX_ROWS, cfg.lm_vocab_size) if type(decoder.head) is nn.Linear else cfg.lm_vocab_size
    small = replace(
        cfg, max_img_size=None, vit_img_size=side * cfg.vit_patch_size, vit_n_blocks=min(2, cfg.vit_n_blocks),
        mp_image_token_length=(side // cfg.mp_pixel_shuffle_factor) ** 2, lm_n_blocks=min(2, cfg.lm_n_blocks),
        lm_vocab_size=n_rows, lm_max_position_embeddings=4 * N_TOKENS,
    )  # fmt: skip
    embedding = decoder.token_embedding
    head = decoder.head
    if n_rows < cfg.lm_vocab_size:
        embedding, head = (_copy(x, weight=_part(x.weight[:n_rows])) for x in (embedding, head))
    patches = _copy(encoder.patch_embedding)
    if patches.position_ids is None:
        patches.position_embedding = _part(patches.position_embedding[:, : side**2])
    else:
        patches.position_ids = patches.position_ids[: side**2]
    encoder = _copy(encoder, patch_embedding=patches, blocks=_first_and_last(encoder.blocks))
    blocks = _first_and_last(decoder.blocks)
    decoder = _copy(decoder, cfg=small, token_embedding=embedding, head=head, blocks=blocks)
    return _copy(model, cfg=small, image_token_id=-1, vision_encoder=encoder, decoder=decoder)


def _part(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter, requires_grad=False)


def _first_and_last(blocks: Any) -> nn.ModuleList:
    return nn.ModuleList([blocks[i] for i in sorted({0, len(blocks) - 1})])


def _copy(module: Any, **changes: Any) -> Any:
    """A module of the same class, parameters and children, but for some attributes."""
    new = copy.copy(module)
    new._parameters = dict(module._parameters)
    new._modules = dict(module._modules)
    for name, value in changes.items():
        setattr(new, name, value)
    return new


@torch.no_grad()
def _largest_difference(model: VisionLanguageModel) -> float:
    """The largest difference between modules and kernels: of an image, a prompt, a padded one, and one more token."""
    kernels = KernelNetwork(model)
    cfg = model.cfg
    on_cpu: Any = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}
    image = torch.rand(1, 3, cfg.vit_img_size, cfg.vit_img_size, dtype=torch.float32, **on_cpu)
    ids = torch.randint(cfg.lm_vocab_size, (2, N_TOKENS), **on_cpu)
    mask = torch.ones_like(ids)
    mask[1, 0] = 0
    pairs = [(model.encode_images(image), kernels.encode_images(image))]
    for rows, attention_mask in ((ids[:1], None), (ids, mask)):
        pairs += zip(*(_two_steps(network, rows, attention_mask) for network in (model, kernels)))
    return max(_difference(ours, theirs) for ours, theirs in pairs)


def _two_steps(network: Any, ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Logits after ids but for the last, and after the last, with the keys and values of the first ones."""
    start = None if mask is None else mask[:, :-1]
    logits, prefix = network.prefill_embeds(network.embed_tokens(ids[:, :-1]), start, None)
    return [logits, network.prefill_embeds(network.embed_tokens(ids[:, -1:]), None, prefix)[0]]


def _difference(expected: Tensor, actual: Tensor) -> float:
    """The root mean square difference over the standard deviation of what is expected; infinite for other shapes."""
    if expected.shape != actual.shape:
        return float("inf")
    expected = expected.float()
    actual = actual.float()
    error = (expected - actual).square().mean().sqrt() / expected.std().clamp_min(1e-12)
    return float("inf") if error.isnan() else error.item()
