"""Chat sessions: answers from the cache equal answers to the whole chat read anew; images are read once."""

import io
from itertools import chain

import numpy as np
import pytest
import torch

from nanovlm import Captioner
from nanovlm.chat_session import ChatSession
from nanovlm.errors import InputError
from nanovlm.processing.conversation import dialogue
from support import noise_image, watch

QUESTIONS = ["What is this?", "How many are there? <|image|>", "?", "And where is the ring, if there is any?", "?"]
WARM = {"temperature": 1.5, "seed": 4, "repetition_penalty": 1.3}
pytestmark = pytest.mark.filterwarnings("ignore:a question without an image")


@pytest.fixture(params=["one tile", "many tiles"])
def captioner(request, model_and_processor, tiled, monkeypatch):
    monkeypatch.setenv("NANOVLM_CPU_LEVEL", "none")  # the plain modules can be watched
    return Captioner(*(model_and_processor if request.param == "one tile" else tiled))


def chat_about(captioner, images):
    """A session that remembers its tiles, which it drops when they are encoded."""
    session = ChatSession(captioner, images)
    session.pixels = [image.tiles for image in session.shown]
    return session


def check_answer(session, question, **options):
    """Ask, and compare with an answer without any cache: the whole chat is read again for every token."""
    history, captioner, eos = list(session.history), session.captioner, session.captioner.tokenizer.eos_token_id
    answer = "".join(session.ask(question, max_new_tokens=7, **options))
    shown = session.shown
    ids = torch.tensor([captioner.processor.encode(dialogue([*chain(*history), question], shown))])
    images = torch.cat(session.pixels) if session.pixels else None
    sampling = captioner.request(None, "?", **options).sampling
    settings = {"max_new_tokens": 7, "eos_token_id": eos, "use_kv_cache": False, "sampling": sampling}
    (ids,) = captioner.model.generate(ids, images, **settings).tolist()
    assert answer == captioner.tokenizer.decode(ids[:-1] if ids[-1] == eos else ids)
    assert session.history == [*history, (question, answer)]


@pytest.mark.parametrize(("n", "options"), [(0, {}), (1, WARM), (2, {})])
def test_every_turn_is_answered_as_if_the_whole_chat_were_read(captioner, n, options):
    session = chat_about(captioner, [noise_image(50, 30, seed) for seed in range(n)])
    for question in QUESTIONS:
        check_answer(session, question, **options)
    first = [answer for _, answer in session.history]
    session.reset()
    assert session.history == []
    with watch(captioner.model.vision_encoder) as encoded:
        assert ["".join(session.ask(question, max_new_tokens=7, **options)) for question in QUESTIONS] == first
    assert not encoded


def test_one_image_is_a_list_of_one_and_wrong_use_an_input_error(captioner):
    image = noise_image(50, 30)
    image.save(file := io.BytesIO(), "PNG")
    one, array, data = ChatSession(captioner, [image]), np.asarray(image), file.getvalue()
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    for same in (image, array, tensor, data, io.BytesIO(data), iter([image])):
        (shown,) = ChatSession(captioner, same).shown
        assert torch.equal(shown.tiles, one.shown[0].tiles)
    assert len(ChatSession(captioner, np.stack([array] * 2)).shown) == 2
    assert ChatSession(captioner, None).shown == []
    session = ChatSession(captioner)
    with pytest.raises(InputError, match="lm_max_position_embeddings=1024; shorten it, or reset the chat"):
        next(session.ask("ξ" * 1100))
    with pytest.raises(InputError, match="start_with is for captions"):
        next(session.ask("?", start_with="A"))
    assert session.history == []
    question = "ξ" * 480  # of two tokens each
    pieces = list(session.ask(question, max_new_tokens=500))
    assert len(pieces) < 1024 - 2 * 480, "the answer is limited to the remaining context"
    assert session.history == [(question, "".join(pieces))]


def test_images_are_encoded_once_and_turns_prefill_only_new_tokens(captioner):
    session, prefilled, tokenizer = chat_about(captioner, [noise_image(50, 30)]), [], captioner.tokenizer
    with watch(captioner.model.vision_encoder) as encoded:
        for _ in range(8):
            assert "".join(session.ask("?", max_new_tokens=6)) == session.history[-1][1]
            prefilled.append(session.tokens_read)
    assert encoded == [tuple(session.pixels[0].shape)]
    turn = len(captioner.processor.encode(dialogue(["?"]))) + 8  # 8 for the template's text after an answer
    longest = max(len(tokenizer.encode(answer)) for _, answer in session.history)
    assert prefilled[0] == len(captioner.processor.encode(dialogue(["?"], session.shown)))
    assert max(prefilled[1:]) <= turn + longest, "more than the last answer and the new question"


def test_a_chat_continues_after_an_interrupted_answer_or_question(captioner):
    session = chat_about(captioner, [noise_image(50, 30)])
    pieces = session.ask("What?", max_new_tokens=30)
    partial = next(pieces) + next(pieces)
    pieces.close()
    assert session.history == [("What?", partial)]

    def interrupt(*args):
        raise KeyboardInterrupt

    hook = captioner.model.decoder.norm.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(session.ask("How many?", max_new_tokens=7))
    hook.remove()
    assert session.history == [("What?", partial)], "a question that could not be read leaves no trace"
    check_answer(session, "Why?")
