"""The decoder block is compiled in the background once, for large models only, and for command lines only."""

import os
import subprocess
import time

import pytest
import torch

from models.inference.aot_compile import package_path
from models.inference.inference_model import InferenceModel
from nanovlm import Captioner
from nanovlm.cli import background_compile
from nanovlm.cli.background_compile import RETRY_SECONDS, compile_in_background
from nanovlm.cli.options import ModelOptions

pytestmark = [
    pytest.mark.usefixtures("workdir"),
    pytest.mark.skipif(background_compile.fcntl is None, reason="there are no file locks here"),
]


@pytest.fixture(autouse=True)
def allowed(monkeypatch, tmp_path):
    """An empty cache, and a machine and a model for which the block is compiled."""
    monkeypatch.setenv("NANOVLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(background_compile, "MIN_PARAMETERS", 1)


@pytest.fixture
def processes(monkeypatch):
    """The arguments of the processes that were started, and the end of each, which releases its lock."""
    started = []

    class Process:
        def __init__(self, command, *, stdout, **options):
            self.command, self.options, self.log = command, options, os.dup(stdout.fileno())
            started.append(self)

        def end(self):
            os.close(self.log)

    monkeypatch.setattr(subprocess, "Popen", Process)
    return started


@pytest.fixture(scope="module")
def captioner(model_folder):
    return Captioner.from_pretrained(model_folder, "cpu", "bfloat16", quantize="int8")


@pytest.fixture
def options(model_folder):
    return ModelOptions(os.path.relpath(model_folder), dtype="bfloat16", quantize="int8")


def package_of(captioner):
    return package_path(captioner.inference.network.decoder.blocks[0])


def test_one_process_is_started_with_the_same_model(captioner, options, model_folder, processes):
    for _ in range(2):
        compile_in_background(captioner, options)
    (process,) = processes
    assert process.command[-10:] == [
        "-m", "nanovlm", "compile", os.path.abspath(model_folder), "--dtype", "bfloat16", "--threads", "1",
        "--quantize", "int8",
    ]  # fmt: skip
    assert process.options["start_new_session"] and process.options["stdin"] == subprocess.DEVNULL


def test_a_failed_attempt_is_repeated_a_day_later_and_success_ends_it(captioner, options, processes):
    compile_in_background(captioner, options)
    processes[0].end()
    compile_in_background(captioner, options)
    assert len(processes) == 1
    long_ago = time.time() - RETRY_SECONDS - 1
    os.utime(package_of(captioner).with_suffix(".log"), (long_ago, long_ago))
    compile_in_background(captioner, options)
    assert len(processes) == 2
    processes[1].end()
    os.utime(package_of(captioner).with_suffix(".log"), (long_ago, long_ago))
    package_of(captioner).touch()
    compile_in_background(captioner, options)
    assert len(processes) == 2


@pytest.mark.parametrize("reason", ["small", "--compile", "--no-compile", "variable", "CI", "read-only"])
def test_nothing_is_started(captioner, options, processes, monkeypatch, reason, tmp_path):
    if reason == "small":
        monkeypatch.setattr(background_compile, "MIN_PARAMETERS", 100_000_000)
    elif reason == "variable":
        monkeypatch.setenv("NANOVLM_BACKGROUND_COMPILE", "0")
    elif reason == "CI":
        monkeypatch.setenv("CI", "true")
    elif reason == "read-only":
        (tmp_path / "cache").write_text("a file where a folder should be")
    else:
        options = ModelOptions(options.model, compile=reason == "--compile")
    compile_in_background(captioner, options)
    assert not processes


def test_command_lines_start_it_after_the_answers_and_the_library_does_not(generate, processes, monkeypatch):
    code, out, err = generate("good.png", "--no-compile")
    assert (code, err, processes) == (0, "", []) and generate("good.png") == (0, out, "") and len(processes) == 1


@pytest.mark.slow
def test_the_process_makes_a_package_that_the_next_run_uses(model_folder, generate):
    first = generate("good.png")
    package = package_of(Captioner.from_pretrained(model_folder, "cpu", "float32"))
    deadline = time.monotonic() + 300
    while not package.exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert package.exists(), package.with_suffix(".log").read_text()
    decoder = Captioner.from_pretrained(model_folder, "cpu", "float32").inference
    assert isinstance(decoder, InferenceModel) and decoder._state.compiled
    assert generate("good.png") == first
    assert {path.suffix for path in package.parent.iterdir()} <= {".pt2", ".json", ".log"}
    assert torch.get_num_threads() == 1
