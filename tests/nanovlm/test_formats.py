"""nanoVLM's config.json and prompts changed four times; a checkpoint of each era is read as that era's code read it.

What is expected is written out by hand below, era by era, and put together without the processor or the cache.
"""

import json
import random
import warnings

import pytest
import tokenizers
import torch
from PIL import Image
from safetensors.torch import load_model as load_strictly
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers
from torchvision import transforms
from transformers import AutoTokenizer

from models.checkpoint import load_config, save_checkpoint
from models.config import CHATML, VLMConfig
from models.decoding import SamplingParams
from nanovlm import Captioner
from nanovlm.data.examples import IGNORE_INDEX, Example, collate, encode
from nanovlm.errors import CheckpointError
from support.checkpoints import BASE_SIZE, EMBEDDING, HEAD, INV_FREQ, raw_config, stock_model, stock_shapes, tiles

ERAS = (1, 2, 3, 4, 5)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>"]


# ------------------------------------------------------------------------------------------- the files of an era


@pytest.fixture(scope="module")
def lent(tmp_path_factory):
    """The folder of a tokenizer like SmolLM2's, which knows nothing of pictures: what lm_tokenizer names."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE_SIZE, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([f"{__doc__} Question: What is this? Answer: user assistant\n"] * 9, trainer)
    filler = BASE_SIZE - backend.get_vocab_size()
    backend.add_special_tokens([f"<filler_{i}>" for i in range(filler)])
    assert backend.get_vocab_size() == BASE_SIZE and [backend.token_to_id(token) for token in SPECIAL[:3]] == [0, 1, 2]
    folder = tmp_path_factory.mktemp("lent")
    backend.save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    words |= {"additional_special_tokens": SPECIAL[1:3], "unk_token": "<|endoftext|>", "chat_template": "none"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


@pytest.fixture(scope="module")
def published(lent, tmp_path_factory):
    """Makes the folder of a random checkpoint of an era, in the format of the published ones."""

    def make(format_version):
        folder = tmp_path_factory.mktemp(f"era{format_version}")
        raw = raw_config(format_version) | {"lm_tokenizer": str(lent)}
        (folder / "config.json").write_text(json.dumps(raw, indent=4))
        chance = torch.Generator().manual_seed(format_version)
        state = {}
        for name, shape in sorted(stock_shapes(VLMConfig.from_dict(raw)).items()):
            noise = torch.randn(shape, generator=chance)
            state[name] = 1 + 0.3 * noise if len(shape) == 1 else noise * 1.5 * noise[0].numel() ** -0.5
        del state[EMBEDDING]
        state[INV_FREQ] = 1.0 / raw["lm_re_base"] ** (torch.arange(0, 4, 2).float() / 4)
        save_file(state, folder / "model.safetensors", {"format": "pt", EMBEDDING: HEAD})
        return folder

    return make


@pytest.fixture(scope="module", params=ERAS, ids="era{}".format)
def format_version(request):
    return request.param


@pytest.fixture(scope="module")
def captioner(format_version, published):
    return Captioner.from_pretrained(published(format_version), "cpu", "float32")


def test_a_file_tells_its_era_and_is_written_as_it_was_read(format_version):
    raw = raw_config(format_version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cfg = VLMConfig.from_dict(raw)
    assert cfg.format_version == format_version and cfg.to_dict() == raw and cfg.mp_image_token_length == 4
    again = VLMConfig.from_dict(json.loads(json.dumps(cfg.to_dict())))
    assert again == cfg and again.format_version == format_version and again.to_dict() == raw


def test_an_eras_unknown_keys_are_kept_too(format_version):
    raw = raw_config(format_version) | {"vit_flavour": "sweet"}
    with pytest.warns(UserWarning, match="kept as they are: vit_flavour$"):
        cfg = VLMConfig.from_dict(raw)
    assert cfg.to_dict() == raw and cfg.format_version == format_version


def test_todays_defaults_tell_no_era():
    """An early file with today's numbers in it is still early, and a key less makes a file older, not newer."""
    raw = raw_config(5)
    for key, format_version in (("resize_to_max_side_len", 5), ("max_img_size", 3), ("lm_chat_template", 2), ("hf_repo_name", 2)):
        del raw[key]
        assert VLMConfig.from_dict(raw).format_version == format_version and VLMConfig.from_dict(raw).to_dict() == raw
    del raw["mp_image_token_length"]
    assert VLMConfig.from_dict(raw).mp_image_token_length == 4
    del raw["vlm_extra_tokens"]
    assert VLMConfig.from_dict(raw).format_version == 1
    tokens = {"image_token": "<|image|>", **tiles(4)}
    assert VLMConfig.from_dict(raw_config(5) | {"vlm_extra_tokens": tokens}).format_version == 4
    for size in ("lm_n_heads", "mp_pixel_shuffle_factor", "lm_tokenizer"):
        with pytest.raises(ValueError, match=f"^{size} missing"):
            VLMConfig.from_dict({key: value for key, value in raw_config(1).items() if key != size})
    for key in ("vlm_extra_tokens", "lm_chat_template", "max_img_size"):
        with pytest.raises(ValueError, match=f"^{key}=None"):
            VLMConfig.from_dict(raw_config(5) | {key: None})


# ------------------------------------------------------------------------------------------------ what is read


def noise(size, seed=0):
    """A picture of a colour of its own, so that it can be told from others however small it is squeezed."""
    chance = random.Random(seed)
    solid = Image.new("RGB", size, tuple(chance.randbytes(3)))
    return Image.blend(Image.frombytes("RGB", size, chance.randbytes(size[0] * size[1] * 3)), solid, 0.6)


ONE, WIDE, TALL, BIG = (16, 16), (30, 14), (30, 48), (64, 60)  # 1 x 1, 1 x 2, 3 x 2 and 4 x 4 tiles of 16 pixels
SHOWN = {"none": [], "1x1": [ONE], "1x2": [WIDE], "3x2": [TALL], "4x4": [BIG], "several": [WIDE, ONE, TALL]}


def pictures_of(shown):
    return [noise(size, seed) for seed, size in enumerate(SHOWN[shown], start=10 * list(SHOWN).index(shown))]


I = "<|image|>" * 4  # noqa: E741
G = "<|global_image|>" + I
R12 = f"<row_1_col_1>{I}<row_1_col_2>{I}"
R32 = f"{R12}<row_2_col_1>{I}<row_2_col_2>{I}<row_3_col_1>{I}<row_3_col_2>{I}"
R44 = "".join(f"<row_{r}_col_{c}>{I}" for r in (1, 2, 3, 4) for c in (1, 2, 3, 4))
MARKUP = {
    2: {"none": "", "1x1": I, "1x2": I, "3x2": I, "4x4": I, "several": I * 3},
    4: {
        "none": "", "1x1": f"<row_1_col_1>{I}", "1x2": R12, "3x2": R32, "4x4": R44,
        "several": f"<image: 0>{R12}<image: 1><row_1_col_1>{I}<image: 2>{R32}",
    },
    5: {
        "none": "", "1x1": G, "1x2": G + R12, "3x2": G + R32, "4x4": G + R44,
        "several": f"<image: 0>{G}{R12}<image: 1>{G}<image: 2>{G}{R32}",
    },
}  # fmt: skip
MARKUP |= {1: MARKUP[2], 3: MARKUP[2]}
ASKED = "What is this?"


def written(format_version, shown, asked=ASKED) -> str:
    """A prompt as that era's code put it together before the tokenizer saw it."""
    if format_version < 3:
        return f"{MARKUP[format_version][shown]}Question: {asked} Answer:"
    return f"<|im_start|>user\n{MARKUP[format_version][shown]}{asked}<|im_end|>\n<|im_start|>assistant\n"


def stock_tokenizer(folder, raw):
    """What stock nanoVLM makes of lm_tokenizer, by transformers."""
    tokens = raw.get("vlm_extra_tokens", {})
    return AutoTokenizer.from_pretrained(
        folder, extra_special_tokens=tokens, chat_template=raw.get("lm_chat_template", "none")
    )


def stock_ids(format_version, text, reference) -> list[int]:
    """Ids of a prompt; where the first era's has <|image|>, which its tokenizer does not know, -1."""
    if format_version > 1:
        return reference.encode(text, add_special_tokens=False)
    places, rest = text.count("<|image|>"), text.replace("<|image|>", "")
    return [-1] * places + reference.encode(rest, add_special_tokens=False)


def stock_pixels(format_version, picture):
    """One picture's images, (n, 3, 16, 16), as that era's code made them."""
    if format_version < 4:
        return transforms.Compose([transforms.Resize((16, 16)), transforms.ToTensor()])(picture)[None]
    width, height = {ONE: (16, 16), WIDE: (32, 16), TALL: (32, 48), BIG: (64, 64)}[picture.size]
    whole = transforms.ToTensor()(picture.resize((width, height), Image.Resampling.BICUBIC))
    images = [whole[:, y : y + 16, x : x + 16] for y in range(0, height, 16) for x in range(0, width, 16)]
    if format_version == 5 and len(images) > 1:
        squeezed = torch.nn.functional.interpolate(whole[None], (16, 16), mode="bilinear", antialias=True)
        images.insert(0, squeezed[0])
    return torch.stack(images)


@pytest.mark.parametrize("shown", SHOWN)
def test_prompts_are_what_the_era_read(format_version, captioner, lent, shown):
    pictures = pictures_of(shown)
    inputs = captioner.processor([pictures], [ASKED])
    reference = stock_tokenizer(lent, raw_config(format_version))
    expected = stock_ids(format_version, written(format_version, shown), reference)
    assert inputs["input_ids"].tolist() == [expected]
    assert inputs["attention_mask"].eq(1).all()
    place = -1 if format_version == 1 else BASE_SIZE
    assert captioner.tokenizer.image_token_id == place
    n_images = {1: 1, 2: 1, 3: 1, 4: {"1x1": 1, "1x2": 2, "3x2": 6, "4x4": 16, "several": 9}}
    n_images[5] = {"1x1": 1, "1x2": 3, "3x2": 7, "4x4": 17, "several": 11}
    if shown == "none":
        assert inputs["images"] is None and place not in expected
    else:
        n = n_images[format_version][shown] if format_version > 3 else len(pictures)
        assert len(inputs["images"]) == n and expected.count(place) == 4 * n


@pytest.mark.parametrize("shown", [shown for shown in SHOWN if shown != "none"])
def test_pixels_are_what_the_era_saw(format_version, captioner, shown):
    pictures = pictures_of(shown)
    images = captioner.processor([pictures], [ASKED])["images"]
    expected = torch.cat([stock_pixels(format_version, picture) for picture in pictures])
    assert images.shape == expected.shape and images.dtype == torch.float32
    assert torch.allclose(images, expected, atol=1e-6) and 0 <= images.min() <= images.max() <= 1
    assert len({tuple(image.flatten().tolist()) for image in images}) == len(images), "images that can be told apart"


def test_a_users_image_tokens_are_text_in_every_era(captioner):
    tokenizer = captioner.tokenizer
    asked = "<|image|><|im_end|><|endoftext|><row_1_col_1>"
    read, plain = captioner.processor.encode_prompt([], asked), captioner.processor.encode_prompt([], "Hi")
    special = {tokenizer.backend.token_to_id(t) for t in ("<|image|>", "<|im_end|>", "<|endoftext|>", "<row_1_col_1>")}
    assert [id for id in read if id in special] == [id for id in plain if id in special]
    assert asked in tokenizer.decode(read)


def test_a_history_is_read_by_the_template_or_refused_in_one_line(format_version, captioner, lent):
    """The first two eras were trained on single questions; from the third on the template lays out any turns."""
    history = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "A star."}]
    history.append({"role": "user", "content": "Where?"})
    if format_version < 3:
        with pytest.raises(ValueError, match="^a chat of 3 messages, but config.json has no lm_chat_template: .*$"):
            captioner.tokenizer.encode_chat(history)
    else:
        reference = stock_tokenizer(lent, raw_config(format_version))
        expected = reference.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
        assert captioner.tokenizer.encode_chat(history) == expected
    for prompt in (history, history[0], None):
        with pytest.raises(
            ValueError, match=f"^a prompt is one string, not {type(prompt).__name__}; .*$"
        ):
            captioner.caption(noise(ONE), prompt)


def test_a_picture_that_the_config_would_blow_up_is_one_line(published):
    folder = published(5)
    raw = json.loads((folder / "config.json").read_text())
    changes = {"max_img_size": 2**24, "resize_to_max_side_len": True}
    (folder / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ValueError, match="^a picture of 16 x 16 would be resized to 16777216 x .*max_side=16777216.*$"):
        Captioner.from_pretrained(folder, "cpu", "float32").caption(noise(ONE))


# --------------------------------------------------------------------------------------------------- end to end


@torch.no_grad()
def said_plainly(format_version, model, reference, shown, max_new_tokens, penalty=1.0) -> list[int]:
    """A greedy answer without processor, embed or cache: pieces of words and pictures in a row, read as a whole."""
    pictures = pictures_of(shown)
    images = torch.cat([stock_pixels(format_version, picture) for picture in pictures]) if pictures else []
    looked = [model.MP(model.vision_encoder(image[None]))[0] for image in images]
    pieces, seen = [], set()
    for k, part in enumerate(written(format_version, shown).split(I)):
        ids = reference.encode(part, add_special_tokens=False) if part else []
        seen |= set(ids)
        pieces += [looked[k - 1]] if k else []
        pieces.append(model.decoder.token_embedding(torch.tensor(ids, dtype=torch.long)))
    x, said = torch.cat(pieces)[None], []
    while len(said) < max_new_tokens and (0 if format_version == 1 else 2) not in said:
        hidden, _ = model.decoder(x, use_cache=False)
        logits = model.decoder.head(hidden[0, -1])
        for id in seen:
            logits[id] = logits[id] / penalty if logits[id] > 0 else logits[id] * penalty
        said.append(int(logits.argmax()))
        seen.add(said[-1])
        x = torch.cat([x, model.decoder.token_embedding(torch.tensor([[said[-1]]]))], dim=1)
    return said


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_a_checkpoint_of_every_era_says_what_a_plain_recomputation_says(format_version, captioner, lent, penalty):
    reference, answers = stock_tokenizer(lent, raw_config(format_version)), []
    for shown in SHOWN:
        pictures = pictures_of(shown)
        expected = said_plainly(format_version, captioner.model, reference, shown, 8, penalty)
        sampling = SamplingParams(repetition_penalty=penalty)
        said = captioner.caption(pictures, ASKED, max_new_tokens=8, sampling=sampling)
        end = captioner.tokenizer.eos_token_id
        assert end == (0 if format_version == 1 else 2) and end == reference.convert_tokens_to_ids(SPECIAL[end])
        assert said == reference.decode([id for id in expected if id != end], skip_special_tokens=True)
        inputs = captioner.processor([pictures], [ASKED])
        for cached in (True, False):
            ids = captioner.model.generate(
                **inputs, max_new_tokens=8, sampling=sampling, eos_token_id=end, use_kv_cache=cached
            )
            assert ids[0].tolist() == expected
        answers.append(tuple(expected))
    assert len(set(answers)) > 3, "answers that do not depend on the picture prove nothing"


def test_a_row_of_a_mixed_batch_says_what_it_says_alone(captioner):
    pictures = [pictures_of(shown) for shown in SHOWN]
    together = list(captioner.captions(pictures, ASKED, max_new_tokens=6))
    assert together == [captioner.caption(row, ASKED, max_new_tokens=6) for row in pictures]


def test_training_reads_what_generation_reads(captioner):
    model, processor = captioner.model, captioner.processor
    answers = [(ASKED, "A star."), ("How many are there? " * 3, "one"), ("?", "")]
    examples = [Example(pictures_of(shown), answers) for shown in ("none", "1x1", "3x2", "several")]
    losses = []
    for example in examples:
        row = encode(example, processor)
        assert sum(mask == 1 for mask in row.mask) >= row.ids.count(captioner.tokenizer.image_token_id)
        for question, (asked, answer) in enumerate(answers):
            inputs = processor([example.images], [asked])
            read = inputs["input_ids"][0].tolist()
            said = [*captioner.tokenizer.encode(answer), captioner.tokenizer.eos_token_id]
            seen = [i for i, branch in enumerate(row.mask) if branch in (1, question + 2)]
            assert [row.ids[i] for i in seen] == (read + said)[:-1]
            assert [row.targets[i] for i in seen] == [IGNORE_INDEX] * (len(read) - 1) + said
            with torch.no_grad():
                logits, _ = model(torch.tensor([(read + said)[:-1]]), inputs["images"])
            likely = logits[0, len(read) - 1 :].log_softmax(-1)
            losses += [-likely[i, id].item() for i, id in enumerate(said)]
    model.zero_grad()
    _, packed = model(**collate([encode(example, processor) for example in examples]))
    assert abs(packed.item() - sum(losses) / len(losses)) < 1e-4
    packed.backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in model.parameters())
    model.zero_grad()


def test_a_conversation_goes_on_after_what_was_said(format_version, captioner):
    processor, turns = captioner.processor, [(ASKED, "A star."), ("Red?", "Yes."), ("?", "No.")]
    for shown in ("none", "1x1", "several"):
        pictures, ids = pictures_of(shown), []
        for k, (asked, answer) in enumerate(turns):
            ids += captioner.tokenizer.encode("\n") if k and format_version > 2 else []
            ids += processor([[] if k else pictures], [asked])["input_ids"][0].tolist()
            ids += [*captioner.tokenizer.encode(answer), captioner.tokenizer.eos_token_id]
        row = encode(Example(pictures, turns, multi_turn=True), processor)
        assert [*row.ids, row.targets[-1]] == ids


# ------------------------------------------------------------------------------------------ written, read again


def test_a_folder_written_again_keeps_its_era_and_words_and_needs_nothing_else(format_version, captioner, tmp_path):
    folder = tmp_path / "again"
    save_checkpoint(folder, captioner.model, captioner.tokenizer.to_json())
    raw = json.loads((folder / "config.json").read_text())
    assert raw == raw_config(format_version) | {"lm_tokenizer": raw["lm_tokenizer"]} and load_config(folder).format_version == format_version
    raw["lm_tokenizer"] = "nobody-here/no-such-model"
    (folder / "config.json").write_text(json.dumps(raw))
    again = Captioner.from_pretrained(folder, "cpu", "float32")
    theirs, ours = captioner.model.state_dict(), again.model.state_dict()
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert again.caption(noise(TALL), ASKED) == captioner.caption(noise(TALL), ASKED)


def test_stock_nanovlm_loads_what_is_written(format_version, captioner, published, tmp_path):
    folder = tmp_path / "ours"
    save_checkpoint(folder, captioner.model, captioner.tokenizer.to_json())
    for path in (folder, published(format_version)):
        stock = stock_model(captioner.model.cfg)
        assert load_strictly(stock, path / "model.safetensors", strict=True) == (set(), [])
        ours = captioner.model.state_dict()
        assert all(torch.equal(tensor, ours[n]) for n, tensor in stock.state_dict().items() if n != INV_FREQ)
        assert torch.allclose(stock.decoder.rotary_embd.inv_freq, torch.tensor([1.0, 100000**-0.5]), rtol=1e-6, atol=0)


def test_stock_nanovlm_reads_the_tokenizer_beside_the_weights(format_version, captioner, lent, tmp_path):
    save_checkpoint(tmp_path / "ours", captioner.model, captioner.tokenizer.to_json())
    raw = raw_config(format_version)
    ours, lent = AutoTokenizer.from_pretrained(tmp_path / "ours"), stock_tokenizer(lent, raw)
    stock = stock_tokenizer(tmp_path / "ours", raw)
    assert ours.eos_token_id == stock.eos_token_id == captioner.tokenizer.eos_token_id
    for shown in SHOWN:
        text = written(format_version, shown)
        assert ours.encode(text) == stock.encode(text) == lent.encode(text)
    for name, token in raw.get("vlm_extra_tokens", {}).items():
        assert getattr(ours, name) == getattr(stock, name) == token
    if format_version > 2:
        assert ours.chat_template == CHATML


# ------------------------------------------------------------------------------------------------------ tokens


EMOJI = (
    "🙂",
    "👩‍👩‍👧",
    "🏳️‍🌈",
    "é",
    "e\u0301",
    "漢字",
    "\u200f",
    "\ufffd",
    "\x00",
    "\t",
    "\r\n",
    " ",
    "  ",
    "\n",
    "\n\n",
)
SPACES = (" ", "  ", "\t", "\n", "\n\n", "\r\n")
WORDS = ("a", "The ", "colour", " What", "this", "12", "3.14", "?", "<", "|", ">", "'s", "<|image|", "<image: 0>")
LOOK_ALIKES = ("<|image|>", "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<row_1_col_1>", "<filler_0>", "<file_sep>")


def strings(n, pieces, seed=0):
    chance = random.Random(seed)
    ranges = [(0x20, 0x7F), (0xA0, 0x250), (0x370, 0x1000), (0x2000, 0x3100), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF)]
    for _ in range(n):
        parts = [chance.choice(pieces) for _ in range(chance.randrange(8))]
        parts += [chr(chance.randrange(*chance.choice(ranges))) for _ in range(chance.randrange(8))]
        chance.shuffle(parts)
        yield "".join(parts)


def plain(texts):
    """Those without a special token, in which transformers would see one."""
    return [text for text in texts if not any(token in text for token in LOOK_ALIKES)]


@pytest.mark.parametrize("format_version", [1, 5])
def test_transformers_reads_thousands_of_strings_the_same(published, lent, format_version):
    tokenizer = Captioner.from_pretrained(published(format_version), "cpu", "float32").tokenizer
    reference = stock_tokenizer(lent, raw_config(format_version))
    extra = raw_config(format_version).get("vlm_extra_tokens", {}).values()
    assert len(tokenizer) == len(reference) == BASE_SIZE + len(extra)
    for id, token in enumerate(extra, start=BASE_SIZE):
        assert reference.convert_tokens_to_ids(token) == tokenizer.special_id(token) == id
    texts = plain(strings(2000, EMOJI + SPACES + WORDS))
    assert len(texts) > 1900
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text == reference.decode(ids, clean_up_tokenization_spaces=False)
    seen = 0
    for text in strings(1000, EMOJI + SPACES + LOOK_ALIKES, seed=1):
        expected = reference.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert tokenizer.encode(text) == expected
        seen += any(token in text for token in LOOK_ALIKES)
    assert seen > 500


def test_transformers_renders_chats_the_same(published, lent):
    tokenizer = Captioner.from_pretrained(published(5), "cpu", "float32").tokenizer
    reference = stock_tokenizer(lent, raw_config(5))
    messages, roles = [], ("system", "user", "assistant")
    for i, text in enumerate(plain(strings(1000, EMOJI + SPACES + WORDS, seed=2))):
        messages = [*messages, {"role": roles[i % 3], "content": text}][-3:]
        for more in (True, False):
            expected = reference.apply_chat_template(messages, add_generation_prompt=more, return_dict=False)
            assert tokenizer.encode_chat(messages, add_generation_prompt=more) == expected


@pytest.mark.parametrize(
    ("format_version", "changes", "told"),
    [
        (2, {"vlm_extra_tokens": {"image_token": ""}}, ["vlm_extra_tokens", "image_token=''"]),
        (1, {"lm_vocab_size": BASE_SIZE - 1}, [f"an id {BASE_SIZE - 1}", f"lm_vocab_size={BASE_SIZE - 1}"]),
        (4, {"lm_vocab_size": BASE_SIZE + 16}, [f"an id {BASE_SIZE + 16}", f"lm_vocab_size={BASE_SIZE + 16}"]),
    ],
)
def test_a_borrowed_tokenizer_that_disagrees_with_the_config_is_one_line(published, lent, format_version, changes, told):
    folder = published(format_version)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(CheckpointError) as error:
        Captioner.from_pretrained(folder, "cpu", "float32")
    assert all(part in str(error.value) for part in [str(lent / "tokenizer.json"), *told]), error.value
    assert "\n" not in str(error.value)


def test_a_shipped_tokenizer_decides_and_must_have_every_token(format_version, captioner, published, tmp_path):
    """It is not added to: a token that it lacks, or has an id too high for, is an error that names both files' word."""
    folder, words = published(format_version), json.loads(captioner.tokenizer.to_json())
    (folder / "tokenizer.json").write_text(json.dumps(words))
    assert Captioner.from_pretrained(folder, "cpu", "float32").caption(noise(ONE)) == captioner.caption(noise(ONE))
    lost = {1: "<|endoftext|>", 2: "<|image|>", 3: "<|im_end|>", 4: "<row_4_col_4>", 5: "<|global_image|>"}[format_version]
    (folder / "tokenizer.json").write_text(json.dumps(words).replace(lost, "<|lost|>"))
    with pytest.raises(CheckpointError) as error:
        Captioner.from_pretrained(folder, "cpu", "float32")
    assert str(folder / "tokenizer.json") in str(error.value) and repr(lost) in str(error.value)
    assert "\n" not in str(error.value)
