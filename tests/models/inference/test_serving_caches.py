"""Caches change what is computed, never what is generated; and they stay within their bytes."""

from random import Random

import pytest
import torch
from models.inference.serving_caches import ImageCache, LRUCache, PrefixCache, TiledImage

from models.inference.continuous_batching import ContinuousBatch
from support.generation import IMAGE, PER_IMAGE, run_ids

LARGE = 2**24


def generate(batch, *requests, n=6):
    """The ids of each request (ids, images) once all are done."""
    for key, (ids, images) in enumerate(requests):
        batch.add(key, ids, images, max_new_tokens=n)
    outputs = run_ids(batch)
    return [outputs[key] for key in range(len(requests))]


@pytest.fixture
def computed(tiny_model):
    """A model of 256 positions, and lists of how many tiles and how many new tokens it has computed each time."""
    model = tiny_model(lm_max_position_embeddings=256)
    tiles, tokens = [], []
    hooks = [
        model.vision_encoder.register_forward_pre_hook(lambda module, args: tiles.append(len(args[0]))),
        model.decoder.blocks[0].register_forward_pre_hook(lambda module, args: tokens.append(args[0].size(1))),
    ]
    yield model, tiles, tokens
    for hook in hooks:
        hook.remove()


def chat(*parts, seed=0):
    """Ids of text lengths and images ("i") in turn."""
    generator = torch.Generator().manual_seed(seed)
    ids = []
    for part in parts:
        ids += [IMAGE] * PER_IMAGE if part == "i" else torch.randint(4, 40, (part,), generator=generator).tolist()
    return torch.tensor(ids)


def without_images(answer):
    """An answer of the random model as text that may follow: image tokens in it would need images."""
    return torch.tensor([token_id if token_id != IMAGE else 5 for token_id in answer])


def pixels(n, seed=0):
    return torch.rand(n, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def test_image_is_encoded_once(computed):
    model, tiles, _ = computed
    batch = ContinuousBatch(model, max_num_seqs=4, image_cache=(cache := ImageCache(LARGE)))
    images = pixels(3)
    first = generate(batch, (chat(2, "i", "i", 5), [TiledImage(images[:2], "a")]), (chat(9), None))
    assert tiles == [2] and cache.get("b") is None
    found = cache.get("a")
    assert found.tiles is None
    again = generate(batch, (chat(2, "i", "i", 5), [TiledImage(None, "a", embeds=found.embeds)]))
    same = generate(batch, (chat(2, "i", "i", 5), [TiledImage(images[:2], "a")]))
    assert tiles == [2] and again == same == first[:1]
    two = (chat("i", "i", "i", 4), [TiledImage(images[:2], "a"), TiledImage(images[2:], "c")])
    expected = generate(ContinuousBatch(model), (two[0], images))
    tiles.clear()
    assert generate(batch, two) == expected and tiles == [1], "only the new image"


def test_same_image_of_waiting_requests_is_encoded_once(computed):
    model, tiles, _ = computed
    requests = [(chat("i", 5, seed=seed), [TiledImage(pixels(1), "a")]) for seed in range(3)]
    expected = generate(ContinuousBatch(model), *((ids, pixels(1)) for ids, _ in requests))
    tiles.clear()
    assert generate(ContinuousBatch(model, image_cache=ImageCache(LARGE)), *requests) == expected
    assert tiles == [1]
    shared = [TiledImage(pixels(1))]  # of several requests, without a key
    assert len({tuple(ids) for ids in generate(ContinuousBatch(model), *[(chat("i", 5), shared)] * 3)}) == 1
    assert tiles == [1, 1]


def test_next_turn_computes_its_own_tokens_only(computed):
    model, tiles, tokens = computed
    batch = ContinuousBatch(model, prefix_cache=PrefixCache(LARGE))
    turn, expected, image = chat("i", 40), None, pixels(1)
    for n_turn in range(4):
        (expected,) = generate(ContinuousBatch(model), (turn, image))
        tokens.clear(), tiles.clear()
        (ids,) = generate(batch, (turn, [TiledImage(image, "a")]))
        assert ids == expected
        if n_turn:
            assert tiles == [] and tokens[0] == 4, "the answer's last token is not in the cache, and three are new"
        turn = torch.cat([turn, torch.tensor(ids), chat(3, seed=n_turn)])
    assert len(batch.prefix_cache.items()) == 1, "a turn replaces the one before"


def test_another_image_is_no_common_prefix(computed):
    model, tiles, tokens = computed
    batch = ContinuousBatch(model, prefix_cache=PrefixCache(LARGE))
    ids = chat(34, "i", 20)
    generate(batch, (ids, [TiledImage(pixels(1), "a")]))
    expected = generate(ContinuousBatch(model), (ids, pixels(1, seed=1)))
    tokens.clear(), tiles.clear()
    assert generate(batch, (ids, [TiledImage(pixels(1, seed=1), "b")])) == expected
    assert tiles == [1] and tokens[0] == 24, "the text before it is"
    generate(batch, (ids, pixels(1)))
    assert tokens[1] == 1 and len(batch.prefix_cache.items()) == 2, "an image without a key is never found again"


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
        requests = [(ids, [TiledImage(image[seed], seed)]) for ids, seed in chats]
        n = rng.randint(1, 5)
        answers = generate(batch, *requests, n=n)
        plain = [(ids, image[seed]) for ids, seed in chats]
        assert answers == [generate(ContinuousBatch(model), one, n=n)[0] for one in plain]
        chats = [
            (torch.cat([ids, without_images(answer), chat(rng.randint(1, 9))]), seed)
            for (ids, seed), answer in zip(chats, answers)
        ]
    for cache in caches.values():
        assert cache.bytes_used <= cache.max_bytes


def test_cancelled_sequence_is_kept(computed):
    model, _, tokens = computed
    batch = ContinuousBatch(model, prefix_cache=(cache := PrefixCache(LARGE)))
    batch.add(0, chat(50), max_new_tokens=9)
    batch.step()
    batch.cancel(0)
    assert len(cache.items()) == 1
    tokens.clear()
    generate(batch, (torch.cat([chat(50), chat(5, seed=1)]), None))
    assert tokens[0] == 5


def test_cache_without_memory_loses_no_token(computed, monkeypatch):
    model, _, _ = computed
    batch = ContinuousBatch(model, prefix_cache=PrefixCache(LARGE))
    expected = generate(ContinuousBatch(model), (chat(50), None))

    def refuse(*args):
        raise MemoryError

    monkeypatch.setattr(torch.Tensor, "clone", refuse)
    assert generate(batch, (chat(50), None)) == expected and batch.prefix_cache.bytes_used == 0


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
    with pytest.raises(ValueError, match="max_bytes=-1"):
        LRUCache(-1)
