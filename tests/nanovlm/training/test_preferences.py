"""DPO: the loss of its paper, exact on random weights, and preferences that are learned."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from models.lora import adapt, adapters
from nanovlm import Captioner
from nanovlm.cli.main import main
from nanovlm.data.detect import open_source
from nanovlm.data.examples import collate, encode
from nanovlm.errors import DataError, InputError
from nanovlm.options import ReadOptions
from nanovlm.training.config import TrainConfig
from nanovlm.training.preferences import PreferenceObjective, log_ratios
from support import randomize

ROWS = [
    {"image": "0.png", "prompt": "What is it?", "chosen": "A red square.", "rejected": "A dog on a beach."},
    {"image": "1.png", "prompt": "Color?", "chosen": "green", "rejected": "blue and red"},
]


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for i, color in enumerate(("red", "green")):
        Image.new("RGB", (20, 20), color).save(folder / f"{i}.png")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder / "pairs.jsonl"


@pytest.fixture
def captioner(model_folder):
    return Captioner.from_pretrained(model_folder, "cpu", "float32")


def log_p(model, captioner, row, answer, folder):
    """log p of an answer, by a forward pass over its whole chat."""
    ids, tiles = captioner.prepare(str(folder / row["image"]), row["prompt"])
    answer_ids = captioner.tokenizer.encode_answer(answer)
    logits, _ = model(torch.tensor([ids + answer_ids]), torch.cat(tiles))
    rows = logits[0, len(ids) - 1 : -1].log_softmax(-1)
    return rows[torch.arange(len(answer_ids)), torch.tensor(answer_ids)].sum()


def log_ratio(model, captioner, row, folder):
    return log_p(model, captioner, row, row["chosen"], folder) - log_p(model, captioner, row, row["rejected"], folder)


def test_the_loss_is_that_of_the_paper(captioner, data):
    source, policy = open_source(str(data), ReadOptions(preferences=True)), copy.deepcopy(captioner.model)
    objective = PreferenceObjective(policy, 0.3)
    randomize(policy.requires_grad_(False))
    batch = collate([encode(source[i], captioner.processor) for i in range(2)])
    expected = []
    for row in ROWS:
        ratios = [log_ratio(model, captioner, row, data.parent) for model in (policy, captioner.model)]
        expected.append(-F.logsigmoid(0.3 * (ratios[0] - ratios[1])))
    loss = objective.loss(policy, batch)
    assert torch.allclose(loss, torch.stack(expected).mean(), rtol=1e-4) and objective.count(batch) == 2
    assert objective.loss(captioner.model, batch).item() == pytest.approx(math.log(2), abs=1e-5)


def test_the_reference_of_adapters_shares_the_frozen_weights(captioner, data):
    model = captioner.model
    adapt(model, 2, 4, ["decoder"])
    objective = PreferenceObjective(model, 0.1)
    assert objective.reference.MP.proj.weight is model.MP.proj.weight
    source = open_source(str(data), ReadOptions(preferences=True))
    batch = collate([encode(source[0], captioner.processor)])
    before = log_ratios(objective.reference, batch)
    for module in adapters(model).values():
        torch.nn.init.normal_(module.lora_B.weight)
    assert torch.equal(log_ratios(objective.reference, batch), before)
    assert not torch.equal(log_ratios(model, batch), before)


MESSAGES = {
    "texts": ROWS[0],
    "messages": ROWS[0]
    | {
        "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}],
        "chosen": [{"role": "assistant", "content": ROWS[0]["chosen"]}],
        "rejected": [{"role": "assistant", "content": [{"type": "text", "text": ROWS[0]["rejected"]}]}],
    },
    "conversations": {
        "images": ["0.png"],
        "chosen": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": ROWS[0]["chosen"]}],
        "rejected": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": ROWS[0]["rejected"]}],
    },
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_trls_columns_are_read(data, kind):
    data.write_text(json.dumps(MESSAGES[kind]) + "\n")
    example = open_source(str(data), ReadOptions(preferences=True))[0]
    assert example.is_preference and [str(image)[-5:] for image in example.images] == ["0.png"]
    assert list(example.qa_pairs) == [("What is it?", ROWS[0]["chosen"]), ("What is it?", ROWS[0]["rejected"])]


def test_data_and_settings_that_do_not_fit_are_one_line(data, capsys):
    with pytest.raises(DataError, match="by --dpo-beta 0.1"):
        open_source(str(data), ReadOptions())
    with pytest.raises(InputError, match="omit pack=64"):
        TrainConfig(dpo_beta=0.1, pack=64)
    data.write_text(json.dumps({"image": "0.png", "text": "A."}) + "\n")
    with pytest.raises(DataError, match="no column 'chosen'"):
        open_source(str(data), ReadOptions(preferences=True))
    for i in (0, 1):
        (data.parent / f"{i}.txt").write_text("A.")
    assert main(["train", "--data", str(data.parent), "--out", "x", "--dpo-beta", "0.1"]) == 2
    assert "--dpo-beta has no effect on" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("flags", [[], ["--lora-rank", "4"]])
def test_the_command_learns_what_is_preferred(data, tmp_path, flags):
    command = ["train", "--data", str(data), "--out", str(tmp_path / "out"), "--dpo-beta", "0.5", "--max-steps", "40"]
    command += ["--batch-size", "2", "--num-workers", "0", "--lr", "3e-3", "--augment", "0", "--dtype", "float32"]
    embedded = Captioner.from_pretrained(dtype="float32")
    assert main([*command, *flags]) == 0
    trained = Captioner.from_pretrained(tmp_path / "out", dtype="float32")
    for row in ROWS:
        before, after = (log_ratio(c.model, c, row, data.parent) for c in (embedded, trained))
        assert after > before + 2
    losses = [json.loads(line).get("loss") for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3) and losses[-1] < 0.3
