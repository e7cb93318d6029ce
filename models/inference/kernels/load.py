"""The kernel library, one small one for each level of CPU instructions: its structs, its build and its loading.

build_backend.py builds all levels when the package is installed, if there is a C compiler. Where that was not possible,
and after a change of the source, the level that this CPU needs is built at first use, in about two seconds, into the
user's cache.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import textwrap
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from models.common import files
from models.common.errors import InputError

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")
X86 = {  # name: what common.h is compiled with, and the flags that the CPU must have
    "avx2": (("-DLEVEL=AVX2",), AVX2),
    "avx2-vnni": (("-DLEVEL=AVX2_VNNI",), (*AVX2, "avx_vnni")),
    "vnni": (("-DLEVEL=VNNI",), AVX512),
    "bf16": (("-DLEVEL=BF16_DOT",), (*AVX512, "avx512_bf16")),
    "amx-emulated": (("-DLEVEL=AMX", "-DEMULATE_AMX"), (*AVX512, "avx512_bf16")),
    "amx": (("-DLEVEL=AMX",), (*AVX512, "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")),
}
ARM = {
    "neon": (("-DLEVEL=NEON", "-march=armv8-a"), ("asimd",)),
    "neon-dotprod": (("-DLEVEL=NEON_DOTPROD", "-march=armv8.2-a+dotprod"), ("asimd", "asimddp")),
    "neon-i8mm": (
        ("-DLEVEL=NEON_I8MM", "-march=armv8.2-a+dotprod+i8mm+bf16"),
        ("asimd", "asimddp", "i8mm", "bf16"),
    ),
}
ARM_FEATURES = {  # name: entry and bit of Linux's getauxval (asm/hwcap.h), and macOS's name
    "asimd": (16, 1, "AdvSIMD"),
    "asimddp": (16, 20, "FEAT_DotProd"),
    "i8mm": (26, 13, "FEAT_I8MM"),
    "bf16": (26, 14, "FEAT_BF16"),
}
IS_ARM = platform.machine() in ("aarch64", "arm64")
LEVELS = {"naive": (("-DLEVEL=NAIVE",), ()), **(ARM if IS_ARM else X86)}  # of this machine, lowest first
WITHOUT_BF16_DOT = ("avx2", "avx2-vnni", "vnni", "neon", "neon-dotprod")  # multiply bfloat16 weights in float32
# Levels for gcc 11 or clang 12, and what an older compiler builds
NEED_NEW_COMPILER = {"avx2-vnni": "avx2", "amx": "bf16", "neon-i8mm": "neon-dotprod"}
FOR_TESTS = ("naive", "amx-emulated")  # plain loops, and AMX's instructions in plain C
MAX_REASON = 50  # characters, of a line of 120
FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fPIC", "-shared", "-w"]
if IS_ARM:  # no calls of libgcc; and not gcc's first scheduling, which keeps more values than there are registers
    FLAGS += ["-mno-outline-atomics", "-fno-schedule-insns"]
if sys.platform == "darwin":  # Apple's clang hides OpenMP; its calls are looked up in torch's library at loading
    FLAGS += ["-Xclang", "-fopenmp", "-undefined", "dynamic_lookup"]
else:  # without libgomp: torch has loaded one, and two would compete for the cores
    FLAGS += ["-fopenmp", "-nostartfiles", "-nodefaultlibs", "-lm", "-lc"]


def read_structs() -> dict[str, Any]:
    """The C sources' structs by name, as ctypes classes whose fields are written in C alone."""
    types: dict[str, Any] = {"int": ctypes.c_int, "long": ctypes.c_long, "float": ctypes.c_float}
    sources = [FOLDER / name for name in ("common.h", "model.c")]  # missing in a zip, where there are no kernels
    source = "".join(files.read_text(path) for path in sources if path.exists())
    for body, name in re.findall(r"typedef struct \{([^{}]*)\} (\w+);", re.sub("//.*", "", source)):
        fields = []
        for kind, names in re.findall(r"(?:const )?(\w+) ([^;]+);", body):
            for star, field, length in re.findall(r"(\*?)(\w+)(?:\[(\d+)\])?", names):
                one = ctypes.c_void_p if star else types[kind]
                fields.append((field, one * int(length) if length else one))
        types[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return types


@cache
def cpu_info(field: str) -> str:
    """A field of /proc/cpuinfo, such as "model name" or "flags"; "" if there is none."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


@cache
def amx_is_allowed() -> bool:
    """Check whether Linux lets this process use AMX's tiles, which is asked for here; no Linux before 5.16 does.

    It is arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): Linux, Documentation/arch/x86/xstate.rst.
    """
    return ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


def cpu_features() -> set[str]:
    """Names of this CPU's instructions, as Linux calls them; empty where kernels are not written for it."""
    if platform.machine() == "x86_64":
        return set(cpu_info("flags").split())
    if IS_ARM and sys.platform == "linux":
        getauxval = ctypes.CDLL(None).getauxval
        getauxval.argtypes = [ctypes.c_ulong]
        getauxval.restype = ctypes.c_ulong
        return {name for name, (entry, bit, _) in ARM_FEATURES.items() if getauxval(entry) >> bit & 1}
    if IS_ARM and sys.platform == "darwin":
        listed = subprocess.run(["sysctl", "hw.optional.arm"], capture_output=True, text=True).stdout.splitlines()
        return {name for name, (*_, key) in ARM_FEATURES.items() if f"hw.optional.arm.{key}: 1" in listed}
    return set()


def available_levels() -> list[str]:
    """The levels that this CPU can run, lowest first; empty where there are no kernels."""
    features = cpu_features()
    if "amx_tile" in features and not amx_is_allowed():
        features.remove("amx_tile")
    return [name for name, (_, needed) in LEVELS.items() if features and features.issuperset(needed)]


def chosen_level() -> str | None:
    """The CPU's best level, at most $NANOVLM_CPU_LEVEL; None for "none"."""
    available = available_levels()
    wanted = os.environ.get("NANOVLM_CPU_LEVEL")
    if wanted in available:
        return wanted
    if wanted and wanted not in (*LEVELS, "none"):
        raise InputError(f"NANOVLM_CPU_LEVEL={wanted} is not a level; use {', '.join(LEVELS)} or none")
    highest = [*LEVELS].index(wanted) if wanted in LEVELS else len(LEVELS)
    levels = [name for name in [*LEVELS][:highest] if name in available and name not in FOR_TESTS]
    return levels[-1] if levels and wanted != "none" else None


def cache_folder() -> Path:
    """$NANOVLM_CACHE, or nanovlm in $XDG_CACHE_HOME or ~/.cache."""
    given = os.environ.get("NANOVLM_CACHE")
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nanovlm"))


def library_name(level: str) -> str:
    """The name of a level's library, which changes with the source and the compiler."""
    made_of = [files.read_bytes(path) for path in sorted(FOLDER.glob("*.[ch]"))]
    made_of.append(repr((FLAGS, os.environ.get("CC"))).encode())
    return f"kernels-{level}-{hashlib.sha256(b''.join(made_of)).hexdigest()[:12]}.so"


def build(level: str, folder: Path) -> Path:
    """Compile a level's library into a folder. Raises OSError or subprocess.SubprocessError if that is not possible."""
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    library = folder / library_name(level)
    with files.replacing(library, mode=0o700) as new:
        command = [*compiler, *LEVELS[level][0], "-o", str(new), str(FOLDER / "model.c"), *FLAGS]
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=120)
        files.append(new, hashlib.sha256(files.read_bytes(new)).digest())  # which loaders ignore
    return library


def is_trusted(path: Path) -> bool:
    """Check whether a library is whole, and only this user or root can write to it and to its folder."""
    try:
        file = path.lstat()
        folder = path.parent.stat()
        others = any(x.st_uid not in (0, os.getuid()) or x.st_mode & 0o022 for x in (file, folder))
        content = files.read_bytes(path) if stat.S_ISREG(file.st_mode) and not others else b""
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library; on macOS after torch's OpenMP, whose names it uses."""
    if sys.platform == "darwin":
        import torch

        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libomp.dylib"), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


@cache
def load_library(level: str) -> ctypes.CDLL | None:
    """A level's library, built now if need be; None, with a log entry, if that is not possible."""
    own = cache_folder()
    for path in (folder / library_name(level) for folder in (FOLDER, own)):
        if is_trusted(path):
            with suppress(OSError):  # of another system
                return open_library(path)
    try:
        path = build(level, own)
        if not is_trusted(path):
            raise OSError(f"other users can write to {path.parent}")
        return open_library(path)
    except (OSError, subprocess.SubprocessError) as error:
        if level in NEED_NEW_COMPILER:
            return load_library(NEED_NEW_COMPILER[level])
        reason = str(getattr(error, "stderr", None) or error).strip().partition("\n")[0]
        if isinstance(error, subprocess.CalledProcessError) and not error.stderr:
            reason = f"{error.cmd[0]} ended with status {error.returncode}"
        elif isinstance(error, OSError) and error.filename:
            reason = f"{Path(error.filename).name}: {error.strerror}"
        reason = textwrap.shorten(reason, MAX_REASON, placeholder=" ...")
        logger.warning("no CPU kernels (%s): PyTorch's own operations are used, which are slower", reason)
    return None
