"""Functions that load a model in the workers of a Ray cluster, which must be able to import them."""

import os
import signal
import time
import uuid
from pathlib import Path

from nanovlm import Captioner

DEADLY_SIZE = 95, 96  # of an image


def load_and_die(folder, times):
    """A captioner whose process is killed, like by the kernel, at an image of DEADLY_SIZE; `times` times in all.

    The folder remembers which process was killed.
    """
    captioner = Captioner.from_pretrained()
    prepare = captioner.prepare

    def prepare_or_die(image, prompt):
        if image.size == DEADLY_SIZE and len(list(Path(folder).iterdir())) < times:
            Path(folder, str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return prepare(image, prompt)

    captioner.prepare = prepare_or_die
    return captioner


def load_slowly(folder):
    """A captioner that takes a second for an image; a new file in the folder says that a worker has one more."""
    captioner = Captioner.from_pretrained()
    prepare = captioner.prepare

    def prepare_slowly(image, prompt):
        time.sleep(1)
        return prepare(image, prompt)

    captioner.prepare = prepare_slowly
    (folder / uuid.uuid4().hex).touch()
    return captioner
