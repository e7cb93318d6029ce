"""The kernel library is built and loaded safely, at the level asked for, and its absence is one log line."""

import logging
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from models.common.errors import InputError
from models.inference.inference_model import InferenceModel, PlainNetwork
from models.inference.kernels import load
from models.inference.kernels.load import LEVELS as ALL_LEVELS
from models.inference.kernels.load import available_levels, build, chosen_level, is_trusted, load_library
from support.generation import logits_of
from support.kernels import LEVELS

HAS_KERNELS = pytest.mark.skipif(len(LEVELS) < 2, reason="no kernels for this CPU, or no C compiler")
IS_X86 = platform.machine() == "x86_64" and sys.platform == "linux"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build("naive", tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOVLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "library_name", lambda level: f"kernels-{level}-new.so")
    load_library.cache_clear()
    yield tmp_path
    load_library.cache_clear()


def test_the_level_is_the_highest_or_the_one_asked_for(monkeypatch):
    real = [level for level in available_levels() if level not in ("naive", "amx-emulated")]
    monkeypatch.setenv("NANOVLM_CPU_LEVEL", "")
    assert chosen_level() == (real[-1] if real else None)
    for i, level in enumerate(ALL_LEVELS):
        monkeypatch.setenv("NANOVLM_CPU_LEVEL", level)
        lower = [name for name in [*ALL_LEVELS][:i] if name in real]
        assert chosen_level() == (level if level in available_levels() else lower[-1] if lower else None)
    monkeypatch.setenv("NANOVLM_CPU_LEVEL", "none")
    assert chosen_level() is None
    monkeypatch.setenv("NANOVLM_CPU_LEVEL", "sse")
    with pytest.raises(InputError, match=r"NANOVLM_CPU_LEVEL=sse is not a level; use naive, .* or none"):
        chosen_level()


@pytest.mark.parametrize(
    "bits, names, level",  # of Linux's getauxval, of macOS's sysctl
    [
        ({16: 1 << 1}, "AdvSIMD", "neon"),  # Cortex-A72
        ({16: 1 << 1 | 1 << 20}, "AdvSIMD FEAT_DotProd", "neon-dotprod"),  # Neoverse N1, Apple M1
        ({16: 1 << 1 | 1 << 20, 26: 1 << 13}, "AdvSIMD FEAT_DotProd FEAT_I8MM", "neon-dotprod"),
        ({16: 1 << 1 | 1 << 20, 26: 3 << 13}, "AdvSIMD FEAT_DotProd FEAT_I8MM FEAT_BF16", "neon-i8mm"),
        ({}, "", None),
    ],
)
@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_the_level_of_an_arm_cpu_is_read_from_its_system(monkeypatch, system, bits, names, level):
    def auxiliary(entry):
        return bits.get(entry, 0)

    lines = "".join(f"hw.optional.arm.{name}: 1\n" for name in names.split()) + "hw.optional.arm.FEAT_SME: 0\n"
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(load, "IS_ARM", True)
    monkeypatch.setattr(load, "LEVELS", {"naive": ((), ())} | load.ARM)
    monkeypatch.setattr(load.ctypes, "CDLL", lambda path: SimpleNamespace(getauxval=auxiliary))
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: SimpleNamespace(stdout=lines))
    monkeypatch.delenv("NANOVLM_CPU_LEVEL", raising=False)
    assert chosen_level() == level


@pytest.mark.skipif(not IS_X86, reason="the levels are for Linux on x86-64")
def test_amx_is_a_level_only_where_linux_lets_this_process_use_it(monkeypatch):
    assert "amx_tile" in load.cpu_info("flags") or not load.amx_is_allowed()
    monkeypatch.setattr(load, "cpu_info", lambda field: " ".join(ALL_LEVELS["amx"][1]))
    for allowed in (True, False):
        monkeypatch.setattr(load, "amx_is_allowed", lambda allowed=allowed: allowed)
        assert available_levels() == [name for name in ALL_LEVELS if name != "avx2-vnni" and (allowed or name != "amx")]


def test_a_compiler_too_old_for_amx_builds_the_level_below(monkeypatch, no_library):
    built: list[str] = []
    monkeypatch.setattr(load, "build", lambda level, folder: built.append(level) or no_library / "absent.so")
    assert load_library("amx") is None and built == ["amx", "bf16"]


@HAS_KERNELS
def test_a_library_is_trusted_only_if_nobody_else_can_write_it(library):
    assert is_trusted(library)
    for path, mode in ((library, 0o770), (library.parent, 0o777)):
        path.chmod(mode)
        assert not is_trusted(library)
        path.chmod(0o700)
    link = library.with_name("link.so")
    link.symlink_to(library)
    os.mkfifo(fifo := library.with_name("fifo.so"))
    assert not is_trusted(link) and not is_trusted(fifo) and not is_trusted(library.with_name("absent.so"))
    content = library.read_bytes()
    library.with_name("flipped.so").write_bytes(content[:99] + bytes([content[99] ^ 1]) + content[100:])
    library.with_name("flipped.so").chmod(0o700)
    assert not is_trusted(library.with_name("flipped.so")), "it is not what was built"


@HAS_KERNELS
def test_a_damaged_library_is_built_anew(library, monkeypatch, no_library):
    (no_library / "linked.so").write_bytes(library.read_bytes()[:-32])
    (no_library / "cc").write_text(f'#!/bin/sh\ncp "{no_library}/linked.so" "$3"')  # in place of the "-o" file
    (no_library / "cc").chmod(0o700)
    monkeypatch.setenv("CC", str(no_library / "cc"))
    assert load_library.__wrapped__("naive") is not None
    (path,) = (no_library / "cache").glob("*.so")
    whole = path.read_bytes()
    for damaged in (whole[:5000], whole[:-40] + bytes(40), b""):
        path.unlink()  # this process runs the former one
        path.write_bytes(damaged)
        path.chmod(0o700)
        assert load_library.__wrapped__("naive") is not None
        assert is_trusted(path)


@pytest.mark.skipif(not IS_X86, reason="the levels are for Linux on x86-64")
@pytest.mark.parametrize("reason", ["a warning", "no-compiler", "false ended with status 1"])
def test_without_a_compiler_the_plain_modules_compute_and_one_line_says_so(
    monkeypatch, no_library, tiny_model, caplog, reason
):
    def run(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout, stderr=b"a warning")  # in bytes, whatever the options

    monkeypatch.setenv("CC", "false" if "false" in reason else str(no_library / "no-compiler"))
    if reason == "a warning":
        monkeypatch.setattr(subprocess, "run", run)
    with caplog.at_level(logging.WARNING, "models"):
        inference = InferenceModel(tiny_model())
        InferenceModel(tiny_model())
    assert isinstance(inference.network, PlainNetwork)
    (record,) = caplog.records
    assert record.message.startswith("no CPU kernels (") and "\n" not in record.message and reason in record.message
    assert len(record.message) <= 120
    torch.testing.assert_close(logits_of(inference), logits_of(tiny_model()), rtol=1e-4, atol=1e-4)
