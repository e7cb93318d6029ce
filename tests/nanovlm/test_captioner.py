"""Captioner: caption, stream, samples, ask and captions agree; bad input raises; importing has no side effects."""

import copy
import io
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import nanovlm
from models.decoding import SamplingParams
from models.inference.inference_model import InferenceModel
from models.inference.kernels.load import WITHOUT_BF16_DOT, available_levels
from models.inference.request import Request
from models.lora import adapt, adapters
from models.lora.files import write_adapters
from nanovlm import SAMPLE, Captioner, ChatSession
from nanovlm.captioner import Stats
from nanovlm.device import choose_device, choose_dtype
from nanovlm.errors import ImageError, InputError, MissingExtraError
from support import ROOT, noise_image, watch
from support.captioners import ending_with

SAMPLED = SamplingParams(temperature=1.5, seed=3)


@pytest.fixture(scope="module")
def captioner(random_captioner):
    return random_captioner


@pytest.fixture(scope="module")
def images():
    sizes = ((100, 60), (96, 96), (300, 200))
    first, second, third = (noise_image(*size, seed=seed) for seed, size in enumerate(sizes, start=1))
    return [first, second, Image.new("RGB", (20, 70), "red"), third]


def test_arrays_are_images_and_batches_of_them_are_several(captioner, images):
    array = np.asarray(images[1])
    expected = captioner.caption(images[1], max_new_tokens=6)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    assert captioner.caption(array, max_new_tokens=6) == captioner.caption(tensor, max_new_tokens=6) == expected
    assert list(captioner.captions(np.stack([array, array]), max_new_tokens=6)) == [expected] * 2
    assert list(captioner.captions(torch.stack([tensor] * 2), max_new_tokens=6)) == [expected] * 2


def test_urls_are_fetched_only_if_allowed(model_folder, images, monkeypatch):
    url, fetched, there = "https://example.org/image.png", [], {}
    closed = Captioner.from_pretrained(model_folder, "cpu", "float32")
    for call in (lambda: closed.caption(url), lambda: closed.ask(url, ["?"]), lambda: ChatSession(closed, [url])):
        with pytest.raises(ImageError, match="image.png is a URL; .* allow_urls=True"):
            call()
    data = io.BytesIO()
    images[0].save(data, "PNG")
    there[url] = data.getvalue()
    monkeypatch.setattr("nanovlm.processing.image_urls.fetch_image", lambda url: fetched.append(url) or there[url])
    allowed = Captioner.from_pretrained(model_folder, "cpu", "float32", allow_urls=True)
    assert allowed.caption(url, max_new_tokens=6) == closed.caption(images[0], max_new_tokens=6)
    assert fetched == [url]
    there[url] = b"words"
    with pytest.raises(ImageError, match=f"^{url}: not an image"):
        allowed.caption(url)


def test_a_url_needs_the_extra_serve(model_folder, monkeypatch):
    captioner = Captioner.from_pretrained(model_folder, "cpu", "float32", allow_urls=True)
    monkeypatch.delitem(sys.modules, "nanovlm.processing.image_urls", raising=False)
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(MissingExtraError, match="pip install 'nanovlm\\[serve\\]'"):
        captioner.caption("http://a/b.png")


def test_a_question_without_an_image_warns_once(captioner, images):
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for _ in range(3):
            captioner.caption(None, "What colour is it?", max_new_tokens=1)
            "".join(ChatSession(captioner).ask("What colour is it?", max_new_tokens=1))
    assert [str(warning.message)[:27] for warning in caught] == ["a question without an image"] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captioner.caption(images[0], max_new_tokens=1)
        "".join(ChatSession(captioner, [images[0]]).ask("?", max_new_tokens=1, temperature=0.5, seed=1))
        with pytest.raises(InputError, match="start_with"):
            next(ChatSession(captioner, [images[0]]).ask("?", start_with="A"))


def test_streamed_pieces_join_to_the_caption(captioner, images):
    for sampling in (SamplingParams(), SAMPLED, SamplingParams(repetition_penalty=1.5)):
        for image in images:
            options = {"max_new_tokens": 24, "sampling": sampling}
            pieces = list(captioner.stream(image, **options))
            assert len(pieces) > 1 and "".join(pieces) == captioner.caption(image, **options)
            assert captioner.samples(image, **options) == ["".join(pieces)]


def test_stream_decodes_lazily(captioner, images):
    steps, model = [], InferenceModel(captioner.model)
    model.network.run, run = lambda *args: steps.append(1) or run(*args), model.network.run
    stream = Captioner(model, captioner.processor).stream(images[0], max_new_tokens=24)
    assert steps == []
    next(stream), next(stream)
    assert 0 < len(steps) < 12
    stream.close()
    assert len(steps) < 12


def test_an_answer_does_not_depend_on_its_batch(captioner, images):
    """The seed is each row's own: row k is the caption of image k with that seed, in any batch and order."""
    options = {"max_new_tokens": 12, "temperature": 1.5, "seed": 3}
    alone = [captioner.caption(image, **options) for image in images]
    assert len(set(alone)) == len(alone) and alone[0] != captioner.caption(images[0], **options | {"seed": 4})
    for batch_size in (1, 2, 3, 16):
        assert list(captioner.captions(images, batch_size=batch_size, **options)) == alone
        assert list(captioner.captions(images[::-1], batch_size=batch_size, **options)) == alone[::-1]
    samples = captioner.samples(images[0], n=3, **options)
    assert samples == [captioner.caption(images[0], **options | {"seed": seed}) for seed in (3, 4, 5)]
    assert captioner.ask(images[0], [nanovlm.PROMPT, "?"], **options)[0] == alone[0]


def test_an_image_that_fails_names_itself_and_the_others_go_on(captioner, images):
    rows, options = [images[0], "no such file.png", images[1]], {"max_new_tokens": 4}
    answers, expected = captioner.captions(rows, **options), [captioner.caption(one, **options) for one in rows[::2]]
    assert next(answers) == expected[0]
    with pytest.raises(ImageError, match="no such file.png") as info:
        next(answers)
    assert info.value.__notes__ == ["at item 2 of captions"]
    broken = Request((), name="b", error=info.value)
    requests = [captioner.request(images[0], **options), broken, captioner.request(images[1], **options)]
    done = list(captioner.run(iter(requests), batch_size=2))
    assert done == requests and [captioner.answer(one) for one in done[::2]] == expected
    with pytest.raises(ImageError, match="no such file.png"):
        captioner.answer(broken)
    too_long = Request([5] * 2000)
    with pytest.raises(InputError, match="exceed"):
        list(captioner.run([too_long]))


def test_batched_captions_match_single_captions(captioner, images):
    inputs_of_rows = [*images, None, images[:2], (images[3],)]
    prompts = ["Describe this picture.", "What?", "How many are there? " * 4, "?", "Hi!", "Which?", "<|im_end|>"]
    alone = [captioner.caption(image, prompt, max_new_tokens=16) for image, prompt in zip(inputs_of_rows, prompts)]
    for batch_size in (1, 3, 16):
        options = {"batch_size": batch_size, "max_new_tokens": 16}
        assert list(captioner.captions(inputs_of_rows, prompts, **options)) == alone
    one_prompt = [captioner.caption(image, "?", max_new_tokens=16) for image in images]
    assert list(captioner.captions(images, "?", max_new_tokens=16)) == one_prompt
    assert len(set(alone)) == len(alone), "equal captions would prove nothing"
    assert list(captioner.captions([])) == []


QUESTIONS = ["Describe this picture.", "What?", "How many are there? " * 4, "?", "What?", "<|im_end|>"]
QUESTIONS += ["Hi!", "Which?", "Is it?"]


def test_ask_matches_single_questions(captioner, tiled, images):
    for one in (captioner, Captioner(*tiled)):
        for inputs_of_rows in (images[0], images[:2], None):
            alone = [one.caption(inputs_of_rows, question, max_new_tokens=12) for question in QUESTIONS]
            assert one.ask(inputs_of_rows, QUESTIONS, max_new_tokens=12) == alone
            assert one.ask(inputs_of_rows, QUESTIONS[:1], max_new_tokens=12) == alone[:1]
            assert len(set(alone)) > 5, "equal answers would prove nothing"
    assert captioner.ask(images[0], []) == []
    penalized = SamplingParams(repetition_penalty=1.5)
    alone = [captioner.caption(images[0], question, max_new_tokens=12, sampling=penalized) for question in QUESTIONS]
    assert captioner.ask(images[0], QUESTIONS, max_new_tokens=12, sampling=penalized) == alone


def test_ask_encodes_and_prefills_the_image_once(captioner, images, monkeypatch):
    monkeypatch.setenv("NANOVLM_CPU_LEVEL", "none")  # the plain modules can be watched
    model = captioner.model
    captioner = Captioner(InferenceModel(model), captioner.processor)
    with watch(model.vision_encoder) as seen, watch(model.decoder) as read:
        captioner.ask(images[0], QUESTIONS, max_new_tokens=2, stats=(stats := Stats()))
    prompts = [len(captioner.processor.encode_prompt([(1, 1)], question)) for question in QUESTIONS]
    assert [shape[0] for shape in seen] == [1] and read[0][:2] == (1, prompts[0])
    assert stats.prompt_tokens <= sum(n - 36 for n in prompts) + 36, "the image's 36 tokens count once"
    assert stats.answers == len(QUESTIONS) and len(QUESTIONS) <= stats.new_tokens <= 2 * len(QUESTIONS)


def test_captions_read_their_images_batch_by_batch(captioner, images):
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield images[0]

    answers = captioner.captions(endless(), batch_size=3, max_new_tokens=2)
    assert taken == []
    first = [next(answers) for _ in range(3)]
    assert len(taken) == 3 and first == [captioner.caption(images[0], max_new_tokens=2)] * 3
    next(answers)
    assert len(taken) == 6
    slow = captioner.captions((image for image in [images[0]] * 9 if taken.append(1) is None), batch_size=2)
    taken.clear()
    next(slow)
    assert len(taken) <= 4, "at most twice the batch"


def test_wrong_numbers_of_images_and_prompts_are_errors(captioner, images):
    with pytest.raises(InputError, match="4 images, but 2 prompts"):
        list(captioner.captions(images, ["one", "two"]))
    answers = captioner.captions(iter(images), iter(["one", "two"]), batch_size=2, max_new_tokens=1)
    assert len([next(answers), next(answers)]) == 2
    with pytest.raises(InputError, match="item 3 has no prompt"):
        next(answers)
    with pytest.raises(InputError, match="item 2 has no image"):
        list(captioner.captions(iter(images[:1]), iter(["one", "two"]), batch_size=8))
    for one in ("photo.jpg", images[0], np.asarray(images[0]), torch.zeros(3, 9, 9)):
        with pytest.raises(InputError, match="for one image use caption"):
            next(captioner.captions(one))
    with pytest.raises(InputError, match="batch_size=0"):
        next(captioner.captions(images, batch_size=0))
    with pytest.raises(InputError, match="ask takes a list of prompts, not 'What\\?'; for one prompt use caption"):
        captioner.ask(images[0], "What?")


def test_several_images_in_one_prompt(captioner, images):
    first, second = images[0], images[3]
    options = {"prompt": "Which?", "max_new_tokens": 12}
    both = captioner.caption([first, second], **options)
    assert both == captioner.caption((first, second), **options)
    assert len({both, captioner.caption([second, first], **options), captioner.caption(first, **options)}) == 3
    assert captioner.caption([first], **options) == captioner.caption(first, **options)
    assert captioner.caption([], **options) == captioner.caption(None, **options)


def test_stats_are_those_of_the_answers(captioner, images):
    ids, tiles = captioner.prepare(images[0])
    prompt, shown, sampling = torch.tensor([ids]), torch.cat(tiles), SamplingParams(temperature=2.0, seed=0)
    eos = captioner.model.generate(prompt, shown, max_new_tokens=40, sampling=sampling)[0, 20].item()
    captioner = ending_with(captioner, eos)  # random weights seldom choose the real one
    for seed in range(3):
        captioner.samples(images[0], n=3, max_new_tokens=40, temperature=2.0, seed=seed, stats=(stats := Stats()))
        lengths = []
        for own in range(seed, seed + 3):
            sampling = SamplingParams(temperature=2.0, seed=own)
            row = captioner.model.generate(prompt, shown, max_new_tokens=40, sampling=sampling, eos_token_id=eos)
            lengths.append(row.size(1))
        assert stats.prompt_tokens == len(ids) + 2, "the prompt is prefilled once, its last token for each sample"
        assert stats.new_tokens == sum(lengths) and stats.answers == 3 and 0 < stats.first_token_s <= stats.total_s
        tokens = 3 * (len(ids) - 1) + sum(lengths)  # the last token is chosen, not read
        cfg, itemsize = captioner.model.cfg, captioner.model.dtype.itemsize
        assert stats.cache_bytes == 2 * cfg.lm_n_blocks * cfg.lm_n_kv_heads * cfg.lm_head_dim * tokens * itemsize
        later = stats.total_s - stats.first_token_s
        assert stats.tokens_per_s == pytest.approx((sum(lengths) - 3) / later if later else 0)


def test_one_token_has_no_decoding_speed(captioner, images):
    stats = Stats()
    for _ in range(2):  # stats are those of the last call
        list(captioner.stream(images[0], max_new_tokens=1, stats=stats))
    assert stats.new_tokens == 1 and stats.tokens_per_s == 0 and stats.total_s == stats.first_token_s > 0


def test_immediate_end_token_is_an_empty_answer(captioner, images):
    request = captioner.request(images[0], max_new_tokens=1)
    (first,) = next(captioner.run([request])).output
    captioner = ending_with(captioner, first)
    assert captioner.caption(images[0]) == "" == captioner.samples(images[0])[0]


def test_too_long_prompt_raises_input_error(captioner, images):
    for refuse in (
        lambda: captioner.check_prompt("word " * 1100, 1),
        lambda: captioner.caption(images[0], "word " * 1100),
        lambda: captioner.caption(images[0], max_new_tokens=1024),
    ):
        with pytest.raises(ValueError, match="lm_max_position_embeddings=1024"):
            refuse()
    captioner.check_prompt("word", 900)


def test_unavailable_device_or_dtype_names_the_available_ones(model_folder):
    cpu = torch.device("cpu")
    assert choose_device("auto", ["cpu"]) == choose_device("cpu") == cpu
    for name in ("cuda", "mps"):
        with pytest.raises(ValueError, match=f"device={name} is not available here, only cpu"):
            choose_device(name, ["cpu"])
    assert Captioner.from_pretrained(model_folder, torch.device("cpu"), torch.bfloat16).model.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="device=tpu is none of auto"):
        Captioner.from_pretrained(model_folder, device="tpu")
    with pytest.raises(ValueError, match="dtype=int8 is none of auto, float32, bfloat16, float16"):
        Captioner.from_pretrained(model_folder, device="cpu", dtype="int8")
    assert choose_dtype("float16", cpu) == torch.float16 and choose_dtype("auto", cpu).is_floating_point
    assert choose_device("auto", ["mps", "cpu"]) == torch.device("mps")
    assert choose_device("auto", ["cuda", "mps", "cpu"]) == torch.device("cuda")


def test_auto_keeps_stored_bfloat16_where_it_is_multiplied_exactly(model_folder, tmp_path, monkeypatch):
    """Kernels without bfloat16 arithmetic multiply bfloat16 weights in float32."""
    exact = Captioner.from_pretrained(model_folder, "cpu", "float32")
    text = exact.tokenizer.to_json()
    exact.model.save_pretrained(half := tmp_path / "half", tokenizer=text, dtype=torch.bfloat16)
    stored = {model_folder: torch.float32, half: torch.bfloat16}
    for level in set(available_levels()) & {*WITHOUT_BF16_DOT, "bf16", "amx"}:
        monkeypatch.setenv("NANOVLM_CPU_LEVEL", level)
        for folder, dtype in stored.items():
            wanted = dtype if level in WITHOUT_BF16_DOT else torch.bfloat16
            assert Captioner.from_pretrained(folder, "cpu").inference.dtype == wanted


IMPORTS = """
import logging, random, socket, sys
def refuse(*args, **kwargs): raise AssertionError("the network")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
random.seed(1)
before = random.getstate()
import nanovlm
assert nanovlm.Captioner is not None if "torch" in sys.argv else "torch" not in sys.modules
if "torch" in sys.argv:
    import torch
    seed, state, threads = torch.initial_seed(), torch.random.get_rng_state(), torch.get_num_threads()
    import models.attention, models.cache, models.checkpoint, models.config, models.decoding, models.language_model
    import models.modality_projector, models.vision_language_model, models.vision_transformer
    import nanovlm.cli.caption, nanovlm.cli.main, nanovlm.data.examples, nanovlm.processing.processor
    import nanovlm.synthetic.recipe, nanovlm.training.loop
    assert torch.initial_seed() == seed == 0x3A7C9 and torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads and torch.get_default_dtype() == torch.float32
assert random.getstate() == before and not logging.getLogger().handlers and not logging.getLogger("nanovlm").handlers
"""


@pytest.mark.full
@pytest.mark.parametrize("what", ["alone", "torch"])
def test_import_has_no_side_effects(what):
    code = IMPORTS if what == "alone" else "import torch; torch.manual_seed(0x3A7C9)\n" + IMPORTS
    run = subprocess.run([sys.executable, "-W", "error", "-c", code, what], cwd=ROOT, capture_output=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")


def test_adapters_are_used_with_their_base_and_in_any_precision(model_folder, tmp_path):
    base = Captioner.from_pretrained(model_folder, "cpu", "float32")
    adapted = copy.deepcopy(base.model)
    torch.manual_seed(0)
    adapt(adapted, 2, 8)
    for module in adapters(adapted).values():
        torch.nn.init.normal_(module.lora_B.weight, std=0.3)
    (tmp_path / "adapter").mkdir()
    write_adapters(tmp_path / "adapter", adapted, base=str(model_folder))
    ids, tiles = base.prepare(SAMPLE, "What?")
    ids, images = torch.tensor([ids]), torch.cat(tiles)
    expected, _ = adapted(ids, images)  # not merged, by the plain modules
    plain, _ = base.model(ids, images)
    for quantize, tolerance in ((None, 1e-5), ("int8", 0.1)):
        captioner = Captioner.from_pretrained(adapter=tmp_path / "adapter", dtype="float32", quantize=quantize)
        got, _ = captioner.inference.prefill(ids, images)
        error = (got - expected[:, -1]).norm() / expected[:, -1].norm()
        assert error < tolerance < (plain[:, -1] - expected[:, -1]).norm() / expected[:, -1].norm()
    with pytest.raises(InputError, match="LoRA adapters: --adapter"):
        Captioner.from_pretrained(tmp_path / "adapter")
    with pytest.raises(InputError, match="adapter=.* must be a folder with adapter_config.json"):
        Captioner.from_pretrained(model_folder, adapter=model_folder)
