"""An empty folder for each test, where `datasets` keeps its cache, too."""

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def workdir(in_tmp_path, tmp_path, monkeypatch):
    if importlib.util.find_spec("datasets") is not None:  # of the extra data
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
