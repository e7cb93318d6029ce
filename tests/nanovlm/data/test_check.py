"""`--check-data`: what was read, counts by answer, what cannot be used, and examples as they are learned."""

import pytest

from nanovlm.data import ReadOptions, check_data, open_data
from support.data import png, write

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.mark.parametrize(("on_error", "code"), [("stop", 1), ("skip", 0)])
def test_check_data(tiled, capsys, on_error, code):
    for i, label in enumerate(("red", "red", "blue")):
        write(f"{label}/{i}.png", png(i))
    write("red/3.png", b"no image")
    train, held_out = open_data(["."], ReadOptions(on_error=on_error), 0, check=True)
    assert check_data(train, held_out, tiled[1], on_error == "skip") == code
    out = capsys.readouterr().out
    for words in (
        ".: 4 examples, 4 different images",
        "answer name of the folder",
        "by answer: red 2, blue 1",
        "1 cannot be used",
        "red/3.png: not an image",
        "learned: blue",
    ):
        assert words in out
