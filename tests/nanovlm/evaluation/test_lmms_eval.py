"""The model class for lmms-eval: nanoVLM's prompts, and a task of four local images run by lmms-eval's command."""

import importlib.util
import json
import os
import random
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest

from nanovlm import EMBEDDED, Captioner
from nanovlm.errors import MissingExtraError
from nanovlm.evaluation.lmms_eval import PLAIN, PROMPTS, NanoVLM
from nanovlm.synthetic import draw, random_scene
from support import ROOT

INSTALLED = importlib.util.find_spec("lmms_eval") is not None
QUESTIONS = ["Describe this picture.", "What is in this picture?", "What is it?", "Describe this picture."]

TASK = """
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/scenes.jsonl
test_split: test
output_type: generate_until
doc_to_visual: !function utils.images
doc_to_text: !function utils.question
doc_to_target: answer
generation_kwargs:
  max_new_tokens: 40
  until: ["\\n\\n"]
process_results: !function utils.compare
metric_list:
  - metric: equal
    aggregation: mean
    higher_is_better: true
"""
UTILS = """
from PIL import Image

def images(doc):
    return [Image.open(path) for path in doc["images"]]

def question(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]

def compare(doc, results):
    return {"equal": float(results[0] == doc["answer"])}
"""


def test_prompts_are_nanovlms():
    directly = "Answer with the option's letter from the given choices directly."
    choices = f"Which one?\nOptions:\nA. a star\nB. a ring\n{directly}"
    expected = "Which one?\nChoices:\nChoices:\nA. a star\nB. a ring\nAnswer with the letter directly."
    assert PROMPTS["mmstar"](choices) == PROMPTS["seedbench"](choices) == expected  # twice Choices, as nanoVLM's
    assert PROMPTS["mmmu_val"](f"Question: {choices}") == f" {expected.replace('Choices', 'Options', 1)}"
    assert PROMPTS["ocrbench"]("What is written?") == "What is written?\nGive a very brief answer."
    assert PROMPTS["docvqa_val"]("Who?").endswith("without additional explanation. Question: Who?")
    assert PROMPTS["textvqa_val"]("Who?").startswith("Answer the following question about the image using as few words")
    assert {task for task, prompt in PROMPTS.items() if prompt.answer} == {
        "ai2d", "mmstar", "scienceqa", "seedbench", "mmmu_val", "mmmu_test",
    }  # fmt: skip
    assert "chartqa" not in PROMPTS and PLAIN("Who?") == "Who?"


@pytest.mark.skipif(INSTALLED, reason="lmms-eval is installed")
def test_without_lmms_eval_the_extra_is_named():
    with pytest.raises(MissingExtraError, match=r"pip install 'nanovlm\[lmms-eval\]'"):
        NanoVLM()


@pytest.fixture
def scenes(tmp_path):
    """Four images and questions; the answers are Captioner's, but the last one."""
    captioner = Captioner.from_pretrained(EMBEDDED, "cpu", "float32")
    docs = []
    for i, question in enumerate(QUESTIONS):
        path = tmp_path / f"{i}.png"
        draw(random_scene(random.Random(i)), 100 + 40 * i, 130).save(path)
        docs.append({"images": [str(path)], "question": question, "answer": captioner.caption(path, question)})
    docs[-1] = {"images": [str(tmp_path / "0.png")], "question": "é" * 2000, "answer": ""}  # longer than the context
    (tmp_path / "scenes.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for task in ("scenes", "mmstar"):
        (tasks / f"{task}.yaml").write_text(TASK.format(task=task, folder=tmp_path))
    (tasks / "utils.py").write_text(UTILS)
    return tmp_path


def lmms_eval(folder, *flags):
    """Run its command offline in a process of its own, with this project's entry points as pip would install them."""
    info = folder / "site" / "nanovlm_here-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nanovlm-here\nVersion: 0\n")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{n} = {p}\n" for n, p in names.items()) for group, names in points.items())
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(info.parent)]),
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "lmms_eval", "--device", "cpu", "--batch_size", "2", "--include_path"]
    command += [str(folder / "tasks"), "--output_path", str(folder / "results"), "--log_samples", *flags]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    results = sorted((folder / "results").rglob("*_results.json"), key=lambda path: path.stat().st_mtime)
    assert run.returncode == 0 and results, run.stdout[-3000:] + run.stderr[-3000:]
    return json.loads(results[-1].read_text())["results"], run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs lmms-eval")
def test_a_local_task_is_scored_by_lmms_evals_command(scenes):
    arguments = f"pretrained={EMBEDDED},dtype=float32"
    results, log = lmms_eval(scenes, "--model", "nanovlm_captioner", "--model_args", arguments, "--tasks", "scenes")
    assert results["scenes"]["equal,none"] == 1.0
    assert "document 3, gets an empty answer" in log and "exceed lm_max_position_embeddings=1024" in log


@pytest.mark.skipif(not INSTALLED, reason="needs lmms-eval")
def test_answers_begin_as_nanovlm_begins_them(scenes):
    """In a task named mmstar the prompt of the assistant's turn ends with "Answer:", and stop strings cut answers."""
    model = NanoVLM(str(EMBEDDED), "cpu", "float32", batch_size=3)
    docs = [json.loads(line) for line in (scenes / "scenes.jsonl").read_text().splitlines()]
    model.task_dict = {"mmstar": {"test": docs}, "scenes": {"test": docs}}
    captioner = Captioner.from_pretrained(EMBEDDED, "cpu", "float32")

    def visuals(doc):
        return doc["images"]

    def ask(task, doc_id, **settings):
        request = (docs[doc_id]["question"], {"max_new_tokens": 20, **settings}, visuals, doc_id, task, "test")
        return model.generate_until([SimpleNamespace(args=request)])[0]

    ids, tiles = captioner.prepare(docs[0]["images"], docs[0]["question"])
    ids = [*ids, *captioner.tokenizer.encode("Answer:")]
    expected = captioner.generate([(ids, tiles)], max_new_tokens=20)[0]
    assert ask("mmstar", 0) == expected
    assert ask("scenes", 0, max_new_tokens=40) == docs[0]["answer"] != expected
    assert ask("scenes", 0, max_new_tokens=40, until=[" and"]) == docs[0]["answer"].split(" and")[0]
    for refuse in (model.loglikelihood, model.generate_until_multi_round):
        with pytest.raises(NotImplementedError, match="nanovlm_captioner"):
            refuse([])
