"""Finding and reading images by path or URI, alone and in tars and parquet files."""

import io
import tarfile

import pytest

from nanovlm.bulk.remote_inputs import Member, find_remote, open_filesystem, read_container
from nanovlm.errors import DataError, UsageError
from support import noise_image

pytestmark = pytest.mark.full
fsspec = pytest.importorskip("fsspec")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def png(seed=0):
    file = io.BytesIO()
    noise_image(seed=seed).save(file, "PNG")
    return file.getvalue()


def tar(files, mode="w"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


FILES = {
    "a.png": png(1), "sub/b.JPG": png(2), "sub/deep/c.webp": png(3), "sub/text.txt": b"", ".hidden.png": b"",
    ".git/x.png": b"", "model/model.safetensors": b"", "model/report.png": b"", "raw.cr2": b"", "t.tar": b"",
    "u.tar.gz": b"", "p.parquet": b"", "metadata.parquet": b"",
}  # fmt: skip
FOUND = ["a.png", "p.parquet", "sub/b.JPG", "sub/deep/c.webp", "t.tar", "u.tar.gz"]


@pytest.fixture(params=["local", "file", "memory"])
def root(request, tmp_path):
    """The same files on disk, by path and by URI, and in a file system that only fsspec knows."""
    if request.param == "memory":
        filesystem = fsspec.filesystem("memory")
        for name, data in FILES.items():
            filesystem.pipe_file(f"/photos/{name}", data)
        yield "memory://photos"
        filesystem.rm("/photos", recursive=True)
        return
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    yield str(tmp_path) if request.param == "local" else f"file://{tmp_path}"


def names(inputs, root):
    return [file.uri.removeprefix(root.removeprefix("file://")).lstrip("/") for file in inputs.files]


def test_folders_and_patterns_give_visible_images_tars_and_parquet_files(root):
    inputs = find_remote([root, f"{root}/a.png"])
    assert names(inputs, root) == FOUND and inputs.left_out == {".cr2": 1} and not inputs.missing
    assert names(find_remote([root], recursive=False), root) == [name for name in FOUND if "/" not in name]
    assert names(find_remote([f"{root}/*.p*"]), root) == ["a.png", "p.parquet"]
    assert names(find_remote([f"{root}/sub/**"]), root) == ["sub/b.JPG", "sub/deep/c.webp"]
    assert find_remote([f"{root}/sub/*"]).files[0].read() == FILES["sub/b.JPG"]


def test_the_output_folder_is_not_read(root):
    uri = find_remote([f"{root}/a.png"]).files[0].uri.removesuffix("/a.png")
    assert names(find_remote([root], exclude=f"{uri}/sub"), root) == [name for name in FOUND if "sub" not in name]


def test_names_that_give_nothing_are_told(root):
    missing = dict(find_remote([f"{root}/no.png", f"{root}/*.gif", f"{root}/.git"]).missing)
    assert missing.pop(f"{root}/no.png") == "No such file or directory"
    assert set(missing.values()) == {"no images, tars or parquet files there"} and len(missing) == 1


def test_an_unknown_scheme_is_named():
    with pytest.raises(UsageError, match=r"s3x://bucket/a: cannot be opened"):
        open_filesystem("s3x://bucket/a")


def test_a_bucket_needs_no_network_to_be_named():
    filesystem, path, prefix = open_filesystem("s3://bucket/some/*.png?region=eu-west-1")
    assert (filesystem.type_name, path, prefix) == ("s3", "bucket/some/*.png", "s3://")
    with pytest.raises(UsageError, match="Unexpected query parameter"):
        open_filesystem("s3://bucket/some/folder?regoin=eu-west-1")


@pytest.mark.parametrize(("name", "mode"), [("a.tar", "w"), ("a.tar.gz", "w:gz"), ("a.tgz", "w:gz")])
def test_images_of_a_tar_in_order(tmp_path, name, mode):
    files = {"x/2.png": png(2), "x/2.txt": b"two", "x/.3.png": png(3), "1.jpg": b"broken"}
    (tmp_path / name).write_bytes(tar(files, mode))
    (file,) = find_remote([str(tmp_path)]).files
    assert list(read_container(file)) == [Member("x/2.png", files["x/2.png"]), Member("1.jpg", b"broken")]
    assert list(read_container(file, {"x/2.png"})) == [Member("1.jpg", b"broken")]


@pytest.mark.parametrize("cut", ["inside an image", "between two", "inside gzip"])
def test_a_tar_that_is_cut_gives_what_it_has_and_fails(tmp_path, cut):
    data = tar({"1.png": bytes(1000), "2.png": bytes(1000)}, "w:gz" if cut == "inside gzip" else "w")
    length = {"inside an image": 2300, "between two": 512 + 1024, "inside gzip": len(data) // 2}[cut]
    (tmp_path / "a.tar").write_bytes(data[:length])
    (file,) = find_remote([str(tmp_path)]).files
    *images, error = read_container(file)
    assert error.name is None and isinstance(error.content, DataError)
    assert images == ([] if cut == "inside gzip" else [Member("1.png", bytes(1000))])


def test_images_of_a_parquet_file_by_row(tmp_path):
    cells = [{"bytes": b"0", "path": "zero.png"}, None, {"bytes": None, "path": "far.png"}]
    parquet.write_table(pyarrow.table({"text": ["a", "b", "c"], "image": cells}), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"images": [[b"0", b"1"], [], [b"2"]]}), tmp_path / "b.parquet")
    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "c.parquet")
    (tmp_path / "d.parquet").write_bytes(b"no parquet")
    structs, lists, texts, broken = find_remote([str(tmp_path)]).files
    zero, far = read_container(structs)
    assert (zero.name, zero.content, far.name) == ("0", b"0", "2")
    assert str(far.content) == "the cell names far.png instead of holding it"
    assert [zero.columns.to_pylist(), far.columns.to_pylist()] == [[{"text": "a"}], [{"text": "c"}]]
    assert [(m.name, m.content) for m in read_container(lists)] == [("0.0", b"0"), ("0.1", b"1"), ("2.0", b"2")]
    (member,) = read_container(texts)
    assert str(member.content) == "no column image, images, bytes, only text"
    (member,) = read_container(broken)
    assert str(member.content).startswith("cannot be read: ")
