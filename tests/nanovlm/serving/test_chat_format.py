"""Messages as clients write them: whoever begins, whoever ends, whatever the parts are called."""

import base64
import io
from functools import partial

import pytest

from models.inference.serving_caches import ImageCache
from nanovlm import PROMPT, SAMPLE, Captioner
from nanovlm.errors import ImageError
from nanovlm.processing.video import Video
from nanovlm.serving.chat_format import Chat, parse_messages, prepare_inputs, preprocess, video_parts
from nanovlm.serving.protocol import ChatCompletionRequest, MediaURL
from support import noise_image
from support.data import message, text
from support.serving import QUESTIONS, SAMPLE_URL, RunningServer, answer_of, until, user_message
from support.smolvlm import write_folder

GREETING = {"role": "assistant", "content": "Hello, show me an image."}


def chat_of(*messages, **options):
    return parse_messages(ChatCompletionRequest.model_validate({"messages": list(messages)}).messages, **options)


system, user, assistant = (partial(message, role) for role in ("system", "user", "assistant"))


ALONE = {"role": "user", "content": [{"type": "image_url", "image_url": SAMPLE_URL}]}
SHOWN = [MediaURL(url=SAMPLE_URL)]


@pytest.mark.parametrize(
    ("messages", "chat"),
    [
        ([GREETING, user("Hi")], Chat([], [("", GREETING["content"])], "Hi")),
        ([system("Be brief."), GREETING, user("Hi")], Chat([], [("Be brief.", GREETING["content"])], "Hi")),
        ([user("a"), assistant("b")], Chat([], [], "a", "b")),
        ([user("a"), assistant("b"), user("c"), assistant("d")], Chat([], [("a", "b")], "c", "d")),
        ([assistant("A photo of")], Chat([], [], "", "A photo of")),
        ([system("Be brief."), user("What"), user("is it?")], Chat([], [], "Be brief.\n\nWhat\nis it?")),
        ([ALONE, assistant("b"), user("c")], Chat(SHOWN, [(PROMPT, "b")], "c")),
        ([ALONE, user("c")], Chat(SHOWN, [], "c")),
    ],
)
def test_anybody_may_begin_or_end_a_chat_and_an_image_alone_gets_the_default_prompt(messages, chat):
    assert chat_of(*messages) == chat


@pytest.mark.parametrize("silence", [{"content": None}, {}, {"content": []}, {"content": None, "tool_calls": []}])
def test_assistant_may_say_nothing(silence):
    empty = {"role": "assistant", **silence}
    assert chat_of(user("a"), empty, user("b")) == Chat([], [("a", "")], "b")
    assert chat_of(user("a"), empty) == Chat([], [], "a")


def test_turns_are_kept_where_the_layout_has_images_in_turns():
    """The default prompt is added only if nothing else asks."""
    part = {"type": "image_url", "image_url": SAMPLE_URL}

    def turns_of(*messages):
        chat = chat_of(*messages, images_in_turns=True)
        return chat.turns, chat.answer

    alone, blank = (user(*words, part) for words in ([], [text(" ")]))
    assert turns_of(GREETING, alone) == ([("assistant", [GREETING["content"]]), ("user", [None, PROMPT])], "")
    assert turns_of(blank) == ([("user", [" ", None, PROMPT])], "")
    assert turns_of(user(text("<end_of_utter"), text("ance>"))) == ([("user", ["<end_of_utterance>"])], "")
    assert turns_of(user("What?"), alone) == ([("user", ["What?"]), ("user", [None])], "")
    assert turns_of(alone, assistant("A "), assistant("cat")) == ([("user", [None]), ("assistant", ["A "])], "cat")


@pytest.mark.parametrize("n_words", [1, 3, 6])
def test_beginning_of_an_answer_is_continued_to_the_same_answer(served, embedded, n_words):
    whole = embedded.caption(SAMPLE)
    words = whole.split(" ")
    begun, rest = " ".join(words[:n_words]), whole[len(" ".join(words[:n_words])) :]
    messages = [*user_message(QUESTIONS[0], SAMPLE_URL), {"role": "assistant", "content": begun}]
    assert answer_of(served.post({"messages": messages})) == rest


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": SAMPLE_URL},
        {"type": "image_url", "image_url": {"url": SAMPLE_URL, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": SAMPLE_URL.partition(",")[2]}},
        {"type": "image_url", "image_url": "\n".join(SAMPLE_URL.partition(",")[2].partition("0"))},
    ],
    ids=["text", "detail", "bare base64", "base64 of several lines"],
)
def test_image_is_accepted_as_clients_send_it(served, embedded, part):
    response = served.post({"messages": [{"role": "user", "content": [part, text(QUESTIONS[0])]}]})
    assert answer_of(response) == embedded.caption(SAMPLE)


@pytest.mark.full
def test_answer_is_continued_as_transformers_does(tmp_path):
    """SmolVLM's template writes a space before an answer, which belongs to it and not to the question."""
    _, theirs = write_folder(tmp_path)
    processor = Captioner.from_pretrained(tmp_path, device="cpu", dtype="float32").processor
    image = noise_image(20, 20, seed=1)
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is in this picture?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Describe the two"}]},
    ]
    prompt = theirs.apply_chat_template(messages, continue_final_message=True)
    expected = theirs(text=prompt, images=[[image]], return_tensors="pt").input_ids[0].tolist()
    image.save(file := io.BytesIO(), "png")
    chat = Chat([], [], "", "Describe the two", [("user", [None, "What is in this picture?"])])
    inputs = prepare_inputs(chat, [preprocess("image 1", file.getvalue(), processor, 10**6)], processor)
    assert inputs.input_ids.tolist() == expected
    assert processor.tokenizer.decode(inputs.continued_ids) == "Describe the two"


def video_message(question, data):
    url = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 12}


@pytest.mark.full
def test_a_video_is_answered_as_by_the_captioner(clip, tmp_path):
    """In SmolVLM's layout its frames have their times beside them; in others they are images."""
    write_folder(tmp_path / "model")
    captioner = Captioner.from_pretrained(tmp_path / "model", device="cpu", dtype="float32")
    with RunningServer(captioner) as server:
        response = server.post(video_message("What moves?", clip.read_bytes()))
    video = Video.read(clip)
    assert response.json()["usage"]["prompt_tokens"] == len(captioner.processor.encode([video], "What moves?")[0])
    assert answer_of(response) == captioner.caption_video(video, "What moves?", max_new_tokens=12)


@pytest.mark.parametrize("data", [b"", b"no video"])
def test_a_video_that_cannot_be_read_is_refused(served, data):
    error = served.post(video_message("?", data)).json()["error"]
    assert error["code"] == "invalid_video" and "/" not in error["message"], "no path of this server"
    until(lambda: served.service.video_budget.n_free == 1)


def test_frames_of_a_request_are_limited(clip):
    """3 frames of 64 x 48."""
    assert len(video_parts("video 1", clip.read_bytes(), False, 9216)) == 3
    with pytest.raises(ImageError, match="video 1: 3 frames of 9,216 pixels, more than 9,215; scale it down"):
        video_parts("video 1", clip.read_bytes(), False, 9215)


def test_videos_of_a_request_are_shown_in_their_order(served, embedded, clip):
    body = video_message(QUESTIONS[0], clip.read_bytes())
    body["messages"][0]["content"].insert(0, {"type": "image_url", "image_url": SAMPLE_URL})
    body["messages"][0]["content"].append(body["messages"][0]["content"][1])
    frames = Video.read(clip).frames
    expected = embedded.caption([SAMPLE, *frames, *frames], QUESTIONS[0], max_new_tokens=12)
    assert answer_of(served.post(body)) == expected
    assert served.service.video_budget.n_free == 1


def test_an_image_of_low_detail_is_one_tile(embedded):
    image, processor = noise_image(40, 20, seed=2), embedded.processor
    image.save(file := io.BytesIO(), "png")
    cache = ImageCache(2**20)
    low, high = (preprocess("image 1", file.getvalue(), processor, 10**6, cache, "", d) for d in ("low", "high"))
    assert (low.grid, low.n_tiles) == (processor.preprocess(image, 1)[1], 1) and low.key != high.key
