"""The vision-language model: vision encoder, projector and language model on one sequence of embeddings."""

from os import PathLike
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models import checkpoint
from models.cache import PrefillState
from models.common import files
from models.common.errors import CheckpointError, InputError
from models.config import VLMConfig
from models.decoding import GenerationMixin
from models.language_model import LanguageModel
from models.modality_projector import ModalityProjector
from models.vision_transformer import PatchEmbedding, VisionTransformer

IGNORE_INDEX = -100  # a target without a loss


class VisionLanguageModel(nn.Module, GenerationMixin):
    """nanoVLM: a SigLIP encoder, a pixel-shuffle projector and a Llama decoder; `GenerationMixin` adds generation.

    image_token_id marks the positions of images in a prompt; -1 where the vocabulary has no token for them.
    """

    def __init__(self, cfg: VLMConfig, image_token_id: int):
        super().__init__()
        if cfg.lm_use_tokens:
            raise InputError("lm_use_tokens=true makes the decoder read ids; with images it must read embeddings")
        if not -1 <= image_token_id < cfg.lm_vocab_size:
            raise InputError(f"image_token_id={image_token_id} is outside lm_vocab_size={cfg.lm_vocab_size}")
        self.cfg = cfg
        self.image_token_id = image_token_id
        self.tokenizer_json: str | None = None  # the text of tokenizer.json, for save_pretrained
        self.vision_encoder = VisionTransformer(cfg)
        self.MP = ModalityProjector(cfg)
        self.decoder = LanguageModel(cfg)
        if self.device.type != "meta":  # there is nothing to initialize there, and torch would import its compiler
            self.apply(init_weights)
            nn.init.normal_(self.decoder.head.weight, std=0.02)  # like the embedding, which it may be

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | PathLike[str],
        *,
        revision: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> "VisionLanguageModel":
        """Load a folder or a Hub id (owner/name, at a branch, tag or commit), in eval mode.

        Weights stored in dtype, a floating-point one, stay memory-mapped on a CPU. Raises CheckpointError, and
        InputError for another dtype.
        """
        if not getattr(dtype, "is_floating_point", False):
            raise InputError(f"dtype={dtype!r} is no floating-point dtype of torch; pass torch.float32, for example")
        folder = checkpoint.snapshot_path(name_or_folder, revision)
        cfg = checkpoint.load_config(folder)
        model = load_model(folder, cfg, checkpoint.find_image_token_id(folder, cfg), dtype, device)
        path = folder / checkpoint.TOKENIZER
        model.tokenizer_json = checkpoint.read_model_text(path) if path.exists() else None
        return model

    def save_pretrained(
        self, folder: str | PathLike[str], *, tokenizer: str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Write config.json, model.safetensors and tokenizer atomically, as `from_pretrained` and nanoVLM load them.

        tokenizer is the text of a tokenizer.json, by default the one that the model was loaded with, if any. dtype is
        that of the stored weights, by default the model's. InputError if the folder is a file or lies below one.
        """
        checkpoint.save_checkpoint(folder, self, tokenizer or self.tokenizer_json, dtype)

    def push_to_hub(
        self, repo_id: str, *, private: bool = False, revision: str | None = None, token: str | None = None
    ) -> str:
        """Upload what `save_pretrained` writes to the Hub repository owner/name; returns the commit's URL."""
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        with files.scratch_folder() as folder:
            checkpoint.write_checkpoint_files(folder, self, self.tokenizer_json, home=repo_id)
            return api.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message="Upload model", revision=revision
            ).commit_url

    @property
    def device(self) -> torch.device:
        return self.decoder.token_embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.token_embedding.weight.dtype  # a linear layer may be quantized

    def encode_images(self, images: Tensor) -> Tensor:
        """Embeddings (N, L, C) of images (N, 3, S, S), L for each."""
        return self.MP(self.vision_encoder(images.to(self.dtype)))

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """Embeddings (B, T, C) of ids (B, T), an image token's id being an ordinary one."""
        return self.decoder.token_embedding(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        images: Tensor | None = None,
        attention_mask: Tensor | None = None,
        targets: Tensor | None = None,
        targets_only: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (B, T, vocabulary) and, with targets, their mean cross-entropy; for training, without a cache.

        targets (B, T) holds at each position the id that should follow; -100 is ignored. targets_only computes the
        logits (n, vocabulary) of the n positions that have a target, and no others; the loss is the same.
        """
        hidden, _ = self.decoder(self.embed(input_ids, images), attention_mask, use_cache=False)
        if targets is None:
            return self.decoder.head(hidden), None
        if targets_only:
            has_target = targets != IGNORE_INDEX
            hidden = hidden[has_target]
            targets = targets[has_target]
        logits = self.decoder.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE_INDEX)
        return logits, loss

    def prefill_embeds(
        self, embeds: Tensor, attention_mask: Tensor | None = None, prefix: PrefillState | None = None
    ) -> tuple[Tensor, PrefillState]:
        """`prefill` of embeddings (B, T, C); attention_mask (B, T) covers these alone."""
        kv_cache, start_pos = (None, 0) if prefix is None else (prefix.kv_cache, prefix.length)
        mask = self.join_masks(embeds, attention_mask, prefix)
        hidden, kv_cache = self.decoder(embeds, mask, kv_cache, start_pos)
        return self.decoder.head(hidden[:, -1]), PrefillState(kv_cache, mask)

    def join_masks(self, embeds: Tensor, attention_mask: Tensor | None, prefix: PrefillState | None) -> Tensor | None:
        """The mask (B, T_past + T) over a prefix and embeds (B, T, C), from the prefix's and that of embeds (B, T).

        None if neither has one. InputError unless the shapes fit, and T is at least 1.
        """
        width = self.cfg.lm_hidden_dim
        shape = tuple(embeds.shape)
        if embeds.ndim != 3 or not embeds.size(1) or embeds.size(2) != width:
            raise InputError(f"embeddings have the shape {shape}, not (B, T, {width}) of at least one new token")
        past, start_pos = (None, 0) if prefix is None else (prefix.attention_mask, prefix.length)
        masks = ("attention_mask", attention_mask, shape[:2]), ("the prefix's mask", past, (shape[0], start_pos))
        for name, mask, wanted in masks:
            if mask is not None and tuple(mask.shape) != wanted:
                raise InputError(f"{name} has the shape {tuple(mask.shape)}, not {wanted}")
        if past is None and attention_mask is None:
            return None
        ones = torch.ones(1, 1, dtype=torch.long, device=embeds.device)
        parts = ((past, start_pos), (attention_mask, embeds.size(1)))
        return torch.cat([ones.expand(len(embeds), n) if part is None else part for part, n in parts], dim=1)


def load_model(
    folder: str | PathLike[str],
    cfg: VLMConfig,
    image_token_id: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> VisionLanguageModel:
    """The model in a local folder, in eval mode; for callers that have read its config and tokenizer already."""
    path = Path(folder) / checkpoint.CONFIG
    checkpoint.format_of(cfg).check_image_token_id(image_token_id, Path(folder))
    try:
        model = empty_model(cfg, image_token_id)
    except InputError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except RuntimeError:  # more bytes than 64 bits can count
        names = "vit_hidden_dim vit_inter_dim vit_patch_size lm_hidden_dim lm_inter_dim lm_vocab_size"
        sizes = ", ".join(f"{name}={getattr(cfg, name)}" for name in names.split())
        raise CheckpointError(f"{path}: a model of {sizes} is larger than any memory; correct the sizes") from None
    state = checkpoint.read_weights(folder, cfg, model.state_dict(), dtype=dtype, device=device)
    model.load_state_dict(state, assign=True)
    model.decoder.tie_weights()
    return model.eval()


def empty_model(cfg: VLMConfig, image_token_id: int) -> VisionLanguageModel:
    """A model on the meta device, without memory for weights, to load a state dict into."""
    with torch.device("meta"), _SkipInit():
        return VisionLanguageModel(cfg, image_token_id)


class _SkipInit(TorchFunctionMode):
    """Leaves weights of new modules uninitialized; on the meta device torch would import its compiler to draw them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def init_weights(module: nn.Module) -> None:
    """Embeddings N(0, 0.02), matrices N(0, 1/fan_in) (LeCun et al. 1998), biases 0.

    nanoVLM's 0.02 for every matrix suits widths near 2,500. At a width of 192 so little of the image passes the
    projector that training spends its first hundreds of steps on text alone.
    """
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, PatchEmbedding):  # pixels in [0, 1] act as if they were in [-1, 1]
        weight = module.conv.weight
        nn.init.normal_(weight, std=2 * weight[0].numel() ** -0.5)
        assert module.conv.bias is not None  # PatchEmbedding makes one
        module.conv.bias.copy_(-0.5 * weight.sum((1, 2, 3)))
        nn.init.normal_(module.position_embedding, std=0.5)
