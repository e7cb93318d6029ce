"""Finding and reading images by path or URI, and writing captions."""

import pytest

from nanovlm.bulk.ray_captioning import CaptionFolder, RayOptions, plan_workers
from nanovlm.bulk.remote_inputs import find_remote, open_filesystem, read_image
from nanovlm.errors import ImageError, OutputError, UsageError
from support import png

pytestmark = pytest.mark.full
fsspec = pytest.importorskip("fsspec")
parquet = pytest.importorskip("pyarrow.parquet")

FILES = [
    "a.png", "sub/b.JPG", "sub/deep/c.webp", "sub/text.txt", ".hidden.png", ".git/x.png", "model/model.safetensors",
    "model/report.png", "raw.cr2", "t.tar", "p.parquet",
]  # fmt: skip
FOUND = ["a.png", "sub/b.JPG", "sub/deep/c.webp"]


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    """A folder on disk, and one in a file system that only fsspec knows."""
    yield str(tmp_path) if request.param == "local" else "memory://photos"
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()


def found(root, *names, **options):
    files, others = find_remote(names, options.get("recursive", True))
    return [uri.removeprefix(f"{root}/") for uri in files], others


def test_folders_and_patterns_give_visible_images(root):
    filesystem, path, _ = open_filesystem(root)
    for name in FILES:
        filesystem.makedirs(f"{path}/{name}".rpartition("/")[0], exist_ok=True)
        filesystem.pipe_file(f"{path}/{name}", name.encode())
    names, others = found(root, root, f"{root}/a.png")
    assert names == FOUND and others.left_out == {".cr2": 1} and not others.missing
    assert found(root, root, recursive=False)[0] == [name for name in FOUND if "/" not in name]
    assert found(root, f"{root}/*.p*")[0] == ["a.png"]
    assert found(root, f"{root}/sub/**")[0] == ["sub/b.JPG", "sub/deep/c.webp"]
    missing = dict(found(root, f"{root}/no.png", f"{root}/*.gif", f"{root}/.git")[1].missing)
    assert missing.pop(f"{root}/no.png") == "No such file or directory"
    assert set(missing.values()) == {"no images there"}


def test_an_image_is_read_from_its_file(root):
    filesystem, path, _ = open_filesystem(root)
    filesystem.makedirs(path, exist_ok=True)
    filesystem.pipe_file(f"{path}/a.png", png(6, 4))
    filesystem.pipe_file(f"{path}/b.png", b"no image")
    files, _ = find_remote([root], recursive=True)
    good, bad = files.items()
    assert read_image(*good).size == (6, 4)
    with pytest.raises(ImageError, match="b.png: not an image"):
        read_image(*bad)


def test_a_uri_is_named_if_it_cannot_be_opened_and_a_bucket_needs_no_network():
    with pytest.raises(UsageError, match=r"s3x://bucket/a: cannot be opened"):
        open_filesystem("s3x://bucket/a")
    assert open_filesystem("s3://bucket/some/*.png?region=eu-west-1")[1:] == ("bucket/some/*.png", "s3://")


def test_captions_that_are_written_are_done_and_a_second_attempt_replaces_them(root):
    folder = CaptionFolder(f"{root}/out")
    folder.create()
    for text in ("a", "a ü"):
        folder.write_captions(["a.png", "b.png", "bad.png"], {"a.png": text, "b.png": "b"})
    folder.write_captions(["bad.png"], {})
    assert folder.done() == {"a.png", "b.png"}
    (path,) = folder.filesystem.ls(folder.path, detail=False)
    with folder.filesystem.open(path) as file:
        expected = [{"file_name": "a.png", "text": "a ü"}, {"file_name": "b.png", "text": "b"}]
        assert parquet.read_table(file).to_pylist() == expected
    folder.filesystem.pipe_file(path, b"no captions")
    with pytest.raises(UsageError, match="is not a file of captions"):
        folder.done()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="run the same command to resume"):
        CaptionFolder(str(tmp_path / "file")).write("a", b"a")
    with pytest.raises(UsageError, match="cannot be made"):
        CaptionFolder(str(tmp_path / "file" / "out")).create()


@pytest.mark.parametrize(
    ("machines", "options", "expected"),
    [
        ([{"CPU": 16}, {"CPU": 6}], {}, (5, 4, 0)),
        ([{"CPU": 2}, {"CPU": 16}, {"memory": 1}], {"cpus_per_worker": 8}, (2, 8, 0)),
        ([{"CPU": 16, "GPU": 2}, {"CPU": 6, "GPU": 1}], {}, (3, 1, 1)),
        ([{"CPU": 16, "GPU": 2}], {"device": "cpu"}, (4, 4, 0)),
    ],
)
def test_a_worker_per_gpu_or_per_some_cores(machines, options, expected):
    assert plan_workers(machines, RayOptions("out", **options)) == expected


def test_a_cluster_without_the_resources_is_refused():
    for options, message in [({"device": "cuda"}, "no GPU"), ({"cpus_per_worker": 8}, "8 CPUs per worker")]:
        with pytest.raises(UsageError, match=message):
            plan_workers([{"CPU": 4}], RayOptions("out", **options))
