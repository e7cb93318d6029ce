"""Names of files on Windows, and what its registry says of them."""

import mimetypes
import ntpath
from pathlib import PureWindowsPath
from types import SimpleNamespace

import pytest

from nanovlm import outputs
from nanovlm.serving.app import listen
from nanovlm.serving.options import ServeOptions


@pytest.mark.parametrize("image, name", [
    (r"C:\photos\sub\a.png", "sub/a.png"), (r"C:\a.png", "../a.png"), (r"D:\photos\a.png", "D:/photos/a.png"),
])  # fmt: skip
def test_tables_name_images_with_slashes_and_those_of_another_drive_whole(image, name, monkeypatch):
    monkeypatch.setattr(outputs, "os", SimpleNamespace(path=ntpath))
    monkeypatch.setattr(outputs, "Path", PureWindowsPath)
    assert outputs.relative_name(image, r"C:\photos") == name
    assert ntpath.normpath(ntpath.join(r"C:\photos", name)) == image, "and the row is found again"


def test_pages_get_their_scripts_whatever_the_registry_says():
    mimetypes.add_type("text/plain", ".js")
    listen(ServeOptions(port=0)).close()
    assert mimetypes.guess_type("page.js") == ("text/javascript", None)
