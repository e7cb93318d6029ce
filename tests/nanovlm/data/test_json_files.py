"""JSON files as LLaVA, COCO and chat APIs write them."""

import base64
from dataclasses import replace
from pathlib import Path

import pytest

from nanovlm.data import open_source
from nanovlm.data.examples import ExampleError
from support.data import OPTIONS, check_refused, llava, message, png, read_all, text, write

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.mark.parametrize("folder", ["images", ".", "../images", "elsewhere"])
def test_llava_conversations_find_their_image_folder(folder):
    root = Path("data") / folder if folder != "elsewhere" else Path("far/away")
    write(root / "coco/a.png", png(1))
    records = [
        llava("<image>\nWhat is this?", " A star. ", "Red?\n<image>", "Yes.", image=["coco/a.png", "coco/a.png"]),
        llava("Hello?", "Hi."),
        llava("What?", "Noise.", image="coco/a.png"),
    ]
    write("data/llava.json", records)
    options = replace(OPTIONS, images="far/away") if folder == "elsewhere" else OPTIONS
    assert read_all("data/llava.json", options) == [
        ("data/llava.json[0]", [1, 1], [("What is this?", "A star."), ("Red?", "Yes.")], True),
        ("data/llava.json[1]", [], [("Hello?", "Hi.")], False),
        ("data/llava.json[2]", [1], [("What?", "Noise.")], False),
    ]
    if folder == "images":
        assert read_all("data", options) == read_all("data/llava.json")
    if folder == "elsewhere":
        check_refused("data/llava.json", "names the image coco/a.png", "--images FOLDER")
        nowhere = replace(OPTIONS, images="nowhere")
        check_refused("data/llava.json", "not in nowhere", "--images FOLDER", options=nowhere)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (llava("<image> <image>", "x", image="a.png"), "marks the positions of 2 images, but has 1"),
        (llava("What?"), "ends with a question"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "'gpt'; user and assistant must alternate"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "message 1 is of 'bot'"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "part of type 'audio'"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "path": "a.mp4"}]}]}, "part of type 'video'"),
        (llava("<video>What?", "x", video="a.mp4"), "names the video a.mp4; save frames"),
        (llava("What?", "x", image="https://x.org/a.png"), "https://x.org/a.png; download it"),
        (llava("What?", "x", image="data:image/png;base64,%"), "not base64"),
        (llava("What?", "x", images=[None]), "an empty value"),
        ({"conversations": [5]}, "has an unknown structure"),
        ({"messages": [{"role": "user", "content": ["What?"]}]}, "has an unknown structure"),
        ({"image": "a.png", "caption": {"en": "x"}}, "a dict stands where text should be"),
        ({"image": 5, "text": "Five."}, "has 5 where an image should be"),
        ({"image": "a.png", "words": "x"}, "has no column text, caption, answer, captions, only image, words"),
        ({"image": "a.png", "chosen": "x", "rejected": "y"}, "is preference data, with the columns chosen, rejected"),
        ({"image": "a.png", "conversations": []}, "has no answer to learn"),
        ({"images": ["a.png"], "texts": []}, "has no answer to learn"),
        ({"image": "a.png", "text": "x", "rejected": "y"}, "preference data, with the columns rejected; use trl's"),
        (llava("What?", "x", rejected_response="y"), "preference data, with the columns rejected_response; use trl's"),
    ],
)
def test_bad_record_is_named_and_can_be_skipped(record, reason):
    write("a.png", png(1))
    write("chat.json", [llava("What?", "x", image="a.png"), record])
    assert isinstance(check_refused("chat.json", "chat.json[1]", reason), ExampleError), "so that it can be skipped"


def test_chats_of_messages_in_every_style():
    for seed in (1, 2):
        write(f"images/{seed}.png", png(seed))
    inline = "data:image/png;base64," + base64.b64encode(png(3)).decode()
    openai = [
        message("system", "Be short."),
        message("user", {"type": "image_url", "image_url": {"url": inline}}, text("What?")),
        message("assistant", "Noise."),
        message("user", text("Like this?"), {"type": "image_url", "image_url": {"url": "1.png"}}),
        message("assistant", text("No.")),
    ]
    same = message("user", {"type": "image"}, {"type": "image", "text": None}, text("Same?"))
    path = message("user", {"type": "image", "path": "2.png"}, text("Hm?"))
    strings = [message("user", "<image>Who?"), message("assistant", "Me.")]
    records = [
        {"messages": openai, "images": None},
        {"messages": [same, message("assistant", "No.")], "images": ["1.png", "2.png"]},
        {"messages": [path, message("assistant", "Ah.")]},
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
        found = read_all(name, replace(OPTIONS, images="images"))
        assert found == [(f"{name}[{i}]", *e) for i, e in enumerate(expected)]


@pytest.mark.parametrize("images", ["coco/train2017", "coco/annotations/img"])
def test_coco_captions_are_independent_answers_about_their_image(images):
    for seed in (1, 2):
        write(f"{images}/{seed}.png", png(seed))
    content = {
        "images": [{"id": 10 * seed, "file_name": f"{seed}.png"} for seed in (2, 1)],
        "annotations": [{"image_id": id, "caption": f"{words} {id}"} for words in ("A", "The ") for id in (10, 20)],
    }
    write("coco/annotations/captions.json", content)
    assert read_all("coco/annotations/captions.json") == [
        (f"{images}/2.png", [2], [("What?", "A 20"), ("What?", "The  20")], False),
        (f"{images}/1.png", [1], [("What?", "A 10"), ("What?", "The  10")], False),
    ]
    content["images"].append({"id": 30, "file_name": "3.png"})
    write("coco/annotations/captions.json", content)
    check_refused("coco/annotations/captions.json", "captions missing: 1 of 3", ": 3.png;", "--on-error skip")
    assert len(read_all("coco/annotations/captions.json", replace(OPTIONS, on_error="skip"))) == 2
    content["annotations"][0]["image_id"] = 99
    write("coco/annotations/captions.json", content)
    check_refused("coco/annotations/captions.json", "COCO", "99")


def test_json_of_an_imagefolder():
    write("mine/in/a.png", png(1))
    write("mine/rows.json", [{"file_name": "in/a.png", "text": "one"}])
    assert read_all("mine/rows.json") == read_all("mine") == [("mine/in/a.png", [1], [("What?", "one")], False)]


def test_images_in_messages_are_near_the_file_and_their_examples_stay_together():
    for seed in (1, 2):
        write(f"mine/sub/img/{seed}.png", png(seed))
    part = lambda seed: {"type": "image_url", "image_url": {"url": f"img/{seed}.png"}}  # noqa: E731
    chats = [[message("user", part(seed), text(q)), message("assistant", "Yes.")] for seed in (1, 2) for q in "ab"]
    write("mine/sub/chat.jsonl", [{"messages": chat} for chat in chats])
    assert [images for _, images, *_ in read_all("mine/sub/chat.jsonl")] == [[1], [1], [2], [2]]
    source = open_source("mine/sub/chat.jsonl", OPTIONS)
    assert [source.key(i) for i in range(4)] == ["img/1.png", "img/1.png", "img/2.png", "img/2.png"]
