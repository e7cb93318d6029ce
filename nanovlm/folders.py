"""Folders of images and of training data: which of their files are looked at."""

import os
from collections.abc import Callable, Iterator

WEIGHTS = "model.safetensors"  # marks a model's folder, as in models.checkpoint, which imports torch
# Thumbnails of a Synology, resource forks of macOS archives, and what file systems keep at the top of a disk
NO_IMAGE_FOLDERS = {"@eaDir", "__MACOSX", "lost+found", "$RECYCLE.BIN", "System Volume Information"}


def walk(
    folder: str | os.PathLike[str], onerror: Callable[[OSError], None] | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and its subfolders, each with the sorted names of its files; links are followed, each once.

    Left out are what is hidden, thumbnails, file systems' own, and model folders below the first: they hold reports.
    """
    seen = set()
    for current, subfolders, names in os.walk(folder, onerror=onerror, followlinks=True):
        place = os.path.realpath(current)
        if place in seen or (current != os.fspath(folder) and WEIGHTS in names):
            subfolders.clear()
            continue
        seen.add(place)
        visible = [name for name in subfolders if name[0] != "." and name not in NO_IMAGE_FOLDERS]
        subfolders[:] = sorted(visible, key=lambda name: (os.path.islink(os.path.join(current, name)), name))
        yield current, sorted(name for name in names if name[0] != ".")
