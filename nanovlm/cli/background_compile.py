"""Compiling a model's decoder block in a process of its own, after the first answers were given without it."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO

from nanovlm.cli.options import ModelOptions

if TYPE_CHECKING:
    from nanovlm.captioner import Captioner

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ROOT = Path(__file__).parents[2]  # of the packages, where the new process finds them
MIN_PARAMETERS = 100_000_000  # a smaller model answers fast enough
RETRY_SECONDS = 24 * 3600  # after an attempt that left no package


def compile_in_background(captioner: "Captioner", options: ModelOptions) -> None:
    """Start `nanovlm compile` for the captioner's model at the lowest priority, and return at once.

    It goes on when this process ends, and writes to a log beside the package. Nothing happens for models below
    MIN_PARAMETERS and on GPUs, if options.compile is given, if a package exists, if a process is making it or failed to
    within a day, in continuous integration (CI is set), with NANOVLM_BACKGROUND_COMPILE=0, and on Windows.
    """
    from models.inference.aot_compile import is_compilable, package_path
    from models.inference.inference_model import InferenceModel

    inference = captioner.inference
    if options.compile is not None or not allowed() or not isinstance(inference, InferenceModel):
        return
    decoder = inference.network.decoder
    n_parameters = sum(parameter.numel() for parameter in inference.parameters())
    if n_parameters < MIN_PARAMETERS or inference.device.type != "cpu" or not is_compilable(decoder):
        return
    package = package_path(decoder.blocks[0])
    if package.exists():
        return
    try:
        package.parent.mkdir(parents=True, exist_ok=True)
        with open(package.with_suffix(".log"), "ab") as log:
            if is_first(log):
                start(captioner, options, log)
    except OSError:  # a cache that cannot be written, or no process left: the next answer is as fast as this one
        return


def allowed() -> bool:
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return fcntl is not None and not in_ci and os.environ.get("NANOVLM_BACKGROUND_COMPILE") != "0"


def is_first(log: BinaryIO) -> bool:
    """Lock the log; False if another process holds the lock, or an earlier one wrote to the log within a day.

    The lock is that of the open file, which the new process inherits: it ends with that process, however that ends.
    """
    assert fcntl is not None
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    state = os.fstat(log.fileno())
    return state.st_size == 0 or time.time() - state.st_mtime > RETRY_SECONDS


def start(captioner: "Captioner", options: ModelOptions, log: BinaryIO) -> None:
    """Start the process with the same model, precision and number of threads; it holds the log open."""
    import torch

    model = os.path.abspath(options.model) if os.path.exists(options.model) else str(options.model)
    flags = {
        "--dtype": str(captioner.inference.dtype).removeprefix("torch."),
        "--threads": str(torch.get_num_threads()),
        "--quantize": options.quantize,
        "--revision": options.revision,
    }
    command = [sys.executable, "-m", "nanovlm", "compile", model]
    for flag, value in flags.items():
        command += [flag, value] if value else []
    if nice := shutil.which("nice"):
        command = [nice, "-n", "19", *command]
    log.truncate(0)
    log.write(f"{' '.join(command)}\n".encode("utf-8", "surrogateescape"))
    log.flush()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # so that neither ctrl-c nor the end of the terminal reaches it
    )
    process.returncode = 0  # nobody waits for it: no ResourceWarning
