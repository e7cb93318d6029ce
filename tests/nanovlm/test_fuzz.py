"""Ten thousand damaged files: each is an image or an ImageError, by load_image and in a folder.

    python tests/nanovlm/test_fuzz.py 0 10000    # by number; the last line names the last file opened

A number always gives the same file. Files are opened in another process, which a decoder may crash or hang.
"""

import io
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from random import Random

import pytest
from PIL import Image

from nanovlm import Captioner
from nanovlm.data.detect import open_source
from nanovlm.errors import CheckpointError, DataError, ImageError
from nanovlm.options import ReadOptions
from nanovlm.processing.image_loading import load_image
from support import ROOT, noise_image

pytestmark = pytest.mark.usefixtures("workdir")

KINDS = {  # suffix -> mode and options of Pillow's save
    "png": [("RGB", {}), ("RGBA", {}), ("P", {}), ("I;16", {}), ("1", {}), ("LA", {"optimize": True})],
    "jpg": [("RGB", {}), ("L", {}), ("CMYK", {}), ("RGB", {"progressive": True}), ("RGB", {"exif": 6})],
    "webp": [("RGB", {}), ("RGBA", {"lossless": True}), ("RGB", {"animated": True}), ("RGB", {"exif": 6})],
    "gif": [("P", {}), ("L", {"interlace": 1}), ("RGB", {"animated": True}), ("P", {"transparency": 3})],
    "tiff": [("RGB", {"compression": c}) for c in (None, "tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")]
    + [("1", {"compression": "group4"}), ("I;16", {}), ("F", {}), ("CMYK", {})],
    "bmp": [("RGB", {}), ("P", {}), ("1", {}), ("RGBA", {})],
}
FORMATS = {"jpg": "jpeg"}
BOUNDARY_BYTES = [0, 1, 0x7F, 0x80, 0xFF]  # bytes on which lengths and counts turn


@cache
def valid_file(kind: str, which: int) -> bytes:
    """A valid file."""
    mode, options = KINDS[kind][which]
    image, options, file = noise_image(23 + 7 * which, 31, which), dict(options), io.BytesIO()
    if mode == "I;16":
        image = image.convert("I").point(lambda v: v * 257).convert("I;16")
    elif mode == "LA":
        image = image.convert("L").convert("LA")
    else:
        image = image.convert(mode)
    if options.pop("animated", False):
        options |= {"save_all": True, "append_images": [noise_image(*image.size, seed) for seed in (8, 9)]}
    if "exif" in options:
        exif = Image.Exif()
        exif[0x0112] = options["exif"]
        options["exif"] = exif
    image.save(file, FORMATS.get(kind, kind), **options)
    return file.getvalue()


def damaged_file(number: int) -> tuple[str, bytes]:
    """Suffix and bytes of a damaged file; every twentieth is left valid."""
    rng = Random(f"fuzz {number}")
    kind = list(KINDS)[number % len(KINDS)]
    data = bytearray(valid_file(kind, rng.randrange(len(KINDS[kind]))))
    for _ in range(rng.choice((1, 1, 2, 4, 16)) if number % 20 else 0):
        # half of the damage is where the headers are
        at = rng.randrange(min(len(data), 80) if rng.random() < 0.5 else len(data))
        length = rng.choice((1, 2, 4, 8, 64))
        match rng.randrange(7):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + length] = bytes([rng.choice(BOUNDARY_BYTES)]) * len(data[at : at + length])
            case 2:
                data[at : at + length] = rng.randbytes(len(data[at : at + length]))
            case 3:
                del data[at : at + length]
            case 4:
                data[at:at] = data[at : at + length] * rng.choice((1, 3))
            case 5:
                del data[max(at, 8) :]
            case 6:
                other = valid_file(kind, rng.randrange(len(KINDS[kind])))
                data[at:] = other[min(at, len(other) - 1) :]
        data = data or bytearray(b"\0")
    return kind, bytes(data)


def open_files(start: int, stop: int) -> None:
    """Open the files, printing each number before and each outcome after."""
    for number in range(start, stop):
        print(number, end=" ", flush=True)
        try:
            image = load_image(damaged_file(number)[1])
        except ImageError as error:
            assert len(str(error).splitlines()) == 1
            print("refused", flush=True)
        else:
            assert image.mode == "RGB" and image.getpixel((0, 0))
            print("opened", flush=True)


def outcomes(start: int, stop: int, timeout: float) -> list[str]:
    run = [sys.executable, __file__, str(start), str(stop)]
    try:
        done = subprocess.run(
            run,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"hangs, or takes too long, at {(error.stdout or b'').splitlines()[-1]}")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"ended by {done.returncode} at {lines[-1]}: {done.stderr[-500:]}"
    return [line.split()[1] for line in lines]


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, 60),
        pytest.param(60, 400, marks=pytest.mark.full),
        *(pytest.param(n, n + 2000, marks=pytest.mark.slow) for n in range(0, 10_000, 2000)),
    ],
)
def test_damaged_file_is_an_image_or_an_image_error(start, stop):
    found = outcomes(start, stop, timeout=60 + (stop - start) / 10)
    assert len(found) == stop - start
    assert set(found) == {"opened", "refused"} and found.count("refused") > len(found) / 5
    assert all(found[n] == "opened" for n in range(stop - start) if (start + n) % 20 == 0), "the valid files"


@pytest.mark.parametrize("n", [30, pytest.param(600, marks=pytest.mark.slow)])
def test_folder_of_damaged_files_is_captioned_except_unreadable_ones(generate, workdir, n):
    refused = set()
    Path("fuzz").mkdir()
    for number in range(n):
        kind, data = damaged_file(number)
        Path("fuzz", name := f"{number}.{kind}").write_bytes(data)
        try:
            load_image(data)
        except ImageError:
            refused.add(name)
    code, _, err = generate("fuzz")
    failed = [json.loads(line)["file_name"] for line in Path("fuzz/failures.jsonl").read_text().splitlines()]
    assert code == 1 and set(failed) == refused and len(failed) == len(refused) > 0
    assert {path.stem for path in Path("fuzz").glob("*.txt")} == {str(i) for i in range(n)} - {
        name.split(".")[0] for name in refused
    }
    assert err.splitlines()[-1].startswith(f"{n - len(refused)} captioned")


if __name__ == "__main__":
    open_files(int(sys.argv[1]), int(sys.argv[2]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["config", "tokenizer", "header", "template", "image", "json", "jsonl", "csv", "tar", "requests"]
)
def test_two_minutes_of_fuzzing_find_nothing(name):
    pytest.importorskip("atheris")
    command = [sys.executable, "-m", "tests.fuzz", name, "--minutes", "2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
    assert run.returncode == 0 and "Done " in run.stderr, run.stdout + run.stderr[-3000:]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decoder": {"type": "Strip", "content": " ", "start": 2**64 - 5, "stop": 0}}, "tokenizer.json"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "?"}}, "tokenizer.json"),
    ],
)
def test_a_tokenizer_on_which_the_library_fails_is_one_line(model_folder, tmp_path, change, words):
    """Found by fuzzing: a panic, which is no Exception, and a bare Exception."""
    shutil.copytree(model_folder, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=words):
        Captioner.from_pretrained(tmp_path / "model")


def test_half_a_character_and_a_long_name_are_one_line(model_folder, tmp_path):
    """Found by fuzzing: what no file can hold, and a name that no file can have."""
    shutil.copytree(model_folder, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"vlm_extra_tokens": {"image_token": "\ud800"}}))
    with pytest.raises(CheckpointError, match="config.json cannot be read: .*surrogates"):
        Captioner.from_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text(json.dumps({"image": "x" * 5000, "text": "A."}))
    with pytest.raises(DataError, match="names the image xxx.* --images FOLDER"):
        open_source(str(tmp_path / "data.jsonl"), ReadOptions())
