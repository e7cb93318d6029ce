"""Kept output has its command line above it, in a file for each processor."""

from eval.lib.cpu_levels import levels_here
from eval.lib.hardware import cpu_name
from eval.lib.results import append_output, file_name


def test_outputs_are_appended_with_their_command(tmp_path):
    path = append_output(tmp_path / "new", "first\na machine")
    assert append_output(tmp_path / "new", "second") == path
    assert path.stem == file_name([cpu_name(), *levels_here()[-1:]])
    lines = path.read_text().splitlines()
    assert lines[1:3] == ["first", "a machine"] and lines[5:] == ["second", ""]
    assert lines[0] == lines[4] and lines[0].startswith("$ python ")


def test_a_file_name_is_the_model_name_and_highest_level_with_dashes():
    assert file_name(["Intel(R) Xeon(R) Platinum 8488C", "amx"]) == "intel-xeon-platinum-8488c-amx"
    assert file_name(["AMD EPYC", "avx2-vnni"]) == "amd-epyc-avx2-vnni" and file_name(["aarch64"]) == "aarch64"
