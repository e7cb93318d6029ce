"""Encoded images on disk: read instead of encoded, never believed if damaged, and never of another encoder."""

import os

import pytest
import torch

from models.inference.image_store import ImageStore
from models.inference.inference_model import InferenceModel


@pytest.fixture
def encode(tmp_path):
    """Encode through a store in tmp_path with a function that counts tiles."""

    def run(images, encoder="e", max_bytes=10**6):
        def new(tiles):
            counted.append(len(tiles))
            return tiles.mean(1)

        counted: list[int] = []
        return ImageStore(tmp_path / "store", max_bytes).encode(images, encoder, new), sum(counted)

    return run


def tiles(n, seed=0):
    return torch.rand(n, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


def test_a_tile_is_encoded_once_and_again_for_another_encoder(encode):
    first, n = encode(tiles(3))
    assert n == 3 and torch.equal(first, tiles(3).mean(1))
    mixed = torch.cat([tiles(3)[1:], tiles(1, seed=1)])
    again, n = encode(mixed)
    assert n == 1 and torch.equal(again, mixed.mean(1))
    assert encode(tiles(3), "other")[1] == 3 and encode(tiles(3).bfloat16())[1] == 3 and encode(tiles(3))[1] == 0


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:-1] + b"\0", "folder"])
def test_a_damaged_file_is_encoded_and_written_again(encode, tmp_path, damage):
    encode(tiles(1))
    (file,) = (tmp_path / "store").iterdir()
    if damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(damage(file.read_bytes()))
    embeds, n = encode(tiles(1))
    assert n == 1 and torch.equal(embeds, tiles(1).mean(1))
    assert encode(tiles(1))[1] == (1 if damage == "folder" else 0)


def test_what_was_used_longest_ago_goes_first(encode, tmp_path):
    for seed in range(10):
        encode(tiles(1, seed))
        for path in (tmp_path / "store").iterdir():
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 10))
    size = max(path.stat().st_size for path in (tmp_path / "store").iterdir())
    assert encode(tiles(1, 0))[1] == 0, "used now"
    encode(tiles(1, 10), max_bytes=5 * size)
    files = list((tmp_path / "store").iterdir())
    assert sum(path.stat().st_size for path in files) <= 5 * size and len(files) > 2
    assert [encode(tiles(1, seed))[1] for seed in (10, 0, 9, 1)] == [0, 0, 0, 1]


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    store = ImageStore(tmp_path / "file")
    for _ in range(2):
        assert torch.equal(store.encode(tiles(2), "e", lambda new: new.mean(1)), tiles(2).mean(1))
    assert len(caplog.records) == 1 and "images are encoded anew" in caplog.text


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_model_gives_the_same_from_the_store_until_its_encoder_changes(tiny_model, make_batch, tmp_path, quantize):
    model, batch = tiny_model(), make_batch(0)
    del batch["targets"]
    expected, _ = InferenceModel(model, quantize=quantize).prefill(**batch)
    told = []
    for changed in (False, False, True):
        if changed:
            with torch.no_grad():
                model.MP.proj.weight.mul_(2)
        inference = InferenceModel(model, quantize=quantize, image_cache_dir=tmp_path)
        inference.on_tile = lambda done, total: told.append(done)
        logits, _ = inference.prefill(**batch)
        assert torch.allclose(logits, expected, atol=1e-5) != changed
        assert torch.equal(inference.encode_images(batch["images"]), inference.encode_images(batch["images"]))
    n = len(batch["images"]) + 1
    assert len(told) == 2 * n, "encoded by the first and by the changed model"
