"""The process that decodes a video file, with limits on time and memory: decoders are large and read untrusted files.

It starts at once, as it imports no torch.
"""

import json
import sys

from models import files
from nanovlm.errors import MissingExtraError

LISTED_FPS = 24.0  # of frames without times, as in transformers
SKIPPED_SECONDS = 1  # at both ends of a long video
DECODING_SECONDS = 120  # limits of the process that decodes
DECODING_BYTES = 4 * 2**30
MAX_FRAME_PIXELS = 16_000_000  # of a video file; 4K has half of them


def sample_frames(n_frames: int, fps: float, max_frames: int) -> list[int]:
    """The numbers of the frames to show, ascending, of n_frames at fps a second."""
    duration = n_frames / fps
    wanted = max(1, min(round(duration), max_frames))
    first = 0
    last = n_frames - 1
    if duration - 2 * SKIPPED_SECONDS > max_frames:
        first = max(0, int(SKIPPED_SECONDS * fps))
        last = min(n_frames - 1, int(n_frames - SKIPPED_SECONDS * fps))
        if first >= last:
            first = 0
            last = n_frames - 1
    return spread(first, last, wanted)


def spread(first: int, last: int, n: int) -> list[int]:
    """n numbers from first to last at equal distances."""
    step = (last - first) / max(1, n - 1)
    return sorted({int(first + i * step) if i < n - 1 or n == 1 else last for i in range(n)})


def main(path: str, max_frames: int) -> None:
    """Write a line of JSON, then the RGB pixels of the frames that are shown, to standard output."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (DECODING_BYTES, DECODING_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (DECODING_SECONDS, DECODING_SECONDS))
    except ImportError:  # Windows
        pass
    try:
        import av
    except ImportError:
        sys.exit(MissingExtraError.exit_code)
    # Of an open file FFmpeg takes no name for a protocol; the option keeps playlists from opening other files or URLs.
    options = {"protocol_whitelist": "none"}
    with files.opened(path) as file, av.open(file, "r", options=options) as container:
        stream = container.streams.video[0]
        if stream.width * stream.height > MAX_FRAME_PIXELS:
            sys.exit(f"ImageError: frames of {stream.width} x {stream.height}, more than {MAX_FRAME_PIXELS:,} pixels")
        fps = float(stream.average_rate or LISTED_FPS)
        lengths = [float(stream.duration * stream.time_base)] if stream.duration and stream.time_base else []
        lengths += [container.duration / av.time_base] if container.duration else []
        times = [packet.pts * packet.time_base for packet in container.demux(stream) if packet.pts is not None]
        n_frames = stream.frames or len(times)
        lengths += [float(max(times) - min(times))] if times else []  # a screen recording's rate varies
        seconds = max(lengths, default=n_frames / fps)
        if seconds > 0:
            fps = n_frames / seconds
    kept = set(sample_frames(n_frames, fps, max_frames))
    shown = []
    start = None
    with files.opened(path) as file, av.open(file, "r", options=options) as container:
        for i, frame in enumerate(container.decode(video=0)):
            now = i / fps if frame.time is None else frame.time
            start = now if start is None else start
            if i in kept:
                image = frame.to_image()
                if turn := frame.rotation:  # of the display matrix: a phone's portrait video is stored sideways
                    image = image.rotate(turn, expand=True)
                shown.append((now - start, image))
            if i >= max(kept):
                break
    size = shown[0][1].size
    header = {"size": size, "seconds": [second for second, _ in shown], "duration": seconds}
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n")
    for _, image in shown:
        sys.stdout.buffer.write((image if image.size == size else image.resize(size)).tobytes())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
