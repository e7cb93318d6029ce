"""`nanovlm caption FOLDER`: every image is captioned once, even if others fail or the process is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from models.inference.continuous_batching import ContinuousBatch
from nanovlm import EMBEDDED, SAMPLE
from nanovlm.bulk.inputs import find_images
from nanovlm.bulk.outputs import append_row
from nanovlm.data import ReadOptions, open_source
from nanovlm.data.file_lock import file_lock
from nanovlm.data.jsonl import read_jsonl
from nanovlm.errors import CheckpointError
from support import ROOT, noise_image
from support.caption_files import OUTPUTS, CaptionFiles, Killed, read_captions, stem
from support.cli import FAST_FLAGS, IMAGE_NAMES, assert_usage_error, set_stdin, set_stream

pytestmark = pytest.mark.usefixtures("workdir")

full = partial(pytest.param, marks=pytest.mark.full)


@pytest.fixture
def folder(image_folder):
    return image_folder


@pytest.fixture
def where():
    """The kind of output, for tests that are not parametrized by it."""
    return "txt"


@pytest.fixture
def files(folder, where):
    return CaptionFiles(folder, where)


@pytest.fixture
def texts(folder, captions_of):
    """The caption of each image of the folder, by its name without the extension."""
    return {stem(name): captions_of(str(folder / name))[0].strip() for name in IMAGE_NAMES}


@pytest.fixture
def one_worker(monkeypatch):
    """Several workers caption in an order of their own, and when they are stopped each loses a caption."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})


def sidecars(folder, extension=".txt"):
    return CaptionFiles(folder, "txt", extension).texts()


def training_set(folder):
    source = open_source(str(folder), ReadOptions())
    return {stem(source.keys[i]): source[i].qa_pairs[0][1] for i in range(len(source))}


def snapshot(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------- what is written


def test_a_folder_gets_a_txt_beside_each_image(generate, folder, files, texts):
    code, out, err = generate(folder)
    assert (code, out) == (0, "") and err.splitlines()[-1].startswith("5 captioned in ")
    assert files.texts() == training_set(folder) == texts and not files.litter()


@pytest.mark.parametrize("where", ["metadata.jsonl"])
def test_a_table_names_each_image_and_its_caption(generate, folder, files, texts, where):
    code, out, _ = generate(folder, "--out", files.out, "--batch-size", "2")
    expected = {name: texts[stem(name)] for name in IMAGE_NAMES}
    assert (code, out) == (0, "") and read_captions(files.path) == expected
    assert not sidecars(folder) and not files.litter()
    assert training_set(folder) == texts
    generate(folder, "--out", where)  # in another folder, to which the names are relative
    assert read_captions(Path(where)) == {f"images/{name}": text for name, text in expected.items()}


@pytest.mark.parametrize("where", ["txt", full("all.jsonl")])
def test_two_runs_at_once_are_refused(generate, folder, files, texts, where):
    """One lock file is held; the lock of a killed process is released, and its lock file blocks nobody."""
    lock, target = (f".{where}.lock", files.path) if files.is_table else (".captions.lock", folder)
    with file_lock(folder / lock, "x"):
        assert_usage_error(generate(folder, "--out", files.out), f"{target}: another run writes", "wait for")
        assert not files.texts()
    (folder / lock).touch()
    assert generate(folder, "--out", files.out)[0] == 0
    assert files.texts() == texts and not files.litter()


def test_captions_start_with_given_words(generate, folder, files, captions_of):
    start, caption = "Two photos. One", partial(captions_of.captioner.caption, max_new_tokens=6)
    expected = {stem(n): caption(folder / n, start_with=start).strip() for n in IMAGE_NAMES}
    assert generate(folder, "--start-with", f"{start} ")[0] == 0 and files.texts() == expected
    assert all(text.startswith(start) and len(text) > len(start) for text in expected.values())
    assert generate(folder / "a.png", "--start-with", start)[1].split() == expected["a"].split()


def test_lists_patterns_and_names_are_captioned_together(generate, folder, texts, monkeypatch):
    odd = "images/two\nlines.png"
    Path(odd).write_bytes((folder / "a.png").read_bytes())
    set_stdin(b"images/a.png\0" + odd.encode() + b"\0images/deep\0", monkeypatch)
    assert generate("--from-file", "-", "images/*.jpg", "images/../images/a.png", "--out", "all.jsonl")[0] == 0
    captions = read_captions(Path("all.jsonl"))
    assert set(captions) == {f"images/{name}" for name in IMAGE_NAMES if name != "d.gif"} | {odd}
    assert captions[odd] == captions["images/a.png"] == texts["a"]
    Path("names").write_text("images/d.gif\n\nimages/a.png\n")
    assert generate("--from-file", "names", "--out", "listed.jsonl")[0] == 0
    assert set(read_captions(Path("listed.jsonl"))) == {"images/d.gif", "images/a.png"}
    assert generate("good.png", "--out", "txt")[0] == 0 and Path("good.txt").is_file()


def test_captions_beside_images_may_have_another_extension(generate, folder, files, texts):
    (folder / "a.txt").write_text("tags\n")
    for extension in (".caption", "caption"):
        code, _, err = generate(folder, "--extension", extension)
        assert code == 0 and ("5 had captions" in err) == (extension == "caption")
    assert sidecars(folder, ".caption") == texts and files.texts() == {"a": "tags"}


@pytest.mark.parametrize("where", ["captions.jsonl"])
def test_each_of_several_prompts_has_a_column(generate, folder, files, captions_of):
    prompts = ["What is it?", 'Is it red, "really"?']
    assert generate(folder, "--out", files.out, *(word for text in prompts for word in ("--prompt", text)))[0] == 0
    for row in read_jsonl(files.path):
        answers = [captions_of(str(folder / row["file_name"]), text)[0] for text in prompts]
        assert [row[prompt] for prompt in prompts] == answers
        assert json.loads(row["text"]) == dict(zip(prompts, answers))


@pytest.mark.parametrize(("flags", "key"), [(["--out", "-"], "file_name"), full(["--json"], "image")])
def test_json_lines_are_streamed(generate, folder, files, texts, flags, key):
    (folder / "words.png").write_text("hello")
    code, out, err = generate(folder, *flags, "--prefix", "a ")
    rows = [json.loads(line) for line in out.splitlines()]
    assert {row[key]: row["text"] for row in rows} == {f"{folder}/{n}": f"a {texts[stem(n)]}" for n in IMAGE_NAMES}
    assert len(rows) == 5 and all(row.keys() == {key, "text"} for row in rows)
    assert code == 1 and "words.png: not an image" in err and err.endswith("; 1 failed\n")
    assert not files.texts() and not files.litter() and not list(Path(".").rglob("*failures.jsonl"))


def test_a_stream_needs_an_open_standard_output(generate, folder, monkeypatch):
    set_stream("stdout", None, monkeypatch)
    assert_usage_error(generate(folder, "--out", "-"), "standard output, but it is closed", "--out captions.jsonl")


@pytest.mark.full  # a process
def test_a_reader_that_leaves_ends_a_stream(folder, model_folder):
    command = [sys.executable, ROOT / "generate.py", folder, "--json", "--model", model_folder, *FAST_FLAGS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = subprocess.Popen(command, **pipes, env=os.environ | {"OMP_NUM_THREADS": "1"})
    run.stdout.close()
    assert (run.stderr.read(), run.wait()) == (b"", 1)


# ------------------------------------------------------------------------------------------------- existing captions


@pytest.mark.parametrize("existing", ["skip", "overwrite"])
@pytest.mark.parametrize("where", OUTPUTS)
def test_existing_captions_are_skipped_or_overwritten(generate, folder, files, texts, existing):
    old = {"a": "old words", "d": "older"}
    if files.is_table:
        rows = [{"file_name": files.file_name(name), "text": text, "label": "7"} for name, text in old.items()]
        rows.append({"file_name": "x.png", "text": "x"})
        files.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        files.edit(**old)
    code, _, err = generate(folder, "--existing", existing, "--out", files.out)
    assert code == 0 and ("2 had captions already" in err) == (existing == "skip")
    expected = texts | {name: text if existing == "skip" else texts[name] for name, text in old.items()}
    if files.is_table:
        expected |= {"x": "x"}  # rows of other images stay
        assert "label" in read_jsonl(files.path)[0], "and so do other columns"
    assert files.texts() == expected and not files.litter()


@pytest.fixture
def unloadable():
    """A model without weights."""
    return shutil.copytree(EMBEDDED, "broken", ignore=shutil.ignore_patterns("*.safetensors", "README.md"))


def test_a_second_run_does_not_load_the_model(generate, folder, unloadable):
    generate(folder), generate(folder, "--out", "all.jsonl")
    for where in ([], ["--out", "all.jsonl"]):
        assert generate(folder, *where, model=unloadable) == (0, "", "5 had captions already\n")
    assert generate("good.png", model=unloadable)[0] == CheckpointError.exit_code


@pytest.mark.parametrize("existing", [full("skip"), "overwrite"])
def test_a_caption_never_replaces_its_image(generate, folder, existing):
    (folder / "a.txt").write_bytes(whole := (folder / "a.png").read_bytes())
    code, _, err = generate(folder / "a.txt", "--out", "txt", "--existing", existing)
    assert code == 1 and "a.txt: its caption would replace it" in err and (folder / "a.txt").read_bytes() == whole


# ------------------------------------------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("where", OUTPUTS)
def test_a_killed_run_resumes_and_captions_nothing_twice(generate, folder, files, texts, one_worker, monkeypatch):
    """Killed at its third, fourth or fifth write or replacement, run after run, until one finishes."""
    files.edit(a="old")
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
            code, _, _ = generate(folder, "--out", files.out, "--batch-size", "1")
        except Killed:
            kills += 1
            sidecars(folder)  # which checks that they are whole
        else:
            break
    assert code == 0 and not files.litter() and 0 < kills < 12
    assert len(captioned) <= 4 + kills, "but for the one that was about to be written"
    assert files.texts() == texts | {"a": "old"}


def test_what_was_found_before_ctrl_c_is_done(generate, folder, files, monkeypatch):
    """Even if the next run has other settings."""
    table, write, lines = folder / "captions.jsonl", os.write, []

    def interrupted(file, line):
        lines.append(line)
        if len(lines) == 2:
            raise KeyboardInterrupt
        return write(file, line)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted)
        code, _, err = generate(folder, "--out", table, "--prefix", "1 ")
    assert code == 130 and "stopped after 1 of 5 images; run the same command to resume" in err
    code, _, err = generate(folder, "--out", table, "--prefix", "2 ")
    assert code == 0 and "1 had captions already" in err
    assert sorted(text[:2] for text in read_captions(table).values()) == ["1 ", "2 ", "2 ", "2 ", "2 "]


@pytest.mark.full  # two processes
def test_kill_9_leaves_complete_files_and_the_next_run_resumes(folder, files, model_folder, captions_of):
    for i in range(60):
        noise_image(40, 40, seed=i).save(folder / f"n{i:02}.png")
    command = [sys.executable, ROOT / "generate.py", folder, "--model", model_folder, *FAST_FLAGS, "--batch-size", "2"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    run = subprocess.Popen(command, **quiet)
    until = time.monotonic() + 120
    while len(list(folder.glob("[!.]*.txt"))) < 8 and time.monotonic() < until and run.poll() is None:
        time.sleep(0.002)
    run.send_signal(signal.SIGKILL)
    _, err = run.communicate()
    first = {p: (p.stat().st_mtime_ns, p.read_text()) for p in folder.rglob("[!.]*.txt")}
    assert run.returncode == -signal.SIGKILL and 8 <= len(first) < 65, err.decode()
    for name, text in files.texts().items():
        assert text == captions_of(str(folder / files.file_name(name)))[0].strip()
    run = subprocess.run(command, timeout=300, **quiet)
    assert run.returncode == 0 and f"{len(first)} had captions already" in run.stderr.decode()
    assert len(files.texts()) == 65 and not files.litter()
    assert all((p.stat().st_mtime_ns, p.read_text()) == was for p, was in first.items()), "nothing is captioned twice"


@pytest.mark.parametrize("where", OUTPUTS)
def test_a_limit_leaves_the_rest_to_the_next_run(generate, folder, files, texts):
    files.edit(a="old")
    for remain in ("; 2 remain; run the same command for the next", ""):
        code, _, err = generate(folder, "--out", files.out, "--limit", "2")
        assert code == 0 and err.splitlines()[-1].startswith("2 captioned") and remain in err
    assert files.texts() == texts | {"a": "old"}
    assert generate(folder, "--out", files.out, "--limit", "2", "--existing", "overwrite")[2].endswith("; 3 remain\n")


def test_images_that_fail_do_not_count_for_the_limit(generate, folder, files):
    for name in ("0.png", "1.png", "c.png"):
        (folder / name).write_text("hello")
    for left, remaining in ((3, 4), (1, 1), (0, 0)):
        code, _, err = generate(folder, "--limit", "2")
        assert code == 1 and len(files.texts()) == 5 - left
        assert (f"{remaining} remain" in err) == bool(remaining)


@pytest.mark.parametrize("where", ["captions.jsonl"])
def test_rows_of_a_finished_table_follow_the_images(generate, folder, files, monkeypatch):
    """Captions that end early come first, between rows of other images; at the end all are sorted, even if a run is
    killed just then, or the disk is full."""
    errors = [OSError(28, "No space left"), Killed()]

    def dies(source, target, replace=os.replace):
        if Path(target).name == files.out.name:
            raise errors.pop()
        replace(source, target)

    for i in range(12):
        noise_image(30 + i, 40, seed=i).save(folder / f"n{i:02}.png")
    files.edit(zebra="z", d="old", x="x")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", dies)
        generate(folder, "--out", files.out, "--batch-size", "3")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dies)
        code, _, err = generate(folder, "--out", files.out)
    assert code == 1 and f"{files.out}: No space left; " in err
    assert generate(folder, "--out", files.out)[0] == 0
    names = [row["file_name"] for row in read_jsonl(files.path)]
    images = [os.path.relpath(path, folder) for path in find_images([str(folder)]).paths]
    assert [name for name in names if name in images] == images and len(images) == 17
    assert (names[0], names[2]) == ("zebra.png", "x.png"), "rows of other images keep their places"
    before = files.path.read_bytes()
    assert generate(folder, "--out", files.out)[0] == 0 and files.path.read_bytes() == before


# ----------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("where", OUTPUTS)
def test_images_that_fail_are_listed_and_do_not_stop_the_run(generate, folder, files, texts):
    whole = (folder / "a.png").read_bytes()
    (folder / "torn.png").write_bytes(whole[: len(whole) // 2])
    (folder / "words.jpg").write_text("hello")
    (folder / "empty.webp").touch()
    noise_image(3, 1000).save(folder / "thread.bmp")
    (folder / "nowhere.png").symlink_to("missing")
    os.mkfifo(folder / "pipe.png")
    Path("none").mkdir()
    code, _, err = generate(folder, "none", "gone.png", "x*.png", "--out", files.out)
    assert code == 1 and "5 captioned" in err and f"9 failed, see {files.failures}" in err
    reasons = {Path(name).name: reason for name, reason in files.failed().items()}
    words = {
        "torn.png": "cannot be decoded", "words.jpg": "not an image", "empty.webp": "an empty file",
        "thread.bmp": "crop it", "nowhere.png": "No such file", "pipe.png": "not a file",
        "none": "a folder without images", "gone.png": "No such file", "x*.png": "a pattern that matches no image",
    }  # fmt: skip
    assert reasons.keys() == words.keys() and all(words[name] in reason for name, reason in reasons.items())
    assert files.texts() == texts
    for name in words:
        (folder / name).unlink(missing_ok=True)
    assert generate(folder, "--out", files.out)[0] == 0 and not files.failures.exists()


@pytest.mark.parametrize("existing", ["skip", full("overwrite")])
@pytest.mark.parametrize("where", OUTPUTS)
def test_an_empty_caption_is_a_failure_that_the_next_run_tries_again(generate, silent_model, where, existing):
    (folder := Path("scenes")).mkdir()
    for name in ("a.png", "b.png"):
        (folder / name).write_bytes(SAMPLE.read_bytes())
    files = CaptionFiles(folder, where)
    flags = [folder, "--out", files.out, "--existing", existing, "--prefix", "drawing: "]
    for _ in range(2):
        code, _, err = generate(*flags, model=silent_model)
        assert code == 1 and err.count("the model's caption is empty") == 2
        assert "0 captioned" in err and f"2 failed (2 with an empty caption), see {files.failures}" in err
        assert files.failed().keys() == {"a.png", "b.png"} and not files.texts() and not files.path.exists()
    assert generate(*flags, model=None)[0] == 0
    texts = files.texts()
    assert len(texts) == 2 and all(text.startswith("drawing: A") for text in texts.values())


@pytest.mark.full
def test_all_formats_are_captioned_and_others_are_counted(generate):
    (folder := Path("formats")).mkdir()
    names = ["a.tga", "b.ico", "c.jp2", "d.dds", "e.PCX", "f.sgi", "g.icns", "h.apng", "i.pbm"]
    for name in names:
        image = noise_image(64, 64).convert("1" if name == "i.pbm" else "RGB")
        image.save(folder / name, "PNG" if name == "h.apng" else None)
    for name in ("x.svg", "y.svg", "z.nef", "paper.pdf"):
        (folder / name).write_text("no image")
    code, _, err = generate(folder)
    assert code == 0 and set(sidecars(folder)) == set(map(stem, names))
    assert err.splitlines()[-1].startswith("9 captioned") and err.endswith("; 2 .svg left out; 1 .nef left out\n")


def test_two_images_do_not_share_a_txt(generate, folder, files, texts):
    noise_image(30, 30, 9).save(folder / "a.jpg")
    for _ in range(2):
        code, _, err = generate(folder)
        assert code == 1 and "a.png: a.txt is the caption of a.jpg" in err
    found = files.texts()
    assert found.pop("a") != texts.pop("a") and found == texts
    assert generate(folder, "--out", "all.jsonl")[0] == 0


def test_a_file_name_that_is_not_unicode_goes_into_jsonl(generate, folder, texts):
    (folder / os.fsdecode(b"\xff.png")).write_bytes((folder / "a.png").read_bytes())
    assert generate(folder, "--out", folder / "all.jsonl")[0] == 0
    assert CaptionFiles(folder, "all.jsonl").texts() == texts | {"\udcff": texts["a"]}
    assert generate(folder)[0] == 0 and (folder / os.fsdecode(b"\xff.txt")).is_file()


def test_a_read_only_folder_is_reported_before_any_work(generate, folder, files, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "deep")
    code, _, err = generate(folder)
    assert code == 1 and "ünï-🙂.png: its folder is not writable" in err and len(files.texts()) == 4


def test_failures_are_reported_even_if_their_file_cannot_be_written(generate, folder, files, texts):
    files.failures.mkdir()
    (folder / "words.png").write_text("hello")
    code, _, err = generate(folder)
    assert code == 1 and "words.png: not an image" in err and err.endswith("; 1 failed\n")
    assert files.texts() == texts


@pytest.mark.parametrize("where", OUTPUTS)
def test_a_full_disk_names_the_file_and_how_to_resume(generate, folder, files, texts, one_worker, monkeypatch, where):
    """The disk is full after two captions; then the command is repeated."""
    command, written = [folder, "--out", files.out], []

    def after_two(patch, name):
        function = getattr(os, name)

        def write(*args):
            written.append(name)
            if len(written) > 2:
                raise OSError(28, "No space left on device")
            return function(*args)

        patch.setattr(os, name, write)

    with monkeypatch.context() as patch:
        after_two(patch, "write" if files.is_table else "replace")
        code, _, err = generate(*command, "--batch-size", "1")
    line = err.splitlines()[-1]
    assert code == 1 and "2 of 5 captions are written; free some space and run the same command to resume" in line
    assert (f"{files.out}: No space left on device; " if files.is_table else ".txt: No space left") in line
    code, _, err = generate(*command)
    assert code == 0 and files.texts() == texts and not files.litter()


def test_a_line_that_is_written_in_part_is_a_full_disk(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:5]))
    with pytest.raises(OSError, match="No space left"):
        append_row(tmp_path / "log.jsonl", {"file_name": "a.png"})


# ------------------------------------------------------------------------------------------------------------ wrong use


DAMAGED = {
    "latin.jsonl": ('{"file_name": "a.png", "text": "été"}\n'.encode("latin-1"), "cannot be read"),
    "words.jsonl": ("hello\nworld", "line 1"),
    "others.jsonl": ('{"a": 1}\n', "rows without a file_name"),
    "numbers.jsonl": ('{"file_name": "a.png", "text": 3}\n', "row 1, has a text of another type"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_table_that_is_damaged_or_not_ours_is_reported_before_any_work_and_kept(generate, folder, files, name):
    content, words = DAMAGED[name]
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = Path(name).read_bytes()
    for existing in ("skip", "overwrite"):
        assert_usage_error(generate(folder, "--out", name, "--existing", existing), name, words)
    assert Path(name).read_bytes() == before and not files.litter()


def test_a_read_only_table_is_reported_before_any_work(generate, folder, monkeypatch):
    access = os.access
    for closed in (".", "all.jsonl"):
        Path("all.jsonl").touch()
        monkeypatch.setattr(os, "access", lambda path, mode: str(path) != closed and access(path, mode))  # noqa: B023
        assert_usage_error(generate(folder, "--out", "all.jsonl"), "all.jsonl is not writable")
    for make in (os.mkdir, os.mkfifo):
        make(name := f"{make.__name__}.jsonl")
        assert_usage_error(generate(folder, "--out", name), f"{name} exists and is not a file")
    assert_usage_error(generate(folder, "--out", "good.png/all.jsonl"), "good.png/all.jsonl: its folder cannot be made")


@pytest.mark.parametrize("name", ["*.gif", "none"])
def test_a_name_without_an_image_is_wrong_use_and_writes_nothing(generate, folder, name):
    Path("none").mkdir()
    before = snapshot(Path())
    assert_usage_error(generate(name), f"{name}: a ", "image")
    assert snapshot(Path()) == before


TWO_PROMPTS = ["--prompt", "What?", "--prompt", "Where?"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["images", "--json", "--out", "all.jsonl"], "--out captions.jsonl"),
        (["images", "--json", "--existing", "overwrite"], "standard output holds no captions"),
        (["images", "--out", "-", "--extension", ".caption"], "beside each image, not for -"),
        (["images", "--extension", "png"], "extension '.png' is that of images"),
        (["images", "--extension", "../x"], "is not like .txt or .caption"),
        (["images", "--limit", "0"], "limit 0 is less than 1"),
        (["images", "--samples", "2", "--temperature", "1"], "--samples 2"),
        (["images", "-"], "an image without a name"),
        (["images", "--batch-size", "0"], "batch size 0 is less than 1"),
        (["images", "--out", "all.csv"], "must be a .jsonl file, txt or -"),
        (["images", "--prefix", "\udcff"], "not valid Unicode"),
        (["good.png", *TWO_PROMPTS, "--samples", "2"], "--samples 2 of 2 prompts; ask for samples of one at a time"),
        (["images", *TWO_PROMPTS, "--prefix", "a"], "--prompt: answers to several are JSON, to which no text"),
        (["images", *TWO_PROMPTS, "--prompt", "What?"], "--prompt is given twice, or is file_name or text"),
        (["--out", "all.jsonl"], "no images"),
        (["nowhere", "gone.png", "--out", "all.jsonl"], "nowhere: no such file or folder; correct the path"),
        (["--from-file", "nowhere"], "list of names 'nowhere': No such file"),
        (["images", "--out", "failures.jsonl"], "is named like a list of images that failed"),
        (["good.png", "--limit", "1"], "--limit is for files"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_reported_in_one_line(generate, folder, argv, words):
    assert_usage_error(generate(*argv), words)
    assert not sidecars(folder) and not list(Path().glob("all.*"))


def test_the_sample_image_gets_no_file(generate):
    assert generate(SAMPLE)[0] == 0 and not SAMPLE.with_suffix(".txt").exists()
