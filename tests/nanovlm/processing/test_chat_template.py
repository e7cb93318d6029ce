"""Chat templates: published ones render as in transformers, and those that fail end with one line."""

import re

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


@pytest.mark.parametrize("template", FAILING.values(), ids=FAILING)
def test_a_template_that_fails_is_one_line(template):
    with pytest.raises(CheckpointError, match="^lm_chat_template [^\n]*$") as caught:
        ChatTemplate(template).render(CHAT, True)
    assert len(str(caught.value)) < 300
