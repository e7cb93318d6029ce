"""Chat templates: jinja2 programs of a checkpoint, rendered with bounded time, memory and output.

jinja2's sandbox keeps a template away from Python's internals, but not from `{{ "a" * 10**10 }}`. Here a template pays
for what it does before it does it: looping, calling, comparing, joining and printing cost as many steps as the values
are long, and a rendering has MIN_STEPS of them and STEPS_PER_CHARACTER for each character of the chat.
"""

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from nanovlm.errors import CheckpointError

MAX_SOURCE = 100_000  # characters of a template; the longest published ones have some 20,000
MIN_STEPS, STEPS_PER_CHARACTER = 1_000_000, 100
MAX_STEPS = 2**62

# What a template may call. Filters and methods that are left out, such as center and zfill, make long texts of nothing.
FILTERS = """abs attr capitalize count d default dictsort e escape first float groupby int items last length list lower
    map max min reject rejectattr reverse safe select selectattr sort string title trim truncate unique upper
    wordcount"""
METHODS = """capitalize casefold copy count endswith find format format_map get index isalnum isalpha isascii isdecimal
    isdigit isidentifier islower isnumeric isprintable isspace istitle isupper items join keys lower lstrip partition
    removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase
    title upper values"""
VALUES = (str, bytes, int, float, list, tuple, set, frozenset, range, Mapping)


class ChatTemplate:
    """A template that turns messages {'role', 'content'} into text. CheckpointError if its source is not valid."""

    def __init__(self, source: str):
        if len(source) > MAX_SOURCE:
            raise CheckpointError(f"lm_chat_template has {len(source):,} characters, more than {MAX_SOURCE:,}")
        self._environment = _Environment(trim_blocks=True, lstrip_blocks=True)
        try:
            tree = _Metered().visit(self._environment.parse(source))
            self._template = self._environment.from_string(tree)
        except Exception as error:  # also RecursionError, and SyntaxError of the Python code that jinja2 compiles
            raise CheckpointError(f"lm_chat_template is not a valid jinja2 template: {_one_line(error)}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The text of a chat. Thread-safe. CheckpointError if the template fails, takes too long or renders nothing."""
        meter = self._environment.meter
        meter.refill(MAX_STEPS)
        meter.refill(MIN_STEPS + STEPS_PER_CHARACTER * meter.charge(messages))
        try:
            rendered = self._template.render(messages=messages, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is a program: it may divide by zero, recurse ...
            raise CheckpointError(f"lm_chat_template cannot render this chat: {_one_line(error)}") from None
        if not rendered:
            raise CheckpointError("lm_chat_template renders this chat as an empty text")
        return rendered


class _Meter(threading.local):
    """The steps that a rendering, in this thread, has left."""

    total = left = 0

    def refill(self, steps: int) -> None:
        self.total = self.left = steps

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise SecurityError(f"it takes more than {self.total:,} steps")

    def charge(self, *values: Any) -> int:
        """Spend and return the size of values: characters of texts, and one for each item at any depth."""
        size, waiting = 0, list(values)
        while waiting:
            value = waiting.pop()
            size += 1
            match value:
                case str() | bytes() | range():
                    size += len(value)
                case int():
                    size += value.bit_length() // 30
                case list() | tuple() | set() | frozenset():
                    waiting += value
                case Mapping():
                    waiting += [*value.keys(), *value.values()]
                case Namespace():
                    waiting.append(object.__getattribute__(value, "_Namespace__attrs"))
            if size > self.left:
                break  # before values that hold each other are counted for ever
        self.spend(size)
        return size


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which every operation is paid for before it is done."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.meter = meter = _Meter()
        self.finalize = pass_context(lambda context, value: _charged(meter, value))
        self.filters = {name: self.filters[name] for name in FILTERS.split()}
        self.filters |= {name: getattr(self, f"_{name}") for name in ("join", "replace", "tojson")}
        # `pass_context` also keeps jinja2 from computing these when it compiles the template.
        self.filters["charge"] = self.finalize
        self.filters["spend"] = pass_context(lambda context, steps: meter.spend(steps))
        self.globals["raise_exception"] = _raise_exception
        del self.globals["lipsum"]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = attr in METHODS.split() if isinstance(obj, VALUES) else True
        return allowed and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = self.meter.charge(left, right)
        counts = [n for n in (left, right) if isinstance(n, int)]
        if len(counts) == 2:  # the time of a product or quotient grows with the square of the digits
            self.meter.spend(left.bit_length() * max(0, right) if operator == "**" else (size // 2) ** 2)
        elif operator == "*" and counts:
            self.meter.spend(size * max(0, counts[0]))
        elif operator == "%" and isinstance(left, str):
            self._charge_format(left, "%", size)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        receiver, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
        __self.meter.charge(receiver, args, kwargs)
        if isinstance(receiver, str) and name == "join" and args:
            __self._charge_join(args[0], receiver)
        elif isinstance(receiver, str) and name == "replace":
            __self._charge_replace(receiver, *args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            if re.search(r"\{[^{}]*:[^{}]*\{", value.__self__):
                raise SecurityError("str.format with a width that is an argument")
            self._charge_format(value.__self__, "{", self.meter.charge(args, kwargs))
            return wrapped(*args, **kwargs)

        return bounded

    def _charge_format(self, text: str, mark: str, arguments: int) -> None:
        """Pay for widths, and for the arguments as often as they may occur."""
        if mark == "%" and "*" in text:
            raise SecurityError("a format with a width that is an argument")
        widths = [int(number[:20]) for number in re.findall(r"\d+", text)]
        self.meter.spend(len(text) + sum(widths) + text.count(mark) * arguments)

    def _charge_join(self, values: Any, separator: Any) -> None:
        if hasattr(values, "__len__") and isinstance(separator, str):
            self.meter.spend(len(values) * len(separator))

    def _charge_replace(self, text: str, old: Any = None, new: Any = None, *count: Any) -> None:
        if isinstance(old, str) and isinstance(new, str):
            self.meter.spend(len(text) + text.count(old) * len(new))

    # Filters that may make a long text of short ones.

    def _join(self, values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        items = list(values)
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        self._charge_join(items, d)
        self.meter.charge(items)
        return str(d).join(map(str, items))

    def _replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        text = str(text)
        self._charge_replace(text, old, new)
        return text.replace(old, new, -1 if count is None else count)

    def _tojson(self, value: Any, indent: int | None = None, **options: Any) -> str:
        """As in the templates of transformers: nothing is escaped for HTML."""
        self.meter.spend(self.meter.charge(value) * (abs(indent or 0) + 1))
        return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), indent=indent, **options)


class _Metered(NodeTransformer):
    """Rewrites a template so that it pays for its loops, comparisons, containers, joined texts and output."""

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return _charge(nodes.Const(node.data, lineno=node.lineno))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_charge(one) for one in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _charge(node.expr)
        for operand in node.ops:
            operand.expr = _charge(operand.expr)
        return node

    def visit_Filter(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.node = node.node and _charge(node.node)
        node.args = [_charge(one) for one in node.args]
        return node

    visit_Test = visit_Filter

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _charge(node.node)
        return node

    def visit_Tuple(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _charge(node)

    visit_List = visit_Dict = visit_Tuple

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.visit_Macro(node)
        node.iter = _charge(node.iter)
        return node

    def visit_Macro(self, node: Any) -> nodes.Node:
        """Pay for each turn of a body, as many steps as it has nodes."""
        steps = nodes.Const(sum(1 for part in node.body for _ in part.find_all(nodes.Node)) + 1)
        self.generic_visit(node)
        pay = nodes.Filter(steps, "spend", [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(pay, lineno=node.lineno))
        return node

    visit_CallBlock = visit_Macro


def _charge(node: Any) -> nodes.Filter:
    return nodes.Filter(node, "charge", [], [], None, None, lineno=node.lineno)


def _charged(meter: _Meter, value: Any) -> Any:
    meter.charge(value)
    return value


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
