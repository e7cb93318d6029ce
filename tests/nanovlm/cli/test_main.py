"""Every door opened as a user opens it: what comes out, what is said of bad input, and how it ends."""

import io
import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import nanovlm
from nanovlm import SAMPLE, Captioner, image_processing
from nanovlm.cli import caption as captioning
from nanovlm.cli import main as cli
from nanovlm.cli import options
from support import ROOT
from support.cli import SHORT, Terminal, read_or_end, refused, stdin_of, user_runs

pytestmark = pytest.mark.usefixtures("standing")


def png(width, height):
    """A PNG with an honest header, of any size, and hardly any data."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


# --------------------------------------------------------------------------------------------- what comes out


def test_one_picture_is_one_line(generate, said):
    code, out, err = generate("good.png")
    assert (code, out, err) == (0, f"{said('good.png')[0]}\n", "")


def test_several_pictures_are_labelled_lines(generate, said):
    code, out, err = generate("good.png", "fine.jpg", "--prompt", "What?")
    assert (code, err) == (0, "")
    assert out == f"good.png: {said('good.png', 'What?')[0]}\nfine.jpg: {said('fine.jpg', 'What?')[0]}\n"


def test_the_verb_caption_is_the_same_door(generate, model_folder, capsys):
    code = cli.main(["caption", "good.png", "--model", str(model_folder), *SHORT])
    assert (code, *capsys.readouterr()) == generate("good.png")


def test_names_of_all_kinds_stay_on_their_line(generate, said):
    names = ["two words.png", "ünï-漢字-🙂.png", "two\nlines.png", "-dash.png", "tab\t.png", "%s.png"]
    for name in names:
        Path(name).write_bytes(Path("good.png").read_bytes())
    code, out, err = generate("--", *names)
    text = said("good.png")[0]
    labels = ["two words.png", "ünï-漢字-🙂.png", r"'two\nlines.png'", "-dash.png", r"'tab\t.png'", "%s.png"]
    assert (code, err) == (0, "") and out == "".join(f"{label}: {text}\n" for label in labels)
    _, out, _ = generate("--json", "--", *names)
    assert [json.loads(line)["picture"] for line in out.splitlines()] == names


def test_json_is_an_object_per_picture(generate, said):
    code, out, err = generate("good.png", "fine.jpg", "--json", "--prompt", "Où? 🙂")
    assert (code, err) == (0, "")
    records = [json.loads(line) for line in out.split("\n")[:-1]]
    assert [record["picture"] for record in records] == ["good.png", "fine.jpg"]
    kinds = {"picture": str, "prompt": str, "text": str, "prompt_tokens": int, "new_tokens": int}
    kinds |= {"first_token_s": float, "total_s": float, "tokens_per_s": float}
    for record in records:
        assert {name: type(value) for name, value in record.items()} == kinds
        assert record["prompt"] == "Où? 🙂" and record["text"] == said(record["picture"], "Où? 🙂")[0]
        assert 1 <= record["new_tokens"] <= 6 and record["prompt_tokens"] > 36
        assert 0 < record["first_token_s"] <= record["total_s"]


def test_samples_are_lines_and_in_json_a_list(generate, said):
    warm = ["--samples", "3", "--temperature", "1.5", "--seed", "4"]
    expected = said("good.png", n=3, temperature=1.5, seed=4)
    assert len(set(expected)) == 3
    assert generate("good.png", *warm) == (0, "".join(f"{text}\n" for text in expected), "")
    _, out, _ = generate("good.png", "fine.jpg", *warm)
    assert out.startswith("".join(f"good.png: {text}\n" for text in expected) + "fine.jpg: ")
    _, out, _ = generate("good.png", "--json", *warm)
    record = json.loads(out)
    assert record["samples"] == expected and record["text"] == expected[0]


def test_several_prompts_are_answered_in_turn(generate, said):
    prompts = ["What?", "Describe this picture.", "How many are there?"]
    flags = [word for prompt in prompts for word in ("--prompt", prompt)]
    lines = {name: [said(name, prompt)[0] for prompt in prompts] for name in ("good.png", "fine.jpg")}
    code, out, err = generate("good.png", *flags)
    assert (code, out, err) == (0, "".join(f"{line}\n" for line in lines["good.png"]), "")
    code, out, err = generate("good.png", "fine.jpg", *flags, "--json")
    told = [[row[key] for key in ("picture", "prompt", "text")] for row in map(json.loads, out.splitlines())]
    assert (code, err) == (0, "")
    assert told == [[name, prompt, line] for name, found in lines.items() for prompt, line in zip(prompts, found)]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--samples", "2", "--temperature", "1"], "--samples 2 of 2 prompts; ask for samples of one at a time"),
        (["--out", "captions.jsonl"], "2 prompts are for captions on standard output"),
        (["--length", "short"], "not allowed with argument --prompt"),
    ],
)
def test_several_prompts_where_one_is_meant_are_one_line(generate, flags, words):
    refused(generate("good.png", "--prompt", "What?", "--prompt", "Where?", *flags), words)
    assert not Path("captions.jsonl").exists()


def test_a_budget_of_tiles_arrives(generate, monkeypatch):
    given = []

    def from_pretrained(*args, max_tiles, upscale, **others):
        given.append((max_tiles, upscale))
        raise ValueError("enough")

    monkeypatch.setattr(Captioner, "from_pretrained", from_pretrained)
    for flags in ([], ["--max-tiles", "3"], ["--no-upscale"]):
        refused(generate("good.png", *flags), "enough")
    assert given == [(None, True), (3, True), (None, False)]


def test_every_sampling_flag_arrives(generate, said):
    flags = {"temperature": 1.2, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.3, "seed": 5}
    argv = [text for name, value in flags.items() for text in (f"--{name.replace('_', '-')}", value)]
    assert generate("good.png", *argv)[1] == f"{said('good.png', **flags)[0]}\n"


def test_stats_are_one_line_beside_the_captions(generate):
    _, plain, _ = generate("good.png", "fine.jpg")
    code, out, err = generate("good.png", "fine.jpg", "--stats")
    assert code == 0 and out == plain and len(err.splitlines()) == 2
    for line in err.splitlines():
        assert all(words in line for words in ("model loaded in", "tokens/s", "peak memory", "MiB"))


def test_standard_input_is_a_picture(generate, said, monkeypatch):
    stdin_of(Path("good.png").read_bytes(), monkeypatch)
    assert generate("-") == (0, f"{said('good.png')[0]}\n", "")
    stdin_of(Path("good.png").read_bytes(), monkeypatch)
    code, out, err = generate("fine.jpg", "-", "-")
    assert out == f"fine.jpg: {said('fine.jpg')[0]}\n-: {said('good.png')[0]}\n"
    assert code == 1 and "an empty file" in err and len(err.splitlines()) == 1  # it can be read once


@pytest.mark.parametrize("stdin", ["nothing", "words", "a terminal", "closed"])
def test_standard_input_that_is_no_picture_is_one_line(generate, monkeypatch, stdin):
    stdin_of(b"" if stdin == "nothing" else b"hello", monkeypatch)
    if stdin == "a terminal":
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    elif stdin == "closed":
        monkeypatch.setattr(sys, "stdin", None)
    code, out, err = generate("-")
    assert (code, out) == (1, "") and len(err.splitlines()) == 1
    assert {"nothing": "an empty file", "words": "not a picture"}.get(stdin, "standard input") in err


def test_the_embedded_model_says_once_what_it_knows(generate, model_folder, monkeypatch):
    monkeypatch.setattr(options, "EMBEDDED", model_folder)
    monkeypatch.setattr(captioning, "SAMPLE", Path("good.png"))
    code, out, err = generate("good.png", "fine.jpg", model=None)
    assert (code, out, "") == generate("good.png", "fine.jpg"), "who names a model is told nothing"
    assert len(err.splitlines()) == 1 and "drawn scenes" in err and "--model" in err
    assert generate(model=None) == generate("good.png"), "its own sample needs no note"


# ------------------------------------------------------------------------------------------------- bad pictures


BAD = {
    "missing.png": (None, "No such file"),
    "text.png": (b"hello\n" * 50, "not a picture"),
    "empty.png": (b"", "an empty file"),
    "truncated.png": ("good.png", "good.png"),
    "truncated.jpg": ("fine.jpg", "fine.jpg"),
    "bomb.png": (png(60_000, 60_000), "pixels; scale it down"),
    "flat.png": (png(0, 40), ""),
    "thread.png": (Image.new("RGB", (1, 5000)), "crop it"),
    "two\nlines.png": (None, r"two\nlines.png"),
}


def make_bad(name):
    content, words = BAD[name]
    if isinstance(content, Image.Image):
        content.save(name)
    elif isinstance(content, str):
        whole = Path(content).read_bytes()
        Path(name).write_bytes(whole[: len(whole) // 2])
        return name
    elif content is not None:
        Path(name).write_bytes(content)
    return words


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_picture_that_cannot_be_read_is_one_line(generate, name, form):
    words = make_bad(name)
    code, out, err = generate(name, *form)
    assert (code, out) == (1, "") and len(err.splitlines()) == 1
    assert err.startswith(name if name.isprintable() else repr(name)) and words in err


def test_the_other_pictures_are_captioned(generate, said):
    for name in BAD:
        make_bad(name)
    first, *rest = BAD
    code, out, err = generate(first, "good.png", *rest, "fine.jpg")
    assert out == f"good.png: {said('good.png')[0]}\nfine.jpg: {said('fine.jpg')[0]}\n"
    assert code == 1 and [line.split(": ")[0] for line in err.splitlines()] == [
        name if name.isprintable() else repr(name) for name in BAD
    ]


def test_a_prompt_too_long_beside_a_picture_is_that_pictures_line(generate):
    code, out, err = generate("good.png", "fine.jpg", "--prompt", "ξ" * 490)
    assert (code, out) == (1, "") and len(err.splitlines()) == 2
    for line, name in zip(err.splitlines(), ("good.png", "fine.jpg")):
        assert line.startswith(f"{name}: ") and "lm_max_position_embeddings=1024" in line


# ----------------------------------------------------------------------------------------------------- wrong use


WRONG_FLAGS = [
    "--samples 0", "--samples -1", "--samples x", "--samples 2", "--samples 2 --temperature 0",
    "--max-new-tokens 0", "--max-new-tokens -5", "--max-new-tokens 1.5", "--max-new-tokens x",
    "--temperature -0.1", "--temperature nan", "--temperature inf", "--temperature warm",
    "--top-k -1", "--top-k 0.5", "--top-p 0", "--top-p 1.1", "--top-p nan", "--top-p -1",
    "--min-p -0.1", "--min-p 1.1", "--min-p nan", "--seed -1", "--seed 9223372036854775808", "--seed x",
    "--repetition-penalty 0", "--repetition-penalty -1", "--repetition-penalty inf", "--repetition-penalty nan",
    "--max-tiles 0", "--max-tiles -1", "--max-tiles x", "--no-upscale=1",
    "--device tpu", "--dtype int8", "--unknown", "--unknown\nflag", "--prompt", "--model", "--json=yes",
]  # fmt: skip


@pytest.mark.parametrize("flags", WRONG_FLAGS)
def test_wrong_flags_are_one_line_before_any_work(generate, monkeypatch, flags):
    def work(*args, **kwargs):
        raise AssertionError("work")

    monkeypatch.setattr(Captioner, "from_pretrained", work)
    monkeypatch.setattr(image_processing, "load_image", work)
    result = generate("good.png", *flags.split(" "))
    refused(result)
    assert named(flags) & set(result[2].replace("=", " ").split())


def named(flags):
    """A flag and the name of its field."""
    flag = flags.split()[0].split("=")[0]
    return {flag, f"{flag}:", flag.removeprefix("--").replace("-", "_")}


@pytest.mark.parametrize("argv", [[], ["paint"], ["--unknown"], ["caption", "--unknown"], ["train", "--recipe", "x"]])
def test_a_wrong_verb_is_one_line(argv, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    refused((end.value.code, *capsys.readouterr()), program="nanovlm train" if "train" in argv else "nanovlm")


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_one_line(generate, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    refused(generate("good.png", "--device", device), f"device={device} is not available here, only cpu")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prompt", "word " * 1100], "lm_max_position_embeddings=1024"),
        (["--max-new-tokens", "1020"], "lm_max_position_embeddings=1024"),
        (["--prompt", "a\udcff"], "not valid Unicode text"),
    ],
    ids=["too long", "too much asked", "no text"],
)
def test_a_prompt_that_no_picture_could_follow_is_one_line(generate, argv, words):
    refused(generate("good.png", *argv), words)


def edited(folder, **settings):
    """A folder's config.json with other settings."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | settings))


def misfit(folder):
    weights = load_file(folder / "model.safetensors")
    weights["decoder.blocks.1.mlp.up_proj.weight"] = torch.zeros(3, 5)
    save_file(weights, folder / "model.safetensors")


def without_a_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["MP.proj.weight"]
    save_file(weights, folder / "model.safetensors")


BAD_MODELS = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["has no config.json"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["has no model.safetensors"]),
    "no tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        ["has no tokenizer.json, and"],
    ),
    "broken config": (lambda folder: (folder / "config.json").write_text("{,\n"), ["config.json"]),
    "config of a list": (lambda folder: (folder / "config.json").write_text("[]"), ["config.json"]),
    "impossible config": (lambda folder: edited(folder, lm_n_heads=7), ["lm_hidden_dim=192", "lm_n_heads=7"]),
    "no image token": (lambda folder: edited(folder, vlm_extra_tokens={}), ["vlm_extra_tokens={}", "image_token"]),
    "misfit": (misfit, ["decoder.blocks.1.mlp.up_proj.weight", "(3, 5)", "(512, 192)"]),
    "another size": (lambda folder: edited(folder, lm_inter_dim=520), ["(512, 192)", "(520, 192)", "gate_proj"]),
    "a tensor less": (without_a_tensor, ["MP.proj.weight"]),
    "cut weights": (lambda folder: os.truncate(folder / "model.safetensors", 5000), ["model.safetensors"]),
    "broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{\n"), ["tokenizer.json"]),
    "broken template": (lambda folder: edited(folder, lm_chat_template="{% for %}\n"), ["lm_chat_template"]),
    "failing template": (lambda folder: edited(folder, lm_chat_template="{{ 1 / 0 }}"), ["lm_chat_template"]),
}


@pytest.mark.parametrize("what", BAD_MODELS)
def test_a_model_that_cannot_be_used_is_one_line(generate, model_folder, tmp_path, what):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in model_folder.iterdir():
        os.link(path, folder / path.name)
    spoil, words = BAD_MODELS[what]
    for name in ("config.json", "model.safetensors", "tokenizer.json"):  # the tests' model itself stays whole
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).write_bytes(content)
    spoil(folder)
    refused(generate("good.png", model=folder), *words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "neither a folder nor a Hub id"),
        ("./no/where", "neither a folder nor a Hub id"),
        ("/no/where", "neither a folder nor a Hub id"),
        ("good.png", "a file, not a folder"),
        ("two\nlines", "neither a folder"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(generate, name, words):
    refused(generate("good.png", model=name), words)


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path):
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    run = user_runs("good.png", "--model", "lusxvr/nanoVLM-230M-8k", env=environment, text=True)
    refused((run.returncode, run.stdout, run.stderr), "lusxvr/nanoVLM-230M-8k", "offline", "local folder")


def test_keys_of_another_era_are_one_line(generate, model_folder, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in model_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    edited(folder, lm_eos_token_id=0, brand_new=[1])
    code, out, err = generate("good.png", model=folder)
    assert (code, out) == generate("good.png")[:2]
    assert len(err.splitlines()) == 1 and "brand_new" in err
    assert "lm_eos_token_id" not in err  # files of every era say it, and nothing needs it: no news


# --------------------------------------------------------------------------------- terminals, pipes and the rest


def test_a_terminal_sees_the_words_as_they_come(generate, monkeypatch):
    _, piped, _ = generate("good.png", "fine.jpg")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert generate("good.png", "missing.png", "fine.jpg")[0] == 1
    assert terminal.getvalue() == piped
    assert len(set(terminal.shown)) > 4 and all(piped.startswith(shown) for shown in terminal.shown)


def test_a_pseudo_terminal_shows_what_a_pipe_carries(generate, model_folder):
    pty = pytest.importorskip("pty")
    _, piped, _ = generate("good.png", "fine.jpg")
    master, slave = pty.openpty()
    run = user_runs("good.png", "fine.jpg", "--model", model_folder, *SHORT, stdin=slave, stdout=slave)
    os.close(slave)
    shown = b""
    while chunk := read_or_end(master):
        shown += chunk
    os.close(master)
    assert (run.returncode, run.stderr) == (0, b"")
    assert shown.decode().replace("\r\n", "\n") == piped


def test_a_reader_that_leaves_is_no_traceback(model_folder):
    read, write = os.pipe()
    os.close(read)
    run = user_runs("good.png", "fine.jpg", "--model", model_folder, *SHORT, stdout=write)
    os.close(write)
    assert (run.returncode, run.stderr) == (1, b"")


def test_a_user_reads_captions_and_complaints_apart(generate, model_folder, said):
    """The whole door in a process of its own, with a name that is no text."""
    os.link("good.png", b"\xff.png")
    run = user_runs("good.png", b"\xff.png", "missing.png", "-", "--model", model_folder, *SHORT, input=None)
    text = said("good.png")[0]
    assert run.stdout.decode() == f"good.png: {text}\n'\\udcff.png': {text}\n"
    assert [line.split(b": ")[0] for line in run.stderr.splitlines()] == [b"missing.png", b"<stdin>"]
    assert run.returncode == 1


def test_output_that_cannot_be_written_is_one_line(generate, monkeypatch):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = generate("good.png", "fine.jpg")
    assert code == 1 and len(err.splitlines()) == 1 and "No space left" in err


def test_letters_that_the_terminal_lacks_are_no_failure(generate, monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    Path("ü🙂.png").write_bytes(Path("good.png").read_bytes())
    assert generate("ü🙂.png", "good.png", "--prompt", "é🙂")[0] == 0
    assert generate("ü🙂.png", "--prompt", "é🙂", "--json")[0] == 0
    lines = stdout.buffer.getvalue().split(b"\n")
    assert lines[0].startswith(rb"\xfc\U0001f642.png: ")
    record = json.loads(lines[-2])
    assert (record["picture"], record["prompt"]) == ("ü🙂.png", "é🙂")


def test_a_user_who_leaves_is_no_traceback(generate, monkeypatch):
    def leave(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Captioner, "samples", leave)
    assert generate("good.png") == (130, "", "")


@pytest.mark.parametrize("argv", [["generate.py"], ["train.py"], ["-m", "nanovlm"]])
def test_help_comes_without_heavy_imports(argv):
    """Half a second is for Python itself; torch alone takes longer."""
    program = "from nanovlm.cli.main import main; main(['--help'])" if argv[0] == "-m" else None
    command = ["-c", program] if program else [*argv, "--help"]
    run = subprocess.run([sys.executable, "-X", "importtime", *command], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.startswith("usage: ")
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in run.stderr.splitlines()}
    assert {"nanovlm", "argparse"} <= imported
    assert not imported & {"torch", "torchvision", "PIL", "numpy", "tokenizers", "jinja2", "huggingface_hub"}


def test_help_names_every_flag(generate, train):
    code, out, _ = generate("--help")
    assert code == 0 and all(flags.split()[0].split("=")[0] in out for flags in WRONG_FLAGS if "unknown" not in flags)
    code, out, _ = train("--help")
    assert code == 0 and all(flags.split()[0] in out for flags in WRONG_TRAIN_FLAGS)


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"nanovlm {nanovlm.__version__}\n"


# -------------------------------------------------------------------------------------------------------- train


WRONG_TRAIN_FLAGS = [
    "--steps 0", "--steps 1.5", "--batch-size 0", "--lr -1", "--lr nan", "--lr x", "--warmup -1", "--decay 1.1",
    "--augment 0.5", "--weight-decay -1", "--beta2 1", "--beta2 -0.1", "--max-grad-norm -1", "--seed -1",
    "--seed 99999999999999999999", "--save-every 0", "--log-every 0", "--workers -1", "--device tpu", "--recipe x",
]  # fmt: skip


@pytest.mark.parametrize("flags", WRONG_TRAIN_FLAGS)
def test_wrong_train_flags_are_one_line_before_any_work(train, flags):
    result = train("--recipe", "scenes", "--out", "out", *flags.split())
    refused(result, program="train.py")
    assert named(flags) & set(result[2].replace("=", " ").split())
    assert not Path("out").exists()


@pytest.mark.parametrize("argv", [[], ["--recipe", "scenes"], ["--out", "out"]])
def test_train_asks_for_what_it_needs(train, argv):
    refused(train(*argv), "required", program="train.py")


SMALL = ["--recipe", "scenes", "--steps", "2", "--batch-size", "1", "--workers", "0", "--no-compile", "--out"]


def test_train_makes_a_model_that_generate_uses(generate, train):
    code, out, err = train(*SMALL, "out")
    assert (code, out) == (0, "") and err.splitlines()[-1].startswith("step 2/2  loss ")
    code, out, err = generate("good.png", model="out")
    assert code == 0 and err == "" and out.endswith("\n")
    code, _, err = train(*SMALL, "out")
    assert code == 0 and err.splitlines() == ["resumed out at step 2"]


def test_a_training_that_cannot_start_or_go_on_is_one_line(train):
    refused(train(*SMALL, "good.png"), "good.png is a file", program="train.py")
    Path("out/checkpoints/step-1").mkdir(parents=True)
    refused(train(*SMALL, "out"), "step-1", program="train.py")


# -------------------------------------------------------------------------------------------- the embedded model


def test_a_caption_starts_no_compiler():
    """torch imports its own, and torchvision does, too: each takes longer than all that is done for a caption."""
    heavy = {"torchvision", "torch._dynamo", "torch._inductor"}
    code = f"import sys; from nanovlm.cli.main import run_verb; run_verb('caption', []); print({heavy} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "set()"


def test_without_arguments_the_sample_is_captioned(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    assert cli.run_verb("caption") == 0
    out, err = capsys.readouterr()
    assert err == "" and out == f"{Captioner.from_pretrained().caption(SAMPLE)}\n"
    assert out.endswith("background.\n")
