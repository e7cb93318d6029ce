# ruff: noqa: E501  # tables
"""Files as people have them: the examples and the lines that say so, or a refusal of one line."""

import base64
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nanovlm import PROMPT
from nanovlm.data import ExampleError, ReadOptions, open_source
from nanovlm.data.records import Record, to_example
from nanovlm.data.splits import split_named, split_of_path
from support import ROOT
from support.data import OPTIONS, check_refused, llava, message, pairs_of, png, read_all, text, write, write_tar

A, B = png(1), png(2)
TWO = {"a.png": A, "b.png": B}
IMAGE = {"type": "image_url", "image_url": {"url": "a.png"}}
ASK, SAY = message("user", "<image>Q?"), message("assistant", "A.")


def rows(*rows, name="d.json"):
    return {**TWO, name: list(rows)}


def qa(**columns):
    return rows({"image": "a.png", "question": "Q?", "answer": "A.", **columns})


def chat(*messages, **columns):
    return rows({"image": "a.png", "messages": list(messages), **columns})


def table(content, name="metadata.csv"):
    return {**TWO, name: content}


def coco(images, annotations):
    named = [{"id": id, "file_name": name} for id, name in images]
    return rows(), {"images": named, "annotations": [{"image_id": id, "caption": c} for id, c in annotations]}


def captions(*names):
    return {f"{name}.png": png(i) for i, name in enumerate(names, 1)} | {f"{name}.txt": f"{name}!" for name in names}


def labels(*folders):
    return {f"{folder}/{i}.png": png(i) for i, folder in enumerate(sorted(folders), 1)}


def told(*texts):
    return [([i], [("What?", text)]) for i, text in enumerate(texts, 1)]


def classes(bus, train):
    return [([bus], [("What?", "bus")]), ([train], [("What?", "train")])]


SPLIT_ROWS = {"train/a.png": A, "test/a.png": B, "metadata.csv": "file_name,text\ntrain/a.png,x\ntest/a.png,y\n"}
COCO = {"images": [{"id": 1, "file_name": "a.png"}], "annotations": [{"image_id": 1, "caption": c} for c in ("x", "y")]}
ONE = [([1], [("Q?", "A.")])]
CAPTION = told("x")

JUDGED = "d.json[0] has {} beside its answer, which may be none to learn; leave the row out, or name the answers with"
APART = "of which none is called train; write each split to a file of its own"


def halves(column, *values):
    """A table of two rows, a.png and b.png, with these values in a column."""
    return table(f"image,text,{column}\na.png,x,{values[0]}\nb.png,y,{values[1]}\n", "my.csv")


# id: files, expected [(seeds of images, pairs)], words of the lines, path and options
READ = {
    "labels of classes": (qa(label="cat", is_correct=True), ONE, ["not read: column label", "not read: column is_correct"]),
    "a label of three": (qa(label=3, weight=1), ONE, ["not read: column label"]),
    "rejected answers left out": (rows({"image": "a.png", "text": "x", "label": True}, {"image": "b.png", "text": "y", "label": False}),
        CAPTION, ["left out (1, the first d.json[1] has label False"], {"on_error": "skip"}),
    "a label that is named": (qa(label=False), ONE, ["not read: column label"], {"text_column": "answer"}),
    "one fold": (halves("fold", 3, 3), told("x", "y")),
    "training rows alone": (halves("is_test", 0, 0), told("x", "y")),
    "splits of other names": (halves("split", "restval", "test"), told("x", "y"), ["there is no training split: reading rows of restval (1) and test (1)"]),
    "texts": ({"b/a.PNG": A, "b/a.txt": "\ufeff x\r\ny \r\n", ".t/c.png": B, ".t/c.txt": "no"}, told("x\ny"),
        ["image from the image file, question from --prompt, answer from the text file"]),
    "a folder of everything": (captions("a") | {"b/m.pdf": "x", "d.json": [], "LICENSE": "x"}, told("a!"),
        ["not read: .pdf files (1, the first ./b/m.pdf)", ".json files (1", "other files (1"], {"path": "."}),
    "texts of nothing": (captions("a") | {"z.txt": "z", "y.txt": "y"}, told("a!"), ["not read: .txt files (2, the first ./y.txt)"]),
    "a text of several lines": (captions("a", "b") | {"a.txt": "one\ntwo\n", "b.txt": "b!\n\n"}, told("one\ntwo", "b!"),
        ["with a text of several lines, learned as one (1, the first ./a.png)"]),
    "texts of another extension": (captions("a") | {"a.caption": "A cat."}, told("A cat."),
        ["answer from the text file", "not read: .txt files (1, the first ./a.txt)"], {"extension": "caption"}),
    "texts of an extension in capitals": ({"a.png": A, "a.Caption": "x"}, CAPTION, [], {"extension": ".caption"}),
    "two kinds of texts": (captions("a") | {"a.caption": "A cat."}, told("a!"), ["not read: .caption files (1,"]),
    "texts in splits": (captions("train/a", "val/a", "test/a"), told("train/a!"), ["training split; not read: 4 files, test/a.png"]),
    "COCO's names of splits": (captions("train2017/a", "val2017/a"), told("train2017/a!"), ["val2017/a.png"]),
    "folders of labels": ({"cat/1.png": A, "dog/2.png": B}, told("cat", "dog"),
        ["the name of its folder is each image's answer: cat, dog", "answer from the name of the folder"]),
    "labels in splits": ({f"{s}/{k}/1.png": A for s in ("train", "val") for k in ("x", "y")}, [([1], [("What?", "x")]), ([1], [("What?", "y")])],
        ["answer: x, y", "not read: 2 files"]),
    "jsonl table": (table([{"file_name": "a.png", "text": " x\n", "n": 1}], "metadata.jsonl"), CAPTION,
        ["image from column file_name", "column n (1, ", "not read: .png files (1, the first ./b.png)"]),
    "csv table": (table("File Name;Text\na.png;x\n", "my.csv"), CAPTION, ["image from column File Name"], {"path": "."}),
    "csv file": (table('file_name,text\na.png,"x, ""y"""\n', "my.csv"), told('x, "y"'), ["not read: .png files (1, the first ./b.png)"]),
    "tabs": (table("file_name\ttext\na.png\tx\n", "my.tsv"), CAPTION),
    "tables in folders": ({"in/a.png": A, "in/metadata.csv": "file_name,text\na.png,x\n"}, CAPTION),
    "answer before caption": (qa(caption="A cat."), ONE, ["answer from column answer", "not read: column caption"]),
    "text column": (qa(caption="A cat."), [([1], [("Q?", "A cat.")])], ["not read: column answer"], {"text_column": "caption"}),
    "prompt column": (qa(ask="Who?"), [([1], [("Who?", "A.")])], ["not read: column question"], {"prompt_column": "ask", "text_column": "answer"}),
    "answer before caption behind a prompt column": (rows({"image": "a.png", "ask": "Q?", "answer": "A.", "caption": "A cat."}), ONE,
        ["not read: column caption"], {"prompt_column": "ask"}),
    "choices left out": (qa(choices=["A.", "B."]), ONE, ["not read: column choices"], {"prompt_column": "question", "text_column": "answer"}),
    "several answers": (qa(answer=["A.", "B."]), [([1], [("Q?", "A."), ("Q?", "B.")])]),
    "several questions": (rows({"image": "a.png", "question": ["Who?", "When?"], "answer": ["Ann", 1999]}),
        [([1], [("Who?", "Ann"), ("When?", "1999")])]),
    "several questions with marks": (rows({"images": ["a.png", "b.png"], "questions": ["<image> <image>\nWho?", "When?"], "answers": ["Ann", "Now"]}),
        [([1, 2], [("Who?", "Ann"), ("When?", "Now")])]),
    "a list of one question": (qa(question=["Q?"], answer=["A.", "B."]), [([1], [("Q?", "A."), ("Q?", "B.")])]),
    "TRL's prompt and completion": (rows({"image": "a.png", "prompt": "Q?", "completion": "A."}), ONE),
    "a system's prompt": (qa(system_prompt="Be brief."), [([1], [("Be brief.", "Q?", "A.")])]),
    "input as the question": (rows({"image": "a.png", "input": "Q?", "output": "A."}), ONE, [], {"prompt_column": "input"}),
    "an empty input": (rows({"image": "a.png", "instruction": "Q?", "input": "", "output": "A."}), ONE),
    "one column of a letter": (qa(a="id 7"), ONE, ["not read: column a"]),
    "further keys of a message": (chat(ASK | {"user": "alice"}, SAY | {"assistant": "gpt-4", "name": None}), ONE,
        ["not read: key user of messages (1,", "not read: key assistant of messages (1,"]),
    "further keys of ShareGPT": (rows({"image": "a.png", "conversations": [{"from": "human", "value": "Q?", "assistant": "x"}, {"from": "gpt", "value": "A.", "user": "y", "model": "z"}]}),
        ONE, ["key assistant of messages", "key user of messages", "key model of messages"]),
    "the_cauldron with a system": (rows({"images": ["a.png"], "texts": [{"user": "Q?", "assistant": "A.", "system": "S."}]}),
        [([1], [("S.", "Q?", "A.")])]),
    "a part of weight 1": (chat(ASK, message("assistant", text("A.") | {"weight": 1, "train": None})), ONE),
    "parts of an answer": (chat(message("user", text("Q"), text("?"), IMAGE), message("assistant", text("It is "), text("A."))),
        [([1], [("Q\n?", "It is A.")])]),
    "empty column beside": (rows({"images": [], "image": "a.png", "text": "x"}), CAPTION, ["image from column image"]),
    "image path": (rows({"image_path": "a.png", "caption": "x"}), CAPTION, ["image from column image_path"]),
    "image column": (rows({"left": "a.png", "text": "x"}), CAPTION, ["image from column left"], {"image_column": "left"}),
    "some without an image": (rows({"image": "a.png", "text": "x"}, {"text": "y"}), [*CAPTION, ([], [("What?", "y")])],
        ["without an image (1, the first d.json[1])"]),
    "a missing value skipped": (rows({"image": "a.png", "text": "x"}, {"image": "b.png", "text": float("nan")}), CAPTION,
        ["left out (1, the first d.json[1]"], {"on_error": "skip"}),
    "the first is missing": (rows({"image": "0.png", "text": "y"}, {"image": "a.png", "text": "x"}), CAPTION,
        ["left out (1, the first 0.png: No such file"], {"on_error": "skip"}),
    "the one folder": ({"i/a.png": A, ".t/a.png": B, "d.json": [{"image": "a.png", "text": "x"}]}, CAPTION, ["1 different image in i"]),
    "--images": ({"i/a.png": A, "j/a.png": B, "d.json": [{"image": "a.png", "text": "x"}]}, CAPTION, ["in i"], {"images": "i"}),
    "lines with marks and blanks": (table(b'\xef\xbb\xbf{"file_name": "a.png", "text": "x"}\r\n\n', "d.jsonl"), CAPTION),
    "bytes beside their name": (rows({"image": {"bytes": None, "path": "a.png"}, "image_path": "gone.png", "text": "x"}), CAPTION,
        ["image from column image", "column image_path"]),
    "the same image named twice": (rows({"images": ["a.png"], "messages": [message("user", IMAGE, text("Q?")), SAY]}), ONE,
        ["image from column images, question from the chat, answer from column messages"]),
    "COCO": (table(COCO, "d.json"), [([1], [("What?", "x"), ("What?", "y")])], ["answer from column captions"]),
    "LLaVA": (rows(llava("<image>\nQ?", "A.", image="a.png")), ONE, ["question from the chat"]),
    "LLaVA's system": (rows(llava("Q?", "A.", image="a.png", system="Be brief.")), [([1], [("Be brief.", "Q?", "A.")])]),
    "two systems": (chat(message("system", "One."), message("system", "Two."), ASK, SAY), [([1], [("One.", "Two.", "Q?", "A.")])]),
    "OpenAI": (rows({"messages": [message("user", text("Q?"), IMAGE), SAY]}), ONE, ["image from the chat"]),
    "the_cauldron": (rows({"images": ["a.png"], "texts": [{"user": "Q?", "assistant": "A.", "source": "s"}]}), ONE),
    "every key filled": (rows({"images": ["a.png"], "messages": [message("user", {"type": "image", "text": None}, {"type": "text", "text": "Q?", "image": None}), message("assistant", {"type": "text", "text": "A.", "image": None})]}),
        ONE),
    "a tag in an answer": (chat(ASK, message("assistant", "Use <video> and <image>.")), [([1], [("Q?", "Use <video> and <image>.")])]),
    "an image within the text": (chat(message("user", "Is <image> red?"), SAY), [([1], [("Is \n red?", "A.")])],
        ["with an image behind text: SmolVLM's layout reads it there, nanoVLM's before all text (1,"]),
    "an image in a later turn": (chat(message("user", "Hi"), SAY, ASK, SAY), [([1], [("Hi", "A."), ("Q?", "A.")])], ["with an image behind text"]),
    "preferences": (rows({"image": "a.png", "prompt": "Q?", "chosen": "A.", "rejected": "B."}), ONE, ["not read: column rejected"],
        {"text_column": "chosen"}),
    "the outermost split": ({**captions("train/train/a", "train/bus/a", "test/train/a", "test/bus/a")},
        [([2], [("What?", "train/bus/a!")]), ([1], [("What?", "train/train/a!")])], ["training split; not read: 4 files, test/bus/a.png"]),
    "a class train": (labels("train/train", "train/bus", "test/train", "test/bus"), classes(3, 4), ["answer: bus, train", "not read: 2 files"]),
    "splits in classes": (labels("train/train", "bus/train", "train/test", "bus/test"), classes(2, 4), ["answer: bus, train", "not read: 2 files"]),
    "classes only": (labels("train", "bus"), classes(1, 2), ["answer: bus, train"]),
    "a class test": (labels("test/train", "bus/train"), told("bus", "test"), ["answer: bus, test"]),
    "VOC's trainval": (labels("trainval/train", "trainval/bus", "test/bus"), classes(2, 3), ["not read: 1 files, test/bus"]),
    "a table of a split": (table("file_name,text\na.png,x\n", "train.csv") | {"test.csv": "file_name,text\na.png,y\n"}, CAPTION,
        ["training split; not read: 1 files, test.csv"]),
    "a folder before the name of its table": ({"train/a.png": A, "train/metadata.csv": "file_name,text\na.png,x\n", "test/metadata.csv": "a\n"},
        CAPTION, ["training split; not read: 1 files, test/metadata.csv"]),
    "no training split": (captions("val/a", "test/a"), [([2], [("What?", "test/a!")]), ([1], [("What?", "val/a!")])],
        ["there is no training split: reading test and val"]),
    "missing names of folders": (labels("Nan", "None", "null", "NA", "nan"), told("NA", "Nan", "None", "nan", "null"),
        ["answer: NA, Nan, None, nan, null"]),
    "the bread and the word": (rows({"image": "a.png", "text": "Nan"}, {"image": "a.png", "text": "None"}),
        [([1], [("What?", "Nan")]), ([1], [("What?", "None")])], ["learned as a text: the answer 'None' (1, the first d.json[1])"]),
    "missing in a csv": (table("file_name,text\na.png,x\na.png,NA\na.png,None\na.png,null\na.png,\\N\na.png,#N/A\na.png, n/a \n", "my.csv"), CAPTION,
        ["left out (6, the first my.csv[1] has the answer 'NA'"], {"on_error": "skip"}),
    "Excel's first line": (table("sep=;\r\nfile_name;text\r\na.png;x, y\r\n", "my.csv"), told("x, y")),
    "Excel's first line on a Mac": (table("sep=;\rfile_name;text\ra.png;x, y\r", "my.csv"), told("x, y")),
    "Excel's first line with a tab": (table("sep=\t\nfile_name\ttext\na.png\tx\n", "my.csv"), CAPTION),
    "DocVQA": (table({"dataset_name": "DocVQA", "data": [{"questionId": 1, "image": "a.png", "question": "Q?", "answers": ["A.", "B."]}]}, "d.json"),
        [([1], [("Q?", "A."), ("Q?", "B.")])], ["reading the list 'data'; not read: dataset_name"]),
    "half a character": (rows({"image": "a.png", "text": "x"}, {"image": "b.png", "text": "\ud83d"}, {"image": "\ud83d.png", "text": "y"}), CAPTION,
        ["left out (2, the first d.json[1] has half of a character, '\\ud83d'"], {"on_error": "skip"}),
    "a whole one": (table(b'[{"image": "a.png", "text": "\\ud83d\\ude00"}]', "d.json"), told("\U0001f600")),
    "numbered images": (chat(message("user", {"type": "image", "index": 1}, text("Q?"), {"type": "image", "index": 0}), SAY, image=["a.png", "b.png"]),
        [([2, 1], [("Q?", "A.")])]),
    "a part of a name is no split": (labels("train_station", "house", "test_tube"), told("house", "test_tube", "train_station"),
        ["answer: house, test_tube, train_station"]),
    "a folder of another word": (captions("x/train_test_split/a", "pretrain/b", "val d'isere/c"),
        [([2], [("What?", "pretrain/b!")]), ([3], [("What?", "val d'isere/c!")]), ([1], [("What?", "x/train_test_split/a!")])], ["3 examples"]),
    "splits whose names differ in the word alone": (captions("train_images/a", "val_images/a"), told("train_images/a!"),
        ["training split; not read: 2 files, val_images/a.png"]),
    "labels in splits of such names": (labels("my-train/bus", "my-train/car", "my-test/bus"), classes(2, 3)[:1] + [([3], [("What?", "car")])],
        ["answer: bus, car", "not read: 1 files, my-test"]),
    "tables of years": (table("file_name,text\na.png,x\n", "captions_train2014.csv") | {"captions_val2014.csv": "a\n"}, CAPTION,
        ["training split; not read: 1 files, captions_val2014.csv"]),
    "rows of another split left out": (SPLIT_ROWS, CAPTION, ["left out (1, the first ./metadata.csv[1] is of the split 'test' among others"],
        {"on_error": "skip"}),
    "rows of the training split alone": (SPLIT_ROWS | {"metadata.csv": "file_name,text\ntrain/a.png,x\n"}, CAPTION,
        ["1 example, 1 different image", "not read: .png files (1, the first ./test/a.png)"]),
    "rows of the test split alone": (SPLIT_ROWS | {"metadata.csv": "file_name,text\ntest/a.png,x\n"}, [([2], [("What?", "x")])],
        ["not read: .png files (1, the first ./train/a.png)"]),
    "a column split of other words": (rows({"image": "a.png", "text": "x", "subset": "birds"}), CAPTION, ["not read: column subset"]),
    "hidden files": (captions("a") | {".captions.jsonl": [{"file_name": "a.png", "text": "no"}], ".nanovlm-part-1/b.png": B, "._a.png": B},
        told("a!"), ["1 example, 1 different image"]),
    "an address of a file": ({"a b.png": A, **rows({"image": "file://a%20b.png", "text": "x"})}, CAPTION),
    "a data: address": (rows({"image": "data:image/png;base64," + base64.b64encode(A).decode(), "text": "x"}), CAPTION),
}  # fmt: skip


def written(files, options):
    """Write files; the path to read, by default the one table or the folder, and the options."""
    for name, content in files.items():
        write(name, content)
    tables = [name for name in files if name in ("d.json", "d.jsonl", "my.csv", "my.tsv")]
    options = {"path": tables[0] if len(tables) == 1 else "."} | options
    return options.pop("path"), replace(OPTIONS, **options)


@pytest.mark.parametrize("name", READ)
def test_read(name):
    files, expected, words, options = (*READ[name], *([], {})[len(READ[name]) - 2 :])
    path, options = written(files, options)
    assert [(seeds, pairs) for _, seeds, pairs in read_all(path, options)] == expected
    lines = " | ".join(open_source(path, options).lines)
    assert all(part in lines for part in words), lines


OTHER_SPLIT = (
    "1 of 2 records of {} cannot be used, the first: {}[1] is of the split {!r} among others; write each split to"
)
NAMES = {
    "train": "train", "Training": "train", "trainval": "train", "val2017": "val", "test_0": "test", "dev-3": "dev",
    "train-00000-of-00001": "train", "train-00000-of-00001-0f1e2d3c4b5a6978": "train", "valid.part2": "valid",
    "train_station": "", "pretrain": "", "contest": "", "test tube": "", "latest": "", "vale": "", "evaluate": "",
}  # fmt: skip


def test_a_split_is_a_name_and_not_a_part_of_one():
    assert {name: split_named(name) for name in NAMES} == NAMES
    paths = {"train/test/a.png": "train", "a/val/b.png": "val", "train.png": "", "/data/test/train/a.png": "train"}
    assert {path: split_of_path(path) for path in paths} == paths


TWICE = coco([(1, "a.png"), (1, "b.png")], [(1, "x")])[1]
# id: files, words of the refusal, path and options
REFUSED = {
    **{f"a column {name}": (qa(**{name: value}), JUDGED.format(f"{name} {value!r}")) for name, value in {
        "label": False, "kto_tag": False, "is_correct": 0, "hallucinated": True, "weight": 0.5, "score": 1, "status": "rejected", "is_preferred": False,
        "desirable": False, "quality": "bad", "kto_label": -1, "exclude": True, "human_rating": 2, "loss_weight": 0.0,
    }.items()},
    "KTO's label beside a chat": (chat(ASK, SAY, label=False), JUDGED.format("label False")),
    "KTO's label in a csv": (halves("label", "True", "False"), "my.csv[1] has label 'False' beside its answer"),
    "a rating in a csv": (halves("Rating", "5", "1"), "my.csv[0] has Rating '5' beside its answer"),
    "rejected messages": (chat(ASK, SAY, rejected_messages=[ASK, SAY]), "is preference data, with the column rejected_messages"),
    "wrong answers": (qa(incorrect_answers=["B."]), "is preference data, with the column incorrect_answers"),
    "distractors": (qa(distractors=["B."]), "has distractors beside its answer"),
    "a judged message": (chat(ASK, SAY | {"label": False}), "has label in a message; write a weight"),
    "a masked message": (chat(ASK, SAY | {"mask": True}), "has mask in a message"),
    "a reasoning": (chat(ASK, SAY | {"reasoning_content": "Hm."}), "has reasoning_content in a message; write it into the answer"),
    "a loss mask of 0": (chat(ASK, SAY | {"loss_mask": 0}), "learns none of its answers"),
    **{f"a column {name} of splits": (halves(name, *values), OTHER_SPLIT.format("my.csv", "my.csv", split)) for name, values, split in (
        ("is_test", ("False", "True"), "test"), ("is_training_image", (1, 0), "test"), ("Usage", ("Training", "PublicTest"), "PublicTest"),
        ("data_type", ("train2014", "val2014"), "val"), ("is_eval", (0, 1), "eval"), ("holdout", ("False", "True"), "holdout"),
        ("train_test", ("train", "test"), "test"), ("split_name", ("train", "dev-clean"), "dev-clean"), ("phase", ("Train", "Val"), "val"),
    )},
    **{f"numbers of a {name}": (halves(name, 0, 2), f"my.csv has rows of the splits 0 (1) and 2 (1), {APART}") for name in ("partition", "cv_fold", "split")},
    "YOLO's boxes": (captions("a") | {"a.txt": "0 0.5 0.5 0.1 0.1\n17 .5 1.0 0.2 0.25\n"}, "a.png has YOLO's boxes in a.txt; write a text there"),
    "a box in a response": (rows({"images": ["a.png"], "query": "<image>Q?", "response": "<bbox>", "objects": {}}), "the mark <bbox> in its answer"),
    "a box in an answer": (chat(ASK, message("assistant", "<bbox>"), objects={"bbox": [[1, 2, 3, 4]]}), "the mark <bbox> in its answer; write the numbers"),
    "splits named by images": (SPLIT_ROWS, OTHER_SPLIT.format(".", "./metadata.csv", "test")),
    "a column split": (rows({"image": "a.png", "text": "x", "split": "train"}, {"image": "b.png", "text": "y", "split": "val"}),
        OTHER_SPLIT.format("d.json", "d.json", "val")),
    "a column subset": (rows({"image": "a.png", "text": "x", "Subset": "Training"}, {"image": "b.png", "text": "y", "Subset": "Testing"}),
        OTHER_SPLIT.format("d.json", "d.json", "testing")),
    "two answers": (rows({"image": "a.png", "text": "x", "caption": "y"}), "'text' and 'caption', each may be the answer; --text-column names it"),
    "two questions": (qa(prompt="P?"), "may be the question; --prompt-column names it"),
    "two images": (qa(img="b.png"), "may be the image; --image-column names it"),
    "a chat beside columns": (chat(ASK, SAY, caption="x"), "'messages' and 'caption', each may be"),
    "choices": (qa(choices=["A.", "B."]), "has choices beside its answer"),
    "lists of two lengths": (qa(question=["Who?", "When?", "Where?"], answer=["Ann", "1999"]), "has 3 questions, but 2 answers"),
    "questions of one answer": (qa(question=["Who?", "When?"]), "has 2 questions, but 1 answers"),
    "Alpaca's input": (rows({"image": "a.png", "instruction": "Q?", "input": "WHICH", "output": "A."}),
        "has input beside its answer; write it into the question, or leave it out by naming the answer with --text-column"),
    "history": (rows({"image": "a.png", "query": "Q?", "response": "A.", "history": [["q", "a"]]}), "has history beside"),
    "letters": (qa(A="x", B="y", C="z"), "has A and B and C beside its answer"),
    "options by letter": (qa(option_a="x", option_b="y"), "has option_a and option_b beside"),
    "context": (qa(context="In 1999."), "has context beside"),
    "a hint": (qa(hint="Look."), "has hint beside"),
    "tools": (chat(ASK, SAY, tools=[{"name": "f"}]), "has tools beside"),
    "numbered columns of images": (qa(image_2="b.png"), "has image_2; name all of its images in one list"),
    "a part of weight 0": (chat(ASK, message("assistant", text("WRONG") | {"weight": 0}, text("A."))),
        "has a weight of its own at a part of an answer"),
    "a part that is not trained": (chat(ASK, message("assistant", text("A.") | {"train": False})), "at a part of an answer"),
    "axolotl's details": (chat(ASK, SAY | {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}), "has train_detail in a message"),
    "Ollama's images": (rows({"messages": [message("user", "Q?") | {"images": ["a.png"]}, SAY]}), "has the key images in a message"),
    "an image of the system": (chat(message("system", "<image>"), ASK, SAY), "an image in a message of 'system'"),
    "no text": (rows({"image": "a.png", "words": "x"}), "only image, words; name one with --text-column"),
    "nan": (rows({"image": "a.png", "text": float("nan")}), "an empty answer"),
    "nan in a csv": (table("file_name,text\na.png,nan\n"), "the answer 'nan'"),
    "true": (qa(answer=True), "of type bool, which must be text"),
    "an empty question": (qa(question=""), "no question in question"),
    "no images": (rows({"photo_of": "a.png", "text": "x"}), "--image-column names it"),
    "a missing image": (qa(image="c.png"), "names the image c.png, which is not in . or one folder below"),
    "two folders": ({"i/a.png": A, "j/a.png": B, "d.json": [{"image": "a.png", "text": "x"}]},
        "which i and j have; name the folder of the images with --images FOLDER"),
    "ids twice": (table(TWICE, "d.json"), "2 images with the id 1"),
    "a line": (table(b'{"a": 1}\n{oops\n', "d.jsonl"), "d.jsonl, line 2, cannot be read"),
    "a cut line": (table(b'{"a": 1}\n{"a": "\xc3', "d.jsonl"), "line 2, cannot be read"),
    "a deep line": (table(b'{"a":' * 100_000, "d.jsonl"), "line 1, cannot be read"),
    "no object": (table([[1]], "d.jsonl"), "not a list of objects"),
    "UTF-16": (table("a,b\n".encode("utf-16")), "save it as UTF-8"),
    "nothing": (table([], "d.json"), "d.json is empty"),
    "an unknown id": (table(coco([(1, "a.png")], [(2, "x")])[1], "d.json"), "captions but no images with the id 2"),
    "preferences": (qa(rejected_response="B."), "is preference data"),
    "a video": (qa(video="a.mp4"), "names a video"),
    "other marks": (qa(question="<|image_1|> Q?"), "the mark <|image_1|> in its question"),
    "too many marks": (qa(question="<image><image>Q?"), "marks the positions of 2 images, but has 1"),
    "half a weight": (chat(ASK, SAY | {"weight": 0.5}), "the weight 0.5; only 0 and 1"),
    "nothing learned": (chat(ASK, SAY | {"weight": 1, "loss": False}), "learns none of its answers"),
    "a tool": (chat(ASK, SAY | {"tool_calls": [{}]}), "calls a tool"),
    "an odd role": (chat(ASK, message("tool", "x")), "message 2 of 'tool'"),
    "no last answer": (chat(ASK, SAY, ASK), "its answer is missing"),
    "a web address": (qa(image="https://x/a.png"), "download it"),
    "no captions": ({"a.png": A}, "captions missing: 1 images in ."),
    "captions of another extension": ({"a.png": A, "a.caption": "x"}, "label; --extension .caption reads a.caption"),
    "another extension's captions missing": (captions("a"), "--extension .txt reads a.txt", {"extension": ".caption"}),
    "Flickr8k": ({"Images/a.png": A, "captions.txt": "image,caption\na.png,x\n"},
        "captions.txt stands beside no image: if it is a table, call it .csv"),
    "a record beside each image": (TWO | {"a.json": {"text": "x"}, "b.json": {"text": "y"}}, "of records beside each image make one metadata.jsonl"),
    "a key twice": (table(b'[{"image": "a.png", "text": "x", "text": "y"}]', "d.json"), "several values of 'text'"),
    "a key twice in a line": (table(b'{"image": "a.png", "text": "x"}\n{"text": "x", "text": "x"}', "d.jsonl"),
        "d.jsonl, line 2, cannot be read: an object has several values of 'text'"),
    "base64": (rows({"image": base64.b64encode(A).decode(), "text": "x"}),
        "d.json[0] has base64 where an image should be, iVBORw0KGgoAAAANSUhE...; write data:image/png;base64, before it"),
    "a long cell": (table("image,text\na.png,x\na.png," + "y" * 131073, "my.csv"), "my.csv, line 3, has a cell of more than 131,072 letters"),
    "a quote that is not closed": (table("image,text\na.png,\"x\n" + "a.png,y\n" * 20_000, "my.csv"), "close its quotes"),
    "a million columns": (table("image," + ",".join(map(str, range(10**6))) + "\n", "my.csv"), "has 1,000,001 columns in its first line"),
    "many columns": (rows({"image": "a.png", "text": "x"} | {f"{i}": 1 for i in range(20_000)}), "has 20,002 columns; at most 10,000 are read"),
    "many images": (rows({"images": ["a.png"] * 10_001, "text": "x"}), "has 10,001 images"),
    "many answers": (rows({"image": "a.png", "text": ["x"] * 100_000}), "has 100,000 answers"),
    "many turns": (chat(*[ASK, SAY] * 50_000), "has 100,000 messages"),
    "a percent sign": (rows({"image": "my%20a.png", "text": "x"}), "below it, as names of files have no %20; name the folder"),
    "marks of boxes": (chat(message("user", "<image>Find <ref-object>."), SAY), "the mark <ref-object> in its question"),
    "a column set": (rows({"image": "a.png", "text": "x", "set": "train"}, {"image": "b.png", "text": "y", "set": "test"}),
        OTHER_SPLIT.format("d.json", "d.json", "test")),
    "the cause first": (rows({"image": "a.png", "text": ""}), "d.json[0] has an empty answer to 'What?'; write it, or remove the example; no record"),
    "one label": ({"x/a.png": A}, "captions missing: 1 images in ."),
    "labels of two levels": ({"x/a.png": A, "y/z/b.png": B, "y/c.png": B}, "the first ./y/z/b.png"),
    "some texts missing": (captions("a") | {"b.png": B}, "1 of 2 records of . cannot be used, the first: ./b.png has no text: b.txt: No such file"),
    "a text that is no UTF-8": (captions("a") | {"a.txt": b"\xff"}, "a.png has no text: a.txt is not UTF-8 ('utf-8' codec"),
    "a chat with a question of columns": (chat(ASK, SAY), "--prompt-column has no effect", {"prompt_column": "image"}),
    "other images in the chat": (chat(message("user", IMAGE, text("Q?")), SAY, image="b.png"), "names images in its messages and in image"),
    "an image in an answer": (chat(ASK, message("assistant", IMAGE, text("A."))),
        "has an image in a message of 'assistant'; only the user shows images"),
    "a part": (chat(message("user", {"type": "file", "file": "x"})), "a part of type 'file'"),
    "no list": (rows({"image": "a.png", "messages": "x"}), "must be a list of messages"),
    "no chat": (rows({"image": "a.png", "messages": [1]}), "has an unknown structure"),
    "a number for an image": (qa(image=7), "has 7 where an image should be"),
    "no base64": (qa(image="data:image/png;base64,?"), "holds an image: a data URL with invalid base64"),
    "a mask beside": (captions("a") | {"a.jpg": A}, "a.txt stands beside"),
    "an open quote": (table('file_name,text\na.png,"x\nb.png,y\n'), "unexpected end of data"),
    "cells too many": (table("file_name,text\na.png,x,y\n"), "row 1, has more cells than columns"),
    "columns twice": (table("file_name,text,text\na.png,x,y\n"), "several columns named 'text'"),
    "two tables": (table("file_name,text\na.png,x\n") | {"metadata.jsonl": []}, "name the one to read"),
    "two json": (qa() | {"e.json": []}, "name the one to read", {"path": "."}),
    "COCO's objects": (table({"images": COCO["images"], "annotations": [{"image_id": 1, "bbox": [0, 0, 1, 1], "category_id": 1}]}, "d.json"),
        "d.json holds COCO's objects in images, without captions; take captions_*.json"),
    "VQA's questions": (table({"info": {}, "questions": [{"image_id": 9, "question": "Q?", "question_id": 1}]}, "d.json"),
        "VQA's questions without their answers; join the files of questions and annotations by question_id"),
    "VQA's answers": (table({"annotations": [{"question_id": 1, "image_id": 9, "multiple_choice_answer": "A.", "answers": []}]}, "d.json"),
        "VQA's answers without their questions; join"),
    "answers by question": (table({"7": {"question": "Q?"}, "8": {}}, "d.json"), "holds an object with '7', '8', not a list of objects"),
    "images numbered twice": (chat(message("user", {"type": "image", "index": 0}, text("Q?"), {"type": "image", "index": 0}), SAY, image=["a.png", "b.png"]),
        "numbers its images [0, 0]"),
    "images numbered beyond": (chat(message("user", {"type": "image", "index": 0}, text("Q?"), {"type": "image", "index": 2}), SAY, image=["a.png", "b.png"]),
        "numbers its images [0, 2]"),
    "nan as a text": (rows({"image": "a.png", "text": "NaN"}), "the answer 'NaN' to 'What?', which stands for a missing value"),
    "NaN in a chat": (chat(ASK, message("assistant", "<NA>")), "the answer '<NA>' to 'Q?'"),
    "a list in a text": (rows({"image": "a.png", "text": [["x"]]}), "of type list, which must be text"),
    "half a question": (qa(question="Q\ud83d?"), "d.json[0] has half of a character"),
    "a missing question": (table("file_name,question,answer\na.png,N/A,x\n"), "no question in question"),
    "an object": (table({"data": []}, "d.json"), "holds an object with 'data', not a list"),
    "broken json": (table(b'[{"a": 1}', "d.json"), "cannot be read"),
    "no such file": ({}, "no such file or folder", {"path": "gone"}),
    "other files": ({"a.xml": "x"}, "no known extension", {"path": "a.xml"}),
    "nothing in a folder": ({"a.xml": "x"}, "no images found in .; data is images with a .txt beside each"),
    "a model": ({"config.json": {}, "model.safetensors": b""}, "holds a model, not data"),
    "a name that no file can have": (rows({"image": "x" * 5000, "text": "A."}),
        "names the image xxxxxxxxxxxxxxxxxxxx..., of 5,000 letters; name a file of at most 4,096"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    files, words, options = (*REFUSED[name], {})[:3]
    path, options = written(files, options)
    check_refused(path, words, options=options)


def test_only_texts_are_offered_as_captions():
    for name in ("a.png", "a.xml", "a.npz", "a.safetensors", "a.mp4"):
        write(name, A)
    assert "--extension" not in str(check_refused(".", "put them into one folder per label"))


def test_names_masks_and_the_default_question():
    wrong = message("assistant", "WRONG") | {"weight": 0}
    for name, content in (captions("a") | chat(ASK, wrong, message("user", "Again."), SAY | {"loss": True})).items():
        write(f"mine/{name}", content)
    example = open_source("mine/d.json", ReadOptions())[0]
    assert pairs_of(example) == [("Q?", "WRONG"), ("Again.", "A.")]
    assert example.answers() == ["A."]
    Path("mine/b.png").unlink()
    assert read_all("mine", ReadOptions()) == [("mine/a.png", [1], [(PROMPT, "a!")])]


def test_a_class_called_nan_is_no_missing_answer():
    with pytest.raises(ExampleError, match="'text' and 'caption', each may be the answer"):
        to_example(Record({"image": "a.png", "text": "nan", "caption": "x"}, "a[0]", classes=["text"]), OPTIONS)


FULL_PIPES = [pytest.param(f"a.{kind}", marks=pytest.mark.full) for kind in ("parquet", "tar", "arrow")]


@pytest.mark.parametrize("name", ["x.png", "y.txt", "metadata.jsonl", "d.csv", "d.json", *FULL_PIPES])
def test_a_pipe_is_no_file(name):
    for other, content in {"x.txt": "x", "y.png": A}.items() if name[0] in "xy" else ():
        write(f"m/{other}", content)
    Path("m").mkdir(exist_ok=True)
    os.mkfifo(f"m/{name}")
    check_refused(f"m/{name}", f"m/{name} is not a file; data is")
    for stream in {False, name[0] == "a"}:
        check_refused("m", f"m/{name} is a pipe or a device", options=replace(OPTIONS, stream=stream))
    Path("m", name).unlink()
    Path("m", name).symlink_to("/dev/zero")
    check_refused("m", f"m/{name} is a pipe or a device")


def test_a_folder_that_cannot_be_opened_is_refused(monkeypatch):
    for name, content in captions("mine/a").items():
        write(name, content)
    scandir = os.scandir
    for folder in ("mine/in", "mine/lost+found"):
        os.mkdir(folder)

    def opened(path):
        if os.path.basename(path) in ("in", "lost+found"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", opened)
    check_refused("mine", "mine/in cannot be opened: Permission denied; allow it, or move the folder away")
    os.rmdir("mine/in")
    assert [name for name, *_ in read_all("mine")] == ["mine/a.png"]


def test_links_are_followed_once_and_model_folders_left_out():
    for name in ("mine/b/1", "far/2", "mine/out/report"):
        write(f"{name}.png", A)
        write(f"{name}.txt", "one")
    write("mine/out/model.safetensors", "")
    for link, target in (("mine/a", "b"), ("mine/b/up", ".."), ("mine/c", "../far")):
        Path(link).symlink_to(target, target_is_directory=True)
    assert [name for name, *_ in read_all("mine")] == ["mine/b/1.png", "mine/c/2.png"]


# ------------------------------------------------------------------------------------- the datasets library

FIVE = {f"{i}.{kind}": png(i) if kind == "png" else b"x" for i in range(5) for kind in ("png", "txt")}
# id: files of a tar, expected or words, words of the lines
TARS = {
    "texts": ({"0.png": A, "0.txt": b" x \n"}, CAPTION, "1 different image"),
    "records": ({"0.PNG": A, "0.json": b'{"caption": "x", "n": 1}'}, CAPTION, "column n"),
    "pages": ({f"0.page.{i}.png": png(i) for i in (10, 2)} | {"0.txt": b"x"}, [([2, 10], [("What?", "x")])], "images"),
    "a mask": ({"0.jpg": A, "0.mask.png": B, "0.txt": b"x"}, CAPTION, "not read: column mask.png"),
    "a record with a key twice": ({"0.png": A, "0.json": b'{"text": "x", "text": "y"}'}, "a.tar, 0.json, cannot be read: an object has several", ""),
    "a hidden file": ({"._0.json": b"\xff", "0.png": A, "0.txt": b"x"}, CAPTION, "not read: 1 files of types that"),
    "a rejected answer": ({"0.png": A, "0.json": b'{"text": "x", "label": false}'}, "0 has label False beside its answer", ""),
    "a later mask": (FIVE | {"5.mask.png": A, "5.png": A, "5.txt": b"x"}, 6, "not read: 1 files of types that"),
    "splits": ({"train/0.png": A, "train/0.txt": b"x", "test/0.png": B, "test/0.txt": b"y"},
               "1 of 2 records of a.tar cannot be used, the first: a.tar[1] test/0 is of the split 'test'", ""),
    "two images": ({"0.left.png": A, "0.right.png": B, "0.txt": b"x"}, "--image-column names it", ""),
    "a name twice": ([("0.png", A), ("0.txt", b"x"), ("0.png", B), ("0.txt", b"y")], "Duplicate field 'png'", ""),
    "no image": ({"0.txt": b"x"}, "has no image", ""),
    "no text": ({"0.png": A, "0.cls": b"1"}, "only cls, png; name one with --text-column", ""),
    "a later type": (FIVE | {"5.jpg": A, "5.txt": b"x"}, "5 has no image of the types that the first samples have", ""),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("files", "expected", "words"), TARS.values(), ids=TARS)
def test_tars(files, expected, words):
    write_tar("a.tar", files)
    if isinstance(expected, str):
        check_refused("a.tar", expected)
        return
    for stream in {False, expected != 6}:  # in a stream, `datasets` cannot cast a later type
        options = replace(OPTIONS, stream=stream)
        found = [(seeds, pairs) for _, seeds, pairs in read_all("a.tar", options)]
        assert found == expected or len(found) == expected
        assert words in " | ".join(open_source("a.tar", options).lines)


@pytest.mark.full
def test_files_that_are_cut_broken_or_unreachable_are_one_line(monkeypatch):
    write_tar("a.tar", FIVE)
    content = Path("a.tar").read_bytes()
    Path("a.tar").write_bytes(content[: content.rindex(png(4)) + 9])
    check_refused("a.tar", "unexpected end of data")
    Path("a.tar").write_bytes(content[: content.rindex(b"4.png")])
    assert any("it may have been cut" in line for line in open_source("a.tar", OPTIONS).lines)
    write("half.parquet", b"PAR1 and no end")
    check_refused("half.parquet", "half.parquet: the datasets library cannot read it", "download it again")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    check_refused("lab/nothing", "lab/nothing: the datasets library cannot read it")
    monkeypatch.setitem(sys.modules, "datasets", None)
    check_refused("half.parquet", "pip install 'nanovlm[data]'")


@pytest.mark.full
def test_parquet_arrow_and_folders_of_save_to_disk():
    import datasets

    features = datasets.Features(
        images=datasets.List(datasets.Image()),
        texts=[{"user": datasets.Value("string"), "assistant": datasets.Value("string")}],
        kind=datasets.ClassLabel(names=["x", "y"]),
    )
    turns = [{"user": "Q?", "assistant": "A."}, {"user": "Why?", "assistant": "So."}]
    rows = datasets.Dataset.from_dict({"images": [[A], [A, B]], "texts": [turns, turns[:1]], "kind": [0, 1]}, features)
    rows.save_to_disk("saved")
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk("split")
    datasets.DatasetDict(a=rows, test=rows).save_to_disk("none")
    for folder in ("rows", "parts/train", "parts/test"):
        Path(folder).mkdir(parents=True)
    rows.to_parquet("rows/train-0.parquet")
    rows.select([0]).to_parquet("rows/test-0.parquet")
    rows.to_parquet("parts/train/test-0.parquet")
    rows.select([0]).to_parquet("parts/test/train-0.parquet")
    datasets.Dataset.from_list([{"file_name": "a.png", "text": "x"}]).to_parquet("mine/metadata.parquet")
    write("mine/a.png", A)
    expected = [([1], [("Q?", "A."), ("Why?", "So.")]), ([1, 2], [("Q?", "A.")])]
    address = Path("rows/train-0.parquet").resolve().as_uri()
    for path in ("saved", "split", "rows", "parts", "rows/train-0.parquet", address, "mine"):
        found = [(seeds, pairs) for _, seeds, pairs in read_all(path)]
        assert found == (CAPTION if path == "mine" else expected), path
    assert any("not read: test" in line for line in open_source("split", OPTIONS).lines)
    named = open_source("saved", replace(OPTIONS, text_column="kind"))
    assert [pairs_of(named[i]) for i in (0, 1)] == [[("What?", "x")], [("What?", "y")]]
    check_refused("none", "has no split 'train', only a, test")


@pytest.mark.full
def test_training_imports_neither_the_drawer_nor_ray_nor_the_server():
    code = "import sys, nanovlm.training.finetuning; names = ('nanovlm.synthetic', 'ray', 'nanovlm.serving')"
    code += "; print([name for name in sys.modules if name.startswith(names)])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
