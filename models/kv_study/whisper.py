"""Whisper (Radford et al. 2022): its audio encoder, before the decoder of encoder_decoder.py.

Parameter names are those of openai/whisper's model.py, whose checkpoints load unchanged. Audio needs no cache of its
own: the encoder runs once, and its keys and values for cross-attention are computed once per recording.
"""

import math
import os
import pickle
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from models.common.errors import CheckpointError, InputError
from models.kv_study.cross_attention import EncoderBlock, HookedKV
from models.kv_study.encoder_decoder import Seq2SeqModel
from models.kv_study.hook_cache import store_projections
from models.kv_study.log_mel import HOP_LENGTH, log_mel
from models.kv_study.text_decoder import TextDecoder

DIMENSIONS = (
    "n_mels", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer",
    "n_vocab", "n_text_ctx", "n_text_state", "n_text_head", "n_text_layer",
)  # fmt: skip


class AudioEncoder(nn.Module):
    """Two convolutions, of which the second halves the frames, sinusoidal positions, and blocks."""

    positional_embedding: Tensor

    def __init__(self, n_mels: int, n_ctx: int, n_state: int, n_head: int, n_layer: int):
        super().__init__()
        self.conv1 = nn.Conv1d(n_mels, n_state, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(n_state, n_state, kernel_size=3, stride=2, padding=1)
        self.register_buffer("positional_embedding", sinusoids(n_ctx, n_state))
        self.blocks = nn.ModuleList(EncoderBlock(n_state, n_head) for _ in range(n_layer))
        self.ln_post = nn.LayerNorm(n_state)

    def forward(self, mel: Tensor) -> Tensor:
        """Encode mel (N, n_mels, 2 * n_ctx): (N, n_ctx, n_state). InputError for another number of frames."""
        n_mels = self.conv1.in_channels
        n_frames = 2 * len(self.positional_embedding)
        if mel.dim() != 3 or mel.shape[1:] != (n_mels, n_frames):
            raise InputError(f"mel has shape {tuple(mel.shape)}, not (N, {n_mels}, {n_frames}); `log_mel` makes it")
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).transpose(1, 2) + self.positional_embedding
        for block in self.blocks:
            x = block(x)
        return self.ln_post(x)


class Whisper(Seq2SeqModel):
    """Whisper of the sizes in `dims`, a checkpoint's dictionary; its inputs are mel spectrograms."""

    def __init__(self, dims: dict[str, int]):
        super().__init__()
        self.dims = dims
        sizes = [dims[name] for name in DIMENSIONS]
        self.encoder = AudioEncoder(*sizes[:5])
        self.decoder = TextDecoder(*sizes[5:])

    def encode(self, inputs: Tensor) -> Tensor:
        """Encode mel spectrograms (N, n_mels, 2 * n_audio_ctx): (N, n_audio_ctx, n_state)."""
        return self.encoder(inputs.type_as(self.decoder.ln.weight))

    def log_mel(self, audio: Tensor) -> Tensor:
        """Spectrogram for `encode` of audio (N, samples), cut or filled with silence to the model's 30 seconds."""
        n_samples = 2 * self.dims["n_audio_ctx"] * HOP_LENGTH
        audio = F.pad(audio[..., :n_samples], (0, max(0, n_samples - audio.size(-1))))
        return log_mel(audio, self.dims["n_mels"])

    def install_kv_cache_hooks(
        self, cache: HookedKV | None = None
    ) -> tuple[dict[nn.Module, Tensor], list[RemovableHandle]]:
        """openai-whisper's method: a cache, for `decoder(ids, xa, kv_cache=cache)`, and the handles of its hooks.

        Its decoding.PyTorchInference drives this model by it. `hook_cache.install_kv_cache_hooks` checks its use.
        """
        kept = dict(cache or {})
        return kept, store_projections(self.decoder, lambda: kept)


def load_whisper(folder_or_file: str | os.PathLike[str]) -> Whisper:
    """Load a checkpoint of openai-whisper, such as tiny.pt, or the only one in a folder, in float32 and eval mode.

    Raises CheckpointError if the file is not a Whisper checkpoint.
    """
    path = Path(folder_or_file)
    files = sorted(path.glob("*.pt")) if path.is_dir() else [path]
    if len(files) != 1:
        raise CheckpointError(f"{path} holds {len(files)} .pt files; name the checkpoint's file")
    try:
        checkpoint = torch.load(files[0], map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{files[0]} cannot be read as a Whisper checkpoint: {error}") from None
    try:
        model = Whisper(checkpoint["dims"])
        model.load_state_dict(checkpoint["model_state_dict"])
    except (TypeError, KeyError, RuntimeError) as error:  # RuntimeError: names or shapes differ
        raise CheckpointError(f"{files[0]} is no checkpoint of openai-whisper: {repr(error)[:200]}") from None
    return model.eval()


def sinusoids(length: int, channels: int) -> Tensor:
    """Positional embeddings (length, channels): sines of `channels / 2` frequencies, then their cosines."""
    rates = torch.exp(-math.log(10_000) / (channels // 2 - 1) * torch.arange(channels // 2))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
