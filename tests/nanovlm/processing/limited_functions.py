"""Functions for limited processes to call, some of which end them."""

import os
import signal
import sys
import time
from functools import partial


def echo(value):
    return value, [b"12", b"", b"345"]


def surroundings():
    return {"environment": dict(os.environ), "path": sys.path, "modules": [*sys.modules]}, []


def spin():
    while True:
        pass


def fill():
    return "x" * 10**12, []


def tear():
    os.write(1, b'{"value": 1, "n_bytes": 9}\nabc')
    os._exit(0)


def divide():
    return 1 / 0, []


sleep = partial(time.sleep, 99)
kill = partial(os.kill, os.getpid(), signal.SIGSEGV)
leave = partial(os._exit, 3)
find = partial(open, "/nobody/there")
