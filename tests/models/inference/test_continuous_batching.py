"""Continuous batching: each request generates what the model generates for its prompt alone, with any caches."""

from random import Random

import pytest
import torch

from models.common.errors import is_out_of_memory
from models.common.options import GREEDY, SamplingParams
from models.decoding import finish_reason
from models.inference import caches, continuous_batching
from models.inference.caches import ImageCache, LRUCache, PrefixCache, TiledImage
from models.inference.continuous_batching import ContinuousBatch, Request
from models.inference.proof import ADAPTERS, Proof
from support import watch
from support.generation import IMAGE, PER_IMAGE, only_row, prompt, run

PROMPT = [4, 5, 6, 7, 8]
SAMPLINGS = [
    GREEDY,
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=2.0, top_p=0.9, repetition_penalty=1.3, seed=6),
    SamplingParams(frequency_penalty=0.8, presence_penalty=-0.3),
    SamplingParams(temperature=1.5, presence_penalty=2.0, seed=7),
    SamplingParams(repetition_detection=(1, 4, 2)),
]
OUT_OF_MEMORY = [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]


def alone(model, ids, n=5, images=None, eos=None, sampling=GREEDY):
    ids = torch.tensor([ids])
    output = model.generate(ids, images, max_new_tokens=n, sampling=sampling, eos_token_id=eos)[0].tolist()
    return output[: output.index(eos) + 1] if eos in output else output


def request(ids=PROMPT, n=5, **options):
    return Request(ids, max_new_tokens=n, **options)


@pytest.fixture
def refuse(tiny_model, monkeypatch):
    """A model, and a list of (condition, error): a decoder step of ids for which the condition is true raises it."""
    model, rules = tiny_model(), []
    monkeypatch.setattr(Proof, "difference", lambda proof: ADAPTERS)  # computed by modules, in batches

    def check(embed, inputs):
        for condition, error in rules:
            if condition(inputs[0]):
                raise error

    model.decoder.token_embedding.register_forward_pre_hook(check)
    return model, rules


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(n, marks=pytest.mark.full) for n in range(8, 40))])
def test_each_request_generates_what_it_generates_alone(refuse, seed):
    (model, rules), rng = refuse, Random(seed)
    rows, eos = rng.randint(1, 4), rng.choice([None, rng.randint(4, 39)])
    arrivals, cancelled, expected = {}, {}, {}
    for number in range(rng.randint(1, 9)):
        row = only_row(prompt("".join(rng.choices("ttti", k=rng.randint(1, 10))), seed=number), 0)
        ids, n, sampling = row["input_ids"][0].tolist(), rng.randint(1, 14), rng.choice(SAMPLINGS)
        images = () if row["images"] is None else [TiledImage(row["images"])]
        one = Request(ids, images, sampling, n)
        expected[one] = alone(model, ids, n, row["images"], eos, sampling)
        arrivals.setdefault(rng.randint(0, 12), []).append(one)
        if rng.random() < 0.2:
            cancelled.setdefault(rng.randint(0, 14), []).append(one)
    full = rng.choice([0, 0.1, 0.4])
    rules.append((lambda ids: len(ids) > 1 and rng.random() < full, MemoryError()))
    batch, streamed = ContinuousBatch(model, max_num_seqs=rows, eos_token_id=eos), {one: [] for one in expected}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuous_batching, "MAX_PREFILL_TOKENS", rng.choice([1, 24, 2048]))
        patch.setattr(continuous_batching, "CAPACITY_STEP", 4)
        patch.setattr(caches, "MIN_PREFIX_TOKENS", rng.choice([1, 32]))
        for step in range(400):
            for one in arrivals.get(step, ()):
                batch.add(one)
            for one in cancelled.get(step, ()):
                batch.cancel(one)
            assert batch.running <= rows
            for output in batch.step():
                assert streamed[output.request][-1:] != ["ended"], "no token follows the end"
                streamed[output.request] += [output.token_id] + ["ended"] * bool(output.finished)
    assert batch.running == batch.waiting == 0
    for one, ids in expected.items():
        if one.finished == "cancelled":
            assert streamed[one] == one.output == ids[: len(one.output)]
        else:
            assert one.output == ids and streamed[one] == [*ids, "ended"]
            assert one.finished == finish_reason(ids, eos, one.sampling.repetition_detection)


def test_prompts_that_begin_alike_are_computed_once(tiny_model):
    model, ids = tiny_model(lm_max_position_embeddings=256), [3] * 4 + [4 + i % 30 for i in range(50)]
    image = TiledImage(torch.rand(1, 3, 16, 16))
    expected = [alone(model, [*ids, *end], 5, image.tiles) for end in ([], [9], [8, 7])]
    requests = [request([*ids, *end], images=[image]) for end in ([], [9], [8, 7], [])]
    with watch(model.decoder.blocks[0]) as shapes:
        assert run(ContinuousBatch(model), *requests) == [*expected, expected[0]]
    assert [one.n_cached for one in requests] == [0, 54, 54, 53]
    assert sum(rows * n for rows, n, _ in shapes if n != 1) <= 54 + 2 * 2


def test_a_freed_slot_is_taken_in_the_same_step(tiny_model):
    batch, long = ContinuousBatch(tiny_model(), max_num_seqs=2), request(n=30)
    batch.add(long)
    batch.step()
    short = [request(n=1) for _ in range(4)]
    for one in short:
        batch.add(one)
    for number, one in enumerate(short):
        assert (batch.waiting, batch.running) == (4 - number, 1)
        assert [output.request for output in batch.step()] == [long, one], "no step of the long answer is missed"
    (last, new), unknown = (request(), request()), request()
    batch.add(last), batch.add(new), batch.step()
    for one in (long, new, unknown):
        batch.cancel(one)
    assert (batch.waiting, batch.running, long.finished, new.finished) == (0, 1, "cancelled", "cancelled")
    assert [output.request for output in batch.step()] == [last]


IMPOSSIBLE = {  # words of the error: arguments of a request
    "exceed lm_max_position_embeddings=64": ([4] * 60, (), GREEDY, 6),
    "max_new_tokens=0 and 5 ids: each is at least 1": (PROMPT, (), GREEDY, 0),
    "0 ids: each is at least 1": ([],),
    "holds 0 image tokens, but the images give 4": (PROMPT, [TiledImage(torch.rand(1, 3, 16, 16))], GREEDY, 9),
    "holds 4 image tokens, but the images give 0": ([3] * 4, (), GREEDY, 9),
    "images are of torch.uint8, not": ([3] * 4, [TiledImage(torch.zeros(1, 3, 16, 16).byte())], GREEDY, 9),
}


def test_impossible_requests_are_refused_when_added(tiny_model):
    batch, first, done = ContinuousBatch(tiny_model(), max_num_seqs=2), request(), request(n=1)
    run(batch, done)
    batch.add(first)
    rows = [*((words, Request(*arguments)) for words, arguments in IMPOSSIBLE.items())]
    for words, one in (*rows, ("used once", first), ("used once", done)):
        with pytest.raises(ValueError, match=words):
            batch.add(one)
    assert (batch.waiting, batch.running) == (1, 0)
    with pytest.raises(ValueError, match="max_num_seqs=0 is less than 1"):
        ContinuousBatch(batch.model, max_num_seqs=0)


@pytest.mark.parametrize("n_others", [0, 1, 4])
def test_a_request_that_cannot_be_computed_ends_alone(refuse, n_others):
    (model, rules), requests = refuse, [request([*range(4 + i, 12 + i)], 6) for i in range(n_others + 1)]
    expected = [alone(model, one.ids, 6) for one in requests]
    bad = n_others // 2
    others = {id for number, ids in enumerate(expected) if number != bad for id in ids}
    poison = next(i for i, id in enumerate(expected[bad][:5]) if id not in others)
    error = KeyError("no such kernel")
    rules.append((lambda ids: ids.size(1) == 1 and (ids == expected[bad][poison]).any(), error))
    unknown, wrong_size = request([44, 45, 46]), request([3] * 4, images=[TiledImage(torch.rand(1, 3, 20, 20))])
    outputs = run(ContinuousBatch(model, max_num_seqs=8), *requests, unknown, wrong_size)
    assert requests[bad].error is error and outputs[bad] == expected[bad][: poison + 1]
    expected[bad] = outputs[bad]
    assert outputs == [*expected, [], []]
    assert all(one.finished == "error" and one.error is not None for one in (unknown, wrong_size))


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_a_lack_of_memory_loses_no_token_and_no_request_that_fits_alone(refuse, error):
    (model, rules), requests = refuse, [request(n=n) for n in (5, 9, 9)]
    expected = [alone(model, PROMPT, n) for n in (5, 9, 9)]
    rules.append((lambda ids: len(ids) > 2, error))
    assert run(ContinuousBatch(model), *requests) == expected
    only_38 = torch.nn.functional.one_hot(torch.tensor([38]), 40).float()
    too_long, too_late = request([*range(4, 30)]), request(n=9, grammar=lambda ids, logits: only_38)
    rules[:] = [(lambda ids: ids.size(1) > 8 or 38 in ids, error)]
    small = request()
    assert run(ContinuousBatch(model), too_long, too_late, small) == [[], [38], expected[0]]
    assert is_out_of_memory(too_long.error) and is_out_of_memory(too_late.error)


class EvenIds:
    """A grammar of even ids; 6 and 8 follow each 4 at once if it forces tokens."""

    def __init__(self, forces):
        self.seen = []
        if forces:
            self.forced_tokens = lambda ids: [6, 8] if ids[-1] == 4 else []

    def __call__(self, ids, logits):
        self.seen.append(list(ids))
        after = {4: 6, 6: 8}.get(ids[-1]) if ids else 4
        return logits.masked_fill(torch.arange(40) % 2 == 1 if after is None else torch.arange(40) != after, -1e9)


def test_a_grammar_decides_and_may_force_tokens_and_its_failure_is_its_own(tiny_model):
    model = tiny_model()
    one_by_one, forcing, free = (request(n=8, grammar=g) for g in (EvenIds(False), EvenIds(True), None))
    broken = request(grammar=lambda ids, logits: 1 / 0)
    run(ContinuousBatch(model), one_by_one, forcing, free, broken)
    assert free.output == alone(model, PROMPT, 8) and isinstance(broken.error, ZeroDivisionError)
    assert one_by_one.output == forcing.output and forcing.output[:3] == [4, 6, 8]
    assert all(token_id % 2 == 0 for token_id in forcing.output)
    assert one_by_one.grammar.seen == [forcing.output[:n] for n in range(8)] and [4] not in forcing.grammar.seen


def test_a_slots_old_contents_reach_no_other_request(tiny_model):
    """Not even infinity, which a mask would turn into NaN."""
    batch, other = ContinuousBatch(model := tiny_model(), max_num_seqs=2), request([*range(4, 20)], 2)
    batch.add(request([*range(4, 20)], 20)), batch.add(other), batch.step()
    with torch.inference_mode():
        batch._cache[:, :, 1] = float("inf")
    batch.cancel(other)
    assert run(batch, request()) == [alone(model, PROMPT)]


def about(ids, pixels, key, n=6):
    return request(ids, n, images=[TiledImage(pixels, key)])


LARGE = 2**24  # bytes of a cache


@pytest.fixture
def computed(tiny_model, monkeypatch):
    """A model of 256 positions, and lists of how many tiles and how many new tokens it has computed each time."""
    model, tiles, tokens = tiny_model(lm_max_position_embeddings=256), [], []
    monkeypatch.setattr(Proof, "difference", lambda proof: ADAPTERS)  # computed by modules, in batches
    model.vision_encoder.register_forward_pre_hook(lambda module, args: tiles.append(len(args[0])))
    model.decoder.blocks[0].register_forward_pre_hook(lambda module, args: tokens.append(args[0].size(1)))
    return model, tiles, tokens


def chat(*parts, seed=0):
    rng, ids = Random(seed), []
    for part in parts:
        ids += [IMAGE] * PER_IMAGE if part == "i" else rng.choices(range(4, 40), k=part)
    return ids


def pixels(n, seed=0):
    return torch.rand(n, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def test_image_is_encoded_once(computed):
    model, tiles, _ = computed
    ids, images = chat(2, "i", "i", 5), pixels(3)
    expected = alone(model, ids, 6, images[:2])
    several = alone(model, two := chat("i", "i", "i", 4), 6, images)
    tiles.clear()
    batch = ContinuousBatch(model, image_cache=(cache := ImageCache(LARGE)))
    assert run(batch, *(about(ids, images[:2], "a") for _ in range(3))) == [expected] * 3, "waiting together"
    assert tiles == [2] and cache.get("b") is None and cache.get("a").tiles is None
    for again in (TiledImage(None, "a", embeds=cache.get("a").embeds), TiledImage(images[:2], "a")):
        assert run(batch, request(ids, 6, images=[again])) == [expected]
    both = request(two, 6, images=[TiledImage(images[:2], "a"), TiledImage(images[2:], "c")])
    assert run(batch, both) == [several] and tiles == [2, 1], "only the new image"


def test_a_next_turn_computes_its_own_tokens_only_and_another_image_what_follows_it(computed):
    model, tiles, tokens = computed
    batch, turn, image = ContinuousBatch(model, prefix_cache=PrefixCache(LARGE)), chat(34, "i", 20), pixels(1)
    for n_turn in range(4):
        expected = alone(model, turn, 6, image)
        tokens.clear(), tiles.clear()
        (ids,) = run(batch, one := about(turn, image, "a"))
        assert ids == expected
        if n_turn:
            assert tiles == [] and tokens[0] == 4, "the answer's last token is not in the cache, and three are new"
            assert one.n_cached == len(turn) - 4
        turn = [*turn, *ids, *chat(3, seed=n_turn)]
    assert len(batch.prefix_cache.items()) == 1, "a turn replaces the one before"
    expected = alone(model, ids := chat(34, "i", 20), 6, pixels(1, seed=1))
    tokens.clear(), tiles.clear()
    assert run(batch, about(ids, pixels(1, seed=1), "b")) == [expected]
    assert tiles == [1] and tokens[0] == 24, "the text before it is known"
    batch.add(one := request(chat(50)))
    batch.step(), batch.cancel(one), tokens.clear()
    run(batch, request(chat(50) + chat(5, seed=1)))
    assert tokens[0] == 5, "a cancelled sequence is kept, too"


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.full) for n in range(4, 25))])
def test_caches_of_any_size_change_no_token(tiny_model, seed):
    model, rng = tiny_model(lm_max_position_embeddings=512), Random(seed)
    caches = {
        "image_cache": ImageCache(rng.choice([0, 2000, LARGE])),
        "prefix_cache": PrefixCache(rng.choice([0, 50_000, LARGE])),
    }
    batch = ContinuousBatch(model, max_num_seqs=rng.randint(1, 3), **caches)
    image = {seed: pixels(1 + seed % 2, seed) for seed in range(3)}
    seeds = rng.choices(range(3), k=rng.randint(1, 4))
    chats = [(chat(*"i" * len(image[seed]), 33, seed=number // 2), seed) for number, seed in enumerate(seeds)]
    for _ in range(3):
        n = rng.randint(1, 5)
        answers = run(batch, *(about(ids, image[seed], seed, n) for ids, seed in chats))
        assert answers == [alone(model, ids, n, image[seed]) for ids, seed in chats]
        for number, ((ids, seed), answer) in enumerate(zip(chats, answers)):
            text = [5 if token_id == IMAGE else token_id for token_id in answer]  # an image token would need an image
            chats[number] = ids + text + chat(rng.randint(1, 9)), seed
    for cache in caches.values():
        assert cache.bytes_used <= cache.max_bytes


def test_cache_without_memory_loses_no_token(tiny_model, monkeypatch):
    model = tiny_model()
    batch, expected = ContinuousBatch(model, prefix_cache=PrefixCache(LARGE)), alone(model, chat(50), 5)

    def refuse(*args):
        raise MemoryError

    monkeypatch.setattr(torch.Tensor, "clone", refuse)
    assert run(batch, request(chat(50))) == [expected] and batch.prefix_cache.bytes_used == 0


def test_least_recently_used_goes_first():
    cache = LRUCache(10)
    for key in "abc":
        cache.put(key, key.upper(), 3)
    assert cache.get("a") == "A" and cache.bytes_used == 9
    cache.put("d", "D", 3)
    assert [key for key, _ in cache.items()] == ["c", "a", "d"]
    cache.put("e", "E", 11)
    assert cache.get("e") is None and len(cache.items()) == 3, "too large alone"
    cache.put("a", "AA", 1)
    assert cache.bytes_used == 7
    few = LRUCache(10, max_entries=1)
    few.put("a", "A", 1), few.put("b", "B", 1)
    assert few.items() == [("b", "B")]
    with pytest.raises(ValueError, match="max_bytes=-1"):
        LRUCache(-1)
