"""Fixtures of the tests of training data."""

import importlib.util

import pytest


@pytest.fixture
def datasets_cache(tmp_path, monkeypatch):
    """The datasets library caches in a folder of this test."""
    if importlib.util.find_spec("datasets") is not None:  # of the extra data
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
