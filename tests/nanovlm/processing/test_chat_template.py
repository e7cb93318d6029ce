"""Chat templates: published ones render as in transformers, and hostile ones end within bounds."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from models.config import CHATML
from nanovlm.errors import CheckpointError
from nanovlm.processing.chat_template import ChatTemplate
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
{{ strftime_now('%Y') }}{% generation %}
{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}{% endgeneration %}
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
    assert re.search(r'\*\*a\*\*\s*\d{4}{"content":"Be brief.","role":"system"}\s*assistant:4$', rendered)
    with pytest.raises(CheckpointError, match="cannot render this chat: an unknown role$"):
        ChatTemplate(LLAMA).render([{"role": "tool", "content": "?"}], True)


def test_a_long_chat_has_steps_enough():
    chat = [{"role": ("user", "assistant")[i % 2], "content": "many words " * 50} for i in range(400)]
    assert ChatTemplate(LLAMA).render(chat, True).endswith("assistant:400")


DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
HOSTILE = {
    "no template": "{% for %}",
    "one that says no": "{{ raise_exception('roles must\nalternate') }}",
    "an unknown name": "{{ nobody.knows }}",
    "nothing": "",
    "globals": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "classes by format": "{{ '{0.__class__.__mro__}'.format(1).upper()[20000] ~ messages.append(1) }}",
    "changes": "{{ messages.append(1) }}",
    "a long text": "{{ 'a' * 10**10 }}",
    "a long constant text": "{{ 'a' * 10000000000 }}",
    "a large number": "{{ 10 ** (10 ** 10) }}",
    "squares": DOUBLING.replace("'ab'", "3").replace("STEP", "ns.x * ns.x"),
    "doubled with ~": DOUBLING.replace("STEP", "ns.x ~ ns.x"),
    "doubled with +": DOUBLING.replace("STEP", "ns.x + ns.x"),
    "doubled by format": DOUBLING.replace("STEP", "'%s%s' % (ns.x, ns.x)"),
    "doubled by str.format": DOUBLING.replace("STEP", "'{0}{0}'.format(ns.x)"),
    "doubled by join": DOUBLING.replace("STEP", "ns.x.join([ns.x, ns.x])"),
    "doubled by a filter": DOUBLING.replace("STEP", "[ns.x, ns.x] | join(ns.x)"),
    "doubled by map": DOUBLING.replace("STEP", "[ns.x] | map('replace', 'a', ns.x) | first"),
    "doubled by replace": DOUBLING.replace("STEP", "ns.x.replace('a', ns.x)"),
    "doubled by a block": DOUBLING.replace(
        "{% set ns.x = STEP %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "lists of lists": DOUBLING.replace("STEP", "[ns.x, ns.x]") + "{{ ns.x }}",
    "dicts of dicts": DOUBLING.replace("STEP", "{1: ns.x, 2: ns.x}") + "{{ ns.x | tojson }}",
    "lists compared": DOUBLING.replace("STEP", "[ns.x, ns.x]") + "{{ ns.x == [ns.x] }}",
    "namespaces of namespaces": DOUBLING.replace("STEP", "namespace(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "a wide format": "{{ '%10000000000d' % 1 }}",
    "a width that is an argument": "{{ '%*d' % (10000000000, 1) }}",
    "a wide str.format": "{{ '{:10000000000}'.format(1) }}",
    "a width in the format": "{{ '{:{}}'.format(1, 10000000000) }}",
    "a wide field": "{{ 'a'.center(10000000000) }}",
    "a wide filter": "{{ 'a' | center(10000000000) }}",
    "many bytes": "{{ (5).to_bytes(10000000000, 'big') }}",
    "a wide indent": "{{ [[1]] | tojson(indent=10000000000) }}",
    "a wide separator": "{{ [1, 2] | tojson(separators=('a' * 900000, ':')) }}",
    "a deep indent": "{% set ns = namespace(x=1) %}{% for i in range(900) %}{% set ns.x = [ns.x] %}{% endfor %}"
    "{% for i in range(9) %}{{ ns.x | tojson(indent=20) }}{% endfor %}",
    "a mapped format": "{{ ('%(a)s' * 9999) % {'a': 'a' * 9999} }}",
    "many words": "{{ lipsum(10000000) }}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "a long body": "{% for i in range(99999) %}" + "{% set a = 1 %}" * 2000 + "{% endfor %}",
    "much text": "{% set x %}{% for i in range(99999) %}" + "text" * 2000 + "{% endfor %}{% endset %}",
    "slices": "{% set x = 'a' * 99999 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "many calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a program": "{% set x = 1 %}" * 10_000,
    "deep": "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates_end_with_one_line(template):
    with pytest.raises(CheckpointError, match="^lm_chat_template [^\n]*$") as caught:
        ChatTemplate(template).render(CHAT, True)
    assert len(str(caught.value)) < 300


def test_threads_have_steps_of_their_own():
    template = ChatTemplate("{% for i in range(2000) %}{{ messages[0].content[:9] }}{% endfor %}")
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda number: template.render(CHAT, True), range(8)))
    assert set(map(len, texts)) == {18_000}
