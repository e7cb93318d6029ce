"""Batches that other processes prepare."""

import pytest
import torch

from nanovlm.training.loader import load_batches


def batch_without_shared_memory(number):
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # of the worker, as if it were full
    return {"images": torch.full((2, 3), float(number)), "targets": None}


def test_batches_arrive_where_shared_memory_is_full():
    pytest.importorskip("resource")
    with load_batches(batch_without_shared_memory, range(3), 1) as batches:
        for number, batch in enumerate(batches):
            assert batch["targets"] is None and torch.equal(batch["images"], torch.full((2, 3), float(number)))
    assert number == 2
