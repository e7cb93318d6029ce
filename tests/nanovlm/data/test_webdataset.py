"""webdataset tars, whole, incomplete and cut."""

import functools
import http.server
import json
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from nanovlm.data import Mixture, Subset, open_source
from nanovlm.data.source import Part
from nanovlm.errors import TrainingError
from nanovlm.training.loader import load_batches
from support.data import OPTIONS, check_refused, llava, png, read_all, write_tar

pytestmark = pytest.mark.usefixtures("in_tmp_path")
STREAMED = replace(OPTIONS, stream=True)


EXAMPLES = {
    "008.tar/0": ([1], [("What?", "one")], False),
    "008.tar/1": ([2, 3], [("Same?", "No.")], False),
    "009.tar/x/0": ([4], [("What?", "four")], False),
}


def write_shards():
    """008.tar and 009.tar, in the folder shards; the second has a sample without an image."""
    Path("shards").mkdir()
    chat = json.dumps(llava("<image><image>Same?", "No.")).encode()
    files = {"0.png": png(1), "0.txt": b" one \n", "1.0.png": png(2), "1.1.png": png(3), "1.json": chat}
    write_tar("shards/008.tar", files)
    write_tar("shards/009.tar", {"x/0.json": b'{"caption": "four"}', "x/0.cls": b"9", "x/0.PNG": png(4), "2.txt": b"?"})


def test_samples_of_several_shards():
    write_shards()
    expected = [(f"shards/{key}", *example) for key, example in EXAMPLES.items()]
    assert read_all("shards") == expected
    assert read_all("shards/008.tar") == expected[:2]


def test_incomplete_or_cut_tars_are_refused():
    write_tar("a.tar", {"0.png": png(1), "1.png": png(2), "1.txt": b"one", "2.txt": b"two"})
    check_refused("a.tar", "1 of 2 images in a.tar have no .txt or .json", ": 0;", "--on-error skip")
    assert [example[0] for example in read_all("a.tar", replace(OPTIONS, on_error="skip"))] == ["a.tar/1"]
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
        whole_ones = read_all("cut.tar", replace(OPTIONS, on_error="skip"))
        assert [name for name, *_ in whole_ones] == ["cut.tar/0", "cut.tar/1"]
    Path("cut.tar").write_bytes(whole[: ends[4] - 512])
    check_refused("cut.tar", "cut.tar is no tar that can be read", "download it again")
    write_tar("d.tar", {"0.png": png(1), "0.json": b"{"})
    check_refused("d.tar", "d.tar/0: its text cannot be read")


@pytest.fixture
def site():
    """The address of a web server that serves the current folder, and no ranges of bytes."""

    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(Path.cwd()))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def remote(site, datasets_cache, monkeypatch, tmp_path):
    import fsspec

    monkeypatch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", tmp_path / "cache/downloads")
    write_shards()
    memory = fsspec.filesystem("memory")
    for name in ("008.tar", "009.tar"):
        memory.pipe(f"/lab/{name}", Path("shards", name).read_bytes())
    yield {"http": f"{site}/shards/{{008..009}}.tar", "memory": "memory://lab/*.tar"}
    memory.rm("/lab", recursive=True)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["http", "memory"])
def test_remote_shards_are_downloaded_or_streamed(remote, kind):
    address = remote[kind]
    assert read_all(address) == [(f"{address}/{key}", *example) for key, example in EXAMPLES.items()]
    streamed = zip(("0:0", "0:1", "1:0"), EXAMPLES.values())
    assert read_all(address, STREAMED) == [(f"{address}[{key}]", *example) for key, example in streamed]
    assert len(open_source(address, STREAMED).shards) == 2


@pytest.mark.full
def test_workers_stream_remote_shards(remote):
    """The first shard was opened in this process: connections must not be shared with the workers."""
    stream = open_source(remote["http"], STREAMED)
    mixture = Mixture([Subset(stream, ())], 0)
    with load_batches(functools.partial(answer_of, mixture), range(8), 2) as answers:
        loaded = list(answers)
    assert loaded[1::2] == ["four"] * 4 and sorted(loaded[:4:2]) == sorted(loaded[4::2]) == ["No.", "one"]


def answer_of(mixture, number):
    turn, part = divmod(number, 2)
    return mixture.example(turn, part=Part(part, 2)).qa_pairs[0][1]


@pytest.mark.full
def test_remote_shards_that_cannot_be_read_are_one_line(remote, site):
    for options in (OPTIONS, STREAMED):
        check_refused(f"{site}/shards/007.tar", "007.tar cannot be read", "check the address", options=options)
    check_refused("memory://lab/*x.tar", "memory://lab/*x.tar: there is no such file")
    check_refused("memory://lab/{9..1}.tar", "{9..1} is no range")
    Path("shards/009.tar").write_bytes(Path("shards/009.tar").read_bytes()[:600])
    stream = open_source(remote["http"], STREAMED)
    mixture = Mixture([Subset(stream, ())], 0)
    with pytest.raises(TrainingError, match="broke off .*; rerun the same command to resume"):
        for position in range(3):
            mixture.example(position)
    write_tar("shards/007.tar", {"0.png": png(1)})
    rows = open_source(f"{site}/shards/007.tar", STREAMED)
    with pytest.raises(Exception, match="has no .txt or .json"):
        Mixture([Subset(rows, ())], 0).example(0)
