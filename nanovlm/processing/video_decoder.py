"""Decode a video file; in a limited process, as decoders are large and read untrusted files.

It starts at once, as it imports no torch.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from PIL import Image
from PIL.Image import Transpose

from models.common import files
from nanovlm.errors import ImageError

LISTED_FPS = 24.0  # of frames without times, as in transformers
SKIPPED_SECONDS = 1  # at both ends of a long video
TIME_ERROR = 0.001  # seconds: containers round times to as much
MAX_FRAME_PIXELS = 16_000_000  # of a video file; 4K has half of them


def sample_times(duration: float, last: float, max_frames: int) -> list[float]:
    """The seconds to show a video's frames at, ascending; its last frame starts at last."""
    n = max(1, min(round(duration), max_frames))
    first = 0.0
    if duration - 2 * SKIPPED_SECONDS > max_frames and min(last, duration - SKIPPED_SECONDS) > SKIPPED_SECONDS:
        first = SKIPPED_SECONDS
        last = min(last, duration - SKIPPED_SECONDS)
    return [first + (last - first) * i / max(1, n - 1) + TIME_ERROR for i in range(n)]


def shown_frames(frames: Iterable[Any], wanted: list[float], fps: float) -> Iterator[tuple[float, Any]]:
    """Yield the frames that a video shows at the wanted seconds, each once, with the second at which it starts."""
    start = current = None
    for i, frame in enumerate(frames):
        now = i / fps if frame.time is None else frame.time
        start = now if start is None else start
        now = now - start if current is None else max(now - start, current[0])  # AVI has times of other frames
        if current is not None and now > wanted[0]:
            yield current
            wanted = [second for second in wanted if second >= now]
            if not wanted:
                return
        current = now, frame
    if current is not None:
        yield current


def spread(first: int, last: int, n: int) -> list[int]:
    """n numbers from first to last at equal distances."""
    step = (last - first) / max(1, n - 1)
    return sorted({int(first + i * step) if i < n - 1 or n == 1 else last for i in range(n)})


def decode(path: str, max_frames: int) -> tuple[dict[str, Any], list[bytes]]:
    """Size, seconds and duration of the frames that are shown, and their RGB pixels; for a limited process."""
    import av

    # Of an open file FFmpeg takes no name for a protocol; the option keeps playlists from opening other files or URLs.
    options: dict[str, Any] = {"options": {"protocol_whitelist": "none"}, "metadata_errors": "replace"}  # Latin-1
    with files.opened(path) as file, av.open(file, "r", **options) as container:
        stream = container.streams.video[0]
        if stream.width * stream.height > MAX_FRAME_PIXELS:
            raise ImageError(f"frames of {stream.width} x {stream.height}, more than {MAX_FRAME_PIXELS:,} pixels")
        fps = float(stream.average_rate or LISTED_FPS)
        lengths = [float(stream.duration * stream.time_base)] if stream.duration and stream.time_base else []
        lengths += [container.duration / av.time_base] if container.duration else []
        packets = [packet for packet in container.demux(stream) if packet.size]
        times = [packet.pts * packet.time_base for packet in packets if packet.pts is not None]
        last = float(max(times) - min(times)) if times else max(0, len(packets) - 1) / fps
        seconds = max([*lengths, last]) or 1 / fps
    shown = []
    with files.opened(path) as file, av.open(file, "r", **options) as container:
        wanted = sample_times(seconds, last, max_frames)
        for second, frame in shown_frames(container.decode(video=0), wanted, fps):
            matrix = frame.side_data.get("DISPLAYMATRIX")
            image = frame.to_image()
            shown.append((second, image if matrix is None else upright(image, struct.unpack("=9i", bytes(matrix)))))
    size = shown[0][1].size
    pixels = [(image if image.size == size else image.resize(size)).tobytes() for _, image in shown]
    return {"size": size, "seconds": [second for second, _ in shown], "duration": seconds}, pixels


def upright(image: Image.Image, matrix: Sequence[int]) -> Image.Image:
    """Turn and mirror a frame by its display matrix, as FFmpeg does: a phone's portrait video is stored sideways."""
    a, b, _, c, d = matrix[:5]  # a point (x, y) is shown at (a x + c y, b x + d y)
    angle = math.degrees(math.atan2(b, a))  # clockwise
    quarter = 90 * round(angle / 90)
    if abs(angle - quarter) >= 1:
        return image.rotate(-angle)
    if a * d < b * c:  # mirrored
        image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
        quarter += 180
    return image.rotate(-quarter, expand=True)
