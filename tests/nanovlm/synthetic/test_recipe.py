"""The embedded model's training data are a pure function of seed and step, and never change."""

import pickle
from hashlib import blake2b

import pytest
import torch

from nanovlm.synthetic.recipe import SceneBatches

# Of the code that trained the published weights; images are left to the pixel tests, as Pillow's versions differ.
DIGESTS = {
    0: "5afb1893f817fa75", 1: "6b684bbbf20115c4", 500: "f0c1e276892f39c1", 900: "46b5d6a767f37cf0",
    1300: "839ce4e8ee81ad77", 2300: "ed84cd86f994958e", 2500: "43006bc1303dbb6a", 2501: "412c7ecb3d41cd8d",
}  # fmt: skip


@pytest.mark.parametrize("step", DIGESTS)
def test_training_data_are_those_of_the_published_weights(model_and_processor, step):
    batch = SceneBatches(model_and_processor[1], 4, 0)(step)
    tokens = b"".join(batch[name].numpy().tobytes() for name in ("input_ids", "targets", "attention_mask"))
    assert blake2b(tokens, digest_size=8).hexdigest() == DIGESTS[step]


def test_a_batch_is_a_pure_function_of_seed_and_step(model_and_processor):
    """Pickled as it reaches a worker process where processes do not fork."""
    batches = [pickle.loads(pickle.dumps(SceneBatches(model_and_processor[1], 4, seed))) for seed in (3, 3, 4)]
    batches[1](4)
    one, same, other = (batch(5) for batch in batches)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["images"], other["images"])
