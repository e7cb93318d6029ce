"""`nanovlm caption` and generate.py: captions on stdout, errors on stderr; and flags that several verbs share."""

import argparse
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from models.inference.quantization import QuantizedLinear
from models.lora import adapt
from models.lora.files import write_adapters
from nanovlm import EMBEDDED, PROMPT, SAMPLE, Captioner
from nanovlm.bulk import Report
from nanovlm.cli import main as cli
from nanovlm.cli.caption import GENERATION_FLAGS, MODEL_FLAGS
from nanovlm.cli.options import load_captioner, model_options, settings_of
from nanovlm.errors import NanoVLMError
from nanovlm.options import ModelOptions
from support import ROOT, png
from support.cli import FAST_FLAGS, FakeTerminal, assert_usage_error, run_program, set_stdin, set_stream

pytestmark = pytest.mark.usefixtures("workdir")

MAX_FILES_OF_A_CAPTION = 43  # beside generate.py and the packages' __init__.py


def test_names_of_any_form_stand_before_and_after_flags_and_on_one_line(generate, captions_of):
    Path("-x.png").write_bytes(Path("good.png").read_bytes())
    texts = [f"{name}: {captions_of(name)[0]}\n" for name in ("good.png", "fine.jpg", "-x.png")]
    assert generate("good.png", "--seed", "0", "fine.jpg") == (0, "".join(texts[:2]), "")
    assert generate("good.png", "--seed", "0", "fine.jpg", "--", "-x.png") == (0, "".join(texts), "")
    names = ["two words.png", "ünï-漢字-🙂.png", "two\nlines.png", "-dash.png", "tab\t.png", "%s.png", "[1].png"]
    for name in names:
        Path(name).write_bytes(Path("good.png").read_bytes())
    code, out, err = generate("--", *names)
    text = captions_of("good.png")[0]
    labels = ["two words.png", "ünï-漢字-🙂.png", r"'two\nlines.png'", "-dash.png", r"'tab\t.png'", *names[-2:]]
    assert (code, err) == (0, "") and out == "".join(f"{label}: {text}\n" for label in labels)
    _, out, _ = generate("--json", "--", *names)
    assert [json.loads(line)["image"] for line in out.splitlines()] == names


def test_edited_texts_are_kept_unless_all_are_overwritten(generate, image_folder):
    assert generate(image_folder, "--prompt", "a")[0] == 0
    Path("images/a.txt").write_text("mine")
    _, _, err = generate("--prompt", "b", "--overwrite", image_folder)
    kept = "1 text that a person wrote or edited is kept; --overwrite all replaces"
    assert err.splitlines()[0].startswith("4 captioned in ") and err.splitlines()[1].startswith(kept)
    assert generate(image_folder, "--prompt", "c", "--overwrite", "all")[2].startswith("5 captioned in ")
    _, _, err = generate(image_folder, "--prompt", "d", "--prefix", "x")
    assert "5 existing captions of another run, with prompt 'c', prefix ''; --overwrite" in err


def test_nothing_is_loaded_to_find_nothing_to_do(image_folder):
    for path in image_folder.rglob("*.*"):
        path.with_suffix(".txt").write_text("mine")
    code = "import sys; from nanovlm.cli.main import main; "
    code += "print(main(['caption', 'images', '--prompt', 'a']), sorted({'torch', 'jinja2'} & sys.modules.keys()))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert run.stdout == "0 []\n" and "5 had captions" in run.stderr


def test_one_image_is_one_line_of_generate_py_and_of_the_verb(generate, captions_of, model_folder, nanovlm_program):
    expected = 0, f"{captions_of('good.png')[0]}\n", ""
    command = ["caption", "good.png", "--model", str(model_folder), *FAST_FLAGS]
    assert generate("good.png") == nanovlm_program(*command) == expected


def test_json_is_one_object_per_image_and_prompt(generate, captions_of):
    prompts, names = ["Où? 🙂", PROMPT, "How many?"], ["good.png", "fine.jpg"]
    flags = [word for prompt in prompts for word in ("--prompt", prompt)]
    lines = {name: [captions_of(name, prompt)[0] for prompt in prompts] for name in names}
    assert generate("good.png", *flags) == (0, "".join(f"{line}\n" for line in lines["good.png"]), "")
    code, out, err = generate(*names, *flags, "--json")
    rows = [json.loads(line) for line in out.split("\n")[:-1]]
    expected = [[name, *pair] for name in names for pair in zip(prompts, lines[name])]
    assert (code, err) == (0, "") and [[row[key] for key in ("image", "prompt", "text")] for row in rows] == expected
    kinds = {str: "image prompt text finish_reason", int: "prompt_tokens new_tokens"}
    kinds |= {float: "first_token_s total_s tokens_per_s"}
    expected = {name: kind for kind, names in kinds.items() for name in names.split()}
    assert {name: type(value) for name, value in rows[0].items()} == expected
    assert 1 <= rows[0]["new_tokens"] <= 18 and 0 < rows[0]["first_token_s"] <= rows[0]["total_s"]


def test_an_answer_that_is_empty_or_has_no_room_is_an_error_of_its_image(generate, silent_model):
    code, out, err = generate(SAMPLE, "--prompt", "What is this?", model=silent_model)
    assert (code, out) == (1, "\n") and err.endswith(f"{SAMPLE}: the model's answer is empty\n")
    code, out, err = generate("good.png", "fine.jpg", "--prompt", "ξ" * 490)
    assert (code, out) == (1, "") and [line.partition(":")[0] for line in err.splitlines()] == ["good.png", "fine.jpg"]
    assert err.count("lm_max_position_embeddings=1024") == 2


def test_dash_reads_an_image_from_stdin(generate, captions_of, monkeypatch):
    set_stdin(Path("good.png").read_bytes(), monkeypatch)
    lines = [f"{name}: {captions_of(file)[0]}\n" for name, file in (("fine.jpg", "fine.jpg"), *[("-", "good.png")] * 2)]
    assert generate("fine.jpg", "-", "-") == (0, "".join(lines), ""), "a file, as after <, can be read twice"


NO_STDIN = {b"": "an empty file", b"hello": "not an image", "a terminal": "standard input", "closed": "standard input"}


@pytest.mark.parametrize("stdin", NO_STDIN)
def test_stdin_without_an_image_is_one_error_line(generate, monkeypatch, stdin):
    set_stdin(stdin if isinstance(stdin, bytes) else b"", monkeypatch)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: stdin == "a terminal")
    if stdin == "closed":
        set_stream("stdin", None, monkeypatch)
    code, out, err = generate("-")
    assert (code, out) == (1, "") and len(err.splitlines()) == 1 and NO_STDIN[stdin] in err


BAD_IMAGES = {  # name: what is in it, and words of the error
    "missing.png": (None, "missing.png: No such file"),
    "empty.png": (b"", "empty.png: an empty file"),
    "truncated.png": (png(60, 40), "truncated.png: .*cannot be decoded"),
    "two\nlines.png": (None, r"'two\\nlines.png': "),
}


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_unreadable_images_are_one_error_line_each_and_others_are_captioned(generate, captions_of, form):
    for name, (content, _) in BAD_IMAGES.items():
        Path(name).write_bytes(content) if content is not None else None
    code, out, err = generate("missing.png", "good.png", *list(BAD_IMAGES)[1:], "fine.jpg", *form)
    rows = [json.loads(line) for line in out.splitlines()] if form else []
    shown = [f"{row['image']}: {row['text']}" for row in rows] or out.splitlines()
    assert code == 1 and shown == [f"{name}: {captions_of(name)[0]}" for name in ("good.png", "fine.jpg")]
    words = [words for _, words in BAD_IMAGES.values()]
    assert len(err.splitlines()) == len(words) and all(map(re.match, words, err.splitlines()))


def test_a_terminal_shows_text_as_it_is_generated_and_no_bar_among_lines(generate, monkeypatch, image_folder):
    _, piped, _ = generate("good.png", "fine.jpg")
    terminal = set_stream("stdout", FakeTerminal(), monkeypatch)
    assert generate("good.png", "missing.png", "fine.jpg")[0] == 1
    assert terminal.getvalue() == piped
    assert len(set(terminal.shown)) > 4 and all(piped.startswith(shown) for shown in terminal.shown)
    terminal = set_stream("stdout", FakeTerminal(), monkeypatch)
    error = set_stream("stderr", FakeTerminal(), monkeypatch)
    monkeypatch.setenv("TERM", "xterm")
    assert generate(image_folder, "--json")[0] == 0
    assert len(terminal.getvalue().splitlines()) == 5 and "image/s" not in error.getvalue()
    assert generate(image_folder)[0] == 0 and "5/5" in error.getvalue()


def test_captions_on_stdout_and_errors_on_stderr(generate, model_folder, captions_of):
    """The whole door in a process of its own, with a name that is no text."""
    os.link("good.png", b"\xff.png")
    run = run_program("good.png", b"\xff.png", "missing.png", "-", "--model", model_folder, *FAST_FLAGS, input=None)
    text = captions_of("good.png")[0]
    assert run.stdout.decode() == f"good.png: {text}\n'\\udcff.png': {text}\n"
    names = [line.split(b": ")[0] for line in run.stderr.splitlines() if b"no CPU kernels" not in line]
    assert names == [b"missing.png", b"<stdin>"]
    assert run.returncode == 1


def test_characters_missing_in_the_encoding_are_escaped(generate, monkeypatch):
    stdout = set_stream("stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"), monkeypatch)
    Path("ü🙂.png").write_bytes(Path("good.png").read_bytes())
    assert generate("ü🙂.png", "good.png", "--prompt", "é🙂")[0] == 0
    assert stdout.buffer.getvalue().startswith(rb"\xfc\U0001f642.png: ")


def test_a_caption_imports_little():
    """Few of our own files, none of other tasks; and not torch's compiler, which takes longer than all the rest."""
    code = "import sys, json; from nanovlm.cli.main import run_verb; run_verb('caption', []); "
    code += "print(json.dumps({name: getattr(module, '__file__', None) for name, module in sys.modules.items()}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = json.loads(run.stdout.splitlines()[-1])
    assert not imported.keys() & {"torchvision", "torch._dynamo", "torch._inductor", "fastapi", "uvicorn", "pydantic"}
    ours = {name for name, file in imported.items() if name.split(".")[0] in ("models", "nanovlm") and file}
    tasks = {f"nanovlm.{name}" for name in ("bulk", "data", "evaluation", "export", "serving", "synthetic", "training")}
    assert not {".".join(name.split(".")[:2]) for name in ours} & tasks
    files = {name for name in ours if Path(imported[name]).name != "__init__.py"}
    assert len(files) <= MAX_FILES_OF_A_CAPTION, sorted(files)


@pytest.mark.parametrize("model", [None, EMBEDDED])
def test_the_embedded_model_is_for_folders_only_if_named(generate, image_folder, model):
    refused = generate(image_folder, model=None)
    assert_usage_error(refused, "drawn scenes", "--model HuggingFaceTB/", "--model embedded")
    assert not list(image_folder.rglob("*.txt"))
    code, out, err = generate(image_folder, "--model", "embedded", model=None)
    assert (code, out) == (0, "") and len(list(image_folder.rglob("*.txt"))) == 5
    lines = err.splitlines()
    assert lines[0].startswith("note: the embedded model knows only drawn scenes") and len(lines) == 3
    assert lines[1].startswith("5 captioned in ") and lines[1].endswith(", in .txt files beside the images")
    assert lines[2].startswith("5 captions were cut at --max-new-tokens; raise it: images/")
    _, _, err = generate(image_folder, model=None)
    assert err == "5 had captions, in .txt files beside the images\n", "in one line, and no model is loaded"


def test_a_folder_is_printed_as_json_lines_and_a_list_captioned(generate, image_folder, captions_of, monkeypatch):
    code, out, _ = generate(image_folder, "--json", "--prefix", "a ")
    rows = {row["image"]: row["text"] for row in map(json.loads, out.splitlines())}
    assert code == 0 and len(rows) == 5 and not list(image_folder.rglob("*.txt"))
    assert all(text == f"a {captions_of(name)[0].strip()}" for name, text in rows.items())
    set_stdin(b"images/a.png\0two\nlines.png\0", monkeypatch)
    Path("two\nlines.png").write_bytes(Path("good.png").read_bytes())
    assert generate("--from-file", "-", "--out", "all.jsonl")[0] == 0
    names = [json.loads(line)["file_name"] for line in Path("all.jsonl").read_text().splitlines()]
    assert names == ["images/a.png", "two\nlines.png"]
    names = "images/a.png\nimages/deep/ünï-🙂.png\n"
    for data in (*map(names.encode, ("utf-8", "utf-8-sig", "utf-16")), names.encode().replace(b"\n", b"\0")):
        Path("names.txt").write_bytes(data)
        code, out, _ = generate("--from-file", "names.txt", "--json")
        assert code == 0 and [json.loads(line)["image"] for line in out.splitlines()] == names.split()
    Path("names.txt").write_text("good.png\nmissing.png\n")
    assert generate("--from-file", "names.txt", "--json")[0] == 1


def test_rows_name_the_model_its_adapters_and_its_own_prompt(generate, image_folder, monkeypatch):
    def caption_files(load, names, output, options, *, model):
        assert (model, options.prompts) == ("owner/name + adapters", ("Who?",))
        return Report()

    monkeypatch.setattr("nanovlm.bulk.caption_files", caption_files)
    Path("adapters").mkdir()
    Path("adapters/adapter_config.json").write_text("{}")
    Path("adapters/nanovlm.json").write_text('{"prompt": "Who?"}')
    code, out, err = generate(image_folder, "--adapter", "adapters", model="owner/name")
    assert (code, out) == (0, "") and re.fullmatch(r"0 captioned in \d+ s\n", err)


def test_choices_have_probabilities(generate, random_captioner):
    first, second = random_captioner.classify("good.png", ["red", "green"])
    assert first.probability + second.probability == pytest.approx(1)
    percent = f"({first.probability:.0%}, log-probability {first.log_probability:.1f})"
    assert generate("good.png", "--choices", "red, green") == (0, f"{first.text} {percent}\n", "")
    row = json.loads(generate("good.png", "--choices", "red,green", "--json")[1])
    assert row["text"] == first.text and row["probability"] == round(first.probability, 4)


def test_a_slow_answer_names_faster_ways_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("nanovlm.cli.caption.LONG_S", 0.0)
    for has_terminal in (False, True):
        monkeypatch.setattr("nanovlm.cli.caption.has_terminal", lambda shown=has_terminal: shown)
        assert cli.main(["caption", str(SAMPLE), "--max-new-tokens", "2", "--model", "embedded"]) == 0
        err = capsys.readouterr().err
        assert bool(re.search(r"note: this took \d+ s; faster: --quantize int8\n", err)) == has_terminal


GENERATION = {  # field: its value, and the flags beside it, without and with which answers differ
    "repetition_penalty": (1.9, {}),
    "temperature": (1.5, {"seed": 4}),
    "top_p": (0.05, {"temperature": 1.5, "seed": 4}),
    "seed": (98765, {"temperature": 1.5}),
    "max_new_tokens": (3, {}),
    "start_with": ("A photo of", {}),
}
MODEL = {  # field: its value, and whether a captioner shows it
    "adapter": ("adapters", lambda captioner: captioner.model.MP.proj.weight.abs().max() > 50),
    "model": ("tiled", lambda captioner: captioner.model.cfg.vit_img_size == 16),
    "revision": ("main", "has no revision 'main'"),
    "device": ("mps", "device=mps is not available"),
    "dtype": ("float16", lambda captioner: captioner.inference.dtype == torch.float16),
    "threads": ("2", lambda captioner: torch.get_num_threads() == 2),
    "quantize": ("int8", lambda captioner: QuantizedLinear in map(type, captioner.inference.network.model.modules())),
    "max_tiles": ("2", lambda captioner: len(captioner.prepare(Image.new("RGB", (64, 64)))[1][0]) == 1),
}  # fmt: skip


def flag(name, value):
    return [f"--{name.replace('_', '-')}", str(value)]


def test_every_flag_is_in_these_tables():
    assert set(GENERATION_FLAGS) == GENERATION.keys()
    assert {f.name for f in settings_of(ModelOptions)} == MODEL.keys()


@pytest.mark.parametrize("name", GENERATION)
def test_generation_flag_changes_the_answer(name, generate, random_captioner):
    value, others = GENERATION[name]
    settings = {"max_new_tokens": 12} | others
    ask = ["good.png", "--prompt", "What?", *(word for pair in settings.items() for word in flag(*pair))]
    answer = random_captioner.caption("good.png", "What?", **settings | {name: value})
    assert generate(*ask, *flag(name, value))[1] == " ".join(answer.splitlines()) + "\n" != generate(*ask)[1]


@pytest.fixture
def one_thread_afterwards():
    n = torch.get_num_threads()
    yield
    torch.set_num_threads(n)


@pytest.mark.parametrize("name", MODEL)
def test_model_flag_changes_the_captioner(name, tiled, one_thread_afterwards):
    """Without the flag the captioner does not show it; each verb that has the flag parses it alike."""
    value, effect = MODEL[name]
    captioner = Captioner(*tiled)
    captioner.save_pretrained("tiled")
    adapted = Captioner.from_pretrained("tiled", "cpu", "float32").model
    adapt(adapted, 2, 4, ["MP"])
    torch.nn.init.constant_(adapted.MP.proj.lora_B.weight, 1e4)
    Path("adapters").mkdir()
    write_adapters(Path("adapters"), adapted)

    def options(verb, *argv):
        cli.import_verb(verb).add_flags(parser := argparse.ArgumentParser())
        return model_options(parser.parse_args([*argv, *(["--data", "scenes"] if verb == "evaluate" else [])]))

    base = [] if name == "model" else ["--model", "tiled"]
    changed = options("evaluate", *base, *flag(name, value))
    for verb in ("caption", "chat") if name in MODEL_FLAGS else ():
        assert options(verb, *base, *flag(name, value)) == changed
    if isinstance(effect, str):
        with pytest.raises(NanoVLMError, match=effect):
            load_captioner(changed)
        return
    assert not effect(load_captioner(options("evaluate", *base)))
    assert effect(load_captioner(changed))


def test_limits_of_the_embedded_model_and_unknown_config_keys_are_a_note_each(generate, changed_model):
    code, out, err = generate("good.png", "fine.jpg", model=None)
    assert code == 0 and len(err.splitlines()) == 1 and "drawn scenes" in err and "--model" in err
    assert (code, out, "") == generate("good.png", "fine.jpg", model=EMBEDDED), "no note with --model"
    for own in ((), (SAMPLE,)):
        assert generate(*own, model=None) == generate(SAMPLE, model=EMBEDDED), "its own sample needs no note"
    code, out, err = generate("good.png", model=changed_model(lm_eos_token_id=0, brand_new=[1]))
    assert (code, out) == generate("good.png")[:2]
    assert len(err.splitlines()) == 1 and err.startswith("note: ") and "brand_new" in err
    assert "lm_eos_token_id" not in err  # files of every version have it, and nothing needs it
