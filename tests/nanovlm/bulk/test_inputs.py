"""Finding the images that names, folders, patterns and lists refer to."""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from nanovlm.bulk.inputs import find_images, read_names
from nanovlm.processing.image_loading import readable_extensions
from support.cli import IMAGE_NAMES

pytestmark = pytest.mark.usefixtures("image_folder")


def test_folders_and_patterns_give_their_images_once():
    Path("link").symlink_to("images")
    images = find_images(["images/d.gif", "images", "images/../images/a.png", "images/*.png", "link", "link/a.png"])
    assert images.paths[0] == "images/d.gif" and images.missing == []
    assert find_images(list(map(Path, ["images/d.gif", "images/*.png"]))).paths[0] == "images/d.gif"
    assert sorted(images.paths) == sorted(f"images/{name}" for name in IMAGE_NAMES)


def test_a_pattern_may_match_folders_and_ignores_other_files():
    assert sorted(find_images(["images/**"]).paths) == sorted(f"images/{name}" for name in IMAGE_NAMES)
    assert find_images(["images/de*"]).paths == [f"images/{name}" for name in sorted(IMAGE_NAMES) if "deep" in name]


def test_images_that_cannot_be_read_are_counted(without_heif, monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    readable_extensions.cache_clear()
    for name in ("a.heic", "deep/B.HEIC", "c.svg", "d.nef", "e.txt", "f.pdf"):
        Path("images", name).touch()
    try:
        for names in (["images"], ["images/*", "images/deep/*"]):
            images = find_images(names)
            assert set(images.paths) == {f"images/{name}" for name in IMAGE_NAMES} and not images.missing
            assert images.left_out >= Counter({".heic": 2, ".svg": 1, ".nef": 1}) and len(images.left_out) == 3
    finally:
        readable_extensions.cache_clear()


def test_a_file_with_a_glob_character_in_its_name_is_a_file():
    Path("[1].png").write_bytes(Path("good.png").read_bytes())
    images = find_images(["[1].png", "[2].png", "gone.png"])
    assert images.paths == ["[1].png", "gone.png"], "reading the last gives the reason"
    assert images.missing == [("[2].png", "a pattern that matches no image")]


@pytest.mark.parametrize(
    ("content", "first"),
    [
        (b"\xff.png\r\n  \r\nb c.png", b"\xff.png"),  # not Unicode
        (b"a.png\0b c.png\0", b"a.png"),
        (b"\xef\xbb\xbfa.png\nb c.png", b"a.png"),
        ("a.png\r\nb c.png\r\n".encode("utf-16"), b"a.png"),
    ],
)
def test_lists_hold_a_name_per_line_or_zero_byte(content, first):
    Path("names").write_bytes(content)
    assert [os.fsencode(name) for name in read_names("names")] == [first, b"b c.png"]
