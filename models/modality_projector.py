"""The modality projector: from image patches to embeddings of the language model, by pixel shuffle and a Linear."""

from torch import Tensor, nn

from models.common.errors import InputError
from models.config import VLMConfig


def pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    """Merge each factor x factor square of patches into one: (N, P*P, C) -> (N, (P/factor)^2, C*factor^2).

    The channel order is Idefics3's (Laurencon et al. 2024), as in the checkpoints.
    """
    N, patches, C = x.shape
    side = round(patches**0.5)
    if side * side != patches or side % factor:
        raise InputError(f"{patches} patches are not a square whose side is a multiple of {factor}")
    x = x.view(N, side // factor, factor, side // factor, factor, C).transpose(2, 3)
    return x.reshape(N, (side // factor) ** 2, C * factor**2)


class ModalityProjector(nn.Module):
    def __init__(self, cfg: VLMConfig):
        super().__init__()
        self.factor = cfg.mp_pixel_shuffle_factor
        self.proj = nn.Linear(cfg.vit_hidden_dim * self.factor**2, cfg.lm_hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Patches (N, vit_grid^2, vit_hidden_dim) -> embeddings (N, mp_image_token_length, lm_hidden_dim)."""
        return self.proj(pixel_shuffle(x, self.factor))
