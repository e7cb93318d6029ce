"""A vision encoder for CPUs: GELU inside the product before it, in bfloat16, and a few patches at a time.

The inner tensor of an MLP is the widest of the encoder. oneDNN applies GELU to a number while it is at hand; torch
writes the tensor, reads it again and writes it again. `python -m eval.pictures` measures what all of it saves.
"""

import torch
from torch import Tensor, nn

from models.attention import needs_grad_or_graph
from models.inference.cpu_kernels import OneDNNLinear
from models.vision_transformer import MLP, VisionTransformer

FEWEST = 16  # patches; fewer have nothing to gain
TOGETHER = 1024  # patches that go through the encoder at once; the tensors of more leave the processor's cache
PLAIN = (nn.Linear, OneDNNLinear)  # whose weights are what they multiply by


def usual(x: Tensor) -> bool:
    """Whether x takes the encoder's own way: on other devices, and where a gradient or a graph is wanted."""
    return x.device.type != "cpu" or needs_grad_or_graph()


class FusedMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        few = x.numel() < FEWEST * x.size(-1)
        if usual(x) or few or x.dtype != torch.bfloat16 or type(self.fc1) not in PLAIN:
            return super().forward(x)
        inner = torch.ops.mkldnn._linear_pointwise(x, self.fc1.weight, self.fc1.bias, "gelu", [], "tanh")
        return self.dropout(self.fc2(inner))


class FusedVisionTransformer(VisionTransformer):
    def forward(self, images: Tensor) -> Tensor:
        if usual(images):
            return super().forward(images)
        few = images.split(max(1, TOGETHER // self.patch_embedding.position_embedding.size(1)))
        return torch.cat([VisionTransformer.forward(self, some) for some in few])


CLASSES = {MLP: FusedMLP, VisionTransformer: FusedVisionTransformer}


def use_fused(model: nn.Module, on: bool = True) -> nn.Module:
    """Make those modules of model the fused ones, or with on=False back; names and weights stay. In place."""
    classes = CLASSES if on else {new: old for old, new in CLASSES.items()}
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        for module in model.modules():
            module.__class__ = classes.get(type(module), type(module))
    return model
