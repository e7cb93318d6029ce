"""`nanovlm caption FOLDER`: every image is captioned once, even if others fail or the process is killed."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest

from models.inference.continuous_batching import ContinuousBatch
from nanovlm import SAMPLE, Captioner
from nanovlm.bulk.inputs import find_images
from nanovlm.bulk.outputs import write_table
from nanovlm.bulk.resume_log import append_row, file_lock
from nanovlm.data import ReadOptions, open_source
from nanovlm.data.folders import read_table
from support import ROOT, noise_image
from support.cli import FAST_FLAGS, IMAGE_NAMES, assert_usage_error, set_stdin

pytestmark = pytest.mark.usefixtures("workdir")

full = partial(pytest.param, marks=pytest.mark.full)

TABLES = ["captions.jsonl", "captions.csv", full("captions.parquet")]
OUTPUTS = ["txt", "captions.jsonl", "captions.csv", "captions.parquet"]
EXPECTED = {"skip": "{old}", "overwrite": "{new}", "append": "{old} {new}", "prepend": "{new} {old}"}


def outputs_and_modes(*default):
    """Every output with every mode; all but the default ones are of the full tier."""
    pairs = [pair if pair in default else full(*pair) for pair in product(OUTPUTS, EXPECTED)]
    return pytest.mark.parametrize(("where", "existing"), pairs)


class Killed(BaseException):
    """What `kill -9` does to a process, as far as its files can tell."""


@pytest.fixture
def folder(image_folder):
    return image_folder


@pytest.fixture
def texts(folder, captions_of):
    return {name: captions_of(str(folder / name))[0].strip() for name in IMAGE_NAMES}


def sidecars(folder):
    return {str(p.relative_to(folder)): p.read_text("utf-8") for p in folder.rglob("*.txt")}


def beside(texts):
    return {str(Path(name).with_suffix(".txt")): f"{text}\n" for name, text in texts.items()}


def read(path):
    """The texts of a table by file name, each name once, read without our own code."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        rows = parquet.read_table(path).to_pylist()
    elif path.suffix == ".csv":
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]
    assert len({row["file_name"] for row in rows}) == len(rows)
    return {row["file_name"]: row["text"] for row in rows}


def litter(folder):
    """Files that a run must not leave behind."""
    return [p.name for p in folder.rglob("*") if p.name.endswith(".lock") or ".tmp" in p.name]


# ------------------------------------------------------------------------------------------------- what is written


def test_a_folder_gets_a_txt_beside_each_image(generate, folder, texts):
    code, out, err = generate(folder)
    assert (code, out) == (0, "") and err.splitlines()[-1].startswith("5 captioned in ")
    assert sidecars(folder) == beside(texts) and not litter(folder)
    source = open_source(str(folder), ReadOptions())
    assert {source.keys[i]: source[i].qa_pairs[0][1] for i in range(len(source))} == texts


@pytest.mark.parametrize("table", TABLES)
def test_a_table_names_each_image_and_its_caption(generate, folder, texts, table):
    code, out, _ = generate(folder, "--out", folder / table, "--batch-size", "2")
    assert (code, out) == (0, "") and read(folder / table) == texts
    assert not sidecars(folder) and not litter(folder)
    generate(folder, "--out", table)  # in another folder, to which the names are relative
    assert read(Path(table)) == {f"images/{name}": text for name, text in texts.items()}


@pytest.mark.parametrize("existing", ["append", full("prepend")])
@pytest.mark.parametrize("where", ["txt", *map(full, OUTPUTS[1:])])
def test_the_same_command_adds_nothing_twice(generate, folder, texts, where, existing):
    out = where if where == "txt" else folder / where
    resume_log = folder / ("captions.run" if where == "txt" else f"{where}.run")

    def now():
        if where == "txt":
            return {name: (folder / name).with_suffix(".txt").read_text().strip() for name in IMAGE_NAMES}
        return {name: text for name, text in read(out).items() if name in IMAGE_NAMES}

    add = ["--existing", existing, "--out", out]
    assert generate(folder, *add)[0] == 0 and now() == texts
    noise_image(33, 44, 3).save(folder / "new.png")
    code, _, err = generate(folder, *add)
    assert code == 0 and "1 captioned" in err and now() == texts
    assert err.splitlines()[-1].endswith(f"5 were done by this command before; to do them again, remove {resume_log}")
    (folder / "new.png").unlink()
    assert generate(folder, *add, "--suffix", "!")[0] == 0, "another command"
    twice = {name: EXPECTED[existing].format(old=text, new=f"{text}!") for name, text in texts.items()}
    assert now() == twice
    resume_log.unlink()
    assert generate(folder, *add, "--suffix", "!")[0] == 0
    assert now() == {name: EXPECTED[existing].format(old=twice[name], new=f"{texts[name]}!") for name in IMAGE_NAMES}
    if where == "txt":
        (folder / "a.txt").unlink()
        assert generate(folder, *add, "--suffix", "!")[0] == 0 and now()["a.png"] == f"{texts['a.png']}!", (
            "a deleted caption is written again"
        )
    else:
        rows = [row | {"text": "mine"} for row in read_table(out)]
        write_table(out, rows)
        assert generate(folder, *add, "--suffix", "!")[0] == 0 and set(now().values()) == {"mine"}
    assert generate(folder, "--existing", "overwrite", "--out", out)[0] == 0
    assert now() == texts and not resume_log.exists() and not litter(folder)


@pytest.mark.parametrize("where", ["txt", full("all.csv")])
def test_two_runs_at_once_are_refused(generate, folder, texts, where):
    """One lock file is held; the lock of a killed process is released, and its lock file blocks nobody."""
    lock, target = (".captions.lock", folder) if where == "txt" else (f".{where}.lock", folder / where)
    out = ["--out", where if where == "txt" else target]
    with file_lock(folder / lock, "x"):
        assert_usage_error(generate(folder, *out), f"{target}: another run writes", "wait for")
        assert not sidecars(folder)
    (folder / lock).touch()
    assert generate(folder, *out)[0] == 0
    assert (sidecars(folder) == beside(texts)) if where == "txt" else (read(target) == texts)
    assert not litter(folder)


@pytest.mark.full
def test_metadata_is_a_training_set(generate, folder, texts):
    assert generate(folder, "--out", folder / "metadata.jsonl")[0] == 0
    source = open_source(str(folder), ReadOptions())
    assert {source.keys[i]: source[i].qa_pairs[0][1] for i in range(len(source))} == texts


def test_prefix_suffix_and_length(generate, folder, captions_of):
    assert generate(folder, "--prefix", "foo, ", "--suffix", " (ai)", "--length", "short")[0] == 0
    expected = {
        name: captions_of(str(folder / name), "Describe this picture in a few words.")[0].strip()
        for name in IMAGE_NAMES
    }
    assert sidecars(folder) == beside({name: f"foo, {text} (ai)" for name, text in expected.items()})


def test_captions_start_with_given_words_and_end_with_a_sentence(generate, folder, model_folder):
    captioner = Captioner.from_pretrained(model_folder, "cpu", "float32")
    start = "Two photos. One"
    expected = {n: captioner.caption(folder / n, start_with=start, max_new_tokens=6).strip() for n in IMAGE_NAMES}
    assert generate(folder, "--start-with", f"{start} ")[0] == 0 and sidecars(folder) == beside(expected)
    assert all(text.startswith(start) and len(text) > len(start) for text in expected.values())
    assert generate(folder / "a.png", "--start-with", start)[1].split() == expected["a.png"].split()
    code, out, _ = generate(folder, "--start-with", start, "--trim-incomplete", "--out", "-")
    texts = {Path(row["file_name"]).name: row["text"] for row in map(json.loads, out.splitlines())}
    cut = {captioner.caption(folder / n, start_with=start, trim_incomplete=True, max_new_tokens=6) for n in IMAGE_NAMES}
    assert code == 0 and set(texts.values()) == cut and "Two photos." in cut


def test_a_prompt_template_asks_with_the_tags_of_each_image(generate, folder, captions_of):
    for i, name in enumerate(IMAGE_NAMES[1:]):
        (folder / name).with_suffix(".txt").write_text(f"tag{i},\n  red {{name}}\n", encoding="utf-8")
    flags = [folder, "--prompt-template", "In {folder}, {name}: {tags}!", "--extension", "caption"]
    code, _, err = generate(*flags)
    assert code == 1 and "a.png: a.txt is missing, so the prompt has no {tags}" in err and "4 captioned" in err
    expected = {}
    for i, name in enumerate(IMAGE_NAMES[1:]):
        path = folder / name
        prompt = f"In {path.parent.name}, {path.stem}: tag{i}, red {{name}}!"
        expected[str(Path(name).with_suffix(".caption"))] = captions_of(str(path), prompt)[0].strip() + "\n"
    assert {str(p.relative_to(folder)): p.read_text("utf-8") for p in folder.rglob("*.caption")} == expected
    (folder / "a.txt").touch()
    assert generate(*flags)[0] == 0 and (folder / "a.caption").exists()


def test_lists_patterns_and_names_are_captioned_together(generate, folder, texts, monkeypatch):
    odd = "images/two\nlines.png"
    Path(odd).write_bytes((folder / "a.png").read_bytes())
    set_stdin(b"images/a.png\0" + odd.encode() + b"\0images/deep\0", monkeypatch)
    assert generate("--from-file", "-", "images/*.jpg", "images/../images/a.png", "--out", "all.jsonl")[0] == 0
    captions = read(Path("all.jsonl"))
    assert set(captions) == {f"images/{name}" for name in IMAGE_NAMES if name != "d.gif"} | {odd}
    assert captions[odd] == captions["images/a.png"] == texts["a.png"]
    Path("names").write_text("images/d.gif\n\nimages/a.png\n")
    assert generate("--from-file", "names", "--out", "listed.csv")[0] == 0
    assert set(read(Path("listed.csv"))) == {"images/d.gif", "images/a.png"}
    assert generate("good.png", "--out", "txt")[0] == 0 and Path("good.txt").is_file()


@pytest.mark.full
def test_models_of_the_first_format_caption_folders(generate, folder, model_folder, tmp_path):
    (old := tmp_path / "old").mkdir()
    for path in model_folder.iterdir():
        (old / path.name).write_bytes(path.read_bytes())
    raw = json.loads((old / "config.json").read_text())
    for name in ("lm_chat_template", "max_img_size"):
        del raw[name]
    (old / "config.json").write_text(json.dumps(raw))
    assert generate(folder, model=old)[0] == 0 and len(sidecars(folder)) == 5


# ------------------------------------------------------------------------------------------- existing captions


@outputs_and_modes(("txt", "overwrite"), ("captions.jsonl", "skip"), ("captions.csv", "append"))
def test_existing_captions_are_skipped_overwritten_or_added_to(generate, folder, texts, where, existing):
    old = {"a.png": "old words", "d.gif": "older"}
    if where == "txt":
        for name, text in old.items():
            (folder / name).with_suffix(".txt").write_text(text)
    else:
        rows = [{"file_name": name, "text": text, "label": "7"} for name, text in old.items()]
        write_table(folder / where, rows + [{"file_name": "x.png", "text": "x"}])
    code, _, err = generate(folder, "--existing", existing, "--out", where if where == "txt" else folder / where)
    assert code == 0 and ("2 had captions already" in err) == (existing == "skip")
    expected = texts | {name: EXPECTED[existing].format(old=text, new=texts[name]) for name, text in old.items()}
    if where == "txt":
        written = {name: (folder / name).with_suffix(".txt").read_text().strip() for name in IMAGE_NAMES}
        assert written == expected
    else:
        assert read(folder / where) == expected | {"x.png": "x"}, "rows of other images stay"
        assert "label" in {**read_table(folder / where)[0]}, "and so do other columns"
    assert not litter(folder)


def test_a_second_run_does_not_load_the_model(generate, folder, monkeypatch):
    generate(folder), generate(folder, "--out", "all.csv")
    monkeypatch.setattr(Captioner, "from_pretrained", lambda *args: pytest.fail("loaded"))
    for where in ([], ["--out", "all.csv"]):
        assert generate(folder, *where) == (0, "", "5 had captions already\n")


# ------------------------------------------------------------------------------------------------------- interruptions


def interrupt_second_line(patch):
    """Ctrl-C at the second line of a log; returns the lines that were written."""
    write, lines = os.write, []

    def interrupted(file, line):
        if lines:
            raise KeyboardInterrupt
        lines.append(line)
        return write(file, line)

    patch.setattr(os, "write", interrupted)
    return lines


@outputs_and_modes(("txt", "append"), ("captions.jsonl", "skip"))
def test_a_killed_run_resumes_and_captions_nothing_twice(generate, folder, texts, monkeypatch, where, existing):
    """Killed at its third, fourth or fifth write or replacement, run after run, until one finishes."""
    out = where if where == "txt" else folder / where
    if where == "txt":
        (folder / "a.txt").write_text("old\n")
    else:
        write_table(out, [{"file_name": "a.png", "text": "old"}])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})  # each of several workers may lose a caption
    captioned, calls, kills = [], [0], 0

    def dies(function, torn):
        def die(*args):
            calls[0] += 1
            if calls[0] == 3 + kills % 3:
                torn(*args)
                raise Killed
            return function(*args)

        return die

    write, add = os.write, ContinuousBatch.add
    monkeypatch.setattr(ContinuousBatch, "add", lambda *args, **more: captioned.append(1) or add(*args, **more))
    monkeypatch.setattr(os, "replace", dies(os.replace, lambda *args: None))
    monkeypatch.setattr(os, "write", dies(write, lambda file, line: write(file, line[:-3])))
    for _ in range(20):
        calls[0] = 0
        try:
            code, _, _ = generate(folder, "--existing", existing, "--out", out, "--batch-size", "1")
        except Killed:
            kills += 1
            assert all(text.endswith("\n") for text in sidecars(folder).values())
        else:
            break
    assert code == 0 and not litter(folder) and 0 < kills < 12
    assert len(captioned) <= 5 + kills, "but for the one that was about to be written"
    expected = texts | {"a.png": EXPECTED[existing].format(old="old", new=texts["a.png"])}
    written = {Path(k).stem: v.strip() for k, v in sidecars(folder).items()} if where == "txt" else read(out)
    assert written == ({Path(name).stem: text for name, text in expected.items()} if where == "txt" else expected)


@outputs_and_modes(("txt", "append"), ("captions.csv", "append"))
def test_a_caption_edited_after_an_interrupted_run_is_kept(generate, folder, texts, monkeypatch, where, existing):
    """Ctrl-C after one image of --existing append, an edit by hand, and then another command or the same."""
    out = where if where == "txt" else folder / where
    if where == "txt":
        for name in IMAGE_NAMES:
            (folder / name).with_suffix(".txt").write_text("old\n")
    else:
        write_table(out, [{"file_name": name, "text": "old"} for name in IMAGE_NAMES])
    with monkeypatch.context() as patch:
        added = interrupt_second_line(patch)
        code, _, err = generate(folder, "--existing", "append", "--out", out)
    assert code == 130 and "stopped after 1 of 5 images; run the same command to resume" in err
    name = json.loads(added[0])["file_name"]
    if where == "txt":
        (folder / name).with_suffix(".txt").write_text("mine\n")
    else:
        rows = [row | ({"text": "mine"} if row["file_name"] == name else {}) for row in read_table(out)]
        write_table(out, rows)
    code, _, err = generate(folder, "--existing", existing, "--out", out)
    expected = {key: EXPECTED[existing].format(old="old", new=text) for key, text in texts.items()}
    expected[name] = "mine" if existing == "append" else EXPECTED[existing].format(old="mine", new=texts[name])
    if where == "txt":
        assert {key: (folder / key).with_suffix(".txt").read_text().strip() for key in IMAGE_NAMES} == expected
    else:
        assert read(out) == expected
    assert code == 0 and ("5 had captions already" in err) == (existing == "skip")


@pytest.mark.parametrize("cut", [1, *map(full, range(8, 60, 7))])
def test_an_unfinished_last_line_is_repaired(generate, folder, texts, cut):
    table = folder / "captions.jsonl"
    generate(folder, "--out", table)
    os.truncate(table, table.stat().st_size - cut)
    code, _, err = generate(folder, "--out", table)
    assert code == 0 and read(table) == texts, err


def test_a_line_cut_within_a_character_is_repaired(generate, folder, texts):
    table = folder / "captions.jsonl"
    generate(folder, "--out", table)
    table.write_bytes(table.read_bytes() + '{"file_name": "z.png", "text": "é'.encode()[:-1])
    code, _, err = generate(folder, "--out", table)
    assert code == 0 and read(table) == texts and "removed its unfinished last line" in err


def test_a_table_that_is_not_ours_is_refused_and_kept(generate, folder):
    table = folder / "captions.jsonl"
    for content, words in (("hello\nworld", "line 1"), ('{"a": 1}\n', "file_name"), ("[1]\n", "not an object")):
        table.write_text(content)
        assert_usage_error(generate(folder, "--out", table), str(table), words)
        assert table.read_text() == content


@pytest.mark.parametrize("name", ["*.gif", "none"])
def test_a_name_without_an_image_is_wrong_use_and_writes_nothing(generate, folder, name):
    Path("none").mkdir()
    before = snapshot(Path())
    assert_usage_error(generate(name), f"{name}: a ", "image")
    assert snapshot(Path()) == before


def test_other_settings_are_another_run(generate, folder, texts, monkeypatch):
    """What an interrupted run has found is kept, and the next one, with other settings, begins anew."""
    table = folder / "captions.csv"
    with monkeypatch.context() as patch:
        interrupt_second_line(patch)
        code, _, _ = generate(folder, "--out", table, "--prefix", "1 ")
    assert code == 130 and not table.exists()
    code, _, err = generate(folder, "--out", table, "--prefix", "2 ")
    assert code == 0 and "1 had captions already" in err
    assert sorted(text[:2] for text in read(table).values()) == ["1 ", "2 ", "2 ", "2 ", "2 "]


@pytest.mark.full  # two processes
def test_kill_9_leaves_complete_files_and_the_next_run_resumes(folder, model_folder, captions_of):
    for i in range(60):
        noise_image(40, 40, seed=i).save(folder / f"n{i:02}.png")
    command = [sys.executable, "-c", "import sys; from nanovlm.cli.main import main; sys.exit(main())", "caption"]
    command += [str(folder), "--model", str(model_folder), *FAST_FLAGS, "--batch-size", "2"]
    quiet = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.PIPE,
        "env": os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    }
    run = subprocess.Popen(command, **quiet)
    until = time.monotonic() + 120
    while len(list(folder.glob("[!.]*.txt"))) < 8 and time.monotonic() < until and run.poll() is None:
        time.sleep(0.002)
    run.send_signal(signal.SIGKILL)
    _, err = run.communicate()
    first = {p: (p.stat().st_mtime_ns, p.read_text()) for p in folder.rglob("[!.]*.txt")}
    assert run.returncode == -signal.SIGKILL and 8 <= len(first) < 65, err.decode()
    for path, (_, text) in first.items():
        (image,) = (p for p in folder.rglob(f"{path.stem}.*") if p.suffix != ".txt")
        assert text == captions_of(str(image))[0].strip() + "\n"
    run = subprocess.run(command, timeout=300, **quiet)
    assert run.returncode == 0 and f"{len(first)} had captions already" in run.stderr.decode()
    assert len(list(folder.rglob("[!.]*.txt"))) == 65 and not litter(folder)
    assert all((p.stat().st_mtime_ns, p.read_text()) == was for p, was in first.items()), "nothing is captioned twice"


# ----------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("where", ["txt", "captions.csv", *map(full, OUTPUTS[1::2])])
def test_images_that_fail_are_listed_and_do_not_stop_the_run(generate, folder, texts, where):
    whole = (folder / "a.png").read_bytes()
    (folder / "torn.png").write_bytes(whole[: len(whole) // 2])
    (folder / "words.jpg").write_text("hello")
    (folder / "empty.webp").touch()
    noise_image(3, 1000).save(folder / "thread.bmp")
    (folder / "nowhere.png").symlink_to("missing")
    os.mkfifo(folder / "pipe.png")
    Path("none").mkdir()
    out = where if where == "txt" else folder / where
    code, _, err = generate(folder, "none", "gone.png", "x*.png", "--out", out)
    assert code == 1 and "5 captioned" in err and f"9 failed, see {folder / 'failures.jsonl'}" in err
    failed = [json.loads(line) for line in (folder / "failures.jsonl").read_text().splitlines()]
    reasons = {Path(row["file_name"]).name: row["reason"] for row in failed}
    words = {
        "torn.png": "cannot be decoded", "words.jpg": "not an image", "empty.webp": "an empty file",
        "thread.bmp": "crop it", "nowhere.png": "No such file", "pipe.png": "not a file",
        "none": "without images", "gone.png": "No such file", "x*.png": "a pattern that matches no image",
    }  # fmt: skip
    assert reasons.keys() == words.keys() and all(words[name] in reason for name, reason in reasons.items())
    assert (sidecars(folder) == beside(texts)) if where == "txt" else (read(out) == texts)
    for name in words:
        (folder / name).unlink(missing_ok=True)
    assert generate(folder, "--out", out)[0] == 0 and not (folder / "failures.jsonl").exists()


@pytest.mark.parametrize("existing", ["skip", full("append")])
@pytest.mark.parametrize("where", ["txt", "captions.jsonl", *map(full, OUTPUTS[2:])])
def test_an_empty_caption_is_a_failure_that_the_next_run_tries_again(generate, silent_model, where, existing):
    (folder := Path("scenes")).mkdir()
    for name in ("a.png", "b.png"):
        (folder / name).write_bytes(SAMPLE.read_bytes())
    out = ["--out", where if where == "txt" else folder / where, "--existing", existing]
    flags = [folder, *out, "--prefix", "drawing: ", "--suffix", "."]
    for _ in range(2):
        code, _, err = generate(*flags, model=silent_model)
        assert code == 1 and err.count("the model's caption is empty") == 2
        assert "0 captioned" in err and f"2 failed (2 with an empty caption), see {folder / 'failures.jsonl'}" in err
        rows = [json.loads(line) for line in (folder / "failures.jsonl").read_text().splitlines()]
        assert {row["file_name"]: row["reason"] for row in rows}.keys() == {"a.png", "b.png"}
        assert not sidecars(folder) and not (folder / where).exists()
    assert generate(*flags, model=None)[0] == 0
    texts = list(sidecars(folder).values()) if where == "txt" else list(read(folder / where).values())
    assert len(texts) == 2 and all(text.startswith("drawing: A") for text in texts)


@pytest.mark.full
def test_all_formats_are_captioned_and_others_are_counted(generate, workdir):
    (folder := Path("formats")).mkdir()
    names = ["a.tga", "b.ico", "c.jp2", "d.dds", "e.PCX", "f.sgi", "g.icns", "h.apng", "i.pbm"]
    for name in names:
        image = noise_image(64, 64).convert("1" if name == "i.pbm" else "RGB")
        image.save(folder / name, "PNG" if name == "h.apng" else None)
    for name in ("x.svg", "y.svg", "z.nef", "words.txt", "paper.pdf"):
        (folder / name).write_text("no image")
    code, _, err = generate(folder)
    assert code == 0 and set(sidecars(folder)) == {Path(name).with_suffix(".txt").name for name in names} | {
        "words.txt"
    }
    assert err.splitlines()[-1].startswith("9 captioned") and err.endswith("; 2 .svg left out; 1 .nef left out\n")


def test_two_images_do_not_share_a_txt(generate, folder, texts):
    noise_image(30, 30, 9).save(folder / "a.jpg")
    for _ in range(2):
        code, _, err = generate(folder)
        assert code == 1 and "a.png: a.txt is the caption of a.jpg" in err
    texts["a.jpg"] = sidecars(folder)["a.txt"].strip()
    assert texts["a.jpg"] != texts.pop("a.png") and sidecars(folder) == beside(texts)
    assert generate(folder, "--out", "all.jsonl")[0] == 0


def test_a_file_name_that_is_not_unicode_goes_into_jsonl(generate, folder, texts):
    (folder / os.fsdecode(b"\xff.png")).write_bytes((folder / "a.png").read_bytes())
    assert generate(folder, "--out", folder / "all.jsonl")[0] == 0
    assert read(folder / "all.jsonl") == texts | {"\udcff.png": texts["a.png"]}
    code, _, err = generate(folder, "--out", folder / "all.csv")
    assert code == 1 and "not valid Unicode" in err and read(folder / "all.csv") == texts
    assert generate(folder)[0] == 0 and (folder / os.fsdecode(b"\xff.txt")).is_file()


def test_a_read_only_folder_is_reported_before_any_work(generate, folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "deep")
    code, _, err = generate(folder)
    assert code == 1 and "ünï-🙂.png: its folder is not writable" in err and len(sidecars(folder)) == 4


def test_failures_are_reported_even_if_their_file_cannot_be_written(generate, folder, texts):
    (folder / "failures.jsonl").mkdir()
    (folder / "words.png").write_text("hello")
    code, _, err = generate(folder)
    assert code == 1 and "words.png: not an image" in err and err.endswith("; 1 failed\n")
    assert sidecars(folder) == beside(texts)


def test_running_out_of_memory_halves_the_batch(generate, folder, texts, monkeypatch):
    step = ContinuousBatch.step

    def small_memory(batch):
        if batch.running > 2:
            raise MemoryError
        return step(batch)

    monkeypatch.setattr(ContinuousBatch, "step", small_memory)
    assert generate(folder, "--batch-size", "5")[0] == 0 and sidecars(folder) == beside(texts)
    monkeypatch.setattr(ContinuousBatch, "step", lambda batch: (_ for _ in ()).throw(MemoryError))
    code, _, err = generate(folder, "--existing", "overwrite")
    assert code == 1 and err.count("not enough memory") == 5 and sidecars(folder) == beside(texts)


def test_a_bug_stops_the_run_and_keeps_what_was_finished(generate, folder, texts, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    prepare = Captioner.prepare

    def broken(captioner, image, prompt):
        if image.endswith("c.webp"):
            raise RuntimeError("of ours")
        return prepare(captioner, image, prompt)

    with monkeypatch.context() as patch:
        patch.setattr(Captioner, "prepare", broken)
        code, _, err = generate(folder, "--batch-size", "1")
    assert code == 70 and "Traceback" in err and "RuntimeError: of ours" in err and "a bug in nanovlm" in err
    first = sidecars(folder)
    assert 1 <= len(first) < 5 and first.items() <= beside(texts).items()
    code, _, err = generate(folder)
    assert code == 0 and f"{len(first)} had captions already" in err and sidecars(folder) == beside(texts)


def test_a_full_disk_stops_the_run(generate, folder, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with open(os.devnull, "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        code, _, err = generate(folder)
    assert code == 1 and len(err.splitlines()) == 1 and "No space left" in err


@pytest.mark.parametrize("where", ["txt", "captions.csv", *map(full, OUTPUTS[1::2])])
def test_a_full_disk_names_the_file_and_how_to_resume(generate, folder, texts, monkeypatch, where):
    """The disk is full after two captions, and again when the table is completed; each time the command is repeated."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    out = where if where == "txt" else folder / where
    full = OSError(28, "No space left on device")
    replace, append, written = os.replace, os.write, [0]

    def after_two(function):
        def write(*args):
            written[0] += 1
            if written[0] > 2:
                raise full
            return function(*args)

        return write

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", after_two(replace)) if where == "txt" else None
        patch.setattr(os, "write", after_two(append))
        code, _, err = generate(folder, "--out", out, "--batch-size", "1")
    line = err.splitlines()[-1]
    assert code == 1 and "2 of 5 captions are written; free some space and run the same command to resume" in line
    assert (".txt: No space left" if where == "txt" else f"{out}: No space left on device; ") in line
    if where not in ("txt", "captions.jsonl"):  # which is replaced only if its rows are out of order
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", after_two(replace))
            code, _, err = generate(folder, "--out", out)
        assert code == 1 and f"{out}: No space left on device; " in err and "run the same command to resume" in err
    code, _, err = generate(folder, "--out", out)
    assert code == 0 and not litter(folder)
    assert (sidecars(folder) == beside(texts)) if where == "txt" else (read(out) == texts)


def test_a_line_that_is_written_in_part_is_a_full_disk(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:5]))
    with pytest.raises(OSError, match="No space left"):
        append_row(tmp_path / "log.jsonl", {"file_name": "a.png"})


@pytest.mark.parametrize("name", TABLES)
def test_the_prompt_of_an_image_may_be_in_the_table(generate, folder, captions_of, name):
    questions = {image: f"What is {i}?" for i, image in enumerate(IMAGE_NAMES)}
    rows = [{"file_name": image, "id": i, "question": text} for i, (image, text) in enumerate(questions.items())]
    write_table(folder / name, rows[:-1])
    code, _, err = generate(folder, "--out", folder / name, "--prompt-template", "{column:question} Say it.")
    assert code == 1 and "its row has no question, which the prompt needs; write it" in err
    found = {row["file_name"]: row for row in read_table(folder / name)}
    assert found.keys() == set(IMAGE_NAMES[:-1])
    for i, image in enumerate(IMAGE_NAMES[:-1]):
        text = captions_of.captioner.caption(str(folder / image), f"{questions[image]} Say it.", max_new_tokens=6)
        assert (found[image]["text"], int(found[image]["id"])) == (text.strip(), i)


@pytest.mark.parametrize("name", TABLES)
def test_each_of_several_prompts_has_a_column(generate, folder, captions_of, name):
    prompts = ["What is it?", 'Is it red, "really"?']
    flags = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert generate(folder, "--out", folder / name, *flags)[0] == 0
    rows = {row["file_name"]: row for row in read_table(folder / name)}
    for image in IMAGE_NAMES:
        answers = [captions_of.captioner.caption(str(folder / image), text, max_new_tokens=6) for text in prompts]
        assert [rows[image][prompt] for prompt in prompts] == answers
        assert json.loads(rows[image]["text"]) == dict(zip(prompts, answers))


@pytest.mark.parametrize(("flags", "key"), [(["--out", "-"], "file_name"), full(["--json"], "image")])
def test_json_lines_are_streamed(generate, folder, texts, flags, key):
    (folder / "words.png").write_text("hello")
    code, out, err = generate(folder, *flags, "--prefix", "a ")
    rows = [json.loads(line) for line in out.splitlines()]
    assert {row[key]: row["text"] for row in rows} == {f"{folder}/{name}": f"a {text}" for name, text in texts.items()}
    assert len(rows) == 5 and all(row.keys() == {key, "text"} for row in rows)
    assert code == 1 and "words.png: not an image" in err and err.endswith("; 1 failed\n")
    assert not sidecars(folder) and not litter(folder) and not list(Path(".").rglob("failures.jsonl"))


@pytest.mark.full  # a process
def test_a_reader_that_leaves_ends_a_stream(folder, model_folder):
    command = [sys.executable, ROOT / "generate.py", folder, "--json", "--model", model_folder, *FAST_FLAGS]
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    run.stdout.close()
    assert (run.stderr.read(), run.wait()) == (b"", 1)


def test_captions_beside_images_may_have_another_extension(generate, folder, texts):
    (folder / "a.txt").write_text("tags")
    for extension in (".caption", "caption"):
        code, _, err = generate(folder, "--extension", extension)
        assert code == 0 and ("5 had captions" in err) == (extension == "caption")
    written = {str(p.relative_to(folder)): p.read_text("utf-8") for p in folder.rglob("*.caption")}
    assert written == {str(Path(name).with_suffix(".caption")): f"{text}\n" for name, text in texts.items()}
    assert sidecars(folder) == {"a.txt": "tags"}


def test_xmp_files_hold_captions_as_dc_description(generate, folder, texts):
    (folder / "a.xmp").write_text("another program's")
    code, _, err = generate(folder, "--extension", "xmp", "--prefix", "A & <B>: ")
    assert code == 0 and "1 had captions" in err and (folder / "a.xmp").read_text() == "another program's"
    for name, text in texts.items():
        if name != "a.png":
            packet = ElementTree.fromstring((folder / name).with_suffix(".xmp").read_text("utf-8"))
            (found,) = packet.iter("{http://www.w3.org/1999/02/22-rdf-syntax-ns#}li")
            assert found.text == f"A & <B>: {text}"
    code, _, err = generate(folder, "--extension", ".xmp", "--existing", "overwrite")
    assert code == 2 and "would change an .xmp of other programs" in err


@outputs_and_modes(("txt", "append"), ("captions.jsonl", "skip"))
def test_a_limit_leaves_the_rest_to_the_next_run(generate, folder, texts, where, existing):
    out = where if where == "txt" else folder / where
    if where == "txt":
        (folder / "a.txt").write_text("old\n")
    else:
        write_table(out, [{"file_name": "a.png", "text": "old"}])
    counts = []
    for _ in range(5):
        code, _, err = generate(folder, "--out", out, "--existing", existing, "--limit", "2")
        counts.append(int(err.split(" captioned")[0]) if "captioned" in err else 0)
        assert code == 0 and ("remain; run the same command for the next" in err) == (
            sum(counts) < 5 - (existing == "skip")
        )
        if sum(counts) >= 5 - (existing == "skip"):
            break
    assert counts == ([2, 2] if existing == "skip" else [2, 2, 1])
    expected = texts | {"a.png": EXPECTED[existing].format(old="old", new=texts["a.png"])}
    assert (sidecars(folder) == beside(expected)) if where == "txt" else (read(out) == expected)


def test_images_that_fail_do_not_count_for_the_limit(generate, folder):
    for name in ("0.png", "1.png", "c.png"):
        (folder / name).write_text("hello")
    for left, remaining in ((3, 4), (1, 1), (0, 0)):
        code, _, err = generate(folder, "--limit", "2")
        assert code == 1 and len(sidecars(folder)) == 5 - left
        assert (f"{remaining} remain" in err) == bool(remaining)


@pytest.mark.full
def test_subfolders_are_left_out_when_asked(generate, folder, texts):
    assert generate(folder, "--no-recursive")[0] == 0 and set(sidecars(folder)) == {"a.txt", "b two.txt", "d.txt"}
    assert generate(folder, "--recursive")[0] == 0 and sidecars(folder) == beside(texts)


def snapshot(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("where", ["txt", *TABLES, full("new/all.csv")])
def test_a_dry_run_names_what_a_run_would_caption_and_writes_nothing(generate, folder, monkeypatch, where):
    """With captions of earlier runs, finished and interrupted, and a line that a killed process left unfinished."""
    out = ["--out", where if where == "txt" else folder / where]
    if where == "txt":
        (folder / "a.txt").write_text("old")
    elif "new" not in where:
        write_table(folder / where, [{"file_name": "a.png", "text": "old"}])
    if where == "captions.jsonl":
        with open(folder / where, "a") as file:
            file.write('{"file_name": "b')
    if where == "captions.csv":
        log = {"settings": {"of": "another run"}}, {"file_name": "d.gif", "before": "", "text": "waits"}
        (folder / f"{where}.run").write_text("".join(json.dumps(row) + "\n" for row in log))
    (folder / "failures.jsonl").write_text("of another run")
    before = snapshot(folder)
    with monkeypatch.context() as patch:
        patch.setattr(Captioner, "from_pretrained", lambda *args: pytest.fail("loaded"))
        code, listed, err = generate(folder, "gone*.png", *out, "--dry-run")
        assert snapshot(folder) == before and not (folder / "new").exists()
        assert generate(folder, *out, "--limit", "1", "--dry-run")[1].splitlines() == listed.splitlines()[:1]
    assert code == 1 and "gone*.png: a pattern that matches no image" in err
    assert err.splitlines()[-1].startswith(f"{len(listed.splitlines())} to caption; ")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    captioned, add = [], ContinuousBatch.add
    monkeypatch.setattr(
        ContinuousBatch, "add", lambda batch, key, *a, **k: captioned.append(key[0]) or add(batch, key, *a, **k)
    )
    assert generate(folder, *out)[0] == 0
    assert captioned == listed.splitlines()


@pytest.mark.parametrize("where", [OUTPUTS[1], *map(full, OUTPUTS[2:])])
def test_rows_of_a_finished_table_follow_the_images(generate, folder, texts, where):
    """Captions that end early come first, between rows of other images; at the end all are sorted."""
    for i in range(12):
        noise_image(30 + i, 40, seed=i).save(folder / f"n{i:02}.png")
    others = [
        {"file_name": "zebra.png", "text": "z"},
        {"file_name": "d.gif", "text": "old"},
        {"file_name": "x", "text": "x"},
    ]
    write_table(folder / where, others)
    assert generate(folder, "--out", folder / where, "--batch-size", "3")[0] == 0
    names = [row["file_name"] for row in read_table(folder / where)]
    images = [os.path.relpath(path, folder) for path in find_images([str(folder)]).paths]
    assert [name for name in names if name in images] == images and len(images) == 17
    assert (names[0], names[2]) == ("zebra.png", "x"), "rows of other images keep their places"
    before = (folder / where).read_bytes()
    assert generate(folder, "--out", folder / where)[0] == 0 and (folder / where).read_bytes() == before


@pytest.mark.parametrize("existing", [full("skip"), full("overwrite"), "append"])
def test_a_caption_never_replaces_its_image(generate, folder, existing):
    (folder / "a.txt").write_bytes(whole := (folder / "a.png").read_bytes())
    code, _, err = generate(folder / "a.txt", "--out", "txt", "--existing", existing)
    assert code == 1 and "a.txt: its caption would replace it" in err and (folder / "a.txt").read_bytes() == whole


def test_an_old_caption_that_is_not_utf8_is_kept(generate, folder, texts):
    (folder / "a.txt").write_bytes("été".encode("latin-1"))
    code, _, err = generate(folder, "--existing", "append")
    assert code == 1 and "a.png: a.txt is not UTF-8 text" in err and "4 captioned" in err
    assert (folder / "a.txt").read_bytes() == "été".encode("latin-1")


# ------------------------------------------------------------------------------------------------------------ wrong use


DAMAGED = {
    "cells.csv": ('file_name,text\na.png,"yes",no\n', "row 1, has more cells than columns"),
    "quotes.csv": (f'file_name,text\na.png,"{"x" * 200_000}\n', "field larger than field limit"),
    "columns.csv": ("file,caption\na.png,yes\n", "rows without a file_name"),
    "latin.csv": ("file_name,text\na.png,été\n".encode("latin-1"), "cannot be read"),
    "numbers.jsonl": ('{"file_name": "a.png", "text": 3}\n', "row 1, has a text of another type"),
    "names.jsonl": ('{"file_name": ["a.png"]}\n', "rows without a file_name"),
    "deep.jsonl": ("[" * 100_000 + "\n", "line 1, cannot be read"),
    "torn.jsonl": ('{"file_name": "a.png", "te\n{"file_name": "b.png"}\n', "line 1, cannot be read"),
    "words.parquet": ("PAR1 and no more", "cannot be read"),
}


@pytest.mark.parametrize("name", [full(name) if name.endswith(".parquet") else name for name in DAMAGED])
def test_a_damaged_table_is_reported_before_any_work(generate, folder, name):
    content, words = DAMAGED[name]
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = Path(name).read_bytes()
    for existing in ("skip", "append"):
        assert_usage_error(generate(folder, "--out", name, "--existing", existing), name, words)
    assert Path(name).read_bytes() == before and not litter(Path("."))


@pytest.mark.parametrize("content", ['{"a": 1}\n', '{"settings": {}}\n{"b": 2}\n', "words\n"])
def test_a_file_with_the_name_of_the_resume_log_is_kept(generate, folder, content):
    append = ["--existing", "append"]
    for target, argv in ((folder / "captions.run", append), (Path("all.csv.run"), ["--out", "all.csv"])):
        target.write_text(content)
        assert_usage_error(generate(folder, *argv), target.name)
        assert target.read_text() == content
    assert generate(folder)[0] == 0 and (folder / "captions.run").read_text() == content, "sidecars that skip need none"


def test_a_read_only_table_is_reported_before_any_work(generate, folder, monkeypatch):
    access = os.access
    for closed in (".", "all.jsonl"):
        Path("all.jsonl").touch()
        monkeypatch.setattr(os, "access", lambda path, mode: str(path) != closed and access(path, mode))  # noqa: B023
        assert_usage_error(generate(folder, "--out", "all.jsonl"), "all.jsonl is not writable")
    for make in (os.mkdir, os.mkfifo):
        make(f"{make.__name__}.jsonl")
        assert_usage_error(
            generate(folder, "--out", f"{make.__name__}.jsonl"), f"{make.__name__}.jsonl exists and is not a file"
        )
    assert_usage_error(generate(folder, "--out", "good.png/all.jsonl"), "good.png/all.jsonl: its folder cannot be made")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["images", "--json", "--out", "all.jsonl"], "--out captions.jsonl"),
        (["images", "--json", "--existing", "append"], "standard output holds no captions"),
        (["images", "--out", "-", "--extension", ".caption"], "beside each image, not for -"),
        (["images", "--out", "all.csv", "--extension", "caption"], "beside each image, not for all.csv"),
        (["images", "--extension", "png"], "extension '.png' is that of images"),
        (["images", "--extension", "../x"], "is not like .txt or .caption"),
        (["images", "--limit", "0"], "limit 0 is less than 1"),
        (["good.png", "--limit", "1"], "--limit is for files"),
        (["good.png", "--prompt-template", "{tags}"], "--prompt-template is for files"),
        (["images", "--prompt-template", "{tag}"], "{tag} is none of {tags}, {name}, {folder} and {column:NAME}"),
        (["images", "--prompt-template", "{tags}"], "count as captions that exist; write others by --extension"),
        (["good.png", "--dry-run"], "--dry-run is for files"),
        (["good.png", "--no-recursive"], "--recursive is for files"),
        (["good.png", "--extension", "x"], "--extension is for files"),
        (["images", "--samples", "2", "--temperature", "1"], "--samples 2"),
        (["images", "-"], "an image without a name"),
        (["images", "--batch-size", "0"], "batch size 0 is less than 1"),
        (["images", "--out", "all.xml"], ".jsonl, .csv, .parquet"),
        (["images", "--prefix", "\udcff"], "not valid Unicode"),
        (["images", "--existing", "burn"], "--existing"),
        (["images", "--prompt", "What?", "--length", "short"], "--length"),
        (["--out", "all.csv"], "no images"),
        (["--from-file", "nowhere"], "No such file"),
        (["--from-file", ""], "Is a directory"),
        (["images", "--out", ""], "is none of .jsonl"),
        (["good.png", "--existing", "skip"], "--existing is for files"),
        (["good.png", "--prefix", "x"], "--prefix is for files"),
        (["good.png", "--batch-size", "2"], "--batch-size is for files"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_reported_in_one_line(generate, folder, argv, words):
    assert_usage_error(generate(*argv), words)
    assert not sidecars(folder)


def test_the_sample_image_gets_no_file(generate):
    assert generate(SAMPLE)[0] == 0 and not SAMPLE.with_suffix(".txt").exists()
