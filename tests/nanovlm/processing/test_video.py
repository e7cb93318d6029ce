"""Videos: frames, times, text and pixels against transformers' SmolVLM processor; files, animations and folders."""

import json
import math
import struct
import subprocess
import sys
import wave
from bisect import bisect_right
from contextlib import suppress
from fractions import Fraction
from itertools import repeat
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageColor, features

from nanovlm import Captioner
from nanovlm.chat_session import ChatSession
from nanovlm.cli.main import main
from nanovlm.errors import ImageError, MissingExtraError, UsageError
from nanovlm.processing.convert import convert_layout
from nanovlm.processing.video import Video, in_words
from nanovlm.processing.video_decoder import sample_times, upright
from support import Package
from support.generation import prompt_of
from support.smolvlm import write_folder

transformers = Package("transformers")
pytestmark = pytest.mark.usefixtures("in_tmp_path")


def images(n=6, size=(40, 24)):
    frames = [Image.effect_noise(size, 90).convert("RGB") for _ in range(n)]
    for frame, color in zip(frames, ("red", "green", "blue", "white", "black", "yellow")):
        frame.paste(color, (0, 0, 12, 12))
    return frames


def test_frames_are_chosen_and_their_times_written_as_smolvlm2_reads_them():
    cases = [(300, 30, 64), (1980, 30, 64), (2010, 30, 64), (3600, 30, 64)]  # frames, frames a second, at most
    cases += [(15, 10, 64), (25, 25, 64), (7, 3, 64), (99, 7, 4)]
    chosen = []
    for n, fps, at_most in cases:
        starts = [i / fps for i in range(n)]
        wanted = sample_times(n / fps, starts[-1], at_most)
        chosen.append(sorted({bisect_right(starts, second) - 1 for second in wanted}))
    assert [len(one) for one in chosen] == [10, 64, 64, 64, 2, 1, 2, 4]
    assert chosen[0] == [0, 33, 66, 99, 132, 166, 199, 232, 265, 299] and chosen[1][0] == 0
    assert chosen[2][:3] == [30, 60, 91] and chosen[2][-1] == 1980
    assert chosen[3][:4] == [30, 86, 142, 198] and chosen[3][-2:] == [3513, 3570]
    first, second, end = Video(images(2), [0.0, 75.9], 3725.9).texts()
    intro = "You are provided the following series of two frames from a 1:02:05 [H:MM:SS] video.\n"
    assert (first, second, end) == (f"{intro}\nFrame from 00:00:", "\nFrame from 01:15:", "\n\n")
    words = "one, twenty, twenty-one, sixty-four, one hundred and one, three hundred and forty"
    assert ", ".join(map(in_words, (1, 20, 21, 64, 101, 340))) == words


@pytest.mark.full
def test_text_and_pixels_are_those_of_transformers(tmp_path):
    pytest.importorskip("num2words")
    _, processor = write_folder(tmp_path / "model", "SmolVLM")
    sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 16}}
    processor.video_processor = transformers.SmolVLMVideoProcessor(**sizes)
    frames = images()
    pixels = torch.stack([torch.frombuffer(bytearray(f.tobytes()), dtype=torch.uint8).view(24, 40, 3) for f in frames])
    metadata = transformers.video_utils.VideoMetadata(6, fps=2.0, duration=3.0, frames_indices=list(range(6)))
    inputs = processor(
        text="<|im_start|>User: <video>What is this?<end_of_utterance>\nAssistant:",
        videos=[pixels.permute(0, 3, 1, 2)], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt",
    )  # fmt: skip
    ours = Captioner.from_pretrained(tmp_path / "model", "cpu", "float32")
    ids, tiles = prompt_of(ours.processor, [Video(frames, [i / 2 for i in range(6)], 3.0)], "What is this?")
    assert ids == inputs["input_ids"][0].tolist()
    difference = (torch.cat(tiles) - inputs["pixel_values"][0]).abs()
    assert difference.mean() < 0.02 and difference.max() <= 6 / 127.5, "of two roundings of two resizes"


@pytest.fixture
def clip(in_tmp_path):
    """The file a.mp4: three seconds of six colors."""
    frames = [Image.new("RGB", (64, 48), color) for color in ("red", "green", "blue", "white", "black", "yellow")]
    encode("a.mp4", [frame for frame in frames for _ in range(5)], range(0, 300, 10), 10)


@pytest.mark.full
def test_a_video_file_is_read_and_what_cannot_be_read_is_one_line(clip, monkeypatch):
    video = Video.read("a.mp4")
    assert (video.duration, video.seconds) == (3.0, [0.0, 1.4, 2.9]) and video.frames[0].size == (64, 48)
    for frame, color in zip(video.frames, ("red", "blue", "yellow")):
        assert max(abs(a - b) for a, b in zip(frame.getpixel((4, 4)), ImageColor.getrgb(color))) < 60
    Path("bad.mp4").write_bytes(Path("a.mp4").read_bytes()[:300])
    Path("list.mp4").write_text("ffconcat version 1.0\nfile a.mp4\n")  # names another file
    Path("concat:a.mp4").write_text("no video")  # to FFmpeg, the name of a protocol
    encode("empty.avi", [], [], 10)
    with wave.open("sound.mp4", "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(8000))
    words = {"none.mp4": "No such file", "sound.mp4": ".*: it has no pictures$", "empty.avi": ".*: none of its pict"}
    for name in ("bad.mp4", "none.mp4", "list.mp4", "concat:a.mp4", "sound.mp4", "empty.avi"):
        with pytest.raises(ImageError, match=f"^{name}: {words.get(name, 'not a video that can be read')}") as error:
            Video.read(name)
        assert len(str(error.value).splitlines()) == 1 and (name == "list.mp4" or str(error.value).count(name) == 1)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtraError, match=r"nanovlm\[video\]"):
        Video.read("a.mp4")
    program = "import sys, nanovlm.processing.video_decoder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0, "torch takes seconds to import"


COLORS = ("red", "green", "blue", "white")  # of the corners: top left, top right, bottom left, bottom right
MATRICES = {  # signs of a display matrix -> the filters by which FFmpeg's own programs follow it (ffmpeg_filter.c)
    (1, 0, 0, 1): [], (-1, 0, 0, 1): ["hflip"], (1, 0, 0, -1): ["vflip"], (-1, 0, 0, -1): ["hflip", "vflip"],
    (0, 1, -1, 0): ["transpose=clock"], (0, -1, 1, 0): ["transpose=cclock"],
    (0, 1, 1, 0): ["transpose=cclock_flip"], (0, -1, -1, 0): ["transpose=clock_flip"],
}  # fmt: skip


def encode(name, frames, times, rate, codec="mpeg4"):
    """Write a video of pictures, shown at these times, of which a second has so many as rate."""
    av = pytest.importorskip("av")
    with av.open(name, "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.start_encoding()
        for frame, time in zip(frames, times):
            picture = av.VideoFrame.from_image(frame)
            picture.pts, picture.time_base = time, Fraction(1, 10 * rate)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


def corners(image):
    points = [(x, y) for y in (6, image.height - 7) for x in (6, image.width - 7)]
    pixels = [image.getpixel(point) for point in points]
    return [min(COLORS, key=lambda c: sum(abs(a - b) for a, b in zip(p, ImageColor.getrgb(c)))) for p in pixels]


@pytest.mark.full
@pytest.mark.parametrize("signs", MATRICES)
def test_a_turned_and_mirrored_video_is_shown_as_ffmpeg_shows_it(signs):
    av = pytest.importorskip("av")
    picture = Image.new("RGB", (64, 48))
    for color, corner in zip(COLORS, ((0, 0), (32, 0), (0, 24), (32, 24))):
        picture.paste(color, (*corner, corner[0] + 32, corner[1] + 24))
    encode("a.mp4", repeat(picture), (0, 10, 20, 300, 400), 10)
    data = Path("a.mp4").read_bytes()
    a, b, c, d = (65536 * sign for sign in signs)
    upright = struct.pack(">5i", 65536, 0, 0, 0, 65536)
    at = data.index(upright, data.index(b"tkhd"))
    Path("phone.bin").write_bytes(data[:at] + struct.pack(">5i", a, b, 0, c, d) + data[at + len(upright) :])
    video = Video.read("phone.bin")  # known by its content
    graph = av.filter.Graph()
    steps = [graph.add_buffer(width=64, height=48, format="rgb24", time_base=Fraction(1, 10))]
    steps += [graph.add(*text.split("=")) for text in [*MATRICES[signs], "buffersink"]]
    graph.link_nodes(*steps).configure()
    graph.push(av.VideoFrame.from_image(picture))
    expected = graph.pull().to_image()
    assert (video.frames[0].size, corners(video.frames[0])) == (expected.size, corners(expected))
    assert [round(time, 3) for time in video.seconds] == [0, 0.2, 4], "frames have their own times"


def test_a_tilted_video_is_turned_by_its_angle():
    picture = images(1)[0]
    for degrees in (5, 45, 200):
        cos, sin = (round(65536 * f(math.radians(degrees))) for f in (math.cos, math.sin))
        tilted = upright(picture, (cos, sin, 0, -sin, cos, 0, 0, 0, 1))
        assert tilted.tobytes() == picture.rotate(-degrees).tobytes()
    assert upright(picture, (0,) * 9).tobytes() == picture.tobytes(), "a damaged matrix"


RECORDING = [*range(0, 1000, 10), *range(1000, 10_001, 1000)]  # a hundred frames in a second, then one a second
CHOSEN = [  # milliseconds at which frames start, the most frames to take, and the seconds of those that are taken
    (RECORDING, 8, [1, 2, 3, 4, 5, 6, 7, 9]), (RECORDING, 64, [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]),
    ([0, 500, 1000, 20_000], 64, [0, 1, 20]), ([*range(0, 5000, 1000), *range(5000, 6000, 10)], 4, [0, 1, 3, 5.99]),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", ["a.mkv", "a.mp4", "a.webm", "a.avi"])
@pytest.mark.parametrize(("times", "at_most", "seconds"), CHOSEN)
def test_frames_of_a_recording_whose_rate_varies_are_chosen_by_time(name, times, at_most, seconds):
    encode(name, repeat(Image.new("RGB", (64, 48))), times, 100, "libvpx" if name == "a.webm" else "mpeg4")
    video = Video.read(name, at_most)
    assert times[-1] / 1000 <= video.duration <= times[-1] / 1000 + 1
    assert [round(second, 2) for second in video.seconds] == list(seconds)


@pytest.mark.parametrize("name", ["a.gif", "a.png", "a.webp", "a.avif"])
@pytest.mark.parametrize("milliseconds", [[2000] * 5, [100, 1900, 500, 3500, 1000]])
def test_an_animation_has_the_times_of_its_frames(name, milliseconds):
    if name[2:] in ("webp", "avif") and not features.check(name[2:]):
        pytest.skip(f"Pillow without {name[2:]}")
    first, *others = (Image.new("RGB", (64, 48), color) for color in ("red", "green", "blue", "white", "black"))
    first.save(name, save_all=True, append_images=others, duration=milliseconds)
    video = Video.read(name)
    starts = [sum(milliseconds[:i]) / 1000 for i in range(5)]
    assert video.duration == pytest.approx(sum(milliseconds) / 1000)
    assert video.seconds == pytest.approx(starts)


def test_animations_folders_and_lists_are_videos():
    first, *others = images()
    first.save("a.gif", save_all=True, append_images=others, duration=[100, 200, 900, 800, 1000, 1000], loop=0)
    video = Video.read("a.gif")
    assert video.duration == 4.0 and video.seconds == pytest.approx([0.0, 0.3, 2.0, 3.0])
    Path("frames").mkdir()
    for i, frame in enumerate([first, *others]):
        frame.save(f"frames/{i}.png")
    assert [f.tobytes() for f in Video.read("frames").frames] == [f.tobytes() for f in [first, *others]]
    listed = Video.read(["frames/1.png", "frames/5.png"])
    assert listed.seconds == [0, 1 / 24] and listed.frames[1].tobytes() == others[4].tobytes()
    assert len(Video.read("frames", max_frames=3).frames) == 3
    for source, max_frames, words in (("frames", 0, "max_frames=0"), ([], 8, "without frames")):
        with pytest.raises((UsageError, ImageError), match=words):
            Video.read(source, max_frames)
    first.save("program.gif", "EPS")
    with pytest.raises(ImageError, match="EPS files are not read"):
        Video.read("program.gif")
    content = Path("a.gif").read_bytes()
    for length in range(0, len(content), len(content) // 8):
        Path("cut.gif").write_bytes(content[:length])
        with suppress(ImageError):  # or some of the frames
            Video.read("cut.gif")


@pytest.mark.full
@pytest.mark.parametrize("layout", ["nanovlm", "smolvlm"])
def test_captions_and_chats_are_about_videos(clip, layout, embedded):
    captioner = Captioner(*convert_layout(embedded.model, embedded.tokenizer)) if layout == "smolvlm" else embedded
    video, question = Video.read("a.mp4"), "What moves?"
    answer = "".join(ChatSession(captioner, [video]).ask(question, max_new_tokens=9))
    assert answer == captioner.caption_video("a.mp4", question, max_new_tokens=9)
    ids, tiles = prompt_of(captioner.processor, [video], question)
    n_embeddings = len(captioner.model.encode_images(tiles[0])[0])
    assert len(tiles) == 3 and ids.count(captioner.tokenizer.image_token_id) == 3 * n_embeddings
    if layout == "nanovlm":  # the frames are images
        assert captioner.caption(video, max_new_tokens=9) == captioner.caption(list(video.frames), max_new_tokens=9)


def test_the_command_answers_about_a_video(capsys, embedded):
    first, *others = images(3)
    first.save("a.gif", save_all=True, append_images=others, duration=1000)
    for frame, name in zip((first, *others), names := ["b.png", "c.png", "d.png"]):
        frame.save(name)
    flags = ["--device", "cpu", "--dtype", "float32", "--max-new-tokens", "9"]
    assert main(["caption", "a.gif", "--as-video", "--json", "--max-tiles", "2", *flags]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["video"] == "a.gif" and one["finish_reason"] == "length" and "image" not in one
    assert one["text"] == embedded.caption_video("a.gif", max_frames=2, max_new_tokens=9)
    assert one["text"] != embedded.caption_video("a.gif", max_frames=3, max_new_tokens=9)
    questions = ["--prompt", "What?", "--prompt", "Why?", "--json"]
    assert main(["caption", *names, "--as-video", *questions, *flags]) == 0
    rows = list(map(json.loads, capsys.readouterr().out.splitlines()))
    texts = [embedded.caption_video(names, prompt, max_new_tokens=9) for prompt in ("What?", "Why?")]
    assert [(row["video"], row["text"]) for row in rows] == [("b.png", text) for text in texts]
    Path("clips/deep").mkdir(parents=True)
    Path("a.gif").rename("clips/deep/a.gif")
    Path("b.png").rename("clips/b.png")
    table = ["clips", "--as-video", "--max-tiles", "2", "--out", "c.jsonl", "--model", "embedded"]
    assert main(["caption", *table, *flags]) == 0
    (written,) = map(json.loads, Path("c.jsonl").read_text().splitlines())
    assert written["file_name"] == "clips/deep/a.gif" and written["text"] == one["text"]
