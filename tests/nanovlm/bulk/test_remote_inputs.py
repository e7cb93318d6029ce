"""Finding images by path or URI, reading those of tars and parquet files, and writing captions."""

import io
import tarfile

import pytest

from nanovlm.bulk.ray_captioning import RayOptions, ShardFolder, plan_workers
from nanovlm.bulk.remote_inputs import RemoteImage, find_remote, open_filesystem, read_images
from nanovlm.errors import OutputError, UsageError

pytestmark = pytest.mark.full
fsspec = pytest.importorskip("fsspec")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

FILES = [
    "a.png", "sub/b.JPG", "sub/deep/c.webp", "sub/text.txt", ".hidden.png", ".git/x.png", "model/model.safetensors",
    "model/report.png", "raw.cr2", "t.tar", "u.tar.gz", "p.parquet", "metadata.parquet", "out/d.png",
]  # fmt: skip
FOUND = ["a.png", "p.parquet", "sub/b.JPG", "sub/deep/c.webp", "t.tar", "u.tar.gz"]


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    """A folder on disk, and one in a file system that only fsspec knows."""
    yield str(tmp_path) if request.param == "local" else "memory://photos"
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()


def found(root, *names, **options):
    files, others = find_remote(names, options.get("recursive", True), exclude=f"{root}/out")
    return [uri.removeprefix(f"{root}/") for uri in files], others


def test_folders_and_patterns_give_visible_images_tars_and_parquet_files(root):
    filesystem, path, _ = open_filesystem(root)
    for name in FILES:
        filesystem.makedirs(f"{path}/{name}".rpartition("/")[0], exist_ok=True)
        filesystem.pipe_file(f"{path}/{name}", name.encode())
    names, others = found(root, root, f"{root}/a.png")
    assert names == FOUND and others.left_out == {".cr2": 1} and not others.missing
    assert found(root, root, recursive=False)[0] == [name for name in FOUND if "/" not in name]
    assert found(root, f"{root}/*.p*")[0] == ["a.png", "p.parquet"]
    assert found(root, f"{root}/sub/**")[0] == ["sub/b.JPG", "sub/deep/c.webp"]
    missing = dict(found(root, f"{root}/no.png", f"{root}/*.gif", f"{root}/.git")[1].missing)
    assert missing.pop(f"{root}/no.png") == "No such file or directory"
    assert set(missing.values()) == {"no images, tars or parquet files there"}


def test_a_uri_is_named_if_it_cannot_be_opened_and_a_bucket_needs_no_network():
    with pytest.raises(UsageError, match=r"s3x://bucket/a: cannot be opened"):
        open_filesystem("s3x://bucket/a")
    assert open_filesystem("s3://bucket/some/*.png?region=eu-west-1")[1:] == ("bucket/some/*.png", "s3://")


def members(path, skip=()):
    ((uri, file),) = find_remote([str(path)], True, exclude="no folder")[0].items()
    return [(image.member, image.content) for image in read_images(uri, file, set(skip))]


@pytest.mark.parametrize(("name", "mode"), [("a.tar", "w"), ("a.tgz", "w:gz")])
def test_images_of_a_tar_in_order_and_a_cut_tar_fails_after_those_it_has(tmp_path, name, mode):
    with tarfile.open(tmp_path / name, mode) as tar:
        for member in ("x/2.png", "x/2.txt", "x/.3.png", "1.jpg"):
            info = tarfile.TarInfo(member)
            info.size = 1000
            tar.addfile(info, io.BytesIO(bytes(1000)))
    assert members(tmp_path / name) == [("x/2.png", bytes(1000)), ("1.jpg", bytes(1000))]
    assert members(tmp_path / name, {"x/2.png"}) == [("1.jpg", bytes(1000))]
    data = (tmp_path / name).read_bytes()
    for length in [2300, 1536] if mode == "w" else [len(data) // 2]:  # inside a file, between two
        (tmp_path / name).write_bytes(data[:length])
        *images, (member, error) = members(tmp_path / name)
        assert member is None and isinstance(error, Exception) and (not images or mode == "w")
        assert images in ([], [("x/2.png", bytes(1000))])


def test_images_of_a_parquet_file_by_row(tmp_path):
    cells = [{"bytes": b"0", "path": "zero.png"}, None, {"bytes": None, "path": "far.png"}]
    parquet.write_table(pyarrow.table({"text": ["a", "b", "c"], "image": cells}), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"images": [[b"0", b"1"], [], [b"2"]]}), tmp_path / "b.parquet")
    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "c.parquet")
    (tmp_path / "d.parquet").write_bytes(b"no parquet")
    zero, far = members(tmp_path / "a.parquet")
    assert zero == ("0", b"0") and str(far[1]) == "the cell names far.png instead of holding it"
    assert members(tmp_path / "b.parquet") == [("0.0", b"0"), ("0.1", b"1"), ("2.0", b"2")]
    assert str(members(tmp_path / "c.parquet")[0][1]) == "no column image, images, bytes, only text; rename one"
    assert str(members(tmp_path / "d.parquet")[0][1]).startswith("cannot be read: ")


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_captions_that_are_written_are_done_and_a_second_attempt_replaces_them(root, format):
    folder = ShardFolder(f"{root}/out", format)
    folder.create()
    images = [RemoteImage("a.png", None, b"", None, "a ü"), RemoteImage("b.tar", "1.png", b"", None, "b")]
    for _ in range(2):
        folder.write_shard(["a.png", "b.tar/1.png", "bad.png"], images, str.upper)
    assert folder.done() == {"a.png": {None}, "b.tar": {"1.png"}}
    (path,) = folder.filesystem.ls(folder.path, detail=False)
    if format == "jsonl":
        assert '"text": "A Ü"' in folder.filesystem.cat_file(path).decode()
    folder.filesystem.pipe_file(path, b"no captions")
    with pytest.raises(UsageError, match="is not a shard of captions"):
        folder.done()


def test_other_settings_and_a_folder_that_cannot_be_written_are_refused(tmp_path):
    folder = ShardFolder(str(tmp_path))
    folder.check_settings({"prompt": "a", "model": "m"})
    folder.check_settings({"prompt": "a", "model": "m"})
    with pytest.raises(UsageError, match="prompt 'a', not 'b'"):
        folder.check_settings({"prompt": "b", "model": "m"})
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="run the same command to resume"):
        ShardFolder(str(tmp_path / "file")).write("a", b"a")
    with pytest.raises(UsageError, match="cannot be made"):
        ShardFolder(str(tmp_path / "file" / "out")).create()


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
