"""The rules of docs/architecture.md: imports run one way, without circles, the core knows no add-on, nothing
grows, and a message of wrong use or bad data says what to do.

`python tests/test_architecture.py` prints that page's table of sizes with the lines of now.
"""

import ast
import re

import pytest

from support import ROOT
from support.import_graph import PACKAGES, SCRIPTS, ImportGraph

GRAPH = ImportGraph(ROOT)
MAINTAINED = {".py", ".c", ".h", ".html", ".css", ".js"}  # endings of the files whose lines count
SUM, TESTS = "sum", "`tests/`"  # rows of the table of sizes

FORBIDDEN = {  # packages that the modules of a package must not import
    "models": {"nanovlm", "eval", "tests", "PIL", "torchvision", "tokenizers", "jinja2", "transformers", "numpy"},
    "nanovlm": {"eval", "tests", "torchvision", "transformers", "numpy"},
    "eval": {"tests", "generate", "train"},
}
CORE = {
    "models.config", "models.cache", "models.attention", "models.language_model", "models.vision_transformer",
    "models.modality_projector", "models.vision_language_model", "models.decoding",
}  # fmt: skip
BELOW = ("models.common", "models.checkpoint")  # what the core, too, may import
MINGPT_NEEDS = {"models.cache", "models.checkpoint", "models.common.errors"}
ROOTS = {script.removesuffix(".py") for script in SCRIPTS}
ADD_ONS = ("models.inference", "models.kv_study", "models.lora", "models.mingpt", "models.formats")


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_there_are_no_import_circles_and_the_graph_sees_imports_inside_functions(tmp_path):
    assert not GRAPH.circle
    (tmp_path / "models").mkdir()
    late = "def f():\n    importlib.import_module('models.b')\n"
    sources = dict.fromkeys(SCRIPTS, "") | {"models/a.py": late, "models/b.py": "from .a import f\n"}
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    assert set(ImportGraph(tmp_path).circle) == {"models.a", "models.b"}


IMPORTS = [(module, item) for module, imports in GRAPH.imports.items() for item in imports]
EDGES = [(module, target) for module, targets in GRAPH.edges.items() for target in targets]
BROKEN = {  # rule: what breaks it
    **{
        f"{package} imports what is below it": [
            (module, item) for module, item in IMPORTS
            if within(module, package) and item.module.partition(".")[0] in forbidden
        ]
        for package, forbidden in FORBIDDEN.items()
    },
    "only entry points and eval import the command line": [
        module for module, target in EDGES
        if within(target, "nanovlm.cli") and not within(module, "nanovlm.cli", "nanovlm.__main__", "eval", *ROOTS)
    ],
    "root scripts only call the command line": [
        item for module, item in IMPORTS if module in ROOTS and item.module not in ("sys", "nanovlm.cli.main")
    ],
    "the core imports no add-on": [
        (module, target) for module, target in EDGES
        if (module in CORE or within(module, *BELOW)) and within(target, *ADD_ONS)
    ],
    "models/*.py is network, caches and generation": CORE
    ^ {module for module in GRAPH.files if module.startswith("models.") and not within(module, *ADD_ONS, *BELOW)},
    "mingpt needs the core's cache and, for GPT-2's weights, its reader of files": MINGPT_NEEDS
    ^ {target for module, target in EDGES if within(module, "models.mingpt") and not within(target, "models.mingpt")},
    "no module imports a private name of another": [
        (module, item) for module, item in IMPORTS
        if item.module.partition(".")[0] in FORBIDDEN and re.match("_(?!_version__$)", item.name or "")
    ],
}  # fmt: skip


@pytest.mark.parametrize("rule", BROKEN)
def test_imports_follow_the_rules(rule):
    assert not BROKEN[rule]


# --------------------------------------------------------------------------------------------------- one gate

# What `files` does for everyone: names of functions of these modules, and of methods whatever the object is.
FILE_MODULES = {"builtins", "io", "os", "shutil", "tempfile", "fcntl", "posix", "codecs", "gzip", "PIL.Image"}
FUNCTIONS = {
    "open", "fdopen", "replace", "rename", "renames", "unlink", "remove", "removedirs", "rmdir", "truncate", "link",
    "symlink", "rmtree", "move", "copy", "copy2", "copyfile", "copytree", "copymode", "mkstemp", "mkdtemp", "mktemp",
    "TemporaryDirectory", "TemporaryFile", "NamedTemporaryFile", "SpooledTemporaryFile", "FileIO", "flock", "lockf",
}  # fmt: skip
METHODS = {
    "open", "rename", "unlink", "rmdir", "rmtree", "write_text", "write_bytes", "read_text", "read_bytes", "touch",
    "symlink_to", "hardlink_to",
}  # fmt: skip
EXCEPTIONS: dict[str, set[str] | None] = {  # of a module: what it may use, as it stands there, or everything
    "models.common.files": None,
    "models.inference.kernels.build_backend": {"old.unlink"},  # runs before the package is installed
    "models.inference.kernels.load": {"path.read_text"},  # /proc/cpuinfo
    "nanovlm.device": {"status.read_text"},  # /proc/self/status
    "nanovlm.cli.main": {"os.open"},  # /dev/null
    "nanovlm.cli.chat": {"self.open"},  # a command of the chat
    "nanovlm.processing.image_loading": {"Image.open"},  # the only one
    "nanovlm.processing.video_decoder": {"av.open"},  # of an open file
    "nanovlm.data.rows": {"tarfile.open"},  # of an open file
    "nanovlm.data.values": {"fsspec.open"},  # of an address on the Hub
    "nanovlm.cli.review": {"webbrowser.open"},  # of an address
}


def file_calls(source: str) -> set[str]:
    """Names in a source file, by whatever alias, that open, replace or remove files as only `files` may."""
    tree = ast.parse(source)
    modules: set[str] = set()  # names in this file of FILE_MODULES
    functions = {"open"}  # names in this file of their functions
    gates: set[str] = set()  # names in this file of models.common.files
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for item in node.names:
            whole, name = f"{prefix}{item.name}", item.asname or item.name
            modules |= {name} if whole in FILE_MODULES else set()
            gates |= {name} if whole == "models.common.files" else set()
            functions |= {name} if prefix[:-1] in FILE_MODULES and item.name in FUNCTIONS else set()
    found = set()
    for node in ast.walk(tree):  # a mention is enough, as of f = os.replace
        text = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute | ast.Call) else ""
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in functions:
                found.add(text)
            case ast.Attribute(value=owner, attr=name) if ast.unparse(owner) not in gates:
                if name in METHODS or (name in FUNCTIONS and ast.unparse(owner) in modules):
                    found.add(text)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=name), *_]):
                if name in FUNCTIONS | METHODS:
                    found.add(text)
    return found


def test_files_and_images_are_opened_in_one_place():
    elsewhere = {}
    for module, path in GRAPH.files.items():
        allowed = EXCEPTIONS.get(module, set())
        if within(module, "models", "nanovlm") and allowed is not None:
            elsewhere[module] = file_calls(path.read_text(encoding="utf-8")) - allowed
    assert not {module: calls for module, calls in elsewhere.items() if calls}, "call `files`, or load_image"


@pytest.mark.parametrize(
    "source",
    [
        "open('a')", "f = open", "Path(a).unlink()", "a.read_text()", "import os; f = os.replace",
        "from os import replace as r; r(a, b)", "import os as o; o.replace(a, b)",
        "import os; getattr(os, 'replace')", "def f():\n  import os\n  os.unlink(a)",
        "import builtins; builtins.open(a)", "from tempfile import TemporaryDirectory as T; T()",
        "from PIL import Image as I; I.open(a)", "import PIL.Image; PIL.Image.open(a)",
    ],
)  # fmt: skip
def test_a_second_way_to_a_file_is_found(source):
    assert file_calls(source)


@pytest.mark.parametrize(
    "source",
    ["'a'.replace('b', 'c')", "from models.common import files; files.read_text(a)", "x.copy()", "[].remove(1)"],
)
def test_what_is_no_way_to_a_file_is_not(source):
    assert not file_calls(source)


PROCESS_MODULES = {"subprocess", "multiprocessing", "pty", "torch.multiprocessing", "concurrent.futures.process"}
PROCESS_NAMES = re.compile(r"fork(pty)?|system|popen|posix_spawnp?|(exec|spawn)[lv]p?e?|startfile|create_subprocess_\w+"
                           r"|ProcessPoolExecutor|ProcessContext|Popen")  # fmt: skip
STARTERS = {
    "nanovlm.processing.limited_process",
    "models.inference.kernels.load",  # the compiler
    "models.inference.kernels.build_backend",  # its errors
}


def process_starts(source: str) -> set[str]:
    """Names in a source file that start processes."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        match node:
            case ast.Import(names=items):
                names = [item.name for item in items]
            case ast.ImportFrom(module=str(module), names=items):
                names = [module, *(f"{module}.{item.name}" for item in items), *(item.name for item in items)]
            case ast.Call(func=function, args=[*_, ast.Constant(value=str(text))]):
                names = [text] if ast.unparse(function).endswith(("getattr", "import_module")) else []
            case ast.Attribute(value=owner, attr=name) if ast.unparse(owner) != "platform":
                names = [name, ast.unparse(node)]
        modules = {name for name in names if name in PROCESS_MODULES or name.partition(".")[0] in PROCESS_MODULES}
        found |= modules | {*filter(PROCESS_NAMES.fullmatch, names)}
    return found


def test_processes_are_started_in_one_place():
    texts = {module: path.read_text(encoding="utf-8") for module, path in GRAPH.files.items()}
    starts = {m: process_starts(text) for m, text in texts.items() if within(m, "models", "nanovlm")}
    assert {m: names for m, names in starts.items() if names and m not in STARTERS} == {}, "use a LimitedProcess"
    assert all(starts[module] for module in STARTERS)


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess", "import subprocess as s", "from subprocess import run", "import multiprocessing.pool",
        "from os import fork", "import os; f = os.system", "os.popen('ls')", "os.execvp('ls', [])", "os.posix_spawn(a)",
        "importlib.import_module('subprocess')", "getattr(os, 'spawnv')", "asyncio.create_subprocess_exec('ls')",
        "from concurrent.futures import ProcessPoolExecutor", "from torch import multiprocessing",
        "import torch; torch.multiprocessing.spawn(f)", "def f():\n  import pty",
    ],
)  # fmt: skip
def test_a_second_start_of_a_process_is_found(source):
    assert process_starts(source)


def limits_by_package() -> dict[str, int]:
    """The table of sizes in docs/architecture.md: packages and how many lines each may have."""
    lines = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("|").split("|") for line in lines if re.match(r"\| .+ \| [\d,]+ \|", line)]
    return {package.strip(): int(limit.replace(",", "")) for package, limit, *_ in rows}


def count_lines(packages: list[str]) -> dict[str, int]:
    """The lines of each package now; a file counts for the longest path in backticks that its own begins with."""
    owners = {path.removesuffix("*.py"): package for package in packages for path in re.findall("`(.+?)`", package)}
    lines = dict.fromkeys(packages, 0)
    for file in (file for folder in (*PACKAGES, "tests") for file in (ROOT / folder).rglob("*")):
        if file.suffix in MAINTAINED:
            name = file.relative_to(ROOT).as_posix()
            owner = max((path for path in owners if name.startswith(path)), key=len)
            lines[owners[owner]] += len(file.read_text(encoding="utf-8").splitlines())
    return lines | {SUM: sum(lines.values()) - lines[TESTS]}


def test_no_package_has_more_lines_than_its_row_of_the_table_says():
    limits = limits_by_package()
    lines = count_lines([*limits])
    grown = {name: f"{lines[name]:,} of {limit:,}" for name, limit in limits.items() if lines[name] > limit}
    assert not grown, "shorten the package, or raise its limit in docs/architecture.md if the change is worth it"


# ---------------------------------------------------------------------------------------------- messages of errors

# Wrong use, bad data and missing packages: the user can do something about each. A damaged file of a model is named.
DATA_KINDS = ("DataError", "ExampleError")
KINDS = ("UsageError", *DATA_KINDS, "TrainingError", "MissingExtraError", "OutputError")
WAY_OUT = re.compile(
    r"; |, or |pip install|\b(must|needs?|has no effect|exclude|omit|name|take|show|ask|send|use|try|raise|lower)\b|"
    r"is none of|is less than|not (like|a|an|one)\b|no (range|share|origin|folder)\b"
)


def messages():
    """Place and text of each message that a raised error begins, {} for each value in it."""
    for path in sorted([*ROOT.glob("models/**/*.py"), *ROOT.glob("nanovlm/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in KINDS and node.args:
                parts = getattr(node.args[0], "values", [node.args[0]])
                if all(isinstance(part, ast.Constant | ast.FormattedValue) for part in parts):
                    text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in parts)
                    yield pytest.param(text, id=f"{path.relative_to(ROOT)}:{node.lineno}")


@pytest.mark.parametrize("text", list(messages()))
def test_a_message_says_what_to_do(text):
    assert not text.endswith((".", "!")) and "  " not in text and not re.search(r"\b(failed|invalid|illegal)$", text)
    is_another_error = re.fullmatch(r"[\w/:{} -]*\{\}", text)  # which names its own way out
    assert is_another_error or WAY_OUT.search(text), f"no way out: {text}"


if __name__ == "__main__":
    limits = limits_by_package()
    for package, n in count_lines([*limits]).items():
        print(f"{n:7,} of {limits[package]:7,} {package}")
