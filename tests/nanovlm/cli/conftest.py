"""`nanovlm` as a fixture, and a model folder with other settings."""

import json
import shutil
from functools import partial

import pytest


@pytest.fixture
def nanovlm_program(run_script):
    return partial(run_script, "nanovlm", None)


@pytest.fixture
def changed_model(model_folder, tmp_path):
    """Make a copy of `model_folder` whose config.json has other settings; None removes one."""

    def change(**settings):
        folder = shutil.copytree(model_folder, tmp_path / "changed")
        config = json.loads((folder / "config.json").read_text()) | settings
        text = json.dumps({name: value for name, value in config.items() if value is not None})
        (folder / "config.json").write_text(text)
        return folder

    return change
