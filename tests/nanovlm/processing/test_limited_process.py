"""Limited processes: they know no key, end in time and say why; and chat templates, which they render."""

import hashlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest

from models.config import CHATML
from nanovlm.errors import CheckpointError, ImageError
from nanovlm.processing import limited_process
from nanovlm.processing.chat_template import KNOWN, ChatTemplate
from nanovlm.processing.limited_process import LimitedError, LimitedProcess
from nanovlm.processing.video import Video
from support import ROOT
from support.smolvlm import TEMPLATE

NAMES = ("jinja2", "hashlib", "random", "json", "torch", "av", "PIL", "tempfile", "sitecustomize", "usercustomize")


def limited(function, seconds=1):
    return closing(LimitedProcess(f"limited_functions:{function}", seconds, 2**29))


@pytest.fixture(autouse=True)
def functions_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def strange(in_tmp_path, tmp_path):
    """The current folder, with modules of common names; each leaves a file if it is executed."""
    for name in NAMES:
        Path(f"{name}.py").write_text(f"import sys; open('executed', 'a').write('{name} ' + sys.argv[0] + '\\n')\n")
    return tmp_path


def test_nothing_of_the_current_folder_is_executed(strange, monkeypatch):
    pytest.importorskip("av")
    for name, value in (("PYTHONPATH", "."), ("PYTHONSTARTUP", "json.py"), ("PYTHONHOME", ".")):
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend("")
    monkeypatch.syspath_prepend(str(strange))
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "Hi"}], True) == "Hi"
    Path("a.mp4").write_text("no video")
    with pytest.raises(ImageError, match=r"^a\.mp4: not a video that can be read: Invalid data found"):
        Video.read("a.mp4")
    assert not Path("executed").exists()


def test_python_m_imports_nothing_of_a_folder_with_images(strange):
    run = subprocess.run([sys.executable, "-m", "nanovlm", "--version"], capture_output=True, text=True,
                         env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
    assert run.stdout.startswith("nanovlm ") and not (strange / "executed").exists()


def test_a_process_knows_what_it_needs_and_no_key(monkeypatch):
    for name in ("NANOVLM_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "LD_PRELOAD", "PYTHONINSPECT"):
        monkeypatch.setenv(name, "secret")
    with limited("surroundings") as process:
        found, _ = process.call()
    assert found["environment"].keys() <= {*limited_process.ENVIRONMENT, "LC_CTYPE"}, "Python may set LC_CTYPE"
    assert found["path"][0] == str(ROOT) and "" not in found["path"] and "torch" not in found["modules"]


ENDED = {
    "spin": "it took more than 1 s", "sleep": "it took more than 1 s", "fill": "it took more than 512 MiB",
    "kill": f"its process ended with signal {signal.SIGSEGV:d} (", "leave": "its process ended with exit status 3",
    "tear": "its process ended with exit status 0", "divide": "ZeroDivisionError: division by zero",
    "find": "No such file or directory", "nobody": "AttributeError: ",
}  # fmt: skip


@pytest.mark.parametrize("function", [pytest.param(f, marks=pytest.mark.full) if f == "spin" else f for f in ENDED])
def test_a_process_says_why_it_failed_and_answers_the_next_call(function, monkeypatch):
    if function == "sleep":
        monkeypatch.setattr(limited_process, "CLOCK_FACTOR", 0.5)
    with limited(function) as process:
        for _ in range(1 if function in ("spin", "sleep") else 2):
            with pytest.raises(LimitedError) as error:
                process.call()
            assert str(error.value).startswith(ENDED[function]) and "\n" not in str(error.value)
        process.function = "limited_functions:echo"
        if function in ("divide", "find", "nobody"):
            process.close()
        assert process.call({"a": ["\ud800", 1.5, None]}) == ({"a": ["\ud800", 1.5, None]}, b"12345")


def test_threads_get_their_own_answers_and_none_of_an_interrupted_call(monkeypatch):
    answers = {}
    with limited("echo", 5) as process:
        threads = [threading.Thread(target=lambda i=i: answers.update({i: process.call(i)})) for i in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {i: (i, b"12345") for i in range(20)}

    def interrupt(text):
        raise KeyboardInterrupt

    with limited("echo", 5) as process:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(limited_process.json, "loads", interrupt)
            process.call("first")
        assert process.call("second")[0] == "second"


@pytest.mark.full
def test_where_python_has_no_resource_the_clock_still_ends_a_template(monkeypatch):
    """Windows: memory is not limited there, which the module says."""
    monkeypatch.setattr(limited_process, "CLOCK_FACTOR", 0.7)
    blocked = "import sys; sys.modules['resource'] = None; "
    monkeypatch.setattr(limited_process, "PROGRAM", blocked + limited_process.PROGRAM)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x"
    with pytest.raises(CheckpointError, match="^lm_chat_template cannot render this chat: it took more than 3 s$"):
        ChatTemplate(endless).render([{"role": "user", "content": "Hi"}], True)


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
def test_templates_render_as_in_transformers():
    from transformers.utils.chat_template_utils import render_jinja_template

    for (template, chat), is_asked in product(((CHATML, CHAT), (LLAMA, CHAT), (TEMPLATE, PARTS)), (True, False)):
        expected = render_jinja_template([chat], chat_template=template, add_generation_prompt=is_asked)
        assert ChatTemplate(template).render(chat, is_asked) == expected[0][0]


def test_published_constructs_are_rendered_and_after_an_end_the_next_chat():
    rendered = ChatTemplate(LLAMA).render(CHAT, True)
    assert rendered.startswith("<<SYS>>Be brief.<</SYS>>02 [USER] How many <b>stars</b>?---03 [ASSISTANT] Two.---")
    assert re.search(r'\*\*a\*\*\s*\d{4}\s*{"content":"Be brief.","role":"system"}\s*assistant:4$', rendered)
    with pytest.raises(CheckpointError, match="cannot render this chat: an unknown role$"):
        ChatTemplate(LLAMA).render([{"role": "tool", "content": "?"}], True)
    template = ChatTemplate("{{ messages[0].content * messages | length ** 15 }}")
    with pytest.raises(CheckpointError, match="cannot render this chat: "):
        template.render(CHAT, True)
    assert template.render(CHAT[:1], True) == "Be brief."


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
ENDLESS = {  # loops without output, and texts that fill the memory
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x",
    "lipsum": "{{ lipsum(n=99999999) }}",
    "indentation of JSON": "{{ [1, 2, [3]] | tojson(indent=9999999999) }}",
    "a product": "{{ 'x' * 10**10 }}",
    "a power": "{{ (9 ** (9 ** 9)) is number }}",
    "a named format": "{{ '{:9999999999}'.format(1) }}",
    "doubled text": "{% set ns = namespace(x='xx') %}"
    "{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
}


@pytest.mark.full
@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_ends(template):
    endless = ChatTemplate(template)
    with pytest.raises(CheckpointError, match="^lm_chat_template [^\n]*$"):
        endless.render(CHAT, True)


def test_a_forked_process_renders_by_itself():
    template, fork = ChatTemplate("{{ messages[0].content }}"), multiprocessing.get_context("fork")
    assert template.render(CHAT, True) == "Be brief."
    texts = fork.SimpleQueue()
    children = [fork.Process(target=lambda: texts.put(template.render(CHAT[1:], True))) for _ in range(2)]
    for child in children:
        child.start()
    assert [texts.get() for _ in children] == [CHAT[1]["content"]] * 2
    for child in children:
        child.join()
    assert template.render(CHAT, True) == "Be brief."


def test_long_chats_are_rendered_and_the_known_templates_are_nanovlms_and_smolvlms():
    chat = CHAT[1:3] * 2000
    assert ChatTemplate(CHATML + " ").render(chat, True).strip() == ChatTemplate(CHATML).render(chat, True).strip()
    assert {hashlib.sha256(source.encode()).hexdigest() for source in (CHATML, TEMPLATE)} == KNOWN


@pytest.mark.parametrize("name", FAILING)
def test_a_template_that_fails_is_one_line(name):
    with pytest.raises(CheckpointError, match="^lm_chat_template [^\n]*$") as caught:
        ChatTemplate(FAILING[name]).render(CHAT, True)
    assert len(str(caught.value)) < 300
    assert ("more than 10,000,000 characters" in str(caught.value)) == (name == "much text")
