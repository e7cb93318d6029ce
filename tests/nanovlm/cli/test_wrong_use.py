"""Wrong use of every verb, a row each: one line that says the words, exit code 2, and nothing is written.

The limits of values have tests with their records; a row or two here show that a flag meets them.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from nanovlm import EMBEDDED
from nanovlm.cli import main as cli
from support import noise_image
from support.cli import assert_usage_error

WRONG = {  # command -> a pattern of the error
    "": "required|VERB",
    "paint": "paint",
    "--unknown": "VERB",
    "good.png": "did you mean: nanovlm caption good.png$",
    "missing.jpg --json": "did you mean: nanovlm caption missing.jpg --json$",
    "caption good.png --top-p 2": "--top-p 2.0 must be",
    "caption good.png --overwrite": "--overwrite is for files",
    "caption images --prompt a --prompt b": "a text file takes the answer to one prompt, not to 2",
    "caption images --prompt a --prompt model": "each names a column of its own",
    "caption good.png --promt x": "unrecognized arguments: --promt; did you mean --prompt?",
    "caption good.png --choices red": "two or more",
    "caption good.png --choices a,b --temperature 1": "--temperature is for generated answers",
    "caption good.png --prompt a --prompt a": "twice",
    "caption good.png --prompt a --prompt b --choices c,d": "ask one",
    "caption images --prompt a --prompt b --prefix x": "no text can be added",
    "caption images --out a.csv": "must be a .jsonl file",
    "caption images --out a.jsonl --extension .x": "--extension is for files beside images",
    "caption images --extension .png": "is that of images",
    "caption images --json --overwrite": "--overwrite is for captions in files",
    "caption images --workers 2": "add --ray",
    "caption - --out a.jsonl": "need names",
    "caption --out a.jsonl": "need names",
    "caption good.png a.mp4": "commands of their own",
    "caption --as-video": "needs names",
    "caption --ray images --out out": "images is no address",
    "caption images --ray --out a.jsonl": "must be a folder",
    "caption images --ray --out out --overwrite": "--overwrite is for one machine",
    "caption images --ray --out out --workers 0": "--workers 0 is less than 1",
    "caption images --ray --out out --json": "omit --json",
    "caption images --ray localhost:1 --out images": "start one with ray start",
    "caption --from-file nowhere --out a.jsonl": "nowhere: No such file",
    "caption good.png --max-new-tokens 1.5": "--max-new-tokens",
    "caption good.png --max-tiles 0": "--max-tiles 0",
    "caption a.mp4 --max-tiles 0": "--max-tiles 0",
    "caption a.gif --as-video --out x": "--out",
    "caption a.gif --as-video --overwrite": "--overwrite",
    "caption good.png --json-schema nowhere": "No such file",
    "caption good.png --json-schema d.json": "is not JSON",
    "caption good.png --json-schema e.json": "cannot be followed",
    "caption good.png --json-schema f.json --start-with A": "excludes start_with",
    "caption good.png --json-schema f.json --out a.jsonl --prefix x": "no text can be added",
    f"caption good.png --prompt '{'word ' * 1100}'": "lm_max_position_embeddings=1024",  # too long for any image
    "caption good.png --max-new-tokens 1020": "lm_max_position_embeddings=1024",
    "caption good.png --prompt a\udcff": "not valid Unicode text",
    "caption good.png --model nowhere": "must be a folder with config.json, or a Hub id",
    "caption good.png --model good.png": "must be a folder with config.json, or a Hub id",
    "caption good.png --model 'two\nlines'": "must be a folder with config.json, or a Hub id",
    "caption good.png --device tpu": "--device",
    "caption good.png --prompt": "--prompt",
    "chat --max-new-tokens 0": "0 must be at least 1",
    "train": "required",
    "train --recipe scenes": "required",
    "train --out out": "required",
    "train --data mine": "--out is required",
    "train --data mine --out ''": "--out",
    "train --recipe scenes --data mine --out out": "exclude each other",
    "train --recipe x --out out": "--recipe",
    "train --recipe scenes --out out --prompt x": "--prompt has no effect with --recipe",
    "train --recipe scenes --out out --pack 9": "--pack has no effect",
    "train --data mine --out out --stream": "--stream has no effect on mine",
    "train --data mine --out out --metric anls": "--metric has no effect",
    "train --data mine --out out --validation 0 --metric f1": "--metric has no effect with --validation 0",
    "train --data mine --out out --validation 1 --metric bleu": "bleu.*exact_match",
    "train --data mine --out out --validation 4": "4 of 4 examples.*none to learn from",
    "train --data far/gone@v1/x --out out": "far/gone@v1/x: no such file or folder; data is",
    "train --data mine@0 --out out": "share must be above 0",
    "train --data mine --out out --model nowhere": "nowhere.*neither a folder nor a Hub id",
    "train --data mine --out out --freeze head": "--freeze.*vision, projector, language",
    "train --data mine --out out --epochs 1 --max-steps 2": "--epochs and --max-steps exclude each other",
    "train --data mine --out out --epochs 0": "--epochs 0.0 must be above 0 and below inf",
    "train --data scenes --out out --epochs 1": "--epochs needs data whose size is known.*--max-steps",
    "train --data mine --out out --optimizer muon --lora-rank 4": "--optimizer muon trains whole matrices",
    "train --data mine --out mine/0.png": "--out mine/0.png: .*is a file",
    "train --data scenes@0.5 mine/../mine@0.5 --out mine": "--out mine holds the data",
    "train --data mine --out begun": "begun holds config.json, but no run to resume; move it away",
    "train --config a.json": "--max-steps x must be a whole number",
    "train --config b.json": "b.json has 'color', which is no setting of a run",
    "train --config c.json": "c.json holds list, not an object",
    "train --config d.json": "d.json cannot be read",
    "train --config nowhere": "--config nowhere: No such file",
    "train --recipe scenes --out out --lr nan": "--lr nan",
    "train --recipe scenes --out out --max-steps 1.5": "--max-steps",
    "evaluate --data mine --metric bleu": "bleu.*exact_match",
    "evaluate --data mine --limit 0": "--limit 0",
    "evaluate --data mine --validation": "nothing of these data is held out",
    "evaluate --data mine --validation 1.5": "--validation 1.5.*must be a whole number",
    "evaluate --data mine --report x.jpg": "--report x.jpg.*.html",
    "evaluate --data mine --report nowhere/x.html": "nowhere is no folder that can be written",
    "evaluate --data mine --model nowhere": "nowhere.*Hub id",
    "evaluate --data mine --stream": "--stream has no effect on mine",
    "export begun --out out --onnx-dtype int8": "--onnx-dtype needs --onnx",
    "export begun --out out --gguf-type f16": "--gguf-type needs --gguf",
    "export begun --out out --gguf --onnx": "run the command twice",
    "export nowhere --out ''": "--out",
    "export nowhere --out good.png": "--out.*is a file",
    "serve --host 0.0.0.0": "set --api-key or, hidden from ps, NANOVLM_API_KEY",
    "serve --host example.com": "needs a key",
    "serve --host 0.0.0.0 --api-key ' '": "--api-key is empty",
    "serve --host nowhere.invalid --api-key x --port 0": "--host .*; name an address of this machine$",
    "serve --host 192.0.2.1 --api-key x --port 0": "; name an address of this machine$",
    "serve --port 70000": "--port 70000",
    "serve --max-num-seqs 0": "--max-num-seqs 0 must be at least 1",
    "serve --allow-origin http://localhost:3000/": "is no origin; give for example http://localhost:",
    "serve --timeout nan": "--timeout nan must be at least 1",
    "serve --model no/such/folder --port 0": "no/such/folder",
    "serve --adapter nowhere --port 0": "must be a folder with adapter_config.json",
    "review gone": "neither a folder nor",
    "review notes.jsonl": "line 1, is no row",
    "capton photos": "did you mean caption?",
    "reveiw": "did you mean review?",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder of what the commands name; they write nothing, so that all may use it."""
    folder = tmp_path_factory.mktemp("world")
    for seed, name in enumerate(("good.png", "images/a.png", *(f"mine/{i}.png" for i in range(4)))):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        noise_image(seed=seed).save(path)
        if name.startswith("mine"):
            path.with_suffix(".txt").write_text(f"Picture {name}.")
    texts = ['{"recipe": "scenes", "out": "o", "max_steps": "x"}', '{"color": "red"}', "[1]", '{"a": ']
    for name, text in zip("abcdef", [*texts, '{"type": "no"}', '{"type": "integer"}']):
        (folder / f"{name}.json").write_text(text)
    (folder / "notes.jsonl").write_text("buy milk")
    shutil.copytree(EMBEDDED, folder / "begun")
    return folder


@pytest.mark.parametrize("command", WRONG, ids=lambda command: ascii(command[:60]))
def test_wrong_use_is_one_line_before_any_work(command, world, monkeypatch, nanovlm_program):
    for part, package in (("localhost:1", "ray"), ("--json-schema", "llguidance")):
        if part in command:
            pytest.importorskip(package)
    monkeypatch.chdir(world)
    monkeypatch.delenv("NANOVLM_API_KEY", raising=False)
    before = sorted(Path().rglob("*"))
    words = shlex.split(command)
    model = {"caption": ["--model", "begun"], "review": ["--no-browser"]}.get(words[0] if words else "", [])
    result = nanovlm_program(*words[:1], *model, *words[1:])
    assert_usage_error(result, program=" ".join(["nanovlm", *(word for word in words[:1] if word in cli.VERBS)]))
    err = result[2].rstrip("\n")
    assert re.search(WRONG[command], err) and sorted(Path().rglob("*")) == before, err
