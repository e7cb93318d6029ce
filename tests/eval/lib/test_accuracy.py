"""Errors are relative to the reference's spread, and float32 engines may not have any but rounding."""

import pytest
import torch

from eval.lib.accuracy import inexact_engines, stage_errors


class FakeEngine:
    def __init__(self, name, offset, dtype=torch.float32, encodes=True):
        self.name, self.offset, self.dtype, self.weight_bytes = name, offset, dtype, dtype.itemsize
        self.logits = torch.empty(0)
        if encodes:
            self.encode_image = lambda image: image + offset

    def prefill(self, ids):
        self.logits = torch.tensor(ids).float() + self.offset
        return [0]

    def decode(self, ids):
        return ids


def test_engines_in_float32_are_checked_in_every_stage():
    reference = FakeEngine("plain", 0.0)
    engines = [FakeEngine("near", 1e-4), FakeEngine("far", 1.0, encodes=False), FakeEngine("low", 1.0, torch.bfloat16)]
    image, prompts = torch.tensor([1.0, 3.0, 5.0]), [[1, 3, 5]]
    errors = stage_errors(engines, reference, prompts, image, ["encode", "prefill", "decode"])
    assert list(errors) == [
        ("encode", "near"), ("encode", "low"), ("prefill", "near"), ("prefill", "far"), ("prefill", "low"),
    ]  # fmt: skip
    assert errors["prefill", "far"] == pytest.approx(0.5)
    (line,) = inexact_engines(engines, errors)
    assert line == "far: prefill is 5.0e-01 off the plain model, more than 0.001"
    assert inexact_engines(engines, {("encode", "near"): float("nan")}), "not a number is no success"
    assert stage_errors(engines, reference, prompts, image, ["decode"]) == {}
