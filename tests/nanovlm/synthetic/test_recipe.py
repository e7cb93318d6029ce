"""The embedded model's training data are a pure function of seed and step, and never change."""

import pickle
from hashlib import blake2b
from random import Random

import pytest
import torch

from nanovlm.synthetic import random_scene
from nanovlm.synthetic.recipe import batches, scene_example

# Of the code that trained the published weights; images are left to the pixel tests, as Pillow's versions differ.
DIGESTS = {
    (0, 0): "59db4523ad2d07ae",
    (0, 1): "3669abcf962325c9",
    (0, 4500): "ee07fe45a4d08f54",
    (0, 5700): "974b3f63ba2ea35d",
    (0, 6300): "735dff607cd22151",
    (0, 7800): "fccf6a03f39a179a",
    (0, 7801): "1e6b42153c659c94",
    (1024, 7801): "a6822d71e957ced0",
}


@pytest.mark.parametrize(("pack", "step"), DIGESTS)
def test_training_data_are_those_of_the_published_weights(model_and_processor, pack, step):
    batch = batches(model_and_processor[1], batch_size=4, seed=0, pack=pack)(step)
    tokens = b"".join(batch[name].numpy().tobytes() for name in ("input_ids", "targets", "attention_mask"))
    assert blake2b(tokens, digest_size=8).hexdigest() == DIGESTS[pack, step]


def test_a_batch_is_a_pure_function_of_seed_and_step(model_and_processor):
    _, processor = model_and_processor
    one, other = (batches(processor, batch_size=2, seed=3) for _ in range(2))
    other(4)
    for a, b in zip(one(5).values(), other(5).values()):
        assert torch.equal(a, b)
    unpickled = pickle.loads(pickle.dumps(one))  # as it reaches a worker process where processes do not fork
    for a, b in zip(one(5).values(), unpickled(5).values()):
        assert torch.equal(a, b)
    assert not torch.equal(one(5)["images"], one(6)["images"])
    assert not torch.equal(one(5)["images"], batches(processor, batch_size=2, seed=4)(5)["images"])


def test_packed_batch_has_the_same_loss_in_fewer_rows(model_and_processor):
    model, processor = model_and_processor
    padded, packed = (batches(processor, batch_size=6, seed=0, pack=length)(0) for length in (0, 600))
    assert len(packed["input_ids"]) < len(padded["input_ids"]) == len(packed["images"]) == 6
    with torch.no_grad():
        torch.testing.assert_close(model(**padded)[1], model(**packed)[1], atol=1e-4, rtol=1e-5)


def test_example_shows_its_scene_and_asks_for_the_caption_first():
    scene = random_scene(Random(0))
    example = scene_example(scene, Random(1), n_questions=5, size=(120, 90))
    assert [image.size for image in example.images] == [(120, 90)] and len(example.qa_pairs) == 6
    caption = example.qa_pairs[0][1]
    assert all(shape.name in caption for shape in scene.shapes) and scene.background in caption
