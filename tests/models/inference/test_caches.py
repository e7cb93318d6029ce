"""Caches change what is computed, never what is generated; and they stay within their bytes."""

from random import Random

import pytest
import torch

from models.inference.caches import ImageCache, LRUCache, PrefixCache, TiledImage
from models.inference.continuous_batching import ContinuousBatch
from models.inference.request import Request
from support.generation import IMAGE, PER_IMAGE, run

LARGE = 2**24


def request(ids, pixels=None, key=None, n=6):
    images = [] if pixels is None else [TiledImage(pixels, **({} if key is None else {"key": key}))]
    return Request(ids, images, max_new_tokens=n)


def alone(model, ids, pixels=None, n=6):
    return run(ContinuousBatch(model), request(ids, pixels, n=n))[0]


@pytest.fixture
def computed(tiny_model):
    """A model of 256 positions, and lists of how many tiles and how many new tokens it has computed each time."""
    model, tiles, tokens = tiny_model(lm_max_position_embeddings=256), [], []
    model.vision_encoder.register_forward_pre_hook(lambda module, args: tiles.append(len(args[0])))
    model.decoder.blocks[0].register_forward_pre_hook(lambda module, args: tokens.append(args[0].size(1)))
    return model, tiles, tokens


def chat(*parts, seed=0):
    """Ids of text lengths and images ("i") in turn."""
    rng, ids = Random(seed), []
    for part in parts:
        ids += [IMAGE] * PER_IMAGE if part == "i" else rng.choices(range(4, 40), k=part)
    return ids


def pixels(n, seed=0):
    return torch.rand(n, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def test_image_is_encoded_once(computed):
    model, tiles, _ = computed
    ids, images = chat(2, "i", "i", 5), pixels(3)
    expected = alone(model, ids, images[:2])
    several = alone(model, two := chat("i", "i", "i", 4), images)
    tiles.clear()
    batch = ContinuousBatch(model, image_cache=(cache := ImageCache(LARGE)))
    assert run(batch, *(request(ids, images[:2], "a") for _ in range(3))) == [expected] * 3, "waiting together"
    assert tiles == [2] and cache.get("b") is None and cache.get("a").tiles is None
    for again in (TiledImage(None, "a", embeds=cache.get("a").embeds), TiledImage(images[:2], "a")):
        assert run(batch, Request(ids, [again], max_new_tokens=6)) == [expected]
    both = Request(two, [TiledImage(images[:2], "a"), TiledImage(images[2:], "c")], max_new_tokens=6)
    assert run(batch, both) == [several] and tiles == [2, 1], "only the new image"


def test_next_turn_computes_its_own_tokens_only(computed):
    model, tiles, tokens = computed
    batch, turn, image = ContinuousBatch(model, prefix_cache=PrefixCache(LARGE)), chat("i", 40), pixels(1)
    for n_turn in range(4):
        expected = alone(model, turn, image)
        tokens.clear(), tiles.clear()
        (ids,) = run(batch, one := request(turn, image, "a"))
        assert ids == expected
        if n_turn:
            assert tiles == [] and tokens[0] == 4, "the answer's last token is not in the cache, and three are new"
            assert one.n_cached == len(turn) - 4
        turn = [*turn, *ids, *chat(3, seed=n_turn)]
    assert len(batch.prefix_cache.items()) == 1, "a turn replaces the one before"
    batch.add(one := request(chat(50)))
    batch.step(), batch.cancel(one), tokens.clear()
    run(batch, request(chat(50) + chat(5, seed=1)))
    assert tokens[0] == 5, "a cancelled sequence is kept, too"


def test_another_image_is_no_common_prefix(computed):
    model, tiles, tokens = computed
    batch, ids = ContinuousBatch(model, prefix_cache=PrefixCache(LARGE)), chat(34, "i", 20)
    run(batch, request(ids, pixels(1), "a"))
    expected = alone(model, ids, pixels(1, seed=1))
    tokens.clear(), tiles.clear()
    assert run(batch, request(ids, pixels(1, seed=1), "b")) == [expected]
    assert tiles == [1] and tokens[0] == 24, "the text before it is"


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.full) for n in range(4, 25))])
def test_caches_of_any_size_change_no_token(tiny_model, seed):
    """Chats of random turns, several at once, against the same prompts without caches."""
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
        answers = run(batch, *(request(ids, image[seed], seed, n) for ids, seed in chats))
        assert answers == [alone(model, ids, image[seed], n) for ids, seed in chats]
        for number, ((ids, seed), answer) in enumerate(zip(chats, answers)):
            text = [5 if token_id == IMAGE else token_id for token_id in answer]  # an image token would need an image
            chats[number] = ids + text + chat(rng.randint(1, 9)), seed
    for cache in caches.values():
        assert cache.bytes_used <= cache.max_bytes


def test_cache_without_memory_loses_no_token(computed, monkeypatch):
    model, _, _ = computed
    batch, expected = ContinuousBatch(model, prefix_cache=PrefixCache(LARGE)), alone(model, chat(50))

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
