"""Generation: caching, batching, chunking and sampling give the same tokens."""

from functools import partial
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import nn

from models.cache import PrefillState
from models.common.errors import InputError
from models.common.options import SamplingParams
from models.modality_projector import pixel_shuffle
from models.vision_language_model import VisionLanguageModel
from support import watch
from support.generation import IDS, IMAGE, IMAGES, PER_IMAGE, only_row, prompt


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


CASES = [*range(15), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(15, 40))]
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(temperature=1.0, top_p=0.9, seed=5),
)


@pytest.mark.parametrize("seed", CASES)
def test_neither_cache_nor_padding_nor_chunks_change_a_token(tiny_model, seed):
    """In batches of up to three prompts of text (t) and images (i)."""
    chance = Random(seed)
    n_kv_heads, group, head_dim = chance.randint(1, 3), chance.randint(1, 3), chance.choice([2, 4, 8])
    heads = {"lm_n_kv_heads": n_kv_heads, "lm_n_heads": n_kv_heads * group}
    heads["lm_hidden_dim"] = n_kv_heads * group * head_dim
    shape = heads | {"lm_n_blocks": chance.randint(1, 3), "lm_tie_weights": chance.random() < 0.5}
    shape["seed"] = chance.randint(0, 9)
    rows = ["".join(chance.choices("ttti", k=chance.randint(1, 10))) for _ in range(chance.randint(1, 3))]
    inputs = prompt(*rows)
    model, ids, mask = tiny_model(**shape), inputs["input_ids"], inputs["attention_mask"]
    n_samples, sampling = chance.randint(1, 3), chance.choice(SAMPLINGS)
    options = {"max_new_tokens": 10, "sampling": sampling, "n_samples": n_samples}
    options["eos_token_id"] = chance.choice([None, *range(4, 10)])
    cached = model.generate(**inputs, **options)
    assert torch.equal(cached, model.generate(**inputs, **options, use_kv_cache=False))
    assert len(cached) == len(ids) * n_samples

    cuts = {chance.randint(1, 40) for _ in range(chance.randrange(12))}
    is_image = ids == IMAGE
    nth = (is_image.cumsum(-1) - 1) % PER_IMAGE  # within an image, which no cut may part
    inner = [cut for cut in sorted(cuts) if cut < ids.size(1) and not (is_image & (nth > 0))[:, cut].any()]
    starts = (is_image & (nth == 0)).nonzero()[:, 1]  # of each image, in reading order
    images = torch.zeros(0, 3, 16, 16) if inputs["images"] is None else inputs["images"]
    whole, expected = model.prefill(**inputs)
    prefix = None
    for start, stop in pairwise([0, *inner, ids.size(1)]):
        if start and start == inner[0]:
            options = {"max_new_tokens": 4, "sampling": SamplingParams(repetition_penalty=1.5)}
            continued = model.generate(ids, images[starts >= start], mask, prefix=prefix, **options)
            assert torch.equal(continued, model.generate(**inputs, **options))
        here = (start <= starts) & (starts < stop)
        logits, prefix = model.prefill(ids[:, start:stop], images[here], mask[:, start:stop], prefix)
    for _ in range(4):
        close(logits, whole)
        new = whole.argmax(-1)
        (whole, expected), (logits, prefix) = model.decode(new, expected), model.decode(new, prefix)
    assert prefix.length == expected.length

    penalty = SamplingParams(repetition_penalty=chance.choice([1.0, 1.5, 1e6]))
    for row, logits in enumerate(model.prefill(**inputs)[0]):
        alone = only_row(inputs, row)
        expected = model.generate(**alone, max_new_tokens=8, sampling=penalty)[0]
        close(logits, model.prefill(**alone)[0][0])
        ids[row, mask[row] == 0] = expected[0]  # padding of a likely id, which no penalty counts
        assert torch.equal(model.generate(**inputs, max_new_tokens=8, sampling=penalty)[row], expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_model_of_any_precision_runs_every_path(tiny_model, dtype, tied):
    model, inputs = tiny_model(lm_tie_weights=tied).to(dtype), prompt("tittt", "ttit")
    targets = inputs["input_ids"].masked_fill(inputs["input_ids"] < 9, -100)
    logits, loss = model(**inputs, targets=targets)
    torch.testing.assert_close(model(**inputs, targets=targets, targets_only=True)[1], loss)
    loss.backward()
    assert all(weight.grad.isfinite().all() and weight.grad.any() for weight in model.parameters())

    with torch.inference_mode():
        last, prefix = model.prefill(**inputs)
        after, prefix = model.decode(last.argmax(-1), prefix)
    assert logits.dtype == last.dtype == after.dtype == prefix.kv_cache[0].key.dtype == dtype
    sampling = SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=1)
    for cached in (True, False):
        ids = model.generate(**inputs, max_new_tokens=3, sampling=sampling, n_samples=2, use_kv_cache=cached)
        assert ids.shape == (4, 3)
    close_enough = {torch.bfloat16: 0.3, torch.float16: 0.03}.get(dtype, 1e-5)
    reference, _ = tiny_model(lm_tie_weights=tied)(**inputs)
    torch.testing.assert_close(logits.float(), reference, atol=close_enough, rtol=0)


def test_samples_are_reproducible_by_seed(tiny_model):
    model, inputs = tiny_model(), prompt("tit", "t")

    def generated(seed=None):
        sampling = SamplingParams(temperature=1.5, seed=seed)
        return model.generate(**inputs, max_new_tokens=12, n_samples=3, sampling=sampling)

    torch.manual_seed(0)
    first = generated(seed=1)
    state = torch.get_rng_state()
    assert torch.equal(first, generated(seed=1)) and not torch.equal(first, generated(seed=2))
    assert torch.equal(state, torch.get_rng_state())  # a seed of its own takes nothing from torch's
    assert len({tuple(row.tolist()) for row in first[:3]}) == 3  # one prompt's samples differ
    unseeded = generated()
    assert not torch.equal(unseeded, generated())
    torch.set_rng_state(state)
    assert torch.equal(unseeded, generated())


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_no_unused_step_is_computed_and_no_unused_cache_kept(tiny_model, n):
    model, inputs, caches = tiny_model(), prompt("titt", "tt"), []
    with watch(model.decoder) as reads:
        assert model.generate(**inputs, max_new_tokens=n, n_samples=2).shape == (4, n)
        model.generate(**inputs, max_new_tokens=n, use_kv_cache=False)
    expected = [(2, 7)] * (n > 0) + [(4, 1)] * (n - 1) + [(2, 7 + i) for i in range(n)]
    assert [shape[:2] for shape in reads] == expected
    model.decoder.register_forward_hook(lambda module, inputs, outputs: caches.append(len(outputs[1])))
    model(**inputs, targets=inputs["input_ids"]), model.prefill(**inputs)
    assert caches == [0, len(model.decoder.blocks)]


@pytest.mark.parametrize("cached", [True, False])
def test_generation_stops_when_every_row_has_ended(tiny_model, cached):
    model, inputs = tiny_model(), prompt("titt", "tt", "ttt")
    options = {"max_new_tokens": 30, "sampling": SamplingParams(temperature=2.0, seed=3), "use_kv_cache": cached}
    free = model.generate(**inputs, **options)
    eos = next(i for i in range(40) if (free == i).any(-1).all())  # a token that every row says some day
    ends = (free == eos).int().argmax(-1)
    assert 0 < ends.max() < 29 and ends.unique().numel() > 1

    with watch(model.decoder) as reads:
        generated = model.generate(**inputs, **options, eos_token_id=eos)
    assert generated.size(1) == len(reads) == ends.max() + 1
    for row, end in enumerate(ends):
        assert torch.equal(generated[row, : end + 1], free[row, : end + 1])
        assert (generated[row, end:] == eos).all()


@torch.inference_mode()
def test_images_replace_the_prompts_image_tokens_in_reading_order_and_a_generated_one_is_a_word(tiny_model):
    model, inputs = tiny_model(), prompt("ti", "iti")
    x = model.embed(inputs["input_ids"], inputs["images"])
    one, two, three = (model.MP(model.vision_encoder(image[None]))[0] for image in inputs["images"])
    close(x[0, -4:], one)
    close(x[1], torch.cat([two, x[1, 4:5], three]))
    logits, _ = model.decode(torch.tensor([IMAGE] * 2), model.prefill(**inputs | {"attention_mask": None})[1])
    word = model.decoder.token_embedding(torch.tensor([[IMAGE]] * 2))
    hidden, _ = model.decoder(torch.cat([x, word], dim=1))
    close(logits, model.decoder.head(hidden[:, -1]))


@pytest.mark.parametrize("cached", [True, False])
def test_generation_reaches_the_last_position_and_not_beyond(tiny_model, cached):
    model, inputs = tiny_model(lm_max_position_embeddings=16), prompt("tit")
    ids = model.generate(**inputs, max_new_tokens=11, use_kv_cache=cached)  # 6 + 10 are read, the 11th is not
    with torch.inference_mode():
        x = torch.cat([model.embed(inputs["input_ids"], inputs["images"]), model.embed_tokens(ids[:, :-1])], 1)
        assert torch.equal(model.decoder.head(model.decoder(x)[0])[:, 5:].argmax(-1), ids)
    with pytest.raises(InputError, match="6 tokens and max_new_tokens=12 .* lm_max_position_embeddings=16"):
        model.generate(**inputs, max_new_tokens=12, use_kv_cache=cached)


def test_new_weights_keep_the_scale_of_what_they_read(tiny_config):
    torch.manual_seed(0)
    model = VisionLanguageModel(tiny_config(), IMAGE)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            std = 0.02 if name == "decoder.head" else module.in_features**-0.5
            assert module.weight.std().item() == pytest.approx(std, rel=0.15), name
            assert module.bias is None or not module.bias.any()
    gray = model.vision_encoder.patch_embedding.conv(torch.full((1, 3, 16, 16), 0.5))
    assert gray.abs().max() < 1e-5, "pixels in [0, 1] act as if they were in [-1, 1]"


OF_GENERATE = {  # words of the error -> what is changed of a prompt of 10 tokens with two images
    "8 image tokens, .* 4 embeddings": {"images": torch.rand(1, 3, 16, 16)},
    "8 image tokens, .* 12 embeddings": {"images": torch.rand(3, 3, 16, 16)},
    "8 image tokens, .* 0 embeddings": {"images": None},
    r"attention_mask has the shape \(1, 3\), not \(1, 10\)": {"attention_mask": torch.ones(1, 3)},
    "max_new_tokens=-1 is negative": {"max_new_tokens": -1},
    "n_samples=0 is less than 1": {"n_samples": 0},
}


@torch.inference_mode()
def test_inputs_that_do_not_fit_are_refused(tiny_model):
    model, ids = tiny_model(), torch.tensor([[5, 6, 7, 8]])
    logits, state = model.prefill(ids)
    masked = PrefillState(state.kv_cache, torch.ones(1, 500, dtype=torch.long))
    assert model.prefill(ids[:0])[0].shape == (0, logits.size(1))
    _, full = model.prefill(torch.randint(4, 40, (1, 64)))
    _, two = model.prefill(ids.repeat(2, 1))
    others = [tiny_model(**sizes).prefill(ids)[1] for sizes in ({"lm_n_blocks": 1}, {"lm_n_kv_heads": 6})]
    width = model.cfg.lm_hidden_dim
    inputs = prompt("tiit") | {"max_new_tokens": 5}
    for wrong, message in (
        *((partial(model.generate, **inputs | changes), words) for words, changes in OF_GENERATE.items()),
        (partial(model.generate, ids, prefix=state, max_new_tokens=2), "not .B, T, .* of at least one new token"),
        (partial(model.prefill_embeds, torch.rand(1, 3, width - 2)), f"have the shape .1, 3, {width - 2}., not"),
        (partial(model.prefill, ids, attention_mask=ids[:, :2].ge(5)), r"the shape \(1, 2\), not \(1, 4\)"),
        (partial(model.decode, ids[0, :1], masked), r"the prefix's mask has the shape \(1, 500\), not \(1, 4\)"),
        (partial(model.decode, ids[:, :1], state), "have the shape .1, 1, 1, .*, not"),
        (partial(model.prefill, IDS, IMAGES.byte()), "images are of torch.uint8, not floats; normalize them"),
        (partial(model.decode, torch.tensor([8]), full), "65 tokens exceed lm_max_position_embeddings=64"),
        (partial(model.decode, torch.tensor([5, 6]), state), "2 new rows do not continue a cache of 1; pass one for"),
        (partial(model.decode, torch.tensor([5]), two), "1 new rows do not continue a cache of 2; pass one for each"),
        *((partial(model.decode, torch.tensor([5]), prefix), None) for prefix in others),
        (partial(model.encode_images, IMAGES.to("meta")), "meta"),
        (partial(model.prefill_embeds, torch.rand(1, 3, width, device="meta")), "meta"),
    ):
        with pytest.raises((InputError, RuntimeError), match=message):
            wrong()


def test_pixel_shuffle_puts_the_rows_of_a_square_one_after_another():
    squares = pixel_shuffle(torch.arange(36).view(1, 36, 1), 3)[0].tolist()
    assert squares[:2] == [[0, 1, 2, 6, 7, 8, 12, 13, 14], [3, 4, 5, 9, 10, 11, 15, 16, 17]]
    assert squares[2:] == [[i + 18 for i in row] for row in squares[:2]]
    for patches, factor in ((15, 1), (16, 3), (36, 4)):
        with pytest.raises(ValueError, match=f"{patches} patches .* multiple of {factor}"):
            pixel_shuffle(torch.zeros(1, patches, 2), factor)
