"""Whisper's log-mel spectrogram (Radford et al. 2022), as openai/whisper's audio.py computes it."""

import math
from functools import lru_cache

import torch
from torch import Tensor

SAMPLE_RATE = 16_000  # Hz
N_FFT = 400  # samples in a window of 25 ms
HOP_LENGTH = 160  # samples from window to window, 10 ms


def log_mel(audio: Tensor, n_mels: int = 80) -> Tensor:
    """Log-mel spectrogram of audio (..., samples), float32 at SAMPLE_RATE: (..., n_mels, samples // HOP_LENGTH)."""
    window = torch.hann_window(N_FFT, device=audio.device)
    power = torch.stft(audio, N_FFT, HOP_LENGTH, window=window, return_complex=True)[..., :-1].abs() ** 2
    log = (mel_filters(n_mels).to(audio.device) @ power).clamp(min=1e-10).log10()
    return (torch.maximum(log, log.amax((-2, -1), keepdim=True) - 8) + 4) / 4


@lru_cache
def mel_filters(n_mels: int) -> Tensor:
    """Triangular filters (n_mels, N_FFT // 2 + 1) of equal area, equally spaced on Slaney's scale, as in librosa."""
    bins = torch.linspace(0, SAMPLE_RATE / 2, N_FFT // 2 + 1, dtype=torch.float64)
    step = math.log(6.4) / 27  # the scale is linear to 1000 Hz, mel 15, and logarithmic beyond
    mels = torch.linspace(0, 15 + math.log(SAMPLE_RATE / 2 / 1000) / step, n_mels + 2, dtype=torch.float64)
    hertz = torch.where(mels < 15, mels * 200 / 3, 1000 * torch.exp(step * (mels - 15)))
    distance = bins - hertz[:, None]
    width = hertz.diff()[:, None]
    rising = distance[:-2] / width[:-1]
    falling = -distance[2:] / width[1:]
    return (torch.minimum(rising, falling).clamp(min=0) * 2 / (hertz[2:] - hertz[:-2])[:, None]).float()
