"""Fixtures of the tests of training data."""

import pytest


@pytest.fixture
def datasets_cache(tmp_path, monkeypatch):
    """The datasets library caches in a folder of this test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
