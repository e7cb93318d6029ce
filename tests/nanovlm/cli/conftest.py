"""`nanovlm` as a fixture, and a model folder with other settings."""

import json
import shutil

import pytest

from nanovlm.cli import main as cli


@pytest.fixture
def nanovlm_program(capsys):
    """Run `nanovlm` in this process: exit code, stdout, stderr."""

    def run(*argv):
        try:
            code = cli.main(list(argv))
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


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
