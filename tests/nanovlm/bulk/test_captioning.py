"""Captioning many images in memory: prefetching, batching, workers, errors of single images, and out of memory."""

import os
import threading
from pathlib import Path

import pytest
import torch
from PIL import Image

from models.inference.continuous_batching import ContinuousBatch
from nanovlm.bulk import captioning
from nanovlm.bulk.captioning import BulkCaptioner, default_workers, failure_reason, image_failure, merge_iterators
from nanovlm.bulk.options import BulkOptions
from nanovlm.bulk.prefetch import Prefetch
from nanovlm.captioner import Stats
from nanovlm.errors import ImageError, InputError
from support.captioners import WatchedCaptioner, ending_with
from support.cli import IMAGE_NAMES

pytestmark = pytest.mark.usefixtures("workdir")


@pytest.fixture
def captioner(random_captioner):
    return random_captioner


def caption(captioner, images, max_new_tokens=2, batch_size=5):
    """What one worker gives for each image."""
    return dict(BulkCaptioner(captioner, options(max_new_tokens, batch_size), workers=1).captions(images))


@pytest.fixture
def images(image_folder):
    return [str(image_folder / name) for name in IMAGE_NAMES]


def many(path, n):
    """n different names of one image."""
    return [os.path.join(os.path.dirname(path), *["."] * i, os.path.basename(path)) for i in range(n)]


def options(max_new_tokens=2, batch_size=2):
    return BulkOptions("?", max_new_tokens=max_new_tokens, batch_size=batch_size)


@pytest.fixture
def full_batches(monkeypatch):
    """Batches wait until the next image is prepared, so that their sizes do not depend on the speed of threads."""
    take = Prefetch.take
    monkeypatch.setattr(Prefetch, "take", lambda prefetch, wait: take(prefetch, wait=True))


def before_each_step(monkeypatch, function):
    step = ContinuousBatch.step
    monkeypatch.setattr(ContinuousBatch, "step", lambda batch: function(batch) or step(batch))


def test_captions_that_repeat_themselves_are_trimmed_and_counted(captioner, images):
    favoring = {"repetition_penalty": 0.2, "repetition_detection": (1, 2, 3), "max_new_tokens": 40}
    bulk = BulkCaptioner(captioner, BulkOptions("?", **favoring), workers=1)
    texts, reasons = dict(bulk.captions(images)), []
    for path, text in texts.items():
        stats = Stats()
        assert text == captioner.caption(path, "?", options=bulk.options, stats=stats)
        reasons += stats.finish_reasons
    assert bulk.repetitions == [reasons.count("repetition")] != [0]


def test_prefetch_prepares_a_window_of_images_in_order():
    requested, prepared, gate = iter(range(10)), [], threading.Event()

    def prepare(image):
        gate.wait(60)
        prepared.append(image)
        return -image

    with Prefetch(requested, prepare, window=3, threads=1) as prefetch:
        assert prefetch.take(wait=False) is None, "none is prepared yet"
        assert next(requested) == 3, "the first three were requested, no more"
        first, future = prefetch.take(wait=True)
        gate.set()
        assert (first, future.result()) == (0, 0)
        prefetch.put_back([first])
        taken = [prefetch.take(wait=True) for _ in range(9)]
        assert [(n, future.result()) for n, future in taken] == [(n, -n) for n in range(10) if n != 3]
        assert prefetch.take(wait=True) is None and prepared.count(0) == 2 and len(prepared) == 10


@pytest.mark.parametrize("workers, threads", [(2, 1), (1, 3)])
def test_several_workers_compute_with_one_thread_each(captioner, images, monkeypatch, workers, threads):
    seen = set()
    before_each_step(monkeypatch, lambda batch: seen.add(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        list(BulkCaptioner(captioner, options(2), workers=workers).captions(images))
        assert torch.get_num_threads() == 3
        with pytest.raises(ZeroDivisionError):
            monkeypatch.setattr(ContinuousBatch, "add", lambda *args, **options: 1 / 0)
            list(BulkCaptioner(captioner, options(2), workers=workers).captions(images))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == {threads}


def test_a_small_model_has_a_worker_for_each_usable_core(captioner, monkeypatch):
    assert sum(weight.nbytes for weight in captioner.inference.parameters()) < captioning.SMALL_MODEL_BYTES
    for cores, workers in ((1, 1), (3, 3), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False)
        assert default_workers(captioner) == workers
    big = torch.nn.Parameter(torch.empty(captioning.SMALL_MODEL_BYTES // 4))
    monkeypatch.setattr(captioner.inference, "parameters", lambda: iter([big]))
    assert default_workers(captioner) == 1


def test_a_short_caption_does_not_wait_for_a_long_one(captioner, images, full_batches, monkeypatch):
    steps = []
    add = ContinuousBatch.add

    def add_short(batch, key, *args, max_new_tokens, **options):
        add(batch, key, *args, max_new_tokens=30 if key[0].endswith("a.png") else 2, **options)

    monkeypatch.setattr(ContinuousBatch, "add", add_short)
    before_each_step(monkeypatch, lambda batch: steps.append(batch.running))
    bulk = BulkCaptioner(ending_with(captioner, -1), options(max_new_tokens=30), workers=1)
    order = [Path(path).name for path, _ in bulk.captions(images)]
    assert order[-1] == "a.png" and len(order) == 5 and len(steps) <= 31


def test_workers_share_the_images_and_caption_as_one_does(captioner, images, monkeypatch):
    captions, threads, both_started = [], set(), threading.Barrier(2, timeout=60)

    def wait_for_the_other(batch):
        """The first step of each worker: neither may take all images."""
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            both_started.wait()

    for workers in (1, 2):
        if workers == 2:
            before_each_step(monkeypatch, wait_for_the_other)
        bulk = BulkCaptioner(captioner, options(8), workers=workers)
        captions.append(dict(bulk.captions(images)))
        assert len(bulk.model_seconds) == workers and all(bulk.model_seconds) and 0 < bulk.utilization <= 1
    assert captions[0] == captions[1] and len(captions[0]) == 5 and len(threads) == 2
    assert threading.get_ident() not in threads and not alive(threads)


def alive(threads):
    return [thread for thread in threading.enumerate() if thread.ident in threads]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_an_error_of_one_iterator_stops_the_others(error):
    threads, items = set(), []

    def iterator(breaks):
        threads.add(threading.get_ident())
        for i in range(10**9):
            if breaks and i == 3:
                raise error
            yield i, breaks

    with pytest.raises(type(error)) as raised:
        for item in merge_iterators([iterator(False), iterator(False), iterator(True)], 4):
            items.append(item)
    assert raised.value is error and len(threads) == 3 and not alive(threads)
    assert [i for i, breaks in items if breaks] == [0, 1, 2], "what was finished before is not lost"


def test_a_consumer_that_stops_ends_the_iterators_and_has_missed_little():
    produced, threads = [], set()

    def iterator():
        threads.add(threading.get_ident())
        for i in range(10**9):
            produced.append(i)
            yield i

    items = merge_iterators([iterator(), iterator()], 4)
    taken = [next(items) for _ in range(10)]
    items.close()
    assert len(taken) == 10 and len(produced) <= 10 + 4 + 2 and not alive(threads), "4 wait, 1 is in each iterator"


ALLOCATOR = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: 9 bytes"


def test_only_errors_of_an_image_or_of_memory_are_failures_of_one_image():
    of_memory = [ALLOCATOR, "DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."]
    of_memory = [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), *map(RuntimeError, of_memory)]
    for error in (ImageError("not an image"), InputError("too long"), FileNotFoundError(2, "No such file"), *of_memory):
        assert image_failure(error) is error
    for error in (RuntimeError("shape '[2]' is invalid"), TypeError("NoneType"), ValueError("of our own"), KeyError()):
        with pytest.raises(type(error)):
            image_failure(error)


def test_reasons_are_one_line_without_the_name_of_the_image():
    assert failure_reason(ImageError("a.png: an empty\nfile"), "a.png") == "an empty file"
    assert failure_reason(FileNotFoundError(2, "No such file", "a.png"), "a.png") == "No such file"
    assert failure_reason(MemoryError(), "a.png") == "not enough memory"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bug_stops_the_run_after_the_captions_that_were_finished(captioner, images, workers):
    results, error = [], RuntimeError("a bug")
    *_, last = paths = many(images[0], 8)

    def broken(what, *inputs):
        if what in (last, "encode_images"):
            raise error

    with pytest.raises(RuntimeError) as raised:
        watched = WatchedCaptioner(captioner, before_prepare=broken)
        for result in BulkCaptioner(watched, options(), workers=workers).captions(paths):
            results.append(result)
    assert raised.value is error and len(results) >= 4 and not any(isinstance(text, Exception) for _, text in results)
    with pytest.raises(RuntimeError) as raised:
        caption(WatchedCaptioner(captioner, before=broken), images)  # in the prefill
    assert raised.value is error


def test_an_image_too_large_for_memory_does_not_stop_the_run(captioner, images):
    expected = caption(captioner, images, batch_size=2)
    Image.new("RGB", (30, 30), "white").save(images[4])

    def small_memory(name, inputs):
        if name == "encode_images" and (inputs == 1).flatten(1).all(1).any():
            raise RuntimeError(ALLOCATOR)

    results = caption(WatchedCaptioner(captioner, before=small_memory), images)
    assert "can't allocate memory" in str(results.pop(images[4]))
    assert results == {path: text for path, text in expected.items() if path != images[4]}


def test_running_out_of_memory_halves_the_batch(captioner, images, full_batches, monkeypatch):
    expected = caption(captioner, images, 6, batch_size=2)
    sizes = []

    def small_memory(batch):
        sizes.append(batch.running)
        if batch.running > 2:
            raise RuntimeError(ALLOCATOR)

    before_each_step(monkeypatch, small_memory)
    assert caption(captioner, images, 6) == expected and sum(size > 2 for size in sizes) == 1


def test_an_image_that_does_not_fit_beside_others_is_captioned_later(captioner, images, full_batches, monkeypatch):
    """Prefilling runs out of memory as long as two others are in the batch."""
    expected = caption(captioner, images, 6, batch_size=2)
    batches, failed = [], []
    before_each_step(monkeypatch, batches.append)

    def small_memory(name, inputs):
        if name == "encode_images" and batches[-1].running + len(inputs) > 2:
            failed.append(len(inputs))
            raise RuntimeError(ALLOCATOR)

    assert caption(WatchedCaptioner(captioner, before=small_memory), images, 6) == expected and failed


def test_an_image_that_is_alone_in_the_batch_fails(captioner, images, monkeypatch):
    def no_memory(batch):
        raise MemoryError

    before_each_step(monkeypatch, no_memory)
    assert [type(error) for error in caption(captioner, images).values()] == [MemoryError] * 5


def test_a_reduced_batch_grows_back(captioner, images, full_batches, monkeypatch):
    sizes, paths = [], many(images[0], 60)

    def fails_once(batch):
        sizes.append(batch.running + batch.waiting)
        if sizes[-1] > 2 and max(sizes[:-1], default=0) <= 2:
            raise MemoryError

    before_each_step(monkeypatch, fails_once)
    captions = caption(captioner, paths, 3, batch_size=4)
    assert len(captions) == 60 and len(set(captions.values())) == 1
    failed = next(i for i, size in enumerate(sizes) if size > 2)
    assert max(sizes[failed + 1 : failed + 10]) <= 2 and max(sizes[failed + 10 :]) > 2
