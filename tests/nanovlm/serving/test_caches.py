"""An image is encoded once, and a chat's next turn computes only what is new; answers stay the same."""

from random import Random

import pytest

from nanovlm import SAMPLE, Captioner
from nanovlm.chat_session import ChatSession
from nanovlm.synthetic import draw, random_scene
from support.captioners import WatchedProcessor
from support.serving import QUESTIONS, SAMPLE_URL, RunningServer, answer_of, data_url, user_message

LARGE = 2**26


@pytest.fixture
def counted(embedded):
    """A captioner that counts the images it preprocesses and the tiles it encodes."""
    captioner, tiles = Captioner(embedded.model, WatchedProcessor(embedded.processor)), []
    encoder = captioner.model.vision_encoder
    hook = encoder.register_forward_pre_hook(lambda module, args: tiles.append(len(args[0])))
    yield captioner, tiles
    hook.remove()


def test_second_request_about_an_image_does_not_encode_it(counted, embedded):
    captioner, tiles = counted
    other = draw(random_scene(Random(1)), 100, 100)
    expected = [embedded.caption(SAMPLE, question) for question in QUESTIONS]
    expected_both = embedded.caption([SAMPLE, other], "?", max_new_tokens=5)
    tiles.clear()
    with RunningServer(captioner, caches=(LARGE, 0)) as server:
        for question, answer in zip(QUESTIONS, expected):
            asked = server.post({"messages": user_message(question, SAMPLE_URL)})
            assert answer_of(asked) == answer
        assert tiles == [1] and captioner.processor.n_images == 1
        cfg = embedded.model.cfg
        used = server.service.engine.batch.image_cache.bytes_used
        assert used == cfg.mp_image_token_length * cfg.lm_hidden_dim * 4
        both = server.post({"messages": user_message("?", SAMPLE_URL, data_url(other)), "max_tokens": 5})
        assert answer_of(both) == expected_both
        assert tiles == [1, 1] and captioner.processor.n_images == 2
        for url in ("data:image/x;base64," + SAMPLE_URL.partition(",")[2], SAMPLE_URL.partition(",")[2]):
            assert answer_of(server.post({"messages": user_message(QUESTIONS[0], url)})) == expected[0]
        assert tiles == [1, 1], "the image counts, not its URL"


def test_next_turn_reuses_the_turns_before(counted, embedded):
    captioner, tiles = counted
    session = ChatSession(embedded, [SAMPLE])
    expected = ["".join(session.ask(question)) for question in QUESTIONS]
    tiles.clear()
    with RunningServer(captioner, caches=(LARGE, LARGE)) as server:
        messages = []
        for question, answer in zip(QUESTIONS, expected):
            messages += user_message(question, *([] if messages else [SAMPLE_URL]))
            response = server.post({"messages": messages})
            assert answer_of(response) == answer
            usage = response.json()["usage"]
            new = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            if len(messages) > 1:
                assert new <= 16, f"{new} tokens are computed; the question alone has about 10"
            messages.append({"role": "assistant", "content": answer_of(response)})
        assert tiles == [1]
        assert 0 < server.service.engine.batch.prefix_cache.bytes_used <= LARGE
