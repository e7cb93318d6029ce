"""Videos as frames with times: video files by PyAV, animated GIF and WebP by Pillow, folders and lists of images.

Frames are chosen as by transformers' SmolVLMVideoProcessor (version 5): one a second, without the first and last second
of a long video, at most max_frames. Video files are decoded by a limited process, see `video_decoder`.
"""

import importlib.util
import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageSequence

from models.common.files import check_regular
from nanovlm.errors import ImageError, MissingExtraError, UsageError
from nanovlm.processing import MAX_FRAMES, VIDEO_EXTENSIONS, video_decoder
from nanovlm.processing.image_loading import (
    load_image,
    open_file,
    open_image,
    prepare_pillow,
    readable_extensions,
    reason,
)
from nanovlm.processing.limited_process import LimitedError, LimitedProcess
from nanovlm.processing.video_decoder import LISTED_FPS, MAX_FRAME_PIXELS, sample_times, spread

DECODING_SECONDS = 120  # of CPU
DECODING_BYTES = 4 * 2**30  # of address space
MAX_ANIMATION_FRAMES = 10_000
ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


@dataclass(frozen=True)
class Video:
    """RGB frames, the second that each is shown at, and the duration of the whole in seconds."""

    frames: Sequence[Image.Image]
    seconds: Sequence[float]
    duration: float

    @classmethod
    def read(
        cls, source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], max_frames: int = MAX_FRAMES
    ) -> "Video":
        """Frames of a video file, an animated image, a folder of images, or a list of images, which all are taken.

        Raises ImageError for a file that cannot be read, MissingExtraError without PyAV (extra: video), and UsageError
        for a max_frames below 1.
        """
        if max_frames < 1:
            raise UsageError(f"max_frames={max_frames} is less than 1")
        if not isinstance(source, (str, os.PathLike)):
            return cls._of_images(source, max_frames)
        path = Path(source)
        if path.is_dir():
            names = sorted(name for name in path.iterdir() if name.suffix.lower() in readable_extensions())
            return cls._of_images(names, max_frames)
        if path.suffix.lower() in VIDEO_EXTENSIONS:
            return _decode(path, max_frames)
        prepare_pillow()
        try:
            return _read_animation(path, max_frames)
        except Exception as error:  # decoders raise anything
            with suppress(ImageError, MissingExtraError):
                return _decode(path, max_frames)  # a video by its content, whatever its name
            raise (error if isinstance(error, ImageError) else ImageError(f"{path}: {reason(error)}")) from error

    def texts(self) -> list[str]:
        """The text before each frame, and the one after the last, as in SmolVLM2's training (smollm, transformers)."""
        hours, rest = divmod(int(self.duration), 3600)
        duration = f"{hours}:{rest // 60:02}:{rest % 60:02}"
        n = in_words(len(self.frames))
        intro = f"You are provided the following series of {n} frames from a {duration} [H:MM:SS] video.\n"
        labels = [f"\nFrame from {int(second) // 60:02}:{int(second) % 60:02}:" for second in self.seconds]
        return [intro + labels[0], *labels[1:], "\n\n"]

    @classmethod
    def _of_images(cls, names: Sequence[str | os.PathLike[str]], max_frames: int) -> "Video":
        if not names:
            raise ImageError("a video without frames; name images, or a folder of them")
        kept = spread(0, len(names) - 1, min(len(names), max_frames))
        return cls([load_image(names[i]) for i in kept], [i / LISTED_FPS for i in kept], len(names) / LISTED_FPS)


def _read_animation(path: Path, max_frames: int) -> Video:
    """An animated GIF or WebP; the times are those of its frames."""
    with open_file(path) as file, open_image(file) as image:
        n = getattr(image, "n_frames", 1)
        if n > MAX_ANIMATION_FRAMES:
            raise ImageError(f"{path}: {n:,} frames, more than {MAX_ANIMATION_FRAMES:,}; cut it")
        if image.width * image.height > MAX_FRAME_PIXELS:
            raise ImageError(f"{path}: frames of {image.width} x {image.height}, more than {MAX_FRAME_PIXELS:,} pixels")
        starts = []
        frames = []
        now = 0.0
        for frame in ImageSequence.Iterator(image):
            starts.append(now)
            frame.load()  # before it, WebP and AVIF do not tell how long a frame is shown
            now += (frame.info.get("duration") or 1000 / LISTED_FPS) / 1000
        wanted = sample_times(now, starts[-1], max_frames)
        kept = sorted({bisect_right(starts, second) - 1 for second in wanted})
        for i in kept:
            image.seek(i)
            frames.append(load_image(image.copy(), name=str(path)))
    return Video(frames, [starts[i] for i in kept], now)


def _decode(path: Path, max_frames: int) -> Video:
    """The frames of a video file, decoded by another process."""
    try:
        check_regular(path)
        if importlib.util.find_spec("av") is None:
            raise MissingExtraError("videos are read by PyAV: pip install 'nanovlm[video]'")
        with closing(LimitedProcess(f"{video_decoder.__name__}:decode", DECODING_SECONDS, DECODING_BYTES)) as process:
            found, data = process.call(os.fspath(path), max_frames)
    except LimitedError as error:
        raise ImageError(f"{path}: not a video that can be read: {error}") from None
    except OSError as error:
        raise ImageError(f"{path}: {reason(error)}") from None
    size = tuple(found["size"])
    n_bytes = 3 * math.prod(size)
    pixels = memoryview(data)
    frames = [Image.frombytes("RGB", size, pixels[at : at + n_bytes]) for at in range(0, len(data), n_bytes)]
    return Video(frames, found["seconds"], found["duration"])


def in_words(n: int) -> str:
    """A number from 0 to 999 in English."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + (f"-{ONES[n % 10]}" if n % 10 else "")
    return f"{ONES[n // 100]} hundred" + (f" and {in_words(n % 100)}" if n % 100 else "")
