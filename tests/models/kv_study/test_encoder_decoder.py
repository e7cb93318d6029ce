"""Whisper's road: cross keys and values made once, a cache hung on by hooks, and the same words with and without."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.decoding import SamplingParams
from models.kv_study.encoder_decoder import EncoderDecoder, TextDecoder, TextPrefillState
from models.kv_study.hook_cache import HookCache, install_kv_cache_hooks
from support import randomise

PROJECTIONS = ("key", "value")


def read(decoder, ids, xa, cuts, rows=None):
    """Logits of ids read in pieces with the hook cache."""
    cache, logits = HookCache(), []
    for start, stop in zip([0, *cuts], [*cuts, ids.size(1)]):
        with install_kv_cache_hooks(decoder, cache) as longer:
            logits.append(decoder(ids[:, start:stop], xa, start_pos=cache.length))
        cache = longer
    return torch.cat(logits, 1), cache


def counted(decoder):
    """How many rows each key and value projection has computed, growing as it does."""
    rows = {}

    def count(name):
        def hook(linear, args, output):
            rows[name] = rows.get(name, 0) + args[0].size(0) * args[0].size(1)

        return hook

    handles = [
        getattr(getattr(block, attn), kind).register_forward_hook(count((i, attn, kind)))
        for i, block in enumerate(decoder.blocks)
        for attn in ("attn", "cross_attn")
        for kind in PROJECTIONS
    ]
    return rows, handles


@pytest.fixture(scope="module")
def whisper_decoder():
    """OpenAI's decoder with random weights, and ours that has loaded them strictly."""
    whisper = pytest.importorskip("whisper.model", reason="openai-whisper is in the extra `test`")
    torch.manual_seed(0)
    theirs = randomise(whisper.TextDecoder(50, 16, 24, 4, 3)).eval()
    ours = TextDecoder(50, 16, 24, 4, 3).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@torch.no_grad()
def test_our_logits_are_those_of_openais_whisper(whisper_decoder):
    theirs, ours = whisper_decoder
    ids, xa = torch.randint(50, (3, 16)), torch.randn(3, 7, 24)
    torch.testing.assert_close(ours(ids, xa), theirs(ids, xa), atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_our_hooks_and_whispers_own_cache_continue_alike(whisper_decoder):
    """Against the cache of the openai-whisper package itself, word by word."""
    theirs, ours = whisper_decoder
    from whisper.model import Whisper

    host = type("Host", (), {"decoder": theirs, "dims": type("Dims", (), {"n_text_ctx": 16})})()
    kept, hooks = Whisper.install_kv_cache_hooks(host)
    ids, xa = torch.randint(50, (2, 9)), torch.randn(2, 7, 24)
    pieces = [theirs(ids[:, s:e], xa, kv_cache=kept) for s, e in ((0, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9))]
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(read(ours, ids, xa, [4, 5, 6, 7, 8])[0], torch.cat(pieces, 1), atol=1e-4, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_way_of_reading_is_one_pass(data):
    """Hooks and explicit caches, any cuts, heads, depths and batches, pictures that serve several rows: to 1e-4."""
    draw = data.draw
    n_head, n_layer = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    pictures, beams, length = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 8))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=3))) if length > 1 else []
    torch.manual_seed(draw(st.integers(0, 999)))
    decoder = randomise(TextDecoder(20, 8, 8 * n_head, n_head, n_layer)).eval()
    ids, xa = torch.randint(20, (pictures * beams, length)), torch.randn(pictures, 5, 8 * n_head)
    with torch.no_grad():
        whole = decoder(ids, xa.repeat_interleave(beams, 0))
        prefix, pieces = TextPrefillState(decoder.cross(xa)), []
        for start, stop in zip([0, *cuts], [*cuts, length]):
            x, prefix = decoder.read(ids[:, start:stop], prefix)
            pieces.append(decoder.logits(x))
        torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(read(decoder, ids, xa, cuts)[0], whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=1.0, seed=1), SamplingParams(repetition_penalty=5.0)],
    ids=["greedy", "sampled", "penalised"],
)
def test_cached_and_uncached_captions_are_the_same(encoder_decoder, sampling):
    images, ids = torch.rand(3, 3, 16, 16), torch.randint(0, 40, (3, 4))
    options = {"max_new_tokens": 20, "sampling": sampling, "n_samples": 2, "eos_token_id": 7}
    cached = encoder_decoder.generate(ids, images, **options)
    assert torch.equal(cached, encoder_decoder.generate(ids, images, **options, use_kv_cache=False))
    assert cached.size(0) == 6


def test_a_repetition_penalty_also_counts_the_prompt(encoder_decoder):
    """A word that would be said is not, once the prompt holds it, and the penalty is without bound."""
    images, ids = torch.rand(1, 3, 16, 16), torch.randint(0, 40, (1, 4))
    first = encoder_decoder.generate(ids, images, max_new_tokens=1)
    ids[0, 0] = first.item()  # the last word, which decides, stays
    unmoved = encoder_decoder.generate(ids, images, max_new_tokens=1)
    ids[0, 0] = unmoved.item()
    penalised = encoder_decoder.generate(ids, images, max_new_tokens=1, sampling=SamplingParams(repetition_penalty=1e9))
    assert penalised.item() not in ids[0].tolist()


def test_no_words_are_an_empty_answer_and_fewer_an_error(encoder_decoder):
    images, ids = torch.rand(2, 3, 16, 16), torch.randint(0, 40, (2, 4))
    assert encoder_decoder.generate(ids, images, max_new_tokens=0, n_samples=3).shape == (6, 0)
    with pytest.raises(ValueError, match="max_new_tokens=-1 is negative"):
        encoder_decoder.generate(ids, images, max_new_tokens=-1)
    with pytest.raises(ValueError, match="n_samples=0 is less than 1"):
        encoder_decoder.generate(ids, images, n_samples=0)


@pytest.mark.parametrize("n_samples", [1, 4])
def test_a_picture_is_projected_once_however_much_is_said(encoder_decoder, n_samples):
    """16 patches, 2 pictures: 32 rows through each cross projection; words once each, without the last, unread one."""
    rows, handles = counted(encoder_decoder.decoder)
    images, ids = torch.rand(2, 3, 16, 16), torch.randint(0, 40, (2, 4))
    encoder_decoder.generate(ids, images, max_new_tokens=10, n_samples=n_samples)
    for handle in handles:
        handle.remove()
    assert len(rows) == 2 * 2 * len(encoder_decoder.decoder.blocks)
    for (_, attn, _), n in rows.items():
        assert n == (2 * 16 if attn == "cross_attn" else 2 * 4 + 2 * n_samples * 9)


@torch.no_grad()
def test_the_hooks_too_project_a_picture_once(encoder_decoder):
    rows, handles = counted(encoder_decoder.decoder)
    xa, ids = encoder_decoder.encode(torch.rand(1, 3, 16, 16)), torch.randint(0, 40, (3, 8))
    _, cache = read(encoder_decoder.decoder, ids, xa, [3, 4, 5, 6, 7])
    for handle in handles:
        handle.remove()
    assert {n for (_, attn, _), n in rows.items() if attn == "cross_attn"} == {16}  # one picture, three rows of words
    assert {n for (_, attn, _), n in rows.items() if attn == "attn"} == {3 * 8}
    assert cache.length == 8


def test_one_picture_after_another_is_never_seen_in_its_stead(encoder_decoder):
    torch.manual_seed(0)
    first, second = torch.rand(2, 1, 3, 16, 16).unbind(0)
    ids = torch.randint(0, 40, (1, 4))
    alone = [encoder_decoder.generate(ids, image, max_new_tokens=12, use_kv_cache=False) for image in (first, second)]
    assert not torch.equal(*alone), "the test needs pictures that are told apart"
    for turn in (0, 1, 0):
        said = encoder_decoder.generate(ids, (first, second)[turn], max_new_tokens=12)
        assert torch.equal(said, alone[turn])


@torch.no_grad()
@pytest.mark.parametrize("way", ["hooks", "explicit"])
def test_beams_reorder(encoder_decoder, way):
    """Rows exchanged in the middle go on as the exchanged words would from the start; the picture is not copied."""
    decoder, xa = encoder_decoder.decoder, encoder_decoder.encode(torch.rand(1, 3, 16, 16))
    ids, order = torch.randint(0, 40, (3, 6)), torch.tensor([2, 0, 0])
    new = torch.randint(0, 40, (3, 1))
    whole = decoder(torch.cat([ids[order], new], 1), xa)[:, -1:]
    if way == "hooks":
        _, cache = read(decoder, ids, xa, [2])
        reordered = cache.rows(order)
        assert all(reordered.picture[linear] is said for linear, said in cache.picture.items())
        with install_kv_cache_hooks(decoder, reordered):
            logits = decoder(new, xa, start_pos=6)
    else:
        _, prefix = decoder.read(ids, TextPrefillState(decoder.cross(xa)))
        reordered = prefix.rows(order)
        assert reordered.cross is prefix.cross
        logits = decoder.logits(decoder.read(new, reordered)[0])
    torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-4)


def hooks_on(module):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


@torch.no_grad()
def test_hooks_go_on_the_way_out_also_after_an_error_and_the_past_is_intact(encoder_decoder):
    decoder, xa = encoder_decoder.decoder, encoder_decoder.encode(torch.rand(1, 3, 16, 16))
    ids = torch.randint(0, 40, (1, 5))
    _, past = read(decoder, ids, xa, [])
    before = {linear: said.clone() for linear, said in past.words.items()}
    with pytest.raises(IndexError), install_kv_cache_hooks(decoder, past):
        decoder(torch.tensor([[99]]), xa, start_pos=5)  # no such word
    with pytest.raises(KeyboardInterrupt), install_kv_cache_hooks(decoder, past):
        decoder(ids[:, :1], xa, start_pos=5)
        raise KeyboardInterrupt
    assert hooks_on(decoder) == 0
    assert past.length == 5 and all(torch.equal(said, before[linear]) for linear, said in past.words.items())
    with install_kv_cache_hooks(decoder, past) as longer:
        again = decoder(ids[:, :1], xa, start_pos=5)
    torch.testing.assert_close(again, decoder(torch.cat([ids, ids[:, :1]], 1), xa)[:, -1:], atol=1e-4, rtol=1e-4)
    assert (longer.length, past.length) == (6, 5)


@torch.no_grad()
def test_two_decodes_at_once_never_mix(encoder_decoder):
    """Turn by turn in one thread, and at the same time in four; two caches installed at once are refused."""
    decoder = encoder_decoder.decoder
    pictures, words = encoder_decoder.encode(torch.rand(4, 3, 16, 16)), torch.randint(0, 40, (4, 12))
    wanted = [decoder(words[i : i + 1], pictures[i : i + 1]) for i in range(4)]

    caches, said = [HookCache()] * 2, [[], []]
    for t in range(12):
        for i in (0, 1):
            with install_kv_cache_hooks(decoder, caches[i]) as longer:
                said[i].append(decoder(words[i : i + 1, t : t + 1], pictures[i : i + 1], start_pos=t))
            caches[i] = longer
    for i in (0, 1):
        torch.testing.assert_close(torch.cat(said[i], 1), wanted[i], atol=1e-4, rtol=1e-4)

    got = {}

    def decode(i):
        with torch.no_grad():
            got[i] = read(decoder, words[i : i + 1], pictures[i : i + 1], list(range(1, 12)))[0]

    threads = [threading.Thread(target=decode, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        torch.testing.assert_close(got[i], wanted[i], atol=1e-4, rtol=1e-4)

    with (
        install_kv_cache_hooks(decoder),
        pytest.raises(RuntimeError, match="another cache is installed"),
        install_kv_cache_hooks(decoder),
    ):
        pass
    assert hooks_on(decoder) == 0


@pytest.mark.parametrize("use_kv_cache", [True, False])
def test_more_words_than_positions_is_an_error_with_both_numbers(encoder_decoder, use_kv_cache):
    images, ids = torch.rand(1, 3, 16, 16), torch.randint(0, 40, (1, 4))
    assert encoder_decoder.generate(ids, images, max_new_tokens=61, use_kv_cache=use_kv_cache).size(1) == 61
    with pytest.raises(ValueError, match=r"65 tokens exceed the decoder's n_ctx=64"):
        encoder_decoder.generate(ids, images, max_new_tokens=62, use_kv_cache=use_kv_cache)


def test_it_learns_to_tell_pictures_apart(tiny_config):
    """A captioner, not only a shape: after some steps on four drawn scenes it says each one's words."""
    from random import Random

    from nanovlm.image_processing import preprocess
    from nanovlm.synthetic import caption, draw, random_scene
    from nanovlm.synthetic.recipe import make_tokenizer

    tokenizer, rng = make_tokenizer(), Random("captioner")
    scenes = [random_scene(rng) for _ in range(4)]
    images = torch.cat([preprocess(draw(scene, 64, 64), tile=16, max_side=None)[0] for scene in scenes])
    said = [tokenizer.encode(caption(scene)).ids for scene in scenes]
    end, longest = 2, max(map(len, said))
    ids = torch.tensor([[1, *words] + [end] * (longest - len(words) + 1) for words in said])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = EncoderDecoder(tiny_config(lm_vocab_size=tokenizer.get_vocab_size(), lm_n_heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(400):
        _, loss = model(ids[:, :-1], images, ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    told = model.eval().generate(ids[:, :1], images, max_new_tokens=longest + 1, eos_token_id=end)
    for row, scene in zip(told.tolist(), scenes):
        assert tokenizer.decode(row) == caption(scene)
