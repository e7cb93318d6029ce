"""The exported chat template, as vLLM reads it: by a loop over message['content'] it knows that contents have parts."""

import jinja2
import pytest
from jinja2 import nodes

from models.checkpoint import load_config
from nanovlm import EMBEDDED
from nanovlm.export.transformers import chat_template
from support.smolvlm import TEMPLATE


def reads(node, name, key=None):
    """Whether an expression is a variable, or its element `key`, perhaps filtered, tested or sliced."""
    if isinstance(node, (nodes.Filter, nodes.Test)) or isinstance(getattr(node, "arg", None), nodes.Slice):
        return node.node is not None and reads(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and (node.ctx, node.name) == ("load", name)
    if isinstance(node, nodes.Getitem):
        return reads(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and reads(node.node, name) and node.attr == key


def content_format(template):
    """What vLLM detects: "openai" for contents that are lists of parts, else "string"."""
    root = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).parse(template)
    chats = ["messages"]  # variables that hold the messages
    for chat in chats:
        for assignment in root.find_all(nodes.Assign):
            if reads(assignment.node, chat) and getattr(assignment.target, "name", chat) not in chats:
                chats.append(assignment.target.name)
    loops = list(root.find_all(nodes.For))
    messages = [loop.target.name for loop in loops if any(reads(loop.iter, chat) for chat in chats)]
    return "openai" if any(reads(loop.iter, name, "content") for loop in loops for name in messages) else "string"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (chat_template(load_config(EMBEDDED)), "openai"),
        (load_config(EMBEDDED).lm_chat_template, "string"),
        (TEMPLATE, "openai"),
        ("{% set m = messages[1:] %}{% for x in m %}{% for p in x.content | list %}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for p in m['parts'] %}{% endfor %}{% endfor %}", "string"),
    ],
)
def test_vllm_detects_contents_of_parts(template, expected):
    assert content_format(template) == expected
