"""Captions on a Ray cluster: two workers on this machine caption files, tars and parquet files, and lose nothing."""

import json
import os
import random
import tarfile
import threading
from functools import partial

import pytest

from nanovlm import Captioner
from nanovlm.bulk.ray_captioning import MAX_ATTEMPTS, RayOptions, caption_on_ray
from nanovlm.cli import main as cli
from nanovlm.synthetic import draw, random_scene
from support import ROOT
from support.ray_workers import load_and_die, load_slowly
from support.serving import until

pytestmark = pytest.mark.full
ray = pytest.importorskip("ray", reason="pip install 'nanovlm[ray]'")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

N_IMAGES = 12


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine with two cores, so with two workers of one core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))  # of the workers
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        options = {"include_dashboard": False, "logging_level": "error", "log_to_driver": False}
        ray.init(num_cpus=2, object_store_memory=80 * 2**20, **options)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of images, one of them broken, a tar and a parquet file."""
    folder = tmp_path_factory.mktemp("photos")
    for i in range(N_IMAGES):
        draw(random_scene(random.Random(i)), 96, 96).save(folder / f"{i:02}.png")
    (folder / "broken.png").write_bytes(b"no image")
    with tarfile.open(folder / "two.tar", "w") as tar:
        tar.add(folder / "01.png", "x/one.png")
        tar.add(folder / "02.png", "x/two.png")
    cells = [{"bytes": (folder / f"{i:02}.png").read_bytes(), "path": None} for i in (3, 4)]
    rows = {"image": [*cells, {"bytes": b"no", "path": None}], "id": [7, 8, 9], "text": ["x", "y", "z"]}
    parquet.write_table(pyarrow.table(rows), folder / "rows.parquet")
    return folder


@pytest.fixture(scope="module")
def expected(photos):
    """The caption of each image by file name and member, by the captioner alone."""
    images = [photos / f"{i:02}.png" for i in range(N_IMAGES)]
    texts = [text.strip() for text in Captioner.from_pretrained().captions(images)]
    members = {("two.tar", "x/one.png"): 1, ("two.tar", "x/two.png"): 2, ("rows.parquet", "0"): 3}
    keys = {(image.name, None): i for i, image in enumerate(images)} | members | {("rows.parquet", "1"): 4}
    return {(str(photos / name), member): texts[i] for (name, member), i in keys.items()}


def captions(out):
    """All rows of all shards, by file name and member, read without our own code; no image is there twice."""
    rows = [row for shard in sorted(out.glob("shard-*.parquet")) for row in parquet.read_table(shard).to_pylist()]
    rows += [json.loads(line) for shard in out.glob("shard-*.jsonl") for line in shard.read_text().splitlines()]
    texts = {(row["file_name"], row["member"]): row["text"] for row in rows}
    assert len(texts) == len(rows)
    return texts


def failed(out):
    rows = [json.loads(line) for line in (out / "failures.jsonl").read_text().splitlines()]
    return {(row["file_name"], row.get("member")): row["reason"] for row in rows}


def test_no_image_is_lost_when_a_worker_is_killed(cluster, photos, expected, tmp_path):
    killed, out = tmp_path / "killed", tmp_path / "out"
    killed.mkdir()
    options = RayOptions(out, cpus_per_worker=1, shard_size=4)
    report = caption_on_ray(partial(load_and_die, killed, 1), [str(photos)], options)
    assert len(list(killed.iterdir())) == 1
    assert captions(out) == expected and (report.captioned, report.failed) == (len(expected), 2)
    assert failed(out) == {
        (str(photos / "broken.png"), None): "not an image of a known format, or a damaged one",
        (str(photos / "rows.parquet"), "2"): "not an image of a known format, or a damaged one",
    }
    (table,) = [table for shard in out.glob("*.parquet") if "id" in (table := parquet.read_table(shard)).column_names]
    assert table.select(["id", "input_text"]).to_pylist() == [
        {"id": 7, "input_text": "x"},
        {"id": 8, "input_text": "y"},
    ]
    others = {path.name for path in out.iterdir()} - {path.name for path in out.glob("shard-*.parquet")}
    assert others == {"run.json", "failures.jsonl"}


@pytest.mark.slow  # three runs of a fresh actor pool, each of some 6 s
def test_a_limit_is_kept_and_the_next_runs_go_on(cluster, photos, expected, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["caption", str(photos), "--ray", "--out", str(out), "--cpus-per-worker", "1"]
    assert cli.main([*command, "--limit", "5"]) == 0
    assert len(captions(out)) == 5 and "10 remain" in capsys.readouterr().err
    assert cli.main([*command, "--limit", "11"]) == 1
    assert len(captions(out)) == 5 + 10, "the last of these is broken, and one of a tar and one of a table come next"
    assert cli.main(command) == 1 and captions(out) == expected


@pytest.mark.slow  # three runs of a fresh actor pool, each of some 6 s
def test_a_rerun_captions_what_is_new_and_what_failed(cluster, photos, expected, tmp_path, capsys):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for name in ("00.png", "01.png", "broken.png", "rows.parquet"):
        (folder / name).write_bytes((photos / name).read_bytes())
    command = ["caption", str(folder), "--ray", "--out", str(out), "--shard-format", "jsonl"]
    assert cli.main(command) == 1
    first = {shard: shard.read_bytes() for shard in out.glob("shard-*")}
    assert len(captions(out)) == 4 and len(failed(out)) == 2
    (folder / "broken.png").write_bytes((photos / "05.png").read_bytes())
    (folder / "06.png").write_bytes((photos / "06.png").read_bytes())
    assert cli.main(command) == 1  # of the cell in the parquet file
    assert "2 captioned" in capsys.readouterr().err.splitlines()[-1]
    assert {shard: shard.read_bytes() for shard in first} == first
    texts = {name: text for (name, member), text in captions(out).items() if member is None}
    origins = {"00.png": "00.png", "01.png": "01.png", "broken.png": "05.png", "06.png": "06.png"}
    assert texts == {str(folder / name): expected[str(photos / origin), None] for name, origin in origins.items()}
    assert list(failed(out)) == [(str(folder / "rows.parquet"), "2")]
    assert cli.main([*command, "--prompt", "What is it?"]) == 2
    assert "prompt" in capsys.readouterr().err


@pytest.mark.slow  # a worker is restarted several times
def test_a_shard_that_kills_every_worker_fails_and_the_others_are_captioned(cluster, photos, tmp_path):
    killed, out = tmp_path / "killed", tmp_path / "out"
    killed.mkdir()
    names = [str(photos / f"{i:02}.png") for i in range(4)]  # the third kills
    options = RayOptions(out, cpus_per_worker=2, shard_size=3)
    report = caption_on_ray(partial(load_and_die, killed, MAX_ATTEMPTS), names, options)
    assert len(list(killed.iterdir())) == MAX_ATTEMPTS
    assert (report.captioned, report.failed) == (1, 3)
    assert list(captions(out)) == [(names[3], None)]
    assert all("the worker died" in reason for reason in failed(out).values())


@pytest.mark.slow  # a cluster of its own, which waits until it knows that a machine is gone
def test_no_image_is_lost_when_a_machine_of_two_is_killed(photos, expected, tmp_path, monkeypatch):
    from ray.cluster_utils import Cluster

    ray.shutdown()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 * 2**20})
    other = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    started = tmp_path / "started"
    started.mkdir()
    killed = []

    def kill_the_other():
        until(lambda: len(list(started.iterdir())) == 2, 60)
        cluster.remove_node(other, allow_graceful=False)
        killed.append(other)

    killer = threading.Thread(target=kill_the_other)
    killer.start()
    try:
        options = RayOptions(tmp_path / "out", cluster.address, cpus_per_worker=1, shard_size=1)
        report = caption_on_ray(partial(load_slowly, started), [str(photos)], options)
        killer.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert killed and captions(tmp_path / "out") == expected and report.failed == 2
