"""webdataset tars, whole, incomplete and cut."""

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from support.data import OPTIONS, check_refused, llava, png, read_all, write_tar

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def test_samples_of_several_shards():
    Path("shards").mkdir()
    chat = json.dumps(llava("<image><image>Same?", "No.")).encode()
    write_tar(
        "shards/0.tar", {"0.png": png(1), "0.txt": b" one \n", "1.0.png": png(2), "1.1.png": png(3), "1.json": chat}
    )
    write_tar("shards/1.tar", {"x/0.json": b'{"caption": "four"}', "x/0.cls": b"9", "x/0.PNG": png(4)})
    expected = [
        ("shards/0.tar/0", [1], [("What?", "one")], False),
        ("shards/0.tar/1", [2, 3], [("Same?", "No.")], False),
        ("shards/1.tar/x/0", [4], [("What?", "four")], False),
    ]
    assert read_all("shards") == expected
    assert read_all("shards/0.tar") == expected[:2]


def test_incomplete_or_cut_tars_are_refused():
    write_tar("a.tar", {"0.png": png(1), "1.png": png(2), "1.txt": b"one", "2.txt": b"two"})
    check_refused("a.tar", "1 of 2 samples", ": 0;", "--on-error skip")
    assert [example[0] for example in read_all("a.tar", replace(OPTIONS, skip_errors=True))] == ["a.tar/1"]
    write_tar("b.tar", {"0.txt": b"two"})
    check_refused("b.tar", "no images found")
    write_tar("c.tar", {"0.png": png(1), "0.txt": b"two"}, "w:gz")
    check_refused("c.tar", "c.tar is no tar that can be read at any position")
    files = {f"{i}.{kind}": png(i) if kind == "png" else b"?" for i in range(9) for kind in ("png", "txt")}
    write_tar("whole.tar", files)
    whole = Path("whole.tar").read_bytes()
    with tarfile.open("whole.tar") as tar:
        ends = [info.offset_data + -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE for info in tar]
    for end in (ends[3], ends[3] + 300, ends[3] + 512 - 1):  # between two files, and within the second's header
        Path("cut.tar").write_bytes(whole[:end])
        check_refused("cut.tar", "cut.tar is cut after 4 files; download it again", "--on-error skip")
        assert [example[0] for example in read_all("cut.tar", replace(OPTIONS, skip_errors=True))] == [
            "cut.tar/0",
            "cut.tar/1",
        ]
    Path("cut.tar").write_bytes(whole[: ends[4] - 512])
    check_refused("cut.tar", "cut.tar is no tar that can be read", "download it again")
    write_tar("d.tar", {"0.png": png(1), "0.json": b"{"})
    check_refused("d.tar", "d.tar/0: its text cannot be read")
