"""Images of a request: read, and refused if they exceed the model's context."""

import hashlib
from collections.abc import Sequence

from models.inference.caches import ImageCache, TiledImage
from nanovlm.processing.image_loading import decode_data_url, load_image
from nanovlm.processing.processor import Processor

MAX_PIXELS = 64_000_000  # of an image: the largest that phones save


def prepare_images(
    files: Sequence[bytes | str], details: Sequence[str], processor: Processor, cache: ImageCache | None
) -> list[TiledImage]:
    """Tiles of images, files or data URLs; an image that the cache holds is neither decoded nor encoded again.

    More images than the context holds are refused before they fill the memory.
    """
    images: list[TiledImage] = []
    n_tokens = 0
    for number, (file, detail) in enumerate(zip(files, details), 1):
        name = f"image {number}"
        is_low = detail == "low"
        data = file if isinstance(file, bytes) else decode_data_url(file, name)
        key = is_low, hashlib.blake2b(data, digest_size=16).digest()
        image = None if cache is None else cache.get(key)
        if image is None:
            tiles, grid = processor.preprocess(load_image(data, name, MAX_PIXELS), 1 if is_low else None)
            image = TiledImage(tiles, key, grid)
        images.append(image)
        n_tokens += image.n_tiles * processor.cfg.mp_image_token_length
        what = f"prompt is too long: {len(files)} images, of which the first {number} take {n_tokens} tokens,"
        processor.cfg.validate_length(n_tokens, 1, what, "send fewer")
    return images
