"""Prove that the kernels compute what a model's modules do: both are the lines that they were tested against.

Kernels stand for certain functions and classes of the core. Their source is compared, as syntax trees without comments
and docstrings, with WRITTEN_FOR; what they read from their files by name counts, too. A model's modules must be these
classes, made as the config says. So an edit of the core's files, a patch, a hook, a replaced module or a class of one's
own counts in every answer, at any length and in any block.

`python -m models.inference.proof` prints WRITTEN_FOR for the source as it is.
"""

import ast
import hashlib
import linecache
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from models import attention, language_model, modality_projector, vision_transformer
from models.cache import KVCache, PrefillState
from models.config import VLMConfig
from models.inference.quantization import QuantizedLinear
from models.vision_language_model import VisionLanguageModel, empty_model

# Digests by file. A test fails if they are not those of the source, and says how to renew them.
WRITTEN_FOR = {
    "models/attention.py": "9d028824ae82276b",
    "models/cache.py": "05471cf9581c6fc0",
    "models/decoding.py": "af12f48f3f83a5f5",
    "models/language_model.py": "8f1a9c8b8d9f83d2",
    "models/modality_projector.py": "bef14cc52d1d750f",
    "models/vision_language_model.py": "7f5f18a563e65a08",
    "models/vision_transformer.py": "11df4d95e5ebd3af",
}
# Of these classes the named methods count, of all others that are reached from here, every method.
METHODS: dict[type, tuple[str, ...]] = {
    VisionLanguageModel: (
        "encode_images", "embed_tokens", "embed_encoded", "prefill_embeds", "join_masks", "decode", "dtype", "device",
    ),
    KVCache: ("__init__", "length", "append"),
    PrefillState: ("length",),
}  # fmt: skip
FILES = (attention, language_model, modality_projector, vision_transformer)
LIBRARY = (nn.Linear, nn.Conv2d, nn.Embedding, nn.LayerNorm, nn.Dropout)
STANDARD = frozenset(vars(nn.Module()))  # what every module has
CONSTANTS = (bool, int, float, str, tuple, type(None))
NOT_COMPUTED = ("annotation", "returns", "type_comment", "type_params", "kind")  # fields of trees that change nothing


class Source:
    """Functions and classes of the core, with all of the core that they reach by name: digests by file."""

    def __init__(self, *roots: Any):
        self._roots = roots
        self._read()

    def difference(self) -> str:
        """The first file that is not what the kernels were written for; "" if there is none."""
        is_bound = all(_get(holder, name) is value for holder, name, value in self._places)
        if not is_bound or any(vars(kind).keys() != names for kind, names in self._names.items()):
            self._read()
        for file, digest in self.digests.items():
            if WRITTEN_FOR.get(file) != digest:
                return f"{file} is without its source" if file in self._unreadable else f"{file} is edited or patched"
        return ""

    def _read(self) -> None:
        self._places: list[tuple[Any, str, Any]] = []  # (class, function or globals, name, value) that were read
        self._names: dict[type, set[str]] = {}  # of all that a class defines
        self._trees: dict[str, set[str]] = defaultdict(set)
        self._unreadable: set[str] = set()
        self._seen: set[int] = set()
        for root in self._roots:
            self._add(root)
        self.digests = {
            file: hashlib.sha256("\n".join(sorted(trees)).encode()).hexdigest()[:16]
            for file, trees in sorted(self._trees.items())
        }

    def _look(self, holder: Any, name: str) -> Any:
        """An attribute or a global, remembered to notice when it is bound to something else."""
        value = _get(holder, name)
        self._places.append((holder, name, value))
        return value

    def _add(self, value: Any) -> None:
        """Add the trees of a function or class of the core, once."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            self._add_function(value)
            return
        if value not in METHODS:
            self._names[value] = set(vars(value))
        names = METHODS.get(value) or [name for name, one in vars(value).items() if _function(one) is not None]
        for name in names:
            function = _function(self._look(value, name))
            self._trees[_file(value)].add(f"{value.__qualname__}.{name} = {_describe(function)}")
            if function is not None:
                self._add(function)

    def _add_function(self, function: FunctionType) -> None:
        file = _file(function)
        code = self._look(function, "__code__")
        source = "".join(linecache.getlines(code.co_filename, function.__globals__))
        node = _nodes(source).get((code.co_firstlineno, code.co_name))
        if node is None:
            self._unreadable.add(file)
        elif code not in _codes(source):  # the file was edited and its module reloaded, or the code is of another text
            node = None
        tree = "?" if node is None else _dump(node)
        lines = [function.__qualname__, tree, *map(_describe, self._look(function, "__defaults__") or ())]
        for part in () if node is None else ast.walk(node):
            if isinstance(part, ast.Name) and part.id in function.__globals__:
                value = self._look(function.__globals__, part.id)
                lines.append(f"{part.id} = {_describe(value)}")
                if _is_core(value):
                    self._add(value)
            elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                holder = function.__globals__.get(part.value.id)
                if isinstance(holder, ModuleType):
                    value = self._look(holder, part.attr)
                    lines.append(f"{part.value.id}.{part.attr} = {_describe(value)}")
        self._trees[file].add(" ".join(lines))


def _get(holder: Any, name: str) -> Any:
    """A global of that name, or an attribute as it is in its class."""
    if isinstance(holder, dict):
        return holder.get(name)
    if isinstance(holder, type):
        return next((vars(kind)[name] for kind in holder.__mro__ if name in vars(kind)), None)
    return getattr(holder, name, None)


def _function(value: Any) -> FunctionType | None:
    """The function behind a method or property that a file defines; None of what a decorator generates."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) and value.__code__.co_filename != "<string>" else None


def _is_core(value: Any) -> bool:
    """True of a function or class of this package that is no error."""
    is_code = isinstance(value, (FunctionType, type)) and value.__module__.startswith("models.")
    return is_code and not (isinstance(value, type) and issubclass(value, Exception))


def _file(value: Any) -> str:
    return f"{value.__module__.replace('.', '/')}.py"


def _describe(value: Any) -> str:
    """A value as a digest has it: the name of code, within the package that it is of, or the value of a constant."""
    if isinstance(value, CONSTANTS):
        return repr(value)
    if isinstance(value, ModuleType):
        return value.__name__
    module = getattr(value, "__module__", None) or "torch"  # builtin functions of torch have none
    name = getattr(value, "__qualname__", type(value).__name__)
    return f"{module if module.startswith('models.') else module.partition('.')[0]} {name}"


@cache
def _codes(source: str) -> set[CodeType]:
    """The code of all functions in a file's text; codes are equal if they do the same, whatever their file."""
    found = {compile(source, "", "exec", dont_inherit=True)}
    waiting = [*found]
    while waiting:
        nested = [one for one in waiting.pop().co_consts if isinstance(one, CodeType)]
        found.update(nested)
        waiting += nested
    return found


@cache
def _nodes(source: str) -> Mapping[tuple[int, str], ast.AST]:
    """The functions in a file's text, without types, by their first line and name."""
    try:
        parts = [*ast.walk(ast.parse(source))]
    except SyntaxError:
        return {}
    for part in parts:
        for name in NOT_COMPUTED:
            if hasattr(part, name):
                setattr(part, name, None)
    nodes = [part for part in parts if isinstance(part, ast.FunctionDef)]
    return {(min([node.lineno, *(x.lineno for x in node.decorator_list)]), node.name): node for node in nodes}


def _dump(node: Any) -> str:
    """A syntax tree as a text that is equal in all versions of Python: without docstrings and empty fields."""
    if isinstance(node, list):
        return f"[{', '.join(map(_dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    kept = [f"{name}={_dump(x)}" for name, x in fields.items() if x not in (None, [])]
    return f"{type(node).__name__}({', '.join(kept)})"


CORE = Source(
    *METHODS,
    *(x for file in FILES for x in vars(file).values() if _is_core(x) and x.__module__ == file.__name__),
)


class Proof:
    """What the modules of models with one config must be, for the kernels to compute the same."""

    def __init__(self, cfg: VLMConfig):
        self._cfg = cfg
        self._plan = empty_model(replace(cfg, lm_n_blocks=1, vit_n_blocks=1), -1)  # its blocks stand for all

    def difference(self, model: VisionLanguageModel) -> str:
        """What of a model the kernels were not written for; "" if nothing."""
        if reason := CORE.difference():
            return reason
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "torch.nn.modules.module has hooks for all modules, which the kernels do not call"
        for kind in (nn.Module, *LIBRARY):
            for name in ("forward", "__call__", "_call_impl"):
                if not getattr(kind, name).__module__.startswith("torch."):
                    return f"{kind.__name__}.{name} of torch is patched"
        if self._cfg.vit_grid == 1:
            return "an image is one patch"
        return next((reason for part in self._parts(model) if (reason := self._compare(model, *part))), "")

    def _parts(self, model: VisionLanguageModel) -> Iterable[tuple[str, Any, Any]]:
        """Name, module and plan of all modules, parents first."""
        waiting: list[tuple[str, Any, Any]] = [("", model, self._plan)]
        while waiting:
            name, module, plan = waiting.pop()
            yield name, module, plan
            for key, child_plan in plan._modules.items() if type(module) is type(plan) else ():
                children = [(key, module._modules.get(key))]
                if isinstance(plan, nn.ModuleList):
                    children = [*module._modules.items()]
                waiting += [(f"{name}.{key}".lstrip("."), child, child_plan) for key, child in children]

    def _compare(self, model: VisionLanguageModel, name: str, module: Any, plan: nn.Module) -> str:
        """How a module differs from its plan; "" if it does not."""
        name = name or "the model"
        kind = type(module)
        is_quantized = kind is QuantizedLinear and type(plan) is nn.Linear
        if kind is not type(plan) and not is_quantized:
            return f"{name} is a {kind.__name__}, not a {type(plan).__name__}"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name} has a hook, which the kernels do not call"
        own = vars(module)
        planned = {key: value for key, value in vars(plan).items() if key not in STANDARD}
        shadowing = plan._modules.keys() | plan._parameters.keys()
        for key in own.keys() - STANDARD - planned.keys():
            if key == "forward" or (not is_quantized and (key in shadowing or hasattr(kind, key))):
                return f"{name} has {key} of its own"
        if is_quantized:
            module.check()
            if (module.out_features, module.in_features) != tuple(plan.weight.shape):  # type: ignore[arg-type]
                return f"{name} is of another size than the config's"
            return "" if (module.bias is None) == (plan.bias is None) else f"{name} has another bias than the config's"
        if isinstance(plan, nn.ModuleList):
            cfg = self._cfg
            n_blocks = cfg.vit_n_blocks if name.startswith("vision") else cfg.lm_n_blocks
            return "" if len(module) == n_blocks else f"{name} are {len(module)}, not the config's {n_blocks}"
        if "cfg" in planned:  # of the whole model and the decoder
            planned = {} if own["cfg"] == self._cfg else {"cfg": None}
        for key, value in planned.items():
            if type(own.get(key)) is not type(value) or own[key] != value:
                return f"{name}.{key} is not the config's"
        if module.training and (getattr(module, "p", 0) or getattr(getattr(module, "dropout", None), "p", 0)):
            return f"{name} is in training mode, with dropout"
        for key, wanted in plan._parameters.items():
            parameter = module._parameters.get(key)
            if (parameter is None) != (wanted is None) or (wanted is not None and parameter.shape != wanted.shape):
                return f"{name}.{key} is of another size than the config's"
            if parameter is not None and not (
                type(parameter) is nn.Parameter
                and parameter.layout is torch.strided
                and (parameter.dtype, parameter.device) == (model.dtype, model.device)
            ):
                return f"{name}.{key} is of {parameter.dtype} on {parameter.device}, unlike the embeddings"
        return ""


if __name__ == "__main__":
    print("WRITTEN_FOR = {")
    for file, digest in CORE.digests.items():
        print(f'    "{file}": "{digest}",')
    print("}")
