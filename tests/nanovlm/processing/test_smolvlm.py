"""Checkpoints in the layout of transformers' SmolVLM and Idefics3, against transformers itself; and odd settings."""

import json
import random
import shutil
from functools import partial

import pytest
import tokenizers
import torch
from PIL import Image

from models.checkpoint import checkpoint_dtype, load_config
from models.vision_language_model import VisionLanguageModel
from nanovlm import Captioner
from nanovlm.cli.main import main
from nanovlm.data.examples import collate, encode, questions
from nanovlm.data.records import Record, to_example
from nanovlm.errors import CheckpointError, NanoVLMError
from nanovlm.evaluation.evaluate import _request
from nanovlm.options import GenerationOptions, ReadOptions
from nanovlm.processing.conversation import with_images
from nanovlm.serving.openai_api import ChatRequest
from support import Package, noise_image
from support.data import llava
from support.data import text as text_part
from support.generation import inputs_of, prompt_of
from support.smolvlm import ADDED, SPECIAL, TEMPLATE, VARIANTS, make_tokenizer, their_inputs, write_folder

transformers = Package("transformers")
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of each variant the folder, transformers' model and its processor."""
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("smolvlm") / name.replace(" ", "-")
            model, processor = write_folder(folder, **VARIANTS[name])
            made[name] = folder, type(model).from_pretrained(folder, dtype=torch.float32), processor
        return made[name]

    return make


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, folders):
    return folders(request.param)


@pytest.fixture(scope="module")
def ours(variant):
    return Captioner.from_pretrained(variant[0], "cpu", "float32")


def sizes(n, seed):
    rng = random.Random(seed)
    return [(rng.randint(1, 300), rng.randint(1, 300)) for _ in range(n)] + [(16, 16), (64, 64), (300, 2), (65, 64)]


def test_ids_and_pixels_of_200_sizes_match(variant, ours):
    _, _, processor = variant
    rng = random.Random(0)
    for i, size in enumerate(sizes(200, 1)):
        images = [noise_image(*size, seed=i)] + [noise_image(*s, seed=i) for s in sizes(2, i)[: rng.randint(0, 2)]]
        turns = ["What is this?", "A cat and 12 dogs.", "And there?"][: rng.choice((1, 3))]
        expected = their_inputs(processor, images, turns)
        ids, tiles = prompt_of(ours.processor, images, *turns)
        assert ids == expected["input_ids"][0].tolist()
        pixels = torch.cat(tiles)
        assert pixels.shape == expected["pixel_values"][0].shape
        assert (pixels - expected["pixel_values"][0]).abs().max() <= 1e-5


def their_answers(model, inputs, n):
    ids = model.generate(**inputs, max_new_tokens=n, do_sample=False, pad_token_id=2)
    return ids[0, inputs["input_ids"].size(1) :].tolist()


@torch.no_grad()
def test_logits_and_greedy_ids_match_cached_uncached_and_batched(variant, ours):
    _, model, processor = variant
    images = [[noise_image(70, 40)], [noise_image(16, 16), noise_image(90, 20)]]
    rows = list(zip(images, ["What is this?", "Describe the two of them."]))
    theirs = [their_inputs(processor, row, [text]) for row, text in rows]
    expected = [their_answers(model, inputs, 12) for inputs in theirs]
    requests = [ours.request(row, text, max_new_tokens=12) for row, text in rows]
    assert [request.output for request in ours.run(requests)] == expected
    for (row, text), inputs, ids in zip(rows, theirs, expected):
        logits, _ = ours.model(inputs["input_ids"], inputs["pixel_values"][0])
        their_logits = model(**inputs).logits
        assert (logits - their_logits).abs().max() <= 1e-4 * their_logits.abs().max()
        for cached in (True, False):
            settings = {"eos_token_id": ours.tokenizer.eos_token_ids, "use_kv_cache": cached}
            generated = ours.model.generate(**inputs_of(ours, row, text), max_new_tokens=12, **settings)
            assert generated[0].tolist() == ids


def test_max_tiles_and_special_tokens_of_answers(folders):
    for max_tiles in (1, 2, 3, 5, None):
        captioner, most = Captioner.from_pretrained(folders("SmolVLM2")[0], max_tiles=max_tiles), 0
        for i, size in enumerate(sizes(20, 3)):
            tiled = captioner.processor.tiled(noise_image(*size, seed=i))
            n = tiled.grid[0] * tiled.grid[1]
            assert tiled.n_tiles == n + (n > 1) and n <= (max_tiles or 16)
            most = max(most, tiled.n_tiles)
        assert most <= captioner.processor.max_tiles_per_image
    tokenizer = captioner.tokenizer
    ids = [*tokenizer.encode_answer("Two")[:-1], tokenizer.special_id("<row_1_col_2>"), *tokenizer.encode(" dogs.")]
    assert tokenizer.decode(ids) == "".join(tokenizer.stream(ids)) == "Two dogs."


def test_weights_keep_their_dtype_and_files_are_read_as_transformers_4_writes_them(folders, tmp_path):
    """preprocessor_config.json of its own, and chat_template.json instead of .jinja."""
    shutil.copytree(folders("SmolVLM2")[0], folder := tmp_path / "model")
    expected = load_config(folder)
    settings = json.loads((folder / "processor_config.json").read_text())
    for name, content in (("preprocessor_config", settings.pop("image_processor")), ("processor_config", settings)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    cfg = load_config(folder)
    assert cfg.lm_chat_template == expected.lm_chat_template == TEMPLATE
    for name in ("longest_edge", "split", "resample", "mean", "std", "rescale_factor", "end_token_ids"):
        assert getattr(cfg.format, name) == getattr(expected.format, name)
    for name in (sorted(folder.glob("model-*.safetensors"))[1].name, "preprocessor_config.json"):
        (folder / name).unlink()
        with pytest.raises(CheckpointError, match=name):
            VisionLanguageModel.from_pretrained(folder)
    folder, model, _ = folders("half")
    VisionLanguageModel.from_pretrained(folder, dtype=checkpoint_dtype(folder)).save_pretrained(tmp_path / "half")
    assert type(model).from_pretrained(tmp_path / "half").dtype == torch.bfloat16


@pytest.mark.parametrize("flags", [["--lora-rank", "2"], ["--pack", "200"]])
def test_models_are_trained_in_smolvlms_layout_and_transformers_reads_them(folders, tmp_path, flags):
    """Conformance shows that the other files stay."""
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    for i in range(4):
        noise_image(20 + 8 * i, 30, seed=i).save(data / f"{i}.png")
        (data / f"{i}.txt").write_text(f"Image {i}.")
    common = ["--batch-size", "2", "--validation", "1", "--device", "cpu", "--model", str(folders("SmolVLM2")[0])]
    for steps in ("2", "4"):  # the second run resumes the first
        assert main(["train", "--data", str(data), "--out", str(out), "--max-steps", steps, *common, *flags]) == 0
    ours, processor = Captioner.from_pretrained(out, "cpu", "float32"), folders("SmolVLM2")[2]
    theirs = transformers.SmolVLMForConditionalGeneration.from_pretrained(out, dtype=torch.float32).eval()
    expected = their_answers(theirs, their_inputs(processor, [noise_image(70, 40)], ["What is this?"]), 6)
    mine = inputs_of(ours, [noise_image(70, 40)], "What is this?")
    got = ours.model.generate(**mine, max_new_tokens=6, eos_token_id=ours.tokenizer.eos_token_ids)
    assert ours.model.cfg.format_name == "smolvlm" and got[0].tolist() == expected


def test_the_loss_of_a_training_example_is_transformers(folders):
    folder, model, processor = folders("SmolVLM2")
    captioner = Captioner.from_pretrained(folder, "cpu", "float32")
    image, texts = noise_image(70, 40), ["Be brief.", "What is this?", "Two dogs.", "And there?", "A cat."]
    roles = ["system", "user", "assistant", "user", "assistant"]
    chat = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    row = encode(to_example(Record({"image": image, "messages": chat}, "a"), ReadOptions()), captioner.processor)
    _, loss = captioner.model(**collate([row]))
    messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in zip(roles, texts)]
    messages[1]["content"].insert(0, {"type": "image"})
    inputs = processor(text=processor.apply_chat_template(messages), images=[[image]], return_tensors="pt")
    end = captioner.tokenizer.eos_token_id
    ids = inputs["input_ids"][0].tolist()
    labels, learning = [], False
    assistant = captioner.tokenizer.encode("Assistant:")
    for i, id in enumerate(ids):
        labels.append(id if learning else -100)
        learning = id != end if learning else ids[max(0, i + 1 - len(assistant)) : i + 1] == assistant
    with torch.no_grad():
        expected = model(**inputs, labels=torch.tensor([labels])).loss
    assert sum(label != -100 for label in labels) == sum(target != -100 for target in row.targets) > 8
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


URL = {"type": "image_url", "image_url": {"url": "data:,"}}


def served_ids(processor, sent, images):
    """Ids of messages that the server gets: their roles and contents."""
    messages = [{"role": role, "content": content} for role, content in sent]
    turns = [message.turn for message in ChatRequest.model_validate({"messages": messages}).messages]
    return processor.encode(with_images(turns, processor.prepare(images)))


def test_messages_keep_their_roles_and_order(folders):
    folder, _, theirs = folders("SmolVLM2")
    ours = Captioner.from_pretrained(folder).processor
    images = [noise_image(70, 40), noise_image(20, 90), noise_image(16, 16)]
    turns = [
        ("system", ["Be brief."]), ("user", ["What is this?", None]), ("assistant", ["A cat."]),
        ("user", [None, "And ", "there?", None, " Well?"]), ("user", ["Go on."]),
    ]  # fmt: skip

    def content(parts, image):
        return [image if part is None else {"type": "text", "text": part} for part in parts]

    sent = [(role, content(parts, URL)) for role, parts in turns]
    sent[0], sent[-1] = ("developer", "Be brief."), ("user", "Go on.")
    ids = served_ids(ours, sent, images)
    asked = [{"role": role, "content": content(parts, {"type": "image"})} for role, parts in turns]
    prompt = theirs.apply_chat_template(asked, add_generation_prompt=True)
    assert ids == theirs(text=prompt, images=[images], return_tensors="pt").input_ids[0].tolist()


def asked(*parts):
    """A user's message, with an image for each number."""
    return "user", [text_part(part) if isinstance(part, str) else IMAGES[part] for part in parts]


IMAGES = [{"type": "image", "image": f"{i}.png"} for i in range(2)]
SAID = "assistant", [text_part("Two dogs.")]
# columns of a row of data, and the conversation that transformers reads
PLACES = {
    "image first": ({"question": "What?", "answer": "Two dogs."}, [asked(0, "What?"), SAID]),
    "text first": (None, [asked("What is this? ", 0), SAID]),
    "between texts": (None, [asked("In ", 0, " the dogs, ", "or not?"), SAID]),
    "a later turn": (None, [asked("Hello."), SAID, asked(0, "What?"), SAID]),
    "a later turn, behind its text": (None, [asked("Hello."), SAID, asked("What?", 0), SAID]),
    "one in each of two turns": (None, [asked(0, "What?"), SAID, asked("And ", 1, "?"), SAID]),
    "several": (None, [("system", SAID[1]), asked(0, 1, "Which"), SAID, asked("Or ", 0, " or ", 1), SAID]),
    "marks": ({"question": "In <image> or\n<image>", "answer": "Two dogs."}, [asked("In ", 0, " or", 1), SAID]),
    "LLaVA's": (llava("<image>\nWhat?", "Two dogs.", "And <image> ?", "Two dogs."),
                [asked(0, "What?"), SAID, asked("And ", 1, " ?"), SAID]),
}  # fmt: skip


@pytest.mark.parametrize(("columns", "said"), PLACES.values(), ids=PLACES)
def test_an_image_stands_where_the_conversation_has_it_in_every_door(folders, tmp_path, monkeypatch, columns, said):
    """Ids of training, of evaluation and of the server equal those of transformers' processor."""
    folder, _, theirs = folders("SmolVLM2")
    monkeypatch.chdir(tmp_path)
    files = [noise_image(70, 40), noise_image(20, 90)]
    for i, image in enumerate(files):
        image.save(f"{i}.png")
    shown = [files[int(part["image"][0])] for _, parts in said for part in parts if part["type"] == "image"]
    names = {"images": [f"{files.index(image)}.png" for image in shown]}
    row = names | columns if columns else {"messages": [{"role": role, "content": parts} for role, parts in said]}
    captioner = Captioner.from_pretrained(folder, "cpu", "float32")
    example = to_example(Record(row, "a"), ReadOptions())
    read = encode(example, captioner.processor)
    pixels = [tile for tiles in read.images for tile in tiles]

    def expected(messages, **options):
        plain = [{"role": role, "content": [{**part, "image": None} for part in parts]} for role, parts in messages]
        n = sum(part["type"] == "image" for _, parts in messages for part in parts)
        prompt = theirs.apply_chat_template(plain, **options)
        return theirs(text=prompt, images=[shown[:n]] if n else None, return_tensors="pt")

    whole = expected(said)
    assert read.ids == whole["input_ids"][0].tolist()[: len(read.ids)] and len(pixels) == len(whole["pixel_values"][0])
    assert (torch.stack(pixels) - whole["pixel_values"][0]).abs().max() <= 1e-5
    (*_, last), *_ = [questions([("a", example)])]
    ids = expected(said[:-1], add_generation_prompt=True)["input_ids"][0].tolist()
    assert _request(captioner, last, GenerationOptions()).ids == ids
    sent = [(role, [URL if part["type"] == "image" else part for part in parts]) for role, parts in said[:-1]]
    assert served_ids(captioner.processor, sent, shown) == ids


# As granite-docling's: other roles and ends than SmolVLM's, a content that may be a string, no space before an answer.
GRANITE = (
    "{%- for message in messages -%}{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}{%- if part['type'] == 'text' -%}{{- part['text'] -}}"
    "{%- elif part['type'] == 'image' -%}{{- '<image>' -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{- '<|end_of_text|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start_of_role|>assistant<|end_of_role|>' -}}{%- endif -%}"
)


def test_another_template_with_several_end_tokens(tmp_path):
    folder = tmp_path / "granite"
    added = [*ADDED, "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"]
    model, processor = write_folder(folder, "Idefics3", added=added)
    (folder / "chat_template.jinja").write_text(GRANITE)
    processor.chat_template = GRANITE
    inputs = their_inputs(processor, [noise_image(70, 40)], ["What is this?"])
    model.generation_config.eos_token_id = None
    free = their_answers(model, inputs, 12)
    ends = [free[-1], processor.tokenizer.get_vocab()["<|end_of_text|>"]]  # the first ends this answer
    model.generation_config.eos_token_id = ends
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    expected = their_answers(model, inputs, 40)
    assert expected[-1] == ends[0] and len(expected) <= 12

    captioner = Captioner.from_pretrained(folder, "cpu", "float32")
    assert captioner.tokenizer.eos_token_ids == (ends[1], ends[0]), "first the template's own"
    assert captioner.tokenizer.answer_prefix == ""
    ours = inputs_of(captioner, [noise_image(70, 40)], "What is this?")
    assert ours["input_ids"].tolist() == inputs["input_ids"].tolist()
    got = captioner.model.generate(**ours, max_new_tokens=40, eos_token_id=captioner.tokenizer.eos_token_ids)[0]
    assert got.tolist() == [*expected[:-1], ends[1]], "the template's own stands for any"


@pytest.mark.parametrize("writes_bos", [True, False])
def test_a_prompt_begins_as_the_post_processor_says(tmp_path, writes_bos):
    """Folder like Idefics3-8B's, whose tokenizer puts <|begin_of_text|> before a text that does not begin with it."""
    write_folder(tmp_path / "model")
    file, template = tmp_path / "model" / "tokenizer.json", TEMPLATE if writes_bos else TEMPLATE[len("<|im_start|>") :]
    backend = tokenizers.Tokenizer.from_file(str(file))
    bos = backend.token_to_id("<|im_start|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", bos)])
    backend.save(str(file))
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    theirs = transformers.AutoProcessor.from_pretrained(tmp_path / "model")
    ours = Captioner.from_pretrained(tmp_path / "model").processor
    messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}]}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    ids = prompt_of(ours, [], "What?")[0]
    assert [ids] == expected["input_ids"] and ids.count(bos) == 1 and ids[0] == bos
    backend.post_processor = tokenizers.processors.TemplateProcessing("$A <|im_start|>", None, [("<|im_start|>", bos)])
    backend.save(str(file))
    with pytest.raises(CheckpointError, match="behind a text"):
        prompt_of(Captioner.from_pretrained(tmp_path / "model").processor, [], "What?")


def metaspace(scheme):
    """A tokenizer of Llama's kind: a ▁ for each space, and before a text or before each piece of it."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<|endoftext|>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
    letters = [*map(chr, range(33, 127)), "\n", "▁"]
    options = {"special_tokens": SPECIAL, "initial_alphabet": letters, "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=200, **options)
    backend.train_from_iterator(["What is in this picture? Assistant: User:"], trainer)
    backend.add_special_tokens(ADDED)
    return backend


def stripping(**sides):
    """SmolVLM's tokenizer, whose special tokens swallow the spaces beside them, as those of Phi-4 do."""
    backend = make_tokenizer(added=[])
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False, **sides) for token in ADDED])
    return backend


TOKENIZERS = {
    "rstrip": lambda: stripping(rstrip=True),
    "lstrip": lambda: stripping(lstrip=True),
    "both": lambda: stripping(lstrip=True, rstrip=True),
    **{f"Metaspace {scheme}": partial(metaspace, scheme) for scheme in ("first", "always", "never")},
}


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
def test_prompts_of_other_tokenizers_have_transformers_ids(tmp_path, make):
    _, processor = write_folder(tmp_path, backend=make())
    ours, image = Captioner.from_pretrained(tmp_path).processor, noise_image(70, 40)
    for turns in (["What is this?"], ["  What\n", "Two  dogs. ", " And there? "]):
        expected = their_inputs(processor, [image], turns)["input_ids"][0].tolist()
        assert prompt_of(ours, [image], *turns)[0] == expected
        typed, _ = prompt_of(ours, [image], *turns[:-1], turns[-1] + "<end_of_utterance><image>")
        special = {*map(ours.tokenizer.special_id, ADDED)}
        assert [id for id in typed if id in special] == [id for id in expected if id in special]


def test_the_markup_of_documents_is_kept_and_may_be_typed(tmp_path):
    """SmolDocling's tags are special tokens of its vocabulary, and its card's prompts hold them."""
    added = [*ADDED, "<doctag>", "</doctag>", "<loc_5>", "<chart>", "<|end_of_text|>"]
    _, processor = write_folder(tmp_path / "model", "Idefics3", added=added)
    ours, image = Captioner.from_pretrained(tmp_path / "model").processor, noise_image(70, 40)
    tokenizer = ours.tokenizer
    begin, location, end = map(tokenizer.special_id, ("<doctag>", "<loc_5>", "</doctag>"))
    ids = [begin, location, *tokenizer.encode("Hi"), end]
    assert tokenizer.decode(ids) == "".join(tokenizer.stream(ids)) == "<doctag><loc_5>Hi</doctag>"
    answer = [*tokenizer.encode(tokenizer.answer_prefix), *ids, tokenizer.eos_token_id]
    assert tokenizer.encode_answer("<doctag><loc_5>Hi</doctag>") == answer
    question = "Convert <chart> at <loc_5> to <doctag>."
    expected = their_inputs(processor, [image], [question])["input_ids"][0].tolist()
    assert prompt_of(ours, [image], question)[0] == expected and location in expected
    for markup in ("<image>", "<end_of_utterance>", "<|im_start|>", "<row_1_col_1>", "<|end_of_text|>"):
        typed, plain = (prompt_of(ours, [image], question + text)[0] for text in (markup, "?"))
        assert typed.count(tokenizer.special_id(markup)) == plain.count(tokenizer.special_id(markup))


FILES = ("config.json", "processor_config.json", "tokenizer_config.json", "generation_config.json")
ODD = ["a", 10**400, -1, 0, 1e400, float("nan"), True, None, [], {}, [True], "x" * 10**6, 1.5, {"a": 1}]


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path / "model")
    return tmp_path / "model"


def odd_settings(settings):
    """The settings with each value of nested dictionaries replaced by odd ones, one at a time."""
    for key, value in settings.items():
        for odd in (*ODD, *(odd_settings(value) if isinstance(value, dict) else ())):
            yield settings | {key: odd}


@pytest.mark.parametrize("file", FILES)
def test_an_odd_value_is_one_short_line_or_without_effect(folder, file):
    settings, refused = json.loads((folder / file).read_text()), 0
    for changed in odd_settings(settings):
        (folder / file).write_text(json.dumps(changed))
        try:
            captioner = Captioner.from_pretrained(folder, "cpu", "float32")
            captioner.caption(Image.new("RGB", (20, 30)), max_new_tokens=2)
        except NanoVLMError as error:
            refused += 1
            assert len(str(error)) < 1000 and "\n" not in str(error), changed
    assert refused > 10 or file == "tokenizer_config.json"


REFUSED = {  # words of the error -> file, section, and the setting changed there
    "scale_factor='a'": ("config.json", None, {"scale_factor": "a"}),
    "model_type='llava' is none of idefics3": ("config.json", None, {"model_type": "llava"}),
    "the image token is .*, but config.json has image_token_id=7": ("config.json", None, {"image_token_id": 7}),
    "text_config: qk_layer_norms=": ("config.json", "text_config", {"qk_layer_norms": True}),
    "text_config: model_type=": ("config.json", "text_config", {"model_type": "mistral"}),
    "text_config: rope_scaling=": ("config.json", "text_config", {"rope_scaling": {"rope_type": "yarn", "factor": 2}}),
    "vision_config: hidden_act=": ("config.json", "vision_config", {"hidden_act": "gelu"}),
    "image_seq_len=5, but a tile has 4 embeddings": ("processor_config.json", None, {"image_seq_len": 5}),
    "longest_edge": ("processor_config.json", "image_processor", {"size": {"longest_edge": 10**400}}),
    "do_center_crop=True is not supported": ("processor_config.json", "image_processor", {"do_center_crop": True}),
    "fake_image_token='xxx": ("tokenizer_config.json", None, {"fake_image_token": "x" * 10**7}),
    "eos_token_id": ("generation_config.json", None, {"eos_token_id": 10**400}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_computes_something_else_or_disagrees_is_named_in_the_words_of_the_file(folder, words):
    file, section, change = REFUSED[words]
    settings = json.loads((folder / file).read_text())
    (settings[section] if section else settings).update(change)
    (folder / file).write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=words):
        Captioner.from_pretrained(folder, "cpu", "float32")


def test_which_of_two_files_counts(folder, monkeypatch):
    """processor_config.json comes first, as in transformers 5; the tokenizer is that of the folder alone."""
    settings = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"do_image_splitting": False}))
    assert Captioner.from_pretrained(folder, "cpu").processor.max_tiles_per_image > 1
    monkeypatch.chdir(folder)
    shutil.copytree(folder, "inner")
    (folder / "inner/tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"inner has no tokenizer\.json"):
        Captioner.from_pretrained("inner")
