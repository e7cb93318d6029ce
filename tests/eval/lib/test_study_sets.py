"""The data sets of `eval.finetune --study`: what they hold, and classifiers that need no training."""

from pathlib import Path

import pytest

from eval.lib.finetune_study import classify_embeddings, classify_pixels
from eval.lib.study_sets import STUDY_SETS, read_study_set, write_study_set
from nanovlm.errors import DataError

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("name", "n_train", "n_test", "n_captions"), [("digits", 600, 1197, 10), ("faces", 130, 70, 2)]
)
def test_sets_that_come_with_packages_are_written(tmp_path, name, n_train, n_test, n_captions):
    pytest.importorskip("sklearn")
    pytest.importorskip("skimage")
    train, test = write_study_set(name, tmp_path, tmp_path / name)
    _, captions = read_study_set(train)
    assert (len(captions), len(read_study_set(test)[0])) == (n_train, n_test) and len(set(captions)) == n_captions
    if name == "faces":
        assert classify_pixels(train, test)["exact"] > 0.9 and classify_embeddings(train, test)["exact"] > 0.8


def test_a_missing_archive_is_named(tmp_path):
    for folder, where in ((tmp_path, str(tmp_path)), (None, "the folder that --study names")):
        with pytest.raises(DataError, match=rf"{where} has no flag-icons\*\.tgz: pip download .* or npm pack"):
            write_study_set("flags", folder, tmp_path / "flags")
    assert list(STUDY_SETS) == ["digits", "patches", "faces", "icons", "flags", "emoji"] and not Path("flags").exists()
