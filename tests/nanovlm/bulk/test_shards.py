"""Shards of captions: written whole, on any file system; what is done and what failed is read from them."""

import json

import pytest

from nanovlm import Captioner
from nanovlm.bulk import BulkOptions, OutputOptions
from nanovlm.bulk.ray_captioning import RayOptions, Shard, Workers, caption_shard, make_shards, plan_workers
from nanovlm.bulk.remote_inputs import find_remote
from nanovlm.bulk.shards import ShardFolder
from nanovlm.errors import OutputError, UsageError
from support import noise_image

pytestmark = pytest.mark.full
fsspec = pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

ROWS = [{"file_name": "a.png", "member": None, "text": "a ü"}, {"file_name": "b.tar", "member": "1.png", "text": "b"}]
FAILURES = [{"file_name": "b.tar", "member": "2.png", "reason": "broken"}, {"file_name": "c.png", "reason": "broken"}]


@pytest.fixture(params=["local", "memory"])
def uri(request, tmp_path):
    yield str(tmp_path / "out") if request.param == "local" else "memory://out"
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/out", recursive=True)


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_what_is_written_is_read_back(uri, format):
    folder = ShardFolder(uri, format)
    folder.create()
    folder.write_shard("shard-000004", ROWS, FAILURES)
    other = ShardFolder(uri, "jsonl")  # the format may change between two runs
    other.write_shard("shard-000005", [{"file_name": "c.png", "member": None, "text": "c"}], [])
    state = folder.read_state()
    assert state.done == {"a.png": {None}, "b.tar": {"1.png"}, "c.png": {None}}
    assert state.failed == {("b.tar", "2.png"): "broken"} and state.n_shards == 6


def test_a_finished_run_has_one_table_of_failures_or_none(tmp_path):
    folder = ShardFolder(str(tmp_path))
    folder.write_shard("shard-000000", [], FAILURES)
    assert folder.write_failures(FAILURES) and [path.name for path in tmp_path.iterdir()] == ["failures.jsonl"]
    assert len(folder.read_state().failed) == 2
    assert not folder.write_failures([]) and not list(tmp_path.iterdir())


def test_another_attempt_at_a_shard_replaces_the_first(tmp_path):
    folder = ShardFolder(str(tmp_path), "jsonl")
    folder.write_shard("shard-000000", ROWS[:1], FAILURES)
    folder.write_shard("shard-000000", ROWS, [])
    assert not folder.read_state().failed
    assert [json.loads(line) for line in (tmp_path / "shard-000000.jsonl").read_text().splitlines()] == ROWS


def test_other_settings_are_refused_and_named(tmp_path):
    folder = ShardFolder(str(tmp_path))
    folder.check_settings({"prompt": "a", "model": "m"})
    folder.check_settings({"prompt": "a", "model": "m"})
    with pytest.raises(UsageError, match="prompt 'a', not 'b'"):
        folder.check_settings({"prompt": "b", "model": "m"})


def test_errors_name_the_file_and_the_way_out(tmp_path):
    (tmp_path / "shard-000000.parquet").write_bytes(b"no parquet")
    with pytest.raises(UsageError, match=r"shard-000000.parquet is not a shard"):
        ShardFolder(str(tmp_path)).read_state()
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="run the same command to resume"):
        ShardFolder(str(tmp_path / "file")).write("a", b"")
    with pytest.raises(UsageError, match="cannot be made"):
        ShardFolder(str(tmp_path / "file" / "out")).create()


def test_files_are_divided_among_workers_without_those_that_are_done(tmp_path):
    for name in ("1.png", "2.png", "3.png", "b.tar", "c.tar"):
        (tmp_path / name).touch()
    files = find_remote([str(tmp_path)]).files
    folder = ShardFolder(str(tmp_path / "out"))
    row = {"file_name": str(tmp_path / "b.tar"), "member": "1.png", "text": "b"}
    folder.write_shard("shard-000000", [row], [])
    shards = make_shards(files, folder.read_state(), 2, 1)
    assert [[file.path.removeprefix(f"{tmp_path}/") for file in shard.files] for shard in shards] == [
        ["b.tar"], ["c.tar"], ["1.png", "2.png"], ["3.png"],
    ]  # fmt: skip
    assert [shard.name for shard in shards] == [f"shard-00000{i}" for i in (1, 2, 3, 4)]
    assert shards[0].skip == {"1.png"} and len(make_shards(files, folder.read_state(), None, 2)) == 5


def test_a_shard_is_captioned_as_the_captioner_does_and_errors_keep_their_images(model_folder, uri):
    captioner = Captioner.from_pretrained(model_folder, "cpu", "float32")
    filesystem = fsspec.filesystem("memory")
    for i in range(3):
        with filesystem.open(f"/in/{i}.png", "wb") as file:
            noise_image(seed=i).save(file, "PNG")
    filesystem.pipe_file("/in/bad.png", b"bad")
    folder = ShardFolder(uri, "jsonl")
    folder.create()
    shard = Shard("shard-000000", find_remote(["memory://in"]).files)
    options = BulkOptions("?", max_new_tokens=6)
    report = caption_shard(captioner, shard, options, OutputOptions(prefix="<", suffix=">"), folder, cores=1)
    texts = captioner.captions([noise_image(seed=i) for i in range(3)], "?", max_new_tokens=6)
    with folder.filesystem.open_input_stream(f"{folder.path}/shard-000000.jsonl") as stream:
        rows = [json.loads(line) for line in stream.read().splitlines()]
    assert rows == [
        {"file_name": f"memory://in/{i}.png", "member": None, "text": f"<{text.strip()}>"}
        for i, text in enumerate(texts)
    ]
    reason = "not an image of a known format, or a damaged one"
    assert report.failures == [{"file_name": "memory://in/bad.png", "reason": reason}] and report.captioned == 3


@pytest.mark.parametrize(
    ("machines", "options", "expected"),
    [
        ([{"CPU": 16}, {"CPU": 6}], {}, Workers(5, 4, 0)),
        ([{"CPU": 2}, {"CPU": 16}, {"memory": 1}], {}, Workers(9, 2, 0)),
        ([{"CPU": 16}, {"CPU": 6}], {"cpus_per_worker": 8}, Workers(2, 8, 0)),
        ([{"CPU": 16, "GPU": 2}, {"CPU": 6, "GPU": 1}], {}, Workers(3, 1, 1)),
        ([{"CPU": 16, "GPU": 2}], {"device": "cpu"}, Workers(4, 4, 0)),
    ],
)
def test_a_worker_per_gpu_or_per_some_cores(machines, options, expected):
    assert plan_workers(machines, RayOptions("out", **options)) == expected


def test_a_cluster_without_the_resources_is_refused():
    with pytest.raises(UsageError, match="no GPU"):
        plan_workers([{"CPU": 4}], RayOptions("out", device="cuda"))
    with pytest.raises(UsageError, match="8 CPUs per worker"):
        plan_workers([{"CPU": 4}], RayOptions("out", cpus_per_worker=8))
