"""A drive that refuses what others can: nothing is lost."""

import os
import shutil
from pathlib import Path

from nanovlm import SAMPLE, Captioner


def test_a_drive_that_refuses_chmod_loses_nothing(random_captioner, model_folder, generate, tmp_path, monkeypatch):
    def refuses(*arguments, **options):
        raise PermissionError(1, "Operation not permitted")

    for owner, name in ((os, "chmod"), (os, "fchmod"), (os, "lchmod"), (Path, "chmod"), (os, "fsync")):
        monkeypatch.setattr(owner, name, refuses, raising=False)
    shutil.copyfile(SAMPLE, tmp_path / "a.png")
    (tmp_path / "all.jsonl").write_text('{"file_name": "a.png", "text": ""}\n')  # a row to be replaced
    for output, flags in (("a.txt", ()), ("all.jsonl", ("--out", str(tmp_path / "all.jsonl")))):
        code, _, err = generate(str(tmp_path), *flags)
        assert code == 0 and (tmp_path / output).stat().st_size > 0, err
    random_captioner.save_pretrained(tmp_path / "model")
    assert Captioner.from_pretrained(tmp_path / "model", "cpu", "float32").caption(SAMPLE, max_new_tokens=2)
