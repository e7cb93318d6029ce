"""The engine: a failure, of whatever type, ends the request that caused it and no other; the thread survives."""

import asyncio
import threading
import time
import weakref

import pytest
import torch
from models.inference.requests import TokenOutput
from models.inference.serving_caches import TiledImage

from models.errors import InputError
from models.inference.continuous_batching import ContinuousBatch
from nanovlm import SAMPLE
from nanovlm.serving.engine import Engine, SequenceRequest
from nanovlm.serving.errors import EngineError, EngineStoppedError
from support.serving import SAMPLE_URL, RunningServer, WatchedBatch, answer_of, http, until, user_message


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no words for it")


ODD_ERRORS = [
    RuntimeError(), StopIteration(), UnprintableError(), MemoryError(), asyncio.CancelledError(), SystemExit(1),
]  # fmt: skip
POISON = 7  # the first token id of the prompt that fails
PROMPTS = [torch.tensor([first, 5, 6, 8]) for first in (4, POISON, 9, 10)]


class FailingBatch(ContinuousBatch):
    """Raises an error at one stage of every prompt that begins with POISON."""

    def __init__(self, model, stage, error):
        super().__init__(model, max_num_seqs=4)
        self.stage, self.error, self.poisoned = stage, error, set()

    def add(self, key, input_ids, images=None, **options):
        poisoned = int(input_ids[0]) == POISON
        if poisoned and self.stage == "add":
            raise self.error
        super().add(key, input_ids, images, **options)
        if poisoned:
            self.poisoned.add(key)

    def cancel(self, key):
        self.poisoned.discard(key)
        super().cancel(key)

    def step(self):
        if self.stage == "step" and self.poisoned:
            raise self.error
        outputs = super().step()
        if self.stage == "decode":
            for output in outputs:
                if output.key in self.poisoned:
                    super().cancel(output.key)
            errors = [TokenOutput(key, -1, "error", self.error) for key in self.poisoned]
            outputs = [output for output in outputs if output.key not in self.poisoned] + errors
            self.poisoned.clear()
        return outputs


async def collect(handle):
    """All token ids of a request."""
    token_ids = []
    while True:
        for output in await handle.outputs():
            token_ids.append(output.token_id)
            if output.finished:
                return token_ids


def run_engine(make_batch, main):
    """Run the coroutine main(engine) with an engine that is alive before and after."""

    async def run():
        engine = Engine(make_batch)
        engine.start()
        try:
            async with asyncio.timeout(30):
                result = await main(engine)
            assert engine.alive
            return result
        finally:
            engine.close()

    return asyncio.run(run())


def expected_tokens(model, max_new_tokens):
    return [model.generate(ids[None], None, max_new_tokens=max_new_tokens)[0].tolist() for ids in PROMPTS]


@pytest.mark.parametrize("error", ODD_ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("stage", ["add", "step", "decode"])
def test_failure_of_one_request_ends_no_other(tiny_model, stage, error, caplog):
    model = tiny_model()

    async def main(engine):
        handles = [engine.submit(SequenceRequest(ids, (), 5)) for ids in PROMPTS]
        results = await asyncio.gather(*map(collect, handles), return_exceptions=True)
        again = await collect(engine.submit(SequenceRequest(PROMPTS[0], (), 5)))
        return results, again

    results, again = run_engine(lambda: FailingBatch(model, stage, error), main)
    failed = results.pop(1)
    expected = expected_tokens(model, 5)
    assert again == expected.pop(0) == results.pop(0) and results == expected[1:]
    assert type(failed) is EngineError and failed.__cause__ is error
    assert any(record.exc_info and record.exc_info[1] is error for record in caplog.records)


def test_sequences_that_had_tokens_fail_with_their_batch(tiny_model):
    model, fail = tiny_model(), threading.Event()

    def before_step():
        time.sleep(0.01)  # or all tokens may come before the failure
        if fail.is_set():
            fail.clear()
            raise ValueError("the cache is gone")

    async def main(engine):
        handle = engine.submit(SequenceRequest(PROMPTS[0], (), 50))
        await handle.outputs()
        fail.set()
        with pytest.raises(EngineError):
            await collect(handle)
        return await collect(engine.submit(SequenceRequest(PROMPTS[0], (), 5)))

    assert run_engine(lambda: WatchedBatch(model, before_step, max_num_seqs=4), main) == expected_tokens(model, 5)[0]


def test_without_memory_for_all_the_newest_sequence_fails(tiny_model):
    model = tiny_model()

    class SmallBatch(ContinuousBatch):
        def step(self):
            if self.running > 1:
                raise MemoryError
            return super().step()

    async def main(engine):
        handles = [engine.submit(SequenceRequest(ids, (), 30)) for ids in PROMPTS[:2]]
        return await asyncio.gather(*map(collect, handles), return_exceptions=True)

    first, second = run_engine(lambda: SmallBatch(model, max_num_seqs=2), main)
    assert first == expected_tokens(model, 30)[0] and type(second) is EngineError


def test_error_of_the_users_reaches_the_request_as_it_is(tiny_model, caplog):
    async def main(engine):
        with pytest.raises(InputError, match="max_new_tokens=0"):
            await collect(engine.submit(SequenceRequest(PROMPTS[0], (), 0)))

    run_engine(lambda: ContinuousBatch(tiny_model(), max_num_seqs=2), main)
    assert not caplog.records


def test_closed_engine_fails_its_requests_at_once(tiny_model):
    async def run():
        engine = Engine(lambda: WatchedBatch(tiny_model(), lambda: time.sleep(0.01), max_num_seqs=1))
        with pytest.raises(EngineStoppedError):
            engine.submit(SequenceRequest(PROMPTS[0], (), 5))
        engine.start()
        handles = [engine.submit(SequenceRequest(ids, (), 50)) for ids in PROMPTS]
        await handles[0].outputs()
        await asyncio.to_thread(engine.close)
        assert not engine.alive
        for handle in handles:
            with pytest.raises(EngineStoppedError):
                await asyncio.wait_for(collect(handle), 10)

    asyncio.run(run())


def test_cancelled_sequences_leave_and_their_images_are_released(tiny_model):
    model = tiny_model()

    async def main(engine):
        images = torch.rand(1, 3, 16, 16)
        reference = weakref.ref(images)
        running = engine.submit(SequenceRequest(PROMPTS[0], (), 50))
        waiting = engine.submit(SequenceRequest(torch.tensor([3, 3, 3, 3, 5]), [TiledImage(images)], 5))
        del images
        waiting.cancel()
        result = await collect(running)
        until(lambda: reference() is None and engine.batch.waiting == 0)
        return result

    assert run_engine(lambda: ContinuousBatch(model, max_num_seqs=1), main) == expected_tokens(model, 50)[0]


def test_clients_of_a_failing_model_are_told_no_details_and_the_next_is_answered(embedded, caplog):
    failures = [RuntimeError("a secret path"), RuntimeError("a secret path")]

    def fail():
        if failures:
            raise failures.pop()

    with RunningServer(embedded, batch={"before_step": fail}) as server:
        body = {"messages": user_message("?", SAMPLE_URL)}
        response = server.post(body)
        assert response.status_code == 500 and "secret" not in response.text
        assert "the model failed" in response.json()["error"]["message"]
        assert "a secret path" in caplog.text
        health = http.get(f"{server.url}/health").json()
        assert (health["status"], health["model"]) == ("ok", "nanovlm")
        assert answer_of(server.post(body)) == embedded.caption(SAMPLE, "?")
        until(lambda: server.idle)


def test_health_says_when_the_engine_has_stopped(embedded):
    with RunningServer(embedded) as server:
        server.service.engine.close()
        health = http.get(f"{server.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "stopped")
        response = server.post({"messages": user_message("?")})
        assert response.status_code == 503 and "does not run" in response.json()["error"]["message"]
