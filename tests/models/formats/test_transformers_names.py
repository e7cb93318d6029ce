"""Names of tensors."""

import pytest

from models.errors import CheckpointError
from models.formats.transformers_names import translate


def test_unknown_tensor_names_raise():
    table = {r"a\.(\d+)": r"b.\1", r"c\..*": None}
    assert translate("a.7", table) == "b.7" and translate("c.7", table) is None
    with pytest.raises(CheckpointError, match="tensor 'a.x' has no place"):
        translate("a.x", table)
