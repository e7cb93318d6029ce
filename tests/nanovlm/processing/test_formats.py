"""Format versions of nanoVLM: prompts by hand, and answers without processor or cache, as each version's code gave."""

import json
import random
import shutil
from itertools import chain

import pytest
import tokenizers
import torch
from PIL import Image

from models.checkpoint import find_image_token_id, load_config, save_checkpoint
from models.common.options import SamplingParams
from models.config import CHATML
from models.vision_language_model import VisionLanguageModel
from nanovlm import Captioner
from nanovlm.data.examples import IGNORE_INDEX, encode
from nanovlm.errors import CheckpointError
from nanovlm.processing.tokenizer import Tokenizer
from support import Package, transforms
from support.checkpoints import BASE_SIZE, SPECIAL, raw_config, read_nanovlm, tiles
from support.data import about
from support.generation import prompt_of

transformers = Package("transformers")


@pytest.fixture(scope="module", params=(1, 2, 3, 4, 5), ids="v{}".format)
def format_version(request):
    return request.param


@pytest.fixture(scope="module")
def captioner(format_version, make_checkpoint):
    return Captioner.from_pretrained(make_checkpoint(format_version), "cpu", "float32")


def test_keys_decide_the_format_version_not_their_values():
    """An old file with today's numbers is still old, and removing a key makes a file older, not newer."""
    for format_version in range(1, 6):
        cfg = read_nanovlm(raw_config(format_version))
        assert cfg.format_version == format_version and cfg.to_dict() == raw_config(format_version)
    raw = raw_config(5)
    removed = {"resize_to_max_side_len": 5, "max_img_size": 3, "lm_chat_template": 2, "hf_repo_name": 2}
    for key, format_version in removed.items():
        del raw[key]
        assert read_nanovlm(raw).format_version == format_version and read_nanovlm(raw).to_dict() == raw
    del raw["mp_image_token_length"]
    assert read_nanovlm(raw).mp_image_token_length == 4
    del raw["vlm_extra_tokens"]
    assert read_nanovlm(raw).format_version == 1
    tokens = {"image_token": "<|image|>", **tiles(4)}
    assert read_nanovlm(raw_config(5) | {"vlm_extra_tokens": tokens}).format_version == 4
    for size in ("lm_n_heads", "mp_pixel_shuffle_factor", "lm_tokenizer"):
        with pytest.raises(ValueError, match=f"^{size} missing"):
            read_nanovlm({key: value for key, value in raw_config(1).items() if key != size})
    for key in ("vlm_extra_tokens", "lm_chat_template", "max_img_size"):
        with pytest.raises(ValueError, match=f"^{key}=None"):
            read_nanovlm(raw_config(5) | {key: None})


def noise(size, seed=0):
    """An image with a mean color of its own, so that it differs from others even at one tile."""
    chance = random.Random(seed)
    solid = Image.new("RGB", size, tuple(chance.randbytes(3)))
    return Image.blend(Image.frombytes("RGB", size, chance.randbytes(size[0] * size[1] * 3)), solid, 0.6)


ONE, WIDE, TALL, BIG = (16, 16), (30, 14), (30, 48), (64, 60)  # 1 x 1, 1 x 2, 3 x 2 and 4 x 4 tiles of 16 pixels
IMAGE_SETS = {"none": [], "1x1": [ONE], "1x2": [WIDE], "3x2": [TALL], "4x4": [BIG], "several": [WIDE, ONE, TALL]}


def make_images(image_set):
    first = 10 * list(IMAGE_SETS).index(image_set)
    return [noise(size, first + i) for i, size in enumerate(IMAGE_SETS[image_set])]


I = "<|image|>" * 4  # noqa: E741
G = "<|global_image|>" + I
R12 = f"<row_1_col_1>{I}<row_1_col_2>{I}"
R32 = f"{R12}<row_2_col_1>{I}<row_2_col_2>{I}<row_3_col_1>{I}<row_3_col_2>{I}"
R44 = "".join(f"<row_{r}_col_{c}>{I}" for r in (1, 2, 3, 4) for c in (1, 2, 3, 4))
R11 = f"<row_1_col_1>{I}"
MARKUP = {  # of the image sets
    version: dict(zip(IMAGE_SETS, markups))
    for versions, markups in (
        ((1, 2, 3), ["", I, I, I, I, I * 3]),
        ((4,), ["", R11, R12, R32, R44, f"<image: 0>{R12}<image: 1>{R11}<image: 2>{R32}"]),
        ((5,), ["", G, G + R12, G + R32, G + R44, f"<image: 0>{G}{R12}<image: 1>{G}<image: 2>{G}{R32}"]),
    )
    for version in versions
}
QUESTION = "What is this?"


def prompt_text(format_version, image_set, question=QUESTION) -> str:
    """The text of a prompt before tokenization, as that version's code wrote it."""
    if format_version < 3:
        return f"{MARKUP[format_version][image_set]}Question: {question} Answer:"
    return f"<|im_start|>user\n{MARKUP[format_version][image_set]}{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def reference(format_version, backbone_tokenizer):
    """Tokenizer that stock nanoVLM makes of lm_tokenizer, by the tokenizers library."""
    backend = tokenizers.Tokenizer.from_file(str(backbone_tokenizer / "tokenizer.json"))
    backend.add_special_tokens(list(raw_config(format_version).get("vlm_extra_tokens", {}).values()))
    return backend


def test_a_language_models_tokenizer_is_extended_as_stock_does(
    make_checkpoint, backbone_tokenizer, format_version, captioner, reference
):
    """Beside the checkpoint lies the language model's tokenizer.json, without nanoVLM's extra tokens."""
    folder = make_checkpoint(format_version)
    shutil.copy(backbone_tokenizer / "tokenizer.json", folder)
    cfg = load_config(folder)
    tokenizer = Tokenizer.from_pretrained(folder, cfg)
    for token in cfg.special_tokens.values():
        assert tokenizer.special_id(token) == reference.token_to_id(token)
    ids = (tokenizer.image_token_id, captioner.tokenizer.image_token_id, find_image_token_id(folder, cfg))
    assert {*ids} == {VisionLanguageModel.from_pretrained(folder).image_token_id}
    assert tokenizer.to_json() == captioner.tokenizer.to_json()


def stock_pixels(format_version, image):
    """The tiles of one image, (n, 3, 16, 16), as that version's code made them."""
    if format_version < 4:
        return transforms.Compose([transforms.Resize((16, 16)), transforms.ToTensor()])(image)[None]
    width, height = {ONE: (16, 16), WIDE: (32, 16), TALL: (32, 48), BIG: (64, 64)}[image.size]
    whole = transforms.functional.to_tensor(image.resize((width, height), Image.Resampling.BICUBIC))
    images = [whole[:, y : y + 16, x : x + 16] for y in range(0, height, 16) for x in range(0, width, 16)]
    if format_version == 5 and len(images) > 1:
        global_view = torch.nn.functional.interpolate(whole[None], (16, 16), mode="bilinear", antialias=True)
        images.insert(0, global_view[0])
    return torch.stack(images)


@pytest.mark.parametrize("image_set", IMAGE_SETS)
def test_prompts_and_pixels_match_the_original_code(format_version, captioner, reference, image_set):
    images = make_images(image_set)
    inputs = captioner.processor([images], [QUESTION])
    text, place = prompt_text(format_version, image_set), BASE_SIZE
    expected = reference.encode(text, add_special_tokens=False).ids
    if format_version == 1:  # whose tokenizer has no <|image|>: -1 in the positions of images
        rest, place = text.replace("<|image|>", ""), -1
        expected = [-1] * text.count("<|image|>") + reference.encode(rest, add_special_tokens=False).ids
    assert inputs["input_ids"].tolist() == [expected]
    assert inputs["attention_mask"].eq(1).all()
    assert captioner.tokenizer.image_token_id == place and (place in expected) == (image_set != "none")
    if images:
        pixels, expected = inputs["images"], torch.cat([stock_pixels(format_version, image) for image in images])
        assert pixels.shape == expected.shape and pixels.dtype == torch.float32
        assert torch.allclose(pixels, expected, atol=1e-6) and 0 <= pixels.min() <= pixels.max() <= 1
        assert len({tuple(tile.flatten().tolist()) for tile in pixels}) == len(pixels), "all tiles differ"


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_post_processor_begins_the_prompts_that_no_template_writes(make_checkpoint, backbone_tokenizer, version):
    """nanoVLM's first two versions called the tokenizer, the others apply_chat_template, which adds no tokens."""
    folder = make_checkpoint(version)
    plain = Captioner.from_pretrained(folder).processor
    backend = tokenizers.Tokenizer.from_file(str(backbone_tokenizer / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing("<repo_name> $A", None, [("<repo_name>", 3)])
    backend.save(str(folder / "tokenizer.json"))
    processors = Captioner.from_pretrained(folder).processor, plain
    ids, without = (prompt_of(processor, make_images("1x1"), "What?")[0] for processor in processors)
    text = backend.encode("Question: What? Answer:").ids
    assert version == 3 or [id for id in without if id != plain.tokenizer.image_token_id] == text[1:]
    images = without[: -len(text) + 1] if version < 3 else []
    assert ids == {1: images + text, 2: text[:1] + images + text[1:], 3: without}[version]


@torch.no_grad()
def recomputed_answer(format_version, model, reference, image_set, max_new_tokens, penalty=1.0) -> list[int]:
    """A greedy answer without processor, embed or cache, from text and image embeddings concatenated by hand."""
    images = make_images(image_set)
    images = torch.cat([stock_pixels(format_version, image) for image in images]) if images else []
    encoded = [model.MP(model.vision_encoder(image[None]))[0] for image in images]
    pieces, seen = [], set()
    for k, part in enumerate(prompt_text(format_version, image_set).split(I)):
        ids = reference.encode(part, add_special_tokens=False).ids if part else []
        seen |= set(ids)
        pieces += [encoded[k - 1]] if k else []
        pieces.append(model.decoder.token_embedding(torch.tensor(ids, dtype=torch.long)))
    x, answer = torch.cat(pieces)[None], []
    while len(answer) < max_new_tokens and (0 if format_version == 1 else 2) not in answer:
        hidden, _ = model.decoder(x, use_cache=False)
        logits = model.decoder.head(hidden[0, -1])
        for id in seen:
            logits[id] = logits[id] / penalty if logits[id] > 0 else logits[id] * penalty
        answer.append(int(logits.argmax()))
        seen.add(answer[-1])
        x = torch.cat([x, model.decoder.token_embedding(torch.tensor([[answer[-1]]]))], dim=1)
    return answer


@pytest.mark.parametrize("penalty", [pytest.param(1.0, marks=pytest.mark.full), 1.5])
def test_answers_match_a_plain_recomputation(format_version, captioner, reference, penalty):
    answers = []
    for image_set in IMAGE_SETS:
        images = make_images(image_set)
        expected = recomputed_answer(format_version, captioner.model, reference, image_set, 8, penalty)
        options = {"max_new_tokens": 8, "sampling": SamplingParams(repetition_penalty=penalty)}
        answer = captioner.caption(images, QUESTION, **options)
        end = captioner.tokenizer.eos_token_id
        assert end == (0 if format_version == 1 else 2) and end == reference.token_to_id(SPECIAL[end])
        assert answer == reference.decode([id for id in expected if id != end], skip_special_tokens=True)
        inputs = captioner.processor([images], [QUESTION])
        for cached in (True, False):
            ids = captioner.model.generate(**inputs, **options, eos_token_id=end, use_kv_cache=cached)
            assert ids[0].tolist() == expected
        answers.append(tuple(expected))
    assert len(set(answers)) > 2, "answers that do not depend on the image prove nothing"


@pytest.mark.parametrize("image_set", ["none", "1x1", "3x2", "several"])
def test_training_prompts_match_generation_prompts(format_version, captioner, image_set):
    """Pairs that are asked one by one see the image and themselves; of a chat each sees those before it."""
    processor, tokenizer, images = captioner.processor, captioner.tokenizer, make_images(image_set)
    typed = "<|image|> <|im_end|>"
    pairs = [(QUESTION, "A star."), ("How many are there? " * 3, "one"), (f"Is\nit {typed}?", f"It is {typed}.")]
    row, chat, labels = encode(about(images, *pairs), processor), [], []
    assert sum(mask == 1 for mask in row.mask) >= row.ids.count(tokenizer.image_token_id)
    assert sorted(row.mask) == row.mask, "the shared prefix, then one continuation after another"
    for n, (question, text) in enumerate(pairs):
        read = processor([images], [question])["input_ids"][0].tolist()
        answer = [*tokenizer.encode(text), tokenizer.eos_token_id]
        seen = [i for i, branch in enumerate(row.mask) if branch in (1, n + 2)]
        assert [row.ids[i] for i in seen] == (read + answer)[:-1]
        assert [row.targets[i] for i in seen] == [IGNORE_INDEX] * (len(read) - 1) + answer
        chat += tokenizer.encode("\n") if n and format_version > 2 else []
        chat += processor([[] if n else images], [question])["input_ids"][0].tolist()
        labels += [IGNORE_INDEX] * (len(chat) - len(labels)) + answer
        chat += answer
    row = encode(about(images, [*chain(*pairs)]), processor)
    assert row.ids == chat[:-1] and row.targets == labels[1:]
    assert sorted(row.mask) == row.mask and set(row.mask) <= {1, 2}, "one continuation, causal within itself"


@pytest.mark.full
def test_stock_nanovlm_reads_the_written_tokenizer(format_version, captioner, backbone_tokenizer, tmp_path):
    """By transformers: as the folder says, and with the config's tokens added once more, as to lm_tokenizer."""
    save_checkpoint(tmp_path / "ours", captioner.model, captioner.tokenizer.to_json())
    tokens = raw_config(format_version).get("vlm_extra_tokens", {})
    load = transformers.AutoTokenizer.from_pretrained
    ours = load(tmp_path / "ours")
    stock, lent = (load(folder, extra_special_tokens=tokens) for folder in (tmp_path / "ours", backbone_tokenizer))
    assert ours.eos_token_id == stock.eos_token_id == captioner.tokenizer.eos_token_id
    for image_set in IMAGE_SETS:
        text = prompt_text(format_version, image_set)
        assert ours.encode(text) == stock.encode(text) == lent.encode(text)
    for name, token in tokens.items():
        assert getattr(ours, name) == getattr(stock, name) == token
    assert format_version < 3 or ours.chat_template == CHATML


REFUSED = {  # format, fields of config.json, token of its tokenizer.json that is renamed (None: no such file), words
    "an empty token": (2, {"vlm_extra_tokens": {"image_token": ""}}, None, ["vlm_extra_tokens", "image_token=''"]),
    "too few tokens": (1, {"lm_vocab_size": BASE_SIZE - 1}, None, [f"an id {BASE_SIZE - 1}", "lm_vocab_size="]),
    "too few extra": (4, {"lm_vocab_size": BASE_SIZE + 16}, None, [f"an id {BASE_SIZE + 16}", "lm_vocab_size="]),
    "no end": (1, {}, "<|endoftext|>", ["'<|endoftext|>'"]),
    "no image token": (2, {}, "<|image|>", ["'<|image|>'"]),
    "no end of turn": (3, {}, "<|im_end|>", ["'<|im_end|>'"]),
    "no name of a tile": (4, {}, "<row_4_col_4>", ["'<row_4_col_4>'"]),
    "no global view": (5, {}, "<|global_image|>", ["'<|global_image|>'"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_contradicts_the_config_is_one_line(name, make_checkpoint, backbone_tokenizer):
    """One that lies beside the model is not added to: it must have every token."""
    version, changes, lost, words = REFUSED[name]
    folder = make_checkpoint(version)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    source = backbone_tokenizer if lost is None else folder
    if lost is not None:
        text = Captioner.from_pretrained(folder, "cpu").tokenizer.to_json()
        (folder / "tokenizer.json").write_text(text.replace(lost, "<|lost|>"))
    with pytest.raises(CheckpointError) as error:
        Captioner.from_pretrained(folder, "cpu", "float32")
    message = str(error.value)
    assert all(word in message for word in [str(source / "tokenizer.json"), *words]) and "\n" not in message


def test_a_foreign_tokenizer_is_refused_with_both_sizes(make_checkpoint, backbone_tokenizer):
    backend = tokenizers.Tokenizer.from_file(str(backbone_tokenizer / "tokenizer.json"))
    backend.add_tokens(["one_more"])
    words = f"with {BASE_SIZE + 1} tokens .* lm_base_vocab_size={BASE_SIZE}$"
    for folder in map(make_checkpoint, (2, 3, 4, 5)):
        backend.save(str(folder / "tokenizer.json"))
        for load in (Tokenizer.from_pretrained, find_image_token_id):
            with pytest.raises(CheckpointError, match=words):
                load(folder, load_config(folder))
