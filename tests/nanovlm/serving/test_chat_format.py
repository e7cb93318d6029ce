"""Messages as clients write them: whoever begins, whatever the parts look like."""

import io
from functools import partial

import pytest
from models.inference.serving_caches import ImageCache

from nanovlm import PROMPT, SAMPLE
from nanovlm.serving.chat_format import Chat, parse_messages, preprocess
from nanovlm.serving.protocol import ChatCompletionRequest, MediaURL
from support import noise_image
from support.data import message, text
from support.serving import QUESTIONS, SAMPLE_URL, answer_of

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
        ([user("a"), assistant("b"), user("c")], Chat([], [("a", "b")], "c")),
        ([system("Be brief."), user("What"), user("is it?")], Chat([], [], "Be brief.\n\nWhat\nis it?")),
        ([ALONE, assistant("b"), user("c")], Chat(SHOWN, [(PROMPT, "b")], "c")),
        ([ALONE, user("c")], Chat(SHOWN, [], "c")),
    ],
)
def test_anybody_may_begin_a_chat_and_an_image_alone_gets_the_default_prompt(messages, chat):
    assert chat_of(*messages) == chat


@pytest.mark.parametrize("silence", [{"content": None}, {}, {"content": []}, {"content": None, "tool_calls": []}])
def test_assistant_may_say_nothing(silence):
    empty = {"role": "assistant", **silence}
    assert chat_of(user("a"), empty, user("b")) == Chat([], [("a", "")], "b")


def test_turns_are_kept_where_the_layout_has_images_in_turns():
    """The default prompt is added only if nothing else asks."""
    part = {"type": "image_url", "image_url": SAMPLE_URL}

    def turns_of(*messages):
        return chat_of(*messages, images_in_turns=True).turns

    alone, blank = (user(*words, part) for words in ([], [text(" ")]))
    assert turns_of(GREETING, alone) == [("assistant", [GREETING["content"]]), ("user", [None, PROMPT])]
    assert turns_of(blank) == [("user", [" ", None, PROMPT])]
    assert turns_of(user(text("<end_of_utter"), text("ance>"))) == [("user", ["<end_of_utterance>"])]
    assert turns_of(user("What?"), alone) == [("user", ["What?"]), ("user", [None])]


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


def test_an_image_of_low_detail_is_one_tile(embedded):
    image, processor = noise_image(40, 20, seed=2), embedded.processor
    image.save(file := io.BytesIO(), "png")
    cache = ImageCache(2**20)
    low, high = (preprocess("image 1", file.getvalue(), processor, 10**6, cache, d) for d in ("low", "high"))
    assert (low.grid, low.n_tiles) == (processor.preprocess(image, 1)[1], 1) and low.key != high.key
