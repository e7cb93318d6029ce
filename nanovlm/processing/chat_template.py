"""Chat templates: jinja2 programs of a checkpoint, rendered with bounded time, memory and output.

jinja2's sandbox keeps a template away from Python's internals, but not from `{{ "a" * 10**10 }}`. So a rendering has a
budget of steps, and pays before it works: the size of what it prints, calls, compares, joins, filters or loops over.
"""

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from nanovlm.errors import CheckpointError

MAX_SOURCE = 100_000  # characters of a template; the longest published ones have some 20,000
MIN_STEPS, STEPS_PER_CHARACTER = 250_000, 100  # of a rendering, and more for each character of its chat
MAX_BLANK = 20  # characters of tojson's indent and separators

# What a template may use. Filters and methods that are left out, such as center and zfill, make long texts of nothing.
FILTERS = """abs attr capitalize count d default dictsort e escape first float groupby int items last length list lower
    map max min reject rejectattr reverse safe select selectattr sort string title trim truncate unique upper
    wordcount"""
METHODS = """capitalize casefold copy count endswith find format format_map get index isalnum isalpha isascii isdecimal
    isdigit isidentifier islower isnumeric isprintable isspace istitle isupper items join keys lower lstrip partition
    removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase
    title upper values"""
VALUES = (str, bytes, int, float, list, tuple, set, frozenset, range, Mapping)
PAYING = (
    *(nodes.Compare, nodes.Operand, nodes.Concat, nodes.Dict, nodes.Pair, nodes.List, nodes.Tuple),
    *(nodes.Filter, nodes.Test, nodes.Keyword, nodes.For, nodes.Output),
)
REPEATED = (nodes.Block, nodes.CallBlock, nodes.For, nodes.Macro)
WIDTH_ARGUMENT = re.compile(r"%[-#0 +\d.]*\*|\{[^{}]*:[^{}]*\{")


class ChatTemplate:
    """A template that turns messages {'role', 'content'} into text. CheckpointError if its source is not valid."""

    def __init__(self, source: str):
        if len(source) > MAX_SOURCE:
            raise CheckpointError(
                f"lm_chat_template has {len(source):,} characters, more than {MAX_SOURCE:,}; shorten it"
            )
        extensions = ["jinja2.ext.loopcontrols", _Generation]
        self._sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        try:
            self._template = self._sandbox.from_string(_Metered().visit(self._sandbox.parse(source)))
        except Exception as error:  # also RecursionError, and SyntaxError of the Python code that jinja2 compiles
            raise CheckpointError(f"lm_chat_template is not a valid jinja2 template: {_one_line(error)}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The text of a chat. Thread-safe. CheckpointError if the template fails, takes too long or renders nothing."""
        self._sandbox.budget.open_for(messages)
        try:
            rendered = self._template.render(messages=messages, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is a program: it may divide by zero, recurse ...
            raise CheckpointError(f"lm_chat_template cannot render this chat: {_one_line(error)}") from None
        if not rendered:
            raise CheckpointError("lm_chat_template renders this chat as an empty text")
        return rendered


class _Budget(threading.local):
    """The steps that a rendering, in this thread, has left."""

    total = left = 0

    def open_for(self, messages: Any) -> None:
        self.total = self.left = 2**62
        self.total = self.left = MIN_STEPS + STEPS_PER_CHARACTER * self.pay(messages)

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise SecurityError(f"it takes more than {self.total:,} steps")

    def pay(self, *values: Any) -> int:
        """Spend and return the size of values: characters and bits, and one for each item at any depth."""
        size, waiting = 0, list(values)
        while waiting and size <= self.left:  # values may hold each other
            value = waiting.pop()
            size += 1
            match value:
                case str() | bytes() | range():
                    size += len(value)
                case int():
                    size += value.bit_length()
                case list() | tuple() | set() | frozenset():
                    waiting += value
                case Mapping():
                    waiting += [*value.keys(), *value.values()]
                case Namespace():
                    waiting.append(object.__getattribute__(value, "_Namespace__attrs"))
        self.spend(size)
        return size


class _Metered(NodeTransformer):
    """Rewrites a template so that it pays for operands, and for each turn of a body as many steps as it has nodes."""

    def generic_visit(self, node: Any, *args: Any, **kwargs: Any) -> nodes.Node:
        is_repeated = isinstance(node, REPEATED)
        n_nodes = sum(1 for part in node.body for _ in part.find_all(nodes.Node)) + 1 if is_repeated else 0
        super().generic_visit(node)
        if isinstance(node, PAYING) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
            for name, value in node.iter_fields():
                setattr(node, name, [*map(_paid, value)] if isinstance(value, list) else _paid(value))
        if is_repeated:
            turn = nodes.Filter(nodes.Const(n_nodes), "spend", [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        return node


def _paid(node: Any) -> Any:
    is_target = getattr(node, "ctx", "load") != "load"
    if isinstance(node, nodes.Slice) or not isinstance(node, nodes.Expr) or is_target:
        return node
    return nodes.Filter(node, "pay", [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """{% generation %}, which marks the text to train on; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose operations, calls and filters pay from a budget."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.budget = _Budget()
        self.filters = {name: self.filters[name] for name in FILTERS.split()}
        self.filters |= {name: getattr(self, f"_{name}") for name in ("join", "pay", "replace", "spend", "tojson")}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        del self.globals["lipsum"]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (attr in METHODS.split() or not isinstance(obj, VALUES)) and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = self.budget.pay(left, right)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.budget.spend(left.bit_length() * max(0, right))
        elif operator == "*" and (hasattr(left, "__len__") or hasattr(right, "__len__")):
            self.budget.spend(size * max([0, *(n for n in (left, right) if isinstance(n, int))]))
        elif operator == "%" and isinstance(left, str):
            self._pay_format(left, "%", size)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
        size = self.budget.pay(text, args, kwargs)
        if not isinstance(text, str):
            pass
        elif name in ("format", "format_map"):
            self._pay_format(text, "{", size)
        elif name == "join":
            self.budget.spend(len(args[0]) * len(text))
        elif name == "replace":
            self.budget.spend(text.count(args[0]) * len(args[1]))
        return super().call(context, obj, *args, **kwargs)

    def _pay_format(self, text: str, mark: str, size: int) -> None:
        """Pay for widths, and for the arguments as often as they may occur."""
        if WIDTH_ARGUMENT.search(text):
            raise SecurityError("a format with a width that is an argument")
        widths = [int(number[:20]) for number in re.findall(r"\d+", text)]
        self.budget.spend(sum(widths) + text.count(mark) * size)

    # Filters. `pass_context` also keeps jinja2 from computing them when it compiles the template.

    @pass_context
    def _pay(self, context: Context, value: Any) -> Any:
        self.budget.pay(value)
        return value

    @pass_context
    def _spend(self, context: Context, steps: int) -> None:
        self.budget.spend(steps)

    @pass_context
    def _join(self, context: Context, values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        items = [value if attribute is None else self.getitem(value, attribute) for value in values]
        self.budget.pay(items)
        return self.call(context, str(d).join, [*map(str, items)])

    @pass_context
    def _replace(self, context: Context, text: Any, old: str, new: str, count: int = -1) -> str:
        return self.call(context, str(text).replace, old, new, count)

    @pass_context
    def _tojson(self, context: Context, value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        """As in the templates of transformers: nothing is escaped for HTML."""
        for blank in (options.get("indent") or 0, *(options.get("separators") or ())):
            if (blank if isinstance(blank, int) else len(blank)) > MAX_BLANK:
                raise SecurityError(f"tojson with an indent or a separator of more than {MAX_BLANK} characters")
        chunks = json.JSONEncoder(ensure_ascii=ensure_ascii, **options).iterencode(value)
        return "".join(chunk for chunk in chunks if self.budget.pay(chunk))


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error)[:200].split()) or type(error).__name__
