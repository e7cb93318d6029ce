"""Each kind of data, written as its users write it, gives the pictures, questions and answers that stand in it."""

import base64
import csv
import io
import json
import logging
import pickle
import random
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from nanovlm import PROMPT
from nanovlm.data import Mixture, ReadOptions, Stream, Subset, open_source
from nanovlm.data.examples import ExampleError
from nanovlm.errors import DataError
from nanovlm.image_processing import load_image
from nanovlm.synthetic.recipe import scene_source

ASK = ReadOptions(prompt="What?")


def noise(seed=0, width=20, height=16):
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(width * height * 3))


def png(seed):
    noise(seed).save(file := io.BytesIO(), "png")
    return file.getvalue()


@pytest.fixture(autouse=True)
def standing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(path, content):
    """A file of bytes, text, or anything as JSON; a .jsonl has an object a line."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        content = "".join(json.dumps(row) + "\n" for row in content)
    elif not isinstance(content, (bytes, str)):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def told(path, reading=ASK):
    """What a source says: (name, the pictures' seeds, answers, chain) of each example, after a journey by pickle."""
    source = pickle.loads(pickle.dumps(open_source(str(path), reading)))
    return [
        (example.name, [seed_of(picture) for picture in example.pictures], list(example.answers), example.chain)
        for example in (source[i] for i in range(len(source)))
    ]


def seed_of(picture):
    shown = load_image(picture).tobytes()
    return next(seed for seed in range(20) if noise(seed).tobytes() == shown)


def refused(path, *words, reading=ASK):
    """Opening, or reading its examples, ends in one line with these words."""
    with pytest.raises((DataError, ExampleError)) as error:
        source = open_source(str(path), reading)
        for i in range(len(source)):
            source[i]
    line = str(error.value)
    assert "\n" not in line and all(word in line for word in words), line
    return error.value


# ------------------------------------------------------------------------------------------ pictures in folders


def test_a_folder_of_pictures_with_texts_beside_them():
    for name, seed in (("b.png", 1), ("cats/a.PNG", 2), ("cats/deep er/ü.v2.png", 3), (".trash/x.png", 4)):
        write(f"mine/{name}", png(seed))
        write(Path("mine", name).with_suffix(".txt"), f"\ufeff Number {seed}.\r\n")
    write("mine/notes.txt", "not about a picture")
    assert told("mine") == [
        ("mine/b.png", [1], [("What?", "Number 1.")], False),
        ("mine/cats/a.PNG", [2], [("What?", "Number 2.")], False),
        ("mine/cats/deep er/ü.v2.png", [3], [("What?", "Number 3.")], False),
    ]
    assert told("mine", ReadOptions())[0][2] == [(PROMPT, "Number 1.")]


def test_a_models_folder_among_the_pictures_is_none_of_them():
    """train.py --data . --out out leaves a report.png there."""
    for name in ("a", "photos/b", "out/report"):
        write(f"mine/{name}.png", png(1))
    for name in ("a", "photos/b"):
        write(f"mine/{name}.txt", "one")
    refused("mine", "captions missing: 1 of 3", "out/report.png")
    write("mine/out/model.safetensors", "")
    assert [name for name, *_ in told("mine")] == ["mine/a.png", "mine/photos/b.png"]


def test_captions_that_are_missing_are_counted_and_named():
    for i in range(6):
        write(f"mine/{i}.png", png(i))
    refused("mine", "captions missing: 6 of 6 pictures in mine", ": 0.png, 1.png, 2.png ...", "write them")
    write("mine/3.txt", "three")
    refused("mine", "5 of 6", ": 0.png, 1.png, 2.png ...", "--on-bad-example skip")
    assert told("mine", replace(ASK, skip=True)) == [("mine/3.png", [3], [("What?", "three")], False)]


ROWS = [{"file_name": "a.png", "text": " one\n", "n": 1}, {"file_name": "in/b.png", "text": "two", "n": 2}]


def write_table(path, rows):
    if path.endswith(".csv"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif path.endswith(".parquet"):
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        write(path, rows)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_an_imagefolder(kind):
    write("mine/a.png", png(1))
    write("mine/in/b.png", png(2))
    write_table(f"mine/metadata.{kind}", ROWS)
    expected = [("mine/a.png", [1], [("What?", "one")], False), ("mine/in/b.png", [2], [("What?", "two")], False)]
    assert told("mine") == told(f"mine/metadata.{kind}") == expected
    assert told("mine", replace(ASK, text_column="n", prompt_column="text"))[1][2] == [("two", "2")]
    for flag in ("text_column", "prompt_column"):
        refused("mine", "no column 'colour'", "only file_name, n, text", reading=replace(ASK, **{flag: "colour"}))


def test_an_imagefolder_in_parts_with_questions_and_several_answers():
    for part, seed in (("train", 1), ("test", 2)):
        write(f"mine/{part}/a.png", png(seed))
        row = {"file_name": "a.png", "question": f"Who is {seed}?", "answer": [f"{seed}", "nobody"]}
        write(f"mine/{part}/metadata.jsonl", [row])
    assert told("mine") == [
        ("mine/test/a.png", [2], [("Who is 2?", "2"), ("Who is 2?", "nobody")], False),
        ("mine/train/a.png", [1], [("Who is 1?", "1"), ("Who is 1?", "nobody")], False),
    ]


def test_tables_that_say_too_little():
    write("mine/metadata.jsonl", [{"picture": "a.png", "text": "x"}])
    refused("mine", "no column 'file_name', only picture, text")
    write("mine/metadata.jsonl", [{"file_name": "a.png", "n": "x"}])
    refused("mine", "no column text, caption", "only file_name, n", "--text-column")
    write("mine/metadata.jsonl", [])
    refused("mine", "no pictures found", "has no rows")
    write("mine/metadata.jsonl", [{"file_name": "a.png", "text": "x"}, {"file_name": "", "text": "x"}])
    refused("mine", "metadata.jsonl, row 2 has no file_name")
    write("mine/metadata.jsonl", "")
    Path("mine/metadata.jsonl").write_text('{"file_name": "a.png", "text": "x"}\n{oops\n')
    refused("mine", "metadata.jsonl, line 2, cannot be read")
    Path("mine/metadata.jsonl").rename("mine/metadata.parquet")
    refused("mine", "metadata.parquet cannot be read")


# ------------------------------------------------------------------------------------------------ conversations


def llava(*turns, **more):
    pairs = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(turns)]
    return {"id": "7", "conversations": pairs, **more}


@pytest.mark.parametrize("folder", ["images", ".", "../images", "elsewhere"])
def test_llavas_conversations_find_their_pictures(folder):
    root = Path("data") / folder if folder != "elsewhere" else Path("far/away")
    write(root / "coco/a.png", png(1))
    records = [
        llava("<image>\nWhat is this?", " A star. ", "Red?\n<image>", "Yes.", image=["coco/a.png", "coco/a.png"]),
        llava("Hello?", "Hi."),
        llava("What?", "Noise.", image="coco/a.png"),
    ]
    write("data/llava.json", records)
    reading = replace(ASK, images="far/away") if folder == "elsewhere" else ASK
    assert told("data/llava.json", reading) == [
        ("data/llava.json[0]", [1, 1], [("What is this?", "A star."), ("Red?", "Yes.")], True),
        ("data/llava.json[1]", [], [("Hello?", "Hi.")], False),
        ("data/llava.json[2]", [1], [("What?", "Noise.")], False),
    ]
    if folder == "images":
        assert told("data", reading) == [
            ("data/llava.json" + name[15:], *rest) for name, *rest in told("data/llava.json")
        ]
    if folder == "elsewhere":
        refused("data/llava.json", "names the picture coco/a.png", "--images FOLDER")
        refused("data/llava.json", "not in nowhere", "--images FOLDER", reading=replace(ASK, images="nowhere"))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (llava("<image> <image>", "x", image="a.png"), "marks the places of 2 pictures, but has 1"),
        (llava("What?"), "ends with a question"),
        (llava("What?", "x", "And?"), "ends with a question"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "'gpt'; user and assistant must take turns"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "message 1 is of 'bot'"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "part of type 'audio'"),
        (llava("What?", "x", image="https://x.org/a.png"), "https://x.org/a.png; download it"),
        (llava("What?", "x", image="data:image/png;base64,%"), "no base64"),
        (llava("What?", "x", images=[None]), "an empty place"),
        ({"conversations": [5]}, "laid out in no way that is known here"),
        ({"conversations": 5}, "laid out in no way that is known here"),
        ({"texts": ["What?"]}, "laid out in no way that is known here"),
        ({"messages": [{"role": "user", "content": ["What?"]}]}, "laid out in no way that is known here"),
        ({"image": "a.png", "caption": {"en": "x"}}, "a dict stands where words should be"),
        ({"image": "a.png", "words": "x"}, "has no column text, caption, answer, captions, only image, words"),
        ({"image": "a.png", "conversations": []}, "has no answer to learn"),
        ({"images": ["a.png"], "texts": []}, "has no answer to learn"),
    ],
)
def test_a_conversation_that_makes_no_sense_is_named(record, words):
    write("a.png", png(1))
    write("chat.json", [llava("What?", "x", image="a.png"), record])
    assert isinstance(refused("chat.json", "chat.json[1]", words), ExampleError), "so that it can be skipped"


def message(role, *parts):
    return {"role": role, "content": parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)}


def text(words):
    return {"type": "text", "text": words}


def test_chats_of_messages_in_every_style():
    for seed in (1, 2):
        write(f"pictures/{seed}.png", png(seed))
    inline = "data:image/png;base64," + base64.b64encode(png(3)).decode()
    openai = [
        message("system", "Be short."),
        message("user", {"type": "image_url", "image_url": {"url": inline}}, text("What?")),
        message("assistant", "Noise."),
        message("user", text("Like this?"), {"type": "image_url", "image_url": {"url": "1.png"}}),
        message("assistant", text("No.")),
    ]
    hf = [
        message("user", {"type": "image"}, {"type": "image", "text": None}, text("Same?")),
        message("assistant", "No."),
    ]
    path = [message("user", {"type": "image", "path": "2.png"}, text("Hm?")), message("assistant", "Ah.")]
    strings = [message("user", "<image>Who?"), message("assistant", "Me.")]
    records = [
        {"messages": openai, "images": None},
        {"messages": hf, "images": ["1.png", "2.png"]},
        {"messages": path},
        {"messages": strings, "images": [{"path": "2.png", "bytes": None}]},
    ]
    expected = [
        ([3, 1], [("Be short.\n\nWhat?", "Noise."), ("Like this?", "No.")], True),
        ([1, 2], [("Same?", "No.")], False),
        ([2], [("Hm?", "Ah.")], False),
        ([2], [("Who?", "Me.")], False),
    ]
    for name in ("chat.jsonl", "chat.json"):
        write(name, records)
        assert told(name, replace(ASK, images="pictures")) == [(f"{name}[{i}]", *e) for i, e in enumerate(expected)]


@pytest.mark.parametrize("images", ["coco/train2017", "coco/annotations/img"])
def test_cocos_captions_are_branches_of_their_picture(images):
    for seed in (1, 2):
        write(f"{images}/{seed}.png", png(seed))
    found = {
        "images": [{"id": 10 * seed, "file_name": f"{seed}.png"} for seed in (2, 1)],
        "annotations": [{"image_id": id, "caption": f"{words} {id}"} for words in ("A", "The ") for id in (10, 20)],
    }
    write("coco/annotations/captions.json", found)
    assert told("coco/annotations/captions.json") == [
        (f"{images}/2.png", [2], [("What?", "A 20"), ("What?", "The  20")], False),
        (f"{images}/1.png", [1], [("What?", "A 10"), ("What?", "The  10")], False),
    ]
    found["images"].append({"id": 30, "file_name": "3.png"})
    write("coco/annotations/captions.json", found)
    refused("coco/annotations/captions.json", "captions missing: 1 of 3", ": 3.png;", "--on-bad-example skip")
    assert len(told("coco/annotations/captions.json", replace(ASK, skip=True))) == 2
    found["annotations"][0]["image_id"] = 99
    write("coco/annotations/captions.json", found)
    refused("coco/annotations/captions.json", "COCO", "99")


# ------------------------------------------------------------------------------------- rows of the datasets library


TURNS = [{"user": "What is this?", "assistant": "A star."}, {"user": "Red?", "assistant": "Yes. "}]


def finevision():
    """Three rows as the_cauldron and FineVision have them; the third shows two pictures, its first is rated low."""
    from datasets import Dataset, Features, Image, List, Value

    features = Features(
        images=List(Image()),
        texts=[{"user": Value("string"), "assistant": Value("string")}],
        formatting_ratings=List(Value("int64")),
        source=Value("string"),
    )
    rows = {
        "images": [[noise(1)], [noise(2)], [noise(3), noise(4)]],
        "texts": [TURNS, TURNS[:1], TURNS],
        "formatting_ratings": [[5, 2], [1], [None, 4]],
        "source": ["a", "b", "c"],
    }
    return Dataset.from_dict(rows, features=features)


PAIRS = [("What is this?", "A star."), ("Red?", "Yes.")]
EXPECTED = [([1], PAIRS, True), ([2], PAIRS[:1], False), ([3, 4], PAIRS, True)]
RATED = [("[0]", [1], PAIRS[:1], False), ("[2]", [3, 4], PAIRS, True)]
HIGH = replace(ASK, min_ratings={"formatting": 3})


@pytest.fixture
def cache(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("form", ["folder", "splits", "parquet", "arrow"])
def test_rows_on_disk(form, cache):
    from datasets import DatasetDict

    rows, path = finevision(), "rows"
    if form == "folder":
        rows.save_to_disk(path)
    elif form == "splits":
        DatasetDict(train=rows, test=rows.select([0])).save_to_disk(path)
    else:
        Path(path).mkdir()
        rows.to_parquet("rows/a.parquet")
        if form == "arrow":
            rows.save_to_disk("saved")
            Path("rows/a.parquet").unlink()
            next(Path("saved").glob("*.arrow")).rename("rows/a.arrow")
    assert told(path) == [(f"rows[{i}]", *e) for i, e in enumerate(EXPECTED)]
    assert told(path, HIGH) == [(f"rows{at}", *rest) for at, *rest in RATED]
    refused(path, "no column 'beauty_ratings', only", "formatting_ratings", reading=ReadOptions(min_ratings={"beauty": 1}))
    rows.select([1]).save_to_disk("low")
    refused("low", "no row rated so high", reading=HIGH)
    if form == "parquet":
        assert [rest for _, *rest in told("rows/a.parquet")] == [list(e) for e in EXPECTED]


@pytest.mark.parametrize("missing", ["datasets", "pyarrow"])
def test_a_library_that_is_missing_is_named_with_the_way_to_it(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    write("rows/a.parquet" if missing == "datasets" else "rows/metadata.parquet", b"PAR1")
    refused("rows", missing, "pip install 'nanovlm[data]'")


def test_rows_of_plain_columns_and_chats(cache):
    from datasets import Dataset

    chat = [message("user", text("<image>Who?")), message("assistant", text("Me."))]
    picture = {"bytes": png(5), "path": None}
    Dataset.from_list([{"image": picture, "caption": "Five."}]).save_to_disk("plain")
    Dataset.from_list([{"images": [picture], "messages": chat}]).save_to_disk("chat")
    assert told("plain") == [("plain[0]", [5], [("What?", "Five.")], False)]
    assert told("chat") == [("chat[0]", [5], [("Who?", "Me.")], False)]
    refused("plain", "no column 'n', only caption, image", reading=ReadOptions(text_column="n"))
    Dataset.from_list([{"caption": "Five."}]).save_to_disk("blind")
    refused("blind", "no pictures found", "only caption")


@pytest.fixture
def hub(monkeypatch, cache):
    """A Hub that has one data set, lab/rows with its subset small."""
    import datasets

    finevision().to_parquet("small.parquet")
    real = datasets.load_dataset

    def load_dataset(name, subset, streaming):
        assert (name, subset) == ("lab/rows", "small")
        return real("parquet", data_files="small.parquet", streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def test_rows_from_the_hub_also_as_a_stream(hub):
    assert told("lab/rows:small") == [(f"lab/rows:small[{i}]", *e) for i, e in enumerate(EXPECTED)]
    for reading, expected in ((ASK, [(f"[{i}]", *e) for i, e in enumerate(EXPECTED)]), (HIGH, RATED)):
        stream = open_source("lab/rows:small", replace(reading, stream=True))
        assert isinstance(stream, Stream)
        stream = pickle.loads(pickle.dumps(stream))
        found = [stream.example(row, stream.name(number)) for number, row in stream.numbered()]
        assert [(e.name, [seed_of(picture) for picture in e.pictures], list(e.answers), e.chain) for e in found] == [
            (f"lab/rows:small{at}", *rest) for at, *rest in expected
        ]


def test_a_stream_is_whole_in_every_process(hub):
    """The library would give each of two processes a part of it."""
    stream = open_source("lab/rows:small", replace(ASK, stream=True))
    order = [Mixture([Subset(stream, ())], 0).example(place).name for place in range(8)]
    assert set(order[:3]) == {f"lab/rows:small[{i}]" for i in range(3)}
    loader = DataLoader(Names(Mixture([Subset(stream, ())], 0)), batch_size=None, num_workers=2)
    assert list(loader) == order


class Names(Dataset):
    def __init__(self, mixture):
        self.mixture = mixture

    def __len__(self):
        return 8

    def __getitem__(self, place):
        return self.mixture.example(place).name


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch, cache):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    refused("lab/nothing", "lab/nothing: the datasets library cannot read it")


# ----------------------------------------------------------------------------------------------------- webdataset


def write_tar(path, files, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_webdataset_tars():
    Path("shards").mkdir()
    chat = json.dumps(llava("<image><image>Same?", "No.")).encode()
    write_tar(
        "shards/0.tar", {"0.png": png(1), "0.txt": b" one \n", "1.0.png": png(2), "1.1.png": png(3), "1.json": chat}
    )
    write_tar("shards/1.tar", {"x/0.json": b'{"caption": "four"}', "x/0.cls": b"9", "x/0.PNG": png(4)})
    expected = [
        ("shards/0.tar/0", [1], [("What?", "one")], False),
        ("shards/0.tar/1", [2, 3], [("Same?", "No.")], False),
        ("shards/1.tar/x/0", [4], [("What?", "four")], False),
    ]
    assert told("shards") == expected
    assert told("shards/0.tar") == expected[:2]


def test_tars_that_lack_something():
    write_tar("a.tar", {"0.png": png(1), "1.png": png(2), "1.txt": b"one", "2.txt": b"two"})
    refused("a.tar", "1 of 2 samples", ": 0;", "--on-bad-example skip")
    assert [example[0] for example in told("a.tar", replace(ASK, skip=True))] == ["a.tar/1"]
    write_tar("b.tar", {"0.txt": b"two"})
    refused("b.tar", "no pictures found")
    write_tar("c.tar", {"0.png": png(1), "0.txt": b"two"}, "w:gz")
    refused("c.tar", "c.tar is no tar that can be read at any place")
    files = {f"{i}.{kind}": png(i) if kind == "png" else b"?" for i in range(9) for kind in ("png", "txt")}
    write_tar("whole.tar", files)
    whole = Path("whole.tar").read_bytes()
    with tarfile.open("whole.tar") as tar:
        ends = [info.offset_data + -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE for info in tar]
    for end in (ends[3], ends[3] + 300, ends[3] + 512 - 1):  # between two files, and within the second's header
        Path("cut.tar").write_bytes(whole[:end])
        refused("cut.tar", "cut.tar is cut after 4 files; download it again", "--on-bad-example skip")
        assert [example[0] for example in told("cut.tar", replace(ASK, skip=True))] == ["cut.tar/0", "cut.tar/1"]
    Path("cut.tar").write_bytes(whole[: ends[4] - 512])
    refused("cut.tar", "cut.tar is no tar that can be read", "download it again")
    write_tar("d.tar", {"0.png": png(1), "0.json": b"{"})
    refused("d.tar", "d.tar/0: its text cannot be read")


# -------------------------------------------------------------------------------------------------------- anything


@pytest.mark.parametrize("kind", ["json", "tar", "parquet"])
def test_the_trace_of_an_example_changes_with_its_words_and_its_picture_and_not_when_written_again(kind, cache):
    import pyarrow
    from pyarrow import parquet

    def trace(picture, text):
        if kind == "json":
            write("a.png", picture)
            write("data.json", [{"image": "a.png", "caption": text}])
        elif kind == "tar":
            write_tar("data.tar", {"a.png": picture, "a.txt": text.encode()})
        else:
            parquet.write_table(
                pyarrow.table({"image": [{"bytes": picture, "path": None}], "caption": [text]}), "data.parquet"
            )
        return open_source(f"data.{kind}", ASK).trace(0)

    first = trace(png(1), "one")
    assert trace(png(1), "one") == first
    assert len({first, trace(png(1), "three"), trace(png(1) + b"\0", "one")}) == 3


def test_the_drawn_scenes_are_a_source():
    scenes = open_source("scenes", ASK, {"scenes": scene_source})
    one, again, other = scenes[7], scenes[7], scenes[8]
    assert one.answers == again.answers and one.pictures[0].tobytes() == again.pictures[0].tobytes()
    assert (one.name, len(one.answers)) == ("scenes[7]", 6)
    assert one.pictures[0].tobytes() != other.pictures[0].tobytes()


def test_a_parquet_that_is_cut_is_told_once(cache):
    told, listener = [], logging.Handler()
    listener.emit = told.append
    logging.getLogger("datasets").addHandler(listener)
    write("half.parquet", b"PAR1 and no end")
    refused("half.parquet", "half.parquet: the datasets library cannot read it", "download it again")
    logging.getLogger("datasets").removeHandler(listener)
    assert told == []


def test_places_without_data():
    Path("empty").mkdir()
    write("a.png", png(1))
    write("a.doc", b"x")
    write("two/a.json", [])
    write("two/b.json", [])
    write("what.json", [{"a": 1, "b": 2}])
    write("object.json", {"a": 1})
    write("broken.json", b"{")
    write("words.json", ["a"])
    refused("empty", "no pictures found in empty", ".txt", "metadata.jsonl")
    refused("nowhere", "nowhere: no such file or folder")
    refused("no/where/at/all", "no such file or folder")
    refused("a.png", "is one picture; name the folder")
    refused("a.doc", "a.doc is not known by its name")
    refused("two", "holds 2 .json files", "two/a.json")
    refused("two/a.json", "no pictures found")
    refused("what.json", "none of COCO's captions", "a, b")
    refused("object.json", "dict, not a list")
    refused("broken.json", "broken.json cannot be read")
    refused("words.json", "words.json[0] is str")
