"""Chat templates: published ones render as in transformers, and those that fail end with one line."""

import hashlib
import multiprocessing
import re

import pytest

from models.config import CHATML
from nanovlm.errors import CheckpointError
from nanovlm.processing.chat_template import KNOWN, ChatTemplate
from support.smolvlm import TEMPLATE

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many <b>stars</b>?\n"},
    {"role": "assistant", "content": "<think>one, two</think> Two."},
    {"role": "user", "content": "  And hearts? " * 20},
]
LLAMA = """{{ bos_token }}{% set ns = namespace(n=0) %}{% for message in messages %}{% set ns.n = ns.n + 1 %}
{%- if message.role == 'system' and loop.first %}<<SYS>>{{ message['content'] | trim }}<</SYS>>
{%- elif message['role'] in ('user', 'assistant') %}{{ '%02d' % ns.n ~ ' [' + message.role | upper ~ '] ' }}
{%- if '</think>' in message.content %}{{ message.content.split('</think>')[-1].lstrip() }}
{%- else %}{{ message.content.strip().replace('And', 'and') }}{% endif %}{{ '-' * 3 }}
{%- else %}{{ raise_exception('an unknown role') }}{% endif %}{% endfor %}
{% set users = messages[1:] | selectattr('role', 'equalto', 'user') | list %}
{% if users | length > 1 %}{{ messages | map(attribute='role') | join(', ') }}{% endif %}
{% macro last(items) %}{{ items[-1] | tojson(indent=2) }}{{ {'a': [1, 2.5, none]} | tojson }}{% endmacro %}
{{ last(messages) }}
{% for word in ['**%s**' % 'a', 'b'] %}{% if loop.last %}{% break %}{% endif %}{{ word }}{% endfor %}
{{ strftime_now('%Y') }}
{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}
{% if add_generation_prompt %}{{ '{}:{}'.format('assistant', messages | length) }}{% endif %}"""
PARTS = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]


@pytest.mark.full
@pytest.mark.parametrize(
    ("template", "chat"), [(CHATML, CHAT), (LLAMA, CHAT), (TEMPLATE, PARTS)], ids=["chatml", "llama", "smolvlm"]
)
def test_templates_render_as_in_transformers(template, chat):
    from transformers.utils.chat_template_utils import render_jinja_template

    for add_generation_prompt in (True, False):
        expected = render_jinja_template([chat], chat_template=template, add_generation_prompt=add_generation_prompt)
        assert ChatTemplate(template).render(chat, add_generation_prompt) == expected[0][0]


def test_constructs_of_published_templates_are_rendered():
    rendered = ChatTemplate(LLAMA).render(CHAT, True)
    assert rendered.startswith("<<SYS>>Be brief.<</SYS>>02 [USER] How many <b>stars</b>?---03 [ASSISTANT] Two.---")
    assert re.search(r'\*\*a\*\*\s*\d{4}\s*{"content":"Be brief.","role":"system"}\s*assistant:4$', rendered)
    with pytest.raises(CheckpointError, match="cannot render this chat: an unknown role$"):
        ChatTemplate(LLAMA).render([{"role": "tool", "content": "?"}], True)


FAILING = {
    "no template": "{% for %}",
    "one that says no": "{{ raise_exception('roles must\nalternate') }}",
    "an unknown name": "{{ nobody.knows }}",
    "an unknown tag": "{% generation %}{% endgeneration %}",
    "nothing": "",
    "globals": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "classes by format": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "changes": "{{ messages.append(1) }}",
    "a long range": "{% for i in range(10**9) %}{% endfor %}",
    "much text": "{% for i in range(99999) %}" + "text" * 2000 + "{% endfor %}",
    "recursive loops": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a program": "{% set x = 1 %}" * 10_000,
    "deep": "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
}
NAMESPACE = "{% set ns = namespace(x='xx') %}"
ENDLESS = {  # loops without output, and texts that fill the memory
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x",
    "lipsum": "{{ lipsum(n=99999999) }}",
    "indent": "{{ 'a\n' * 3000000 | indent(99999999) }}",
    "indentation of JSON": "{{ [1, 2, [3]] | tojson(indent=9999999999) }}",
    "a product": "{{ 'x' * 10**10 }}",
    "a product of a name": "{{ messages[0].role * 10**10 }}",
    "a power": "{{ (9 ** (9 ** 9)) is number }}",
    "center": "{{ 'x' | center(10**10) }}",
    "a method": "{{ 'x'.ljust(10**10) }}",
    "a format": "{{ '%9999999999d' % 1 }}",
    "a named format": "{{ '{:9999999999}'.format(1) }}",
    "doubled text": NAMESPACE + "{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "squared text": NAMESPACE + "{% for i in range(9) %}{% set ns.x = ns.x.replace('x', ns.x) %}{% endfor %}x",
    "doubled lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}x",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
}


@pytest.mark.full
@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_ends(template):
    endless = ChatTemplate(template)
    with pytest.raises(CheckpointError, match="^lm_chat_template [^\n]*$"):
        endless.render(CHAT, True)


def test_a_template_that_ended_its_process_renders_the_next_chat():
    template = ChatTemplate("{{ messages[0].content * messages | length ** 15 }}")
    with pytest.raises(CheckpointError, match="cannot render this chat: "):
        template.render(CHAT, True)
    assert template.render(CHAT[:1], True) == "Be brief."


def test_a_forked_process_renders_by_itself():
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render(CHAT, True) == "Be brief."
    fork = multiprocessing.get_context("fork")
    texts = fork.SimpleQueue()
    children = [fork.Process(target=lambda: texts.put(template.render(CHAT[1:], True))) for _ in range(2)]
    for child in children:
        child.start()
    assert [texts.get() for _ in children] == [CHAT[1]["content"]] * 2
    for child in children:
        child.join()
    assert template.render(CHAT, True) == "Be brief."


def test_long_chats_are_rendered():
    chat = CHAT[1:3] * 2000
    assert ChatTemplate(CHATML + " ").render(chat, True).strip() == ChatTemplate(CHATML).render(chat, True).strip()


def test_the_known_templates_are_those_of_nanovlm_and_smolvlm():
    assert {hashlib.sha256(source.encode()).hexdigest() for source in (CHATML, TEMPLATE)} == KNOWN


@pytest.mark.parametrize("name", FAILING)
def test_a_template_that_fails_is_one_line(name):
    with pytest.raises(CheckpointError, match="^lm_chat_template [^\n]*$") as caught:
        ChatTemplate(FAILING[name]).render(CHAT, True)
    assert len(str(caught.value)) < 300
    assert ("more than 10,000,000 characters" in str(caught.value)) == (name == "much text")
