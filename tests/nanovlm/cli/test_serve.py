"""`nanovlm serve`: flags to options; test_wrong_use.py has its refusals."""

import argparse
import sys

from nanovlm import EMBEDDED
from nanovlm.cli import main as cli
from nanovlm.cli.serve import add_flags, model_name, serve_options
from nanovlm.serving.options import ServeOptions


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return serve_options(parser.parse_args(argv))


def test_flags_become_options(monkeypatch):
    monkeypatch.delenv("NANOVLM_API_KEY", raising=False)
    assert parse() == ServeOptions()
    monkeypatch.setenv("NANOVLM_API_KEY", "secret")
    options = parse("--max-num-seqs", "3", "--max-pending", "0", "--allow-host", "a", "--allow-host", "b")
    assert (options.max_num_seqs, options.max_pending) == (3, 0)
    assert (options.allow_host, options.api_key) == (["a", "b"], "secret")
    assert parse("--api-key", "other").api_key == "other"


def test_folder_names_the_model_by_whatever_path(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert {model_name(model) for model in (".", "../mine/", str(folder))} == {"mine"}
    assert {model_name(EMBEDDED), model_name(str(EMBEDDED))} == {"nanovlm"}, "as adapters may name it"
    assert model_name("owner/model") == "owner/model"


def test_missing_extra_is_named(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("nanovlm.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve", "--device", "cpu"]) == 2 and "pip install 'nanovlm[serve]'" in capsys.readouterr().err
