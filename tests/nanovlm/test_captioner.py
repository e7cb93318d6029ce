"""Captioner: every method gives the answer of `caption`, or scores choices; importing has no side effects."""

import copy
import io
import json
import os
import shutil
import subprocess
import sys
import warnings
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import nanovlm
from models.inference.continuous_batching import Request
from models.inference.inference_model import InferenceModel
from models.inference.kernels.load import WITHOUT_BF16_DOT, available_levels
from models.lora import adapt, adapters
from models.lora.files import write_adapters
from nanovlm import SAMPLE, Captioner, ChatSession
from nanovlm.bulk import caption_rows
from nanovlm.device import choose_device, choose_dtype
from nanovlm.errors import ImageError, InputError, MissingExtraError
from nanovlm.options import CaptionOptions
from nanovlm.processing.processor import Processor
from nanovlm.request_runner import Stats
from support import ROOT, noise_image, watch
from support.generation import logits_of

SAMPLED = {"temperature": 1.5, "seed": 3}
QUESTIONS = ["Describe this picture.", "What?", "How many are there? " * 4, "?", "Hi!", "Which?", "<|im_end|>"]


@pytest.fixture(scope="module")
def captioner(random_captioner):
    return random_captioner


@pytest.fixture(scope="module")
def images():
    sizes = ((100, 60), (96, 96), (300, 200))
    first, second, third = (noise_image(*size, seed=seed) for seed, size in enumerate(sizes, start=1))
    return [first, second, Image.new("RGB", (20, 70), "red"), third]


MORE = ({"repetition_penalty": 1.5}, {"start_with": "A photo"})
MORE_OPTIONS = [pytest.param(options, marks=pytest.mark.full) for options in MORE]


def ending_with(model, processor, eos):
    """A captioner whose answers end with another token: random weights seldom choose the real one."""
    tokenizer = copy.copy(processor.tokenizer)
    tokenizer.eos_token_ids = (eos,)
    return Captioner(model, Processor(processor.cfg, tokenizer))


@pytest.mark.filterwarnings("ignore:a question without an image")
@pytest.mark.parametrize("options", [{}, SAMPLED, *MORE_OPTIONS], ids=str)
def test_every_method_gives_the_same_answer(captioner, images, options):
    """A seed is each answer's own, in any batch and order; sample i has seed + i."""
    options = {"max_new_tokens": 12} | options
    rows = [*images, None, images[:2], (images[3],)]
    alone = [captioner.caption(row, question, **options) for row, question in zip(rows, QUESTIONS)]
    assert len(set(alone)) == len(alone), "equal answers would prove nothing"
    for row, question, answer in zip(rows, QUESTIONS, alone):
        pieces = list(captioner.stream(row, question, **options))
        assert len(pieces) > 1 and "".join(pieces) == answer
    for batch_size in (1, 3, 16):
        in_batches = partial(captioner.captions, batch_size=batch_size, **options)
        assert list(in_batches(rows, QUESTIONS)) == alone
        assert list(in_batches(reversed(rows), reversed(QUESTIONS))) == alone[::-1]
    assert list(captioner.captions(images, "?", **options)) == [captioner.caption(i, "?", **options) for i in images]
    seeds = [options.get("seed", 0) + i for i in range(3)]
    expected = [captioner.caption(images[0], **options | {"seed": seed}) for seed in seeds]
    n_different = 3 if "seed" in options else 1
    assert captioner.samples(images[0], n=3, **options) == expected and len(set(expected)) == n_different


@pytest.mark.filterwarnings("ignore:a question without an image")
def test_ask_matches_single_questions(captioner, tiled, images):
    for one in (captioner, Captioner(*tiled)):
        for shown in (images[0], images[:2], None):
            alone = [one.caption(shown, question, max_new_tokens=12) for question in QUESTIONS]
            assert one.ask(shown, QUESTIONS, max_new_tokens=12) == alone and len(set(alone)) > 3
    assert captioner.ask(images[0], []) == [] == list(captioner.captions([]))


def test_several_images_in_one_prompt(captioner, images):
    first, second = images[0], images[3]
    ask = partial(captioner.caption, prompt="Which?", max_new_tokens=12)
    assert len({ask([first, second]), ask([second, first]), ask(first)}) == 3
    assert ask([first]) == ask(first)
    array = np.asarray(images[1])
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    assert ask(array) == ask(tensor) == ask(images[1])
    for batch in (np.stack([array, array]), torch.stack([tensor] * 2)):
        assert list(captioner.captions(batch, "Which?", max_new_tokens=12)) == [ask(images[1])] * 2
        assert ask(batch) == ask([images[1]] * 2)


def test_urls_are_fetched_only_if_allowed(model_folder, images, monkeypatch):
    url, there = "https://example.org/image.png", {}
    closed, allowed = (Captioner.from_pretrained(model_folder, "cpu", "float32", allow_urls=v) for v in (False, True))
    for call, *arguments in ((closed.caption, url), (closed.ask, url, ["?"]), (ChatSession, closed, ["HTTPS://a.png"])):
        with pytest.raises(ImageError, match=".png is a URL; .* allow_urls=True"):
            call(*arguments)
    with monkeypatch.context() as context:
        context.delitem(sys.modules, "nanovlm.processing.image_urls", raising=False)
        context.setitem(sys.modules, "httpx", None)
        with pytest.raises(MissingExtraError, match="pip install 'nanovlm\\[serve\\]'"):
            allowed.caption(url)
    images[0].save(data := io.BytesIO(), "PNG")
    there[url] = data.getvalue()
    monkeypatch.setattr("nanovlm.processing.image_urls.fetch_image", there.pop)
    assert allowed.caption(url, max_new_tokens=6) == closed.caption(images[0], max_new_tokens=6) and not there
    there[url] = b"words"
    with pytest.raises(ImageError, match=f"^{url}: not an image"):
        allowed.caption(url)


def test_a_question_without_an_image_warns_once(captioner, images):
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for _ in range(3):
            captioner.caption(None, "What colour is it?", max_new_tokens=1)
            "".join(ChatSession(captioner).ask("What colour is it?", max_new_tokens=1))
    messages = [str(warning.message)[:27] for warning in caught if warning.category is UserWarning]
    assert messages == ["a question without an image"] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captioner.caption(images[0], max_new_tokens=1)
        "".join(ChatSession(captioner, [images[0]]).ask("?", max_new_tokens=1))


def test_streams_and_captions_are_computed_as_they_are_read(captioner, images):
    steps, model = [], InferenceModel(captioner.model)
    model.network.run, run = lambda *args: steps.append(1) or run(*args), model.network.run
    stream = Captioner(model, captioner.processor).stream(images[0], max_new_tokens=24)
    assert steps == []
    next(stream), next(stream)
    stream.close()
    assert 0 < len(steps) < 12
    taken, options = [], {"max_new_tokens": 2}
    answers = captioner.captions((taken.append(1) or image for image in repeat(images[0])), batch_size=3, **options)
    assert taken == []
    assert [next(answers) for _ in range(3)] == [captioner.caption(images[0], **options)] * 3 and len(taken) == 3
    next(answers)
    assert len(taken) == 6


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
    with pytest.raises(InputError, match="exceed"):
        list(captioner.run([Request([5] * 2000)]))


WRONG = {  # words of the error -> a call with a captioner and four images
    "4 images, but 2 prompts": lambda c, images: list(c.captions(images, ["one", "two"])),
    "item 2 has no image": lambda c, images: list(c.captions(iter(images[:1]), iter(["one", "two"]), batch_size=8)),
    "item 3 has no prompt": lambda c, images: list(c.captions(iter(images), iter("ab"), max_new_tokens=1)),
    "for one image use caption": lambda c, images: next(c.captions("photo.jpg")),
    "several images, such": lambda c, images: next(c.captions(images[0])),
    "takes several images": lambda c, images: next(c.captions(torch.zeros(3, 9, 9))),
    "classify_each takes several": lambda c, images: next(c.classify_each("photo.jpg", ["a", "b"])),
    "batch_size=0": lambda c, images: next(c.captions(images, batch_size=0)),
    "n=0 is less than 1": lambda c, images: c.samples(images[0], n=0),
    "a list of prompts, not 'What\\?'; for one prompt use caption": lambda c, images: c.ask(images[0], "What?"),
    "lm_max_position_embeddings=1024": lambda c, images: c.check_prompt("word " * 1100, 1),
    "exceed lm_max_pos": lambda c, images: c.caption(images[0], "word " * 1100),
    "exceed lm_max": lambda c, images: c.caption(images[0], max_new_tokens=1024),
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_use_is_one_line(captioner, images, words):
    with pytest.raises(InputError, match=words):
        WRONG[words](captioner, images)
    captioner.check_prompt("word", 900)
    with pytest.raises(TypeError, match="an image is a path, .* not int"):
        captioner.caption(3)


def test_stats_are_those_of_the_answers(captioner, images, monkeypatch):
    """An image is encoded, and what prompts share is prefilled, once."""
    monkeypatch.setenv("NANOVLM_CPU_LEVEL", "none")  # the plain modules can be watched
    model, prompts = captioner.model, [captioner.prepare(images[0], question) for question in QUESTIONS]
    rows = [model.generate(torch.tensor([ids]), *tiles, max_new_tokens=40)[0].tolist() for ids, tiles in prompts]
    eos = rows[0][20]
    answers = [row[: row.index(eos) + 1] if eos in row else row for row in rows]
    captioner = ending_with(model, captioner.processor, eos)
    with watch(model.vision_encoder) as seen, watch(model.decoder) as read:
        captioner.ask(images[0], QUESTIONS, max_new_tokens=40, stats=(stats := Stats()), repetition_detection=(0, 0, 0))
    lengths = [len(ids) for ids, _ in prompts]
    assert [shape[0] for shape in seen] == [1] and read[0][:2] == (1, lengths[0])
    assert stats.prompt_tokens <= sum(n - 36 for n in lengths) + 36, "the image's 36 tokens count once"
    assert stats.new_tokens == sum(map(len, answers)) and 0 < stats.first_token_s <= stats.total_s
    assert stats.finish_reasons == ["stop" if ids[-1] == eos else "length" for ids in answers]
    later = stats.total_s - stats.first_token_s
    assert stats.tokens_per_s == pytest.approx((stats.new_tokens - len(QUESTIONS)) / later)
    list(captioner.stream(images[0], max_new_tokens=1, stats=(stats := Stats())))
    assert stats.new_tokens == 1 and stats.tokens_per_s == 0


def test_unavailable_device_or_dtype_names_the_available_ones(model_folder, monkeypatch):
    for cuda, mps, auto in ((False, False, "cpu"), (False, True, "mps"), (True, True, "cuda")):
        monkeypatch.setattr("torch.cuda.is_available", lambda is_there=cuda: is_there)
        monkeypatch.setattr("torch.backends.mps.is_available", lambda is_there=mps: is_there)
        assert choose_device("auto") == torch.device(auto) and choose_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert choose_device("cuda") == torch.device("cuda", 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="device=cuda is not available here, only mps, cpu"):
        choose_device("cuda")
    assert choose_dtype("float16", torch.device("cpu")) == torch.float16
    assert Captioner.from_pretrained(model_folder, torch.device("cpu"), torch.bfloat16).model.dtype == torch.bfloat16


def test_auto_keeps_stored_bfloat16_where_it_is_multiplied_exactly(model_folder, tmp_path, monkeypatch):
    """Kernels without bfloat16 arithmetic multiply bfloat16 weights in float32."""
    exact = Captioner.from_pretrained(model_folder, "cpu", "float32")
    exact.model.save_pretrained(half := tmp_path / "half", tokenizer=exact.tokenizer.to_json(), dtype=torch.bfloat16)
    stored = {model_folder: torch.float32, half: torch.bfloat16}
    for level in set(available_levels()) & {*WITHOUT_BF16_DOT, "bf16", "amx"}:
        monkeypatch.setenv("NANOVLM_CPU_LEVEL", level)
        for folder, dtype in stored.items():
            wanted = dtype if level in WITHOUT_BF16_DOT else torch.bfloat16
            assert Captioner.from_pretrained(folder, "cpu").inference.dtype == wanted


def test_the_prompt_is_saved_with_the_model(captioner, images, tmp_path):
    Captioner(captioner.model, captioner.processor, prompt="Wo?").save_pretrained(tmp_path / "model")
    again = Captioner.from_pretrained(tmp_path / "model", "cpu", "float32")
    expected = captioner.caption(images[0], "Wo?", max_new_tokens=6)
    assert again.prompt == "Wo?" and again.caption(images[0], max_new_tokens=6) == expected
    captioner.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model/nanovlm.json").read_text()) == {"prompt": nanovlm.PROMPT}
    with pytest.raises(InputError, match="is a file or lies below one"):
        captioner.save_pretrained(tmp_path / "model/nanovlm.json")


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
    inputs = {"ids": torch.tensor([ids]), "images": torch.cat(tiles), "n": 0}
    expected, plain = (logits_of(model, **inputs) for model in (adapted, base.model))  # not merged, by the modules
    for quantize, tolerance in ((None, 1e-5), ("int8", 0.2)):
        captioner = Captioner.from_pretrained(adapter=tmp_path / "adapter", dtype="float32", quantize=quantize)
        error = (logits_of(captioner.inference, **inputs) - expected).norm() / expected.norm()
        assert error < tolerance < (plain - expected).norm() / expected.norm()


def test_a_drive_that_refuses_chmod_loses_nothing(random_captioner, model_folder, generate, tmp_path, monkeypatch):
    def refuses(*arguments, **options):
        raise PermissionError(1, "Operation not permitted")

    for owner, name in ((os, "chmod"), (os, "fchmod"), (os, "lchmod"), (Path, "chmod"), (os, "fsync")):
        monkeypatch.setattr(owner, name, refuses, raising=False)
    shutil.copyfile(SAMPLE, tmp_path / "a.png")
    (tmp_path / "all.jsonl").write_text('{"file_name": "a.png", "text": ""}\n')  # a row to be replaced
    for output, flags in (("a.txt", ()), ("all.jsonl", ("--out", str(tmp_path / "all.jsonl")))):
        code, _, err = generate(str(tmp_path), *flags)
        assert code == 0 and (tmp_path / output).stat().st_size > 0, err
    random_captioner.save_pretrained(tmp_path / "model")
    assert Captioner.from_pretrained(tmp_path / "model", "cpu", "float32").caption(SAMPLE, max_new_tokens=2)


# ------------------------------------------------------------------------------------------------------ the package

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
    import models, nanovlm.cli.caption, nanovlm.cli.main, nanovlm.synthetic.recipe, nanovlm.training.loop
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


@pytest.mark.parametrize("file", ["__init__.py", "notes.txt"])
def test_foreign_models_package_is_one_sentence_with_the_way_out(tmp_path, file):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / file).write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; sys.path.append({str(ROOT)!r}); import nanovlm"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    if file == "notes.txt":  # a namespace package loses against a real one, wherever that is
        assert run.returncode == 0
        return
    message = run.stderr.splitlines()[-1]
    assert run.returncode == 1 and message.startswith("ImportError: nanovlm needs its own package `models`")
    assert str(tmp_path / "models") in message and "run from another directory" in message


def test_exports_are_loaded_on_first_use():
    assert {getattr(nanovlm, name) for name in nanovlm.__all__ if name[0].isupper() and not name.isupper()}
    with pytest.raises(AttributeError, match="nobody"):
        nanovlm.nobody  # noqa: B018


CHOICES = ["A large green ring", "blue", "A", "a much longer answer than all the others"]


def test_each_choice_is_scored_as_alone_without_a_cache(random_captioner):
    captioner, model, prompt = random_captioner, random_captioner.model, "What is it?"
    request, tokenizer = captioner.request(SAMPLE, prompt), captioner.tokenizer
    images, scores = torch.cat([image.tiles for image in request.images]), {}
    for choice in CHOICES:
        answer = tokenizer.encode(tokenizer.answer_prefix + choice)
        total = 0.0
        for i in range(len(answer) + 1):
            logits, _ = model.prefill(torch.tensor([[*request.ids, *answer[:i]]]), images)
            log_probabilities = logits[0].double().log_softmax(-1)
            wanted = answer[i : i + 1] or list(tokenizer.eos_token_ids)
            total += log_probabilities[wanted].logsumexp(0).item()
        scores[choice] = total
    ranked = captioner.classify(SAMPLE, CHOICES, prompt)
    assert {one.text: one.log_probability for one in ranked} == pytest.approx(scores, abs=1e-3)
    assert [one.text for one in ranked] == sorted(scores, key=lambda choice: -scores[choice])
    assert sum(one.probability for one in ranked) == pytest.approx(1)


@pytest.mark.parametrize("batch_size", [1, 7])
def test_many_images_are_scored_together_and_each_is_read_once(random_captioner, batch_size):
    images, captioner = [noise_image(seed=seed) for seed in range(5)], random_captioner
    expected = [captioner.classify(image, CHOICES)[0] for image in images]
    n_prompt = len(captioner.request(images[0]).ids)
    with watch(captioner.model.vision_encoder) as tiles, watch(captioner.model.decoder) as shapes:
        options = CaptionOptions(choices=tuple(CHOICES))
        rows = list(caption_rows(captioner, [(str(i), image) for i, image in enumerate(images)], options, batch_size))
        ranked = list(captioner.classify_each(images, CHOICES, batch_size=batch_size))
    assert [row["text"] for row in rows] == [one[0].text for one in ranked] == [best.text for best in expected]
    for row, best in zip(rows, expected):
        assert (row["probability"], row["log_probability"]) == pytest.approx(tuple(best.columns().values()), abs=1e-3)
    assert sum(n for n, *_ in tiles) == 2 * len(images)
    assert sum(rows for rows, n, *_ in shapes if n >= n_prompt - 1) == 2 * len(images)


def test_an_image_that_fails_fails_alone_and_choices_are_two_or_more(random_captioner):
    options = CaptionOptions(choices=("red", "green"))
    images = [("absent.png", "absent.png"), ("a", noise_image())]
    failed, row = caption_rows(random_captioner, images, options)
    assert isinstance(failed, ImageError) and [row] == list(caption_rows(random_captioner, images[1:], options))
    for choices in ("red", ["red"], ["red", "red"], ["red", " "]):
        with pytest.raises(InputError, match="name two or more"):
            random_captioner.classify(SAMPLE, choices)
