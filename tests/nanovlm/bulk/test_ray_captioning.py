"""Captions on a Ray cluster: two workers on this machine caption files, and lose nothing."""

import json
import os
import random
import threading
from functools import partial

import pytest

from nanovlm import Captioner
from nanovlm.bulk.ray_captioning import MAX_ATTEMPTS, RayOptions, caption_on_ray
from nanovlm.cli import main as cli
from nanovlm.synthetic import draw, random_scene
from support import ROOT
from support.ray_workers import DEADLY_SIZE, load_and_die, load_slowly
from support.serving import until

pytestmark = pytest.mark.full
ray = pytest.importorskip("ray", reason="pip install 'nanovlm[ray]'")
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
    """A folder of images, one of them broken; the third is that at which `load_and_die` dies."""
    folder = tmp_path_factory.mktemp("photos")
    for i in range(N_IMAGES):
        draw(random_scene(random.Random(i)), *(DEADLY_SIZE if i == 2 else (96, 96))).save(folder / f"{i:02}.png")
    (folder / "broken.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def expected(photos):
    """The caption of each image, by the captioner alone."""
    images = [photos / f"{i:02}.png" for i in range(N_IMAGES)]
    texts = Captioner.from_pretrained().captions(images)
    return {str(image): text.strip() for image, text in zip(images, texts)}


def captions(out):
    """The text of each file, read without our own code; no image is there twice."""
    rows = [row for part in sorted(out.glob("*.parquet")) for row in parquet.read_table(part).to_pylist()]
    texts = {row["file_name"]: row["text"] for row in rows}
    assert len(texts) == len(rows)
    return texts


def failed(out):
    rows = [json.loads(line) for line in (out / "failures.jsonl").read_text().splitlines()]
    return {row["file_name"]: row["reason"] for row in rows}


def test_no_image_is_lost_when_a_worker_is_killed(cluster, photos, expected, tmp_path):
    killed, out = tmp_path / "killed", tmp_path / "out"
    killed.mkdir()
    report = caption_on_ray(partial(load_and_die, killed, 1), [str(photos)], RayOptions(out, cpus_per_worker=1))
    assert len(list(killed.iterdir())) == 1
    assert captions(out) == expected and (report.captioned, report.failed) == (len(expected), 1)
    assert failed(out) == {str(photos / "broken.png"): "not an image of a known format, or a damaged one"}
    assert {path.name for path in out.iterdir()} - {path.name for path in out.glob("part-*.parquet")} == {
        "failures.jsonl"
    }


@pytest.mark.slow  # three runs of a fresh actor pool, each of some 6 s
def test_a_limit_is_kept_and_the_next_runs_go_on(cluster, photos, expected, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["caption", str(photos), "--ray", "--out", str(out), "--cpus-per-worker", "1"]
    assert cli.main([*command, "--limit", "5"]) == 0
    assert len(captions(out)) == 5 and "8 remain" in capsys.readouterr().err
    assert cli.main([*command, "--limit", "7"]) == 0
    assert len(captions(out)) == 12 and "1 remain" in capsys.readouterr().err
    assert cli.main(command) == 1 and captions(out) == expected


@pytest.mark.slow  # two runs of a fresh actor pool, each of some 6 s
def test_a_rerun_captions_what_is_new_and_what_failed(cluster, photos, expected, tmp_path, capsys):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for name in ("00.png", "01.png", "broken.png"):
        (folder / name).write_bytes((photos / name).read_bytes())
    command = ["caption", str(folder), "--ray", "--out", str(out)]
    assert cli.main(command) == 1
    first = {part: part.read_bytes() for part in out.glob("*.parquet")}
    assert len(captions(out)) == 2 and len(failed(out)) == 1
    (folder / "broken.png").write_bytes((photos / "05.png").read_bytes())
    (folder / "06.png").write_bytes((photos / "06.png").read_bytes())
    assert cli.main(command) == 0 and not (out / "failures.jsonl").exists()
    assert "2 captioned" in capsys.readouterr().err.splitlines()[-1]
    assert {part: part.read_bytes() for part in first} == first
    origins = {"00.png": "00.png", "01.png": "01.png", "broken.png": "05.png", "06.png": "06.png"}
    assert captions(out) == {str(folder / name): expected[str(photos / origin)] for name, origin in origins.items()}


@pytest.mark.slow  # a worker is restarted several times
def test_a_part_that_kills_every_worker_fails_and_the_others_are_captioned(cluster, photos, tmp_path):
    killed, out = tmp_path / "killed", tmp_path / "out"
    killed.mkdir()
    names = [str(photos / f"{i:02}.png") for i in range(4)]
    load = partial(load_and_die, killed, MAX_ATTEMPTS)
    report = caption_on_ray(load, names, RayOptions(out, cpus_per_worker=2))  # one worker, and a part for each image
    assert len(list(killed.iterdir())) == MAX_ATTEMPTS
    assert (report.captioned, report.failed) == (3, 1)
    assert sorted(captions(out)) == [name for name in names if not name.endswith("02.png")]
    assert list(failed(out)) == [names[2]] and "the worker died" in failed(out)[names[2]]


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
        options = RayOptions(tmp_path / "out", cluster.address, cpus_per_worker=1)
        report = caption_on_ray(partial(load_slowly, started), [str(photos)], options)
        killer.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert killed and captions(tmp_path / "out") == expected and report.failed == 1
