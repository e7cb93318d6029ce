"""Encoded tiles of images on disk: a tile that was seen before is read instead of encoded, whichever run saw it."""

import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from models.checkpoint import atomic_write

logger = logging.getLogger(__name__)

MAX_BYTES = 2 * 2**30  # of a store; what was used longest ago goes first
DIGEST = 32  # bytes of a SHA-256, before the content of a file


class ImageStore:
    """A folder of encoded tiles (n_embeddings, C), each named by what its pixels and the encoder's weights hash to.

    Processes may share it. A file that is damaged is not believed but written again. Where the folder cannot be
    written, tiles are encoded and one warning says so.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int = MAX_BYTES):
        self.folder, self.max_bytes = Path(folder), max_bytes
        self._bytes_written = self.max_bytes  # so that the first write counts what is there
        self._warned = False

    def encode(self, images: Tensor, encoder: str, encode: Callable[[Tensor], Tensor]) -> Tensor:
        """What `encode` gives for tiles (N, 3, S, S), called for those that are not here; encoder names what it is."""
        paths = [self.folder / f"{_digest(tile, encoder)}.tile" for tile in images]
        found = [_read(path) for path in paths]
        missing = [i for i, embeds in enumerate(found) if embeds is None]
        if missing:
            for i, embeds in zip(missing, encode(images[missing])):
                found[i] = embeds
                self._write(paths[i], embeds)
        return torch.stack([embeds.to(images.device) for embeds in found if embeds is not None])

    def _write(self, path: Path, embeds: Tensor) -> None:
        content = save({"embeds": embeds.contiguous().cpu()})
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(len(content))
            with atomic_write(path) as new:
                new.write_bytes(hashlib.sha256(content).digest() + content)
        except OSError as error:
            if not self._warned:
                logger.warning("%s: %s; images are encoded anew each time", self.folder, error.strerror or error)
            self._warned = True

    def _make_room(self, n_bytes: int) -> None:
        """Remove files, also those that killed processes left, until all fit into nine tenths of max_bytes."""
        self._bytes_written += n_bytes
        if self._bytes_written <= self.max_bytes:
            return
        with os.scandir(self.folder) as entries:
            files = sorted((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in entries)
        total = sum(size for _, size, _ in files)
        for _, size, path in files if total + n_bytes > self.max_bytes else ():
            if total + n_bytes <= 0.9 * self.max_bytes:
                break
            with suppress(FileNotFoundError):  # another process was faster
                os.unlink(path)
            total -= size
        self._bytes_written = total + n_bytes


def encoder_digest(*modules: nn.Module, settings: str = "") -> str:
    """A digest of all weights of an encoder's modules, and of the settings that its results depend on."""
    digest = hashlib.sha256(settings.encode())
    for module in modules:
        for name, tensor in module.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def _digest(tile: Tensor, encoder: str) -> str:
    return hashlib.sha256(f"{encoder} {tile.dtype} {tuple(tile.shape)}".encode() + _bytes(tile)).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _read(path: Path) -> Tensor | None:
    """The embeddings in a file, which is then the one used last; None if there is no such file, or not a whole one."""
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[DIGEST:]).digest() != content[:DIGEST]:
            return None
        os.utime(path)
        return load(content[DIGEST:])["embeds"]
    except (OSError, SafetensorError, KeyError):
        return None
