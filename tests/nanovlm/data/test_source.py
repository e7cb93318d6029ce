"""An example's fingerprint, by which a resumed run notices that its data have changed."""

import pytest

from nanovlm.data import open_source
from support.data import OPTIONS, png, write

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.mark.parametrize("kind", ["json", pytest.param("parquet", marks=pytest.mark.full)])
def test_fingerprint_changes_with_text_and_image_but_not_when_files_are_rewritten(kind, request):
    if kind == "parquet":
        request.getfixturevalue("datasets_cache")

    def fingerprint(image, text):
        if kind == "json":
            write("a.png", image)
            write("data.json", [{"image": "a.png", "caption": text}])
        else:
            import pyarrow
            from pyarrow import parquet

            table = pyarrow.table({"image": [{"bytes": image, "path": None}], "caption": [text]})
            parquet.write_table(table, "data.parquet")
        return open_source(f"data.{kind}", OPTIONS).fingerprint(0)

    first = fingerprint(png(1), "one")
    assert fingerprint(png(1), "one") == first
    assert len({first, fingerprint(png(1), "three"), fingerprint(png(1) + b"\0", "one")}) == 3
