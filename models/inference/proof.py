"""Prove that the kernels compute what a model's modules do: both are the lines that they were tested against.

Kernels stand for the core's files. The text of each is compared with WRITTEN_FOR, what runs with the text, and what it
uses of torch with torch's own. A model's modules must be those that its config makes. So an edit of the core's files, a
patch of the core or of torch, a hook, a replaced module or a class of one's own counts in every answer, at any length
and in any block. Lines that are blank or only a comment may change.

`python -m models.inference.proof` prints WRITTEN_FOR for the source as it is.
"""

import hashlib
import linecache
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from models import (
    attention,
    cache,
    decoding,
    language_model,
    modality_projector,
    vision_language_model,
    vision_transformer,
)
from models.inference.quantization import QuantizedLinear
from models.vision_language_model import VisionLanguageModel, empty_model

# Digests by file. A test fails if they are not those of the source, and says how to renew them.
WRITTEN_FOR = {
    "models/attention.py": "288b87c6801629ef",
    "models/cache.py": "7d8fc7dc761caa72",
    "models/decoding.py": "d745a541e299e4e2",
    "models/language_model.py": "ac4e52002d70e6d9",
    "models/modality_projector.py": "eb2e5889a9f9ccc5",
    "models/vision_language_model.py": "c8bc0b31ebdce262",
    "models/vision_transformer.py": "edd0220d8c2c664f",
}
LIBRARY = (nn.Module, nn.Linear, nn.Conv2d, nn.Embedding, nn.LayerNorm, nn.Dropout)
TORCH = os.path.dirname(torch.__file__) + os.sep
NAMESPACES = (F, torch, torch._C._nn, Tensor, nn)  # in which a name of the core's code may be torch's
STANDARD = frozenset(vars(nn.Module()))  # what every module has
ADAPTERS = "it has adapters that are being trained"


class Source:
    """Files of the core, whether what runs is what they say, and whether torch's own functions are called by it."""

    def __init__(self, *files: ModuleType, library: Sequence[type] = ()):
        self._files = files
        self._library = library
        self._read()

    def difference(self) -> str:
        """The first difference from what the kernels were written for; "" if there is none."""
        if self._look() != self._seen:
            self._read()
        return self._reason

    def _look(self) -> tuple[list, list, list]:
        """All that may be patched, to be compared by value: namespaces, functions, and torch's functions."""
        return (
            [vars(holder) for holder in self._holders],
            [(f.__code__, f.__defaults__, f.__kwdefaults__) for f in self._functions],
            [getattr(holder, name, None) for holder, name in self._used],
        )

    def _read(self) -> None:
        self._holders: list[Any] = [*self._library]
        self._functions: list[FunctionType] = []
        self.digests: dict[str, str] = {}  # of the files' texts, by name; "patched" where something else runs
        reasons = []
        for file in self._files:
            name = f"{file.__name__.replace('.', '/')}.py"
            self.digests[name] = digest = self._digest(file)
            if digest != WRITTEN_FOR.get(name):
                reasons.append(f"{name} is {'edited or patched' if digest else 'without its source'}")
        found = [(kind, name, _function(x)) for kind in self._library for name, x in vars(kind).items()]
        own = [f for *_, f in found if isinstance(f, FunctionType) and f.__code__.co_filename.startswith(TORCH)]
        self._functions += own
        called = {name for function in self._functions for name in function.__code__.co_names}
        library = [(kind, name) for kind, name, _ in found if name in called or name.startswith("__")]
        self._used = [*_uses(self._functions)]
        for holder, name in [*self._used, *library]:
            if not _is_torch(getattr(holder, name), "" if holder in self._library else name):
                reasons.append(f"{holder.__name__}.{name} of torch is patched")
        namespaces, functions, used = self._look()
        self._seen = [dict(one) for one in namespaces], functions, used
        self._reason = reasons[0] if reasons else ""

    def _digest(self, file: ModuleType) -> str:
        """Digest of a file's text; "patched" if what runs is not what it says, "" without a text."""
        path = str(file.__file__)
        linecache.checkcache(path)
        lines = linecache.getlines(path, vars(file))
        if not lines:
            return ""
        self._holders.append(file)
        fresh: dict[str, Any] = {"__name__": file.__name__}
        exec(compile("".join(lines), path, "exec", dont_inherit=True), fresh)
        names = [name for name in fresh if not name.startswith("__")]
        if not all(self._is_same(vars(file).get(name), fresh[name], file) for name in names):
            return "patched"
        counted = [line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        return hashlib.sha256("\n".join(counted).encode()).hexdigest()[:16]

    def _is_same(self, live: Any, fresh: Any, file: ModuleType) -> bool:
        """True if an object of a file is what its text makes: a function's code, a class's parts, another's value."""
        live, fresh = _function(live), _function(fresh)
        if type(live) is not type(fresh) or getattr(fresh, "__module__", None) != file.__name__:
            return live is fresh or live == fresh or type(live) is type(fresh) is MemberDescriptorType
        if isinstance(fresh, FunctionType):
            self._functions.append(live)
            is_same = _contents(live) == _contents(fresh)
            if not hasattr(fresh, "__wrapped__"):
                return is_same and live.__globals__ is vars(file)
            return is_same and self._is_same(getattr(live, "__wrapped__", None), fresh.__wrapped__, file)
        if not isinstance(fresh, type):
            return live == fresh
        self._holders.append(live)
        names = [[base.__name__ for base in kind.__mro__] + sorted(_parts(kind)) for kind in (live, fresh)]
        parts = _parts(live)
        return names[0] == names[1] and all(self._is_same(parts[name], x, file) for name, x in _parts(fresh).items())


def _contents(function: FunctionType) -> tuple:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _function(value: Any) -> Any:
    """The function behind a property or method; other values as they are."""
    return getattr(value, "fget", None) or getattr(value, "__func__", value)


def _parts(kind: type) -> dict[str, Any]:
    """Methods and values that a class defines, without what Python adds by itself."""
    parts = {name: x for name, x in vars(kind).items() if not name.startswith(("__", "_abc_"))}
    return parts | {name: x for name, x in vars(kind).items() if isinstance(_function(x), FunctionType)}


def _uses(functions: Iterable[FunctionType]) -> set[tuple[Any, str]]:
    """Namespace and name of what functions may call of torch, and of what torch's Python functions then call."""
    found: set[tuple[Any, str]] = set()
    waiting: list[CodeType] = [function.__code__ for function in functions]
    while waiting:
        code = waiting.pop()
        waiting += [x for x in code.co_consts if isinstance(x, CodeType)]
        names = [name for name in code.co_names if not name.startswith("_")]
        for pair in [(space, name) for space in NAMESPACES for name in names if hasattr(space, name)]:
            if pair not in found and pair[0] is F and isinstance(function := getattr(*pair), FunctionType):
                waiting.append(function.__code__)
            found.add(pair)
    return found


def _is_torch(value: Any, name: str = "") -> bool:
    """True of a function or class of torch, which has that name itself if one is given; of other values always."""
    value = _function(value)
    if isinstance(value, FunctionType):
        is_torch = value.__code__.co_filename.startswith(TORCH) and _is_torch(getattr(value, "__wrapped__", None))
    elif callable(value):
        home = value if isinstance(value, type) else type(value)
        is_torch = home.__module__.partition(".")[0] in ("builtins", "torch", "typing")
    else:
        return True
    return is_torch and name in ("", getattr(value, "__name__", name).lstrip("_"))


CORE = Source(
    attention, cache, decoding, language_model, modality_projector, vision_language_model, vision_transformer,
    library=LIBRARY,
)  # fmt: skip


def difference_of_process() -> str:
    """Name what differs for all models: the core, torch, hooks of all modules, or an active mode; "" if nothing."""
    if reason := CORE.difference():
        return reason
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "torch.nn.modules.module has hooks for all modules, which the kernels do not call"
    modes = [type(mode).__name__ for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]
    if modes or is_in_torch_dispatch_mode():
        return f"{(modes or ['a mode of torch'])[0]} is active, which the kernels do not call"
    return "autocast is active" if torch.is_autocast_enabled("cpu") else ""


class Proof:
    """Compares the modules of a model with what its config makes, and notices whether they change."""

    def __init__(self, model: VisionLanguageModel):
        self._model = model
        modules = [*model.modules()]
        self._modules = modules
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._weights = [m._parameters for m in modules if m._parameters]
        self._kept = self._parameters()  # alive, so that no address is reused
        self._counted = [p for p in self._kept if p is not None and not p.is_inference()]
        self._attributes = [x for m in modules for x in (vars(m), m._modules)]
        self._seen = [dict(x) for x in self._attributes], self._marks()

    def _parameters(self) -> list[nn.Parameter | None]:
        return [p for weights in self._weights for p in weights.values()]

    def _marks(self) -> tuple[list, ...]:
        """Types, hooks and parameters of all modules, with the addresses and the edit counts of parameters."""
        parameters = self._parameters()
        return (
            [type(module) for module in self._modules],
            [tuple(hooks) for hooks in self._hooks if hooks],
            [id(p) for p in parameters],
            [p.data_ptr() for p in parameters if p is not None],
            [p._version for p in self._counted],
        )

    def has_changed(self) -> bool:
        """True if a module, a hook, an attribute or a weight is another than when this object was made."""
        attributes, marks = self._seen
        try:
            return self._attributes != attributes or self._marks() != marks
        except (RuntimeError, ValueError):  # tensors and arrays are neither equal nor unequal
            return True

    def difference(self) -> str:
        """Name what the kernels were not written for, in the process or else in the model; "" if nothing."""
        if reason := difference_of_process():
            return reason
        model = self._model
        if model.cfg.vit_grid == 1:
            return "an image is one patch"
        plan = empty_model(replace(model.cfg, lm_n_blocks=1, vit_n_blocks=1), -1).eval()  # its blocks stand for all
        reasons = [reason for part in _pairs(model, plan) if (reason := self._compare(*part))]
        return next((reason for reason in reasons if reason != ADAPTERS), reasons[0] if reasons else "")

    def _compare(self, name: str, module: Any, plan: nn.Module) -> str:
        """How a module differs from its plan; "" if it does not."""
        cfg = self._model.cfg
        given, wanted = _describe(module), _describe(plan)
        if "cfg" in wanted:  # of the whole model and the decoder
            wanted = {"class": type(plan), "hooks": 0, "cfg": cfg}
        if isinstance(plan, nn.ModuleList):
            wanted["length"] = cfg.vit_n_blocks if name.startswith("vision") else cfg.lm_n_blocks
        for key, value in wanted.items():
            if type(given.get(key)) is not type(value) or given[key] != value:
                if hasattr(module, "lora_A"):
                    return ADAPTERS
                other = f"is a {type(module).__name__}, not a {type(plan).__name__}"
                texts = {"class": other, "hooks": "has a hook", "dropping": "is in training mode, with dropout"}
                return f"{name} {texts[key]}" if key in texts else f"{name}.{key} is not the config's"
        for key in given.keys() - wanted.keys() - vars(plan).keys():
            if key == "forward" or key in plan._modules or hasattr(type(plan), key):
                return f"{name} has {key} of its own"
        wanted_tensor = nn.Parameter, torch.strided, self._model.dtype, self._model.device
        for key, p in module._parameters.items() if type(module) is not QuantizedLinear else ():
            if p is not None and (type(p), p.layout, p.dtype, p.device) != wanted_tensor:
                return f"{name}: {key} is a {type(p).__name__} of {p.dtype} on {p.device}, unlike the embeddings"
        return ""


def _describe(module: Any) -> dict[str, Any]:
    """All by which a module computes: its class, hooks, attributes, and the shapes of its parameters."""
    given: dict[str, Any] = {"class": type(module)}
    if type(module) is QuantizedLinear:
        module.check()
        like = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
        given = _describe(like)
    elif isinstance(module, nn.Module):
        given |= {key: value for key, value in vars(module).items() if key not in STANDARD}
        given |= {key: None if p is None else tuple(p.shape) for key, p in module._parameters.items()}
    if isinstance(module, nn.Module):
        given["hooks"] = len(module._forward_hooks) + len(module._forward_pre_hooks)
        given["length"] = len(module) if isinstance(module, nn.ModuleList) else None
        p = getattr(module, "p", 0) or getattr(getattr(module, "dropout", None), "p", 0)
        given["dropping"] = module.training and p > 0
    return given


def _pairs(model: nn.Module, plan: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Name, module and plan of all modules, parents first."""
    waiting: list[tuple[str, Any, Any]] = [("the model", model, plan)]
    while waiting:
        name, module, plan = waiting.pop()
        yield name, module, plan
        for key, child_plan in plan._modules.items() if type(module) is type(plan) else ():
            many = isinstance(plan, nn.ModuleList)
            children = [*module._modules.items()] if many else [(key, module._modules.get(key))]
            waiting += [(f"{name}.{key}".removeprefix("the model."), child, child_plan) for key, child in children]


if __name__ == "__main__":
    print("WRITTEN_FOR = {")
    for file, digest in CORE.digests.items():
        print(f'    "{file}": "{digest}",')
    print("}")
