"""Captions on a Ray cluster of two nodes: none is lost when one is killed, and a rerun does the rest."""

import os
import threading
from pathlib import Path

import pytest

from nanovlm import EMBEDDED, Captioner
from nanovlm.options import CaptionOptions, ModelOptions
from support import ROOT, noise_image

pytestmark = pytest.mark.full
ray = pytest.importorskip("ray", reason="pip install 'nanovlm[ray]'")
dataset = pytest.importorskip("pyarrow.dataset")

N_IMAGES = 60
OPTIONS = CaptionOptions(max_new_tokens=6, prefix="{folder}: ")


def texts(out):
    rows = dataset.dataset(str(out), format="parquet").to_table().to_pylist()
    found = [(Path(row["file_name"]).name, row["text"]) for row in rows if row["text"] is not None]
    assert len(dict(found)) == len(found), "no image is there twice"
    return dict(found)


def test_nothing_is_lost_when_a_node_of_two_is_killed_and_a_rerun_does_the_rest(tmp_path, monkeypatch):
    from ray.cluster_utils import Cluster

    from nanovlm.ray_captions import caption_on_ray

    photos, out = tmp_path / "photos", tmp_path / "out"
    (photos / "@eaDir").mkdir(parents=True)
    images = [photos / f"{i:02}.png" for i in range(N_IMAGES)]
    for i, path in enumerate(images):
        noise_image(40, 40, seed=i).save(path)
    for name in ("@eaDir/thumb.png", "broken.png"):
        (photos / name).write_bytes(b"no image")
    captioner = Captioner.from_pretrained(EMBEDDED, "cpu", "float32")
    expected = {path.name: f"photos: {captioner.caption(path, max_new_tokens=6).strip()}" for path in images}

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    other, killed = cluster.add_node(**node), []
    model = ModelOptions(model=EMBEDDED, device="cpu", dtype="float32")
    run = lambda: caption_on_ray([str(photos), "gone"], str(out), model, OPTIONS, address=cluster.address)  # noqa: E731

    def kill_when_it_works():
        while not (killed or done.wait(0.1)):
            if ray.is_initialized() and not ray.available_resources().get("CPU"):
                killed.append(cluster.remove_node(other, allow_graceful=False))

    done = threading.Event()
    killer = threading.Thread(target=kill_when_it_works)
    try:
        killer.start()
        first = run()
        done.set()
        killer.join()
        assert killed and texts(out) == expected and (first.captioned, len(first.skipped)) == (N_IMAGES, 0)
        assert first.failed["gone"] == "No such file or directory" and len(first.failed) == 2
        assert "not an image" in first.failed[str(photos / "broken.png")]
        os.replace(images[0], photos / "new.png")
        again = run()
        assert (again.captioned, len(again.skipped), len(again.failed)) == (1, N_IMAGES - 1, 2)
        assert texts(out) == expected | {"new.png": expected[images[0].name]}
    finally:
        done.set()
        ray.shutdown()
        cluster.shutdown()
