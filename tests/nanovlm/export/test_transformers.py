"""Export to SmolVLM: transformers computes the same ids, logits and captions from the exported folder."""

import json

import jinja2
import pytest
import tokenizers
import torch
from jinja2 import nodes
from PIL import Image
from safetensors.torch import load_file

from models.checkpoint import load_config
from models.formats.to_smolvlm import CHAT_TEMPLATE
from nanovlm import EMBEDDED, PROMPT, SAMPLE, Captioner
from nanovlm.export.transformers import chat_template, export_smolvlm
from nanovlm.processing.processor import Processor
from nanovlm.processing.tokenizer import Tokenizer
from support import Package
from support.generation import inputs_of
from support.smolvlm import assert_same_logits

pytest.importorskip("num2words")  # without which SmolVLM's processor will not load
transformers = Package("transformers")
pytestmark = pytest.mark.full

PARTS = [{"type": "image"}, {"type": "text", "text": PROMPT}]


@pytest.fixture(scope="module")
def folder(embedded, tmp_path_factory):
    """The embedded model, exported with a tokenizer that puts a token before each text, which our prompts leave out."""
    backend, start = tokenizers.Tokenizer.from_str(embedded.tokenizer.to_json()), "<|im_start|>"
    ids = [(start, backend.token_to_id(start))]
    backend.post_processor = tokenizers.processors.TemplateProcessing(f"{start} $A", special_tokens=ids)
    processor = Processor(embedded.model.cfg, Tokenizer(backend, embedded.model.cfg))
    export_smolvlm(Captioner(embedded.model, processor), folder := tmp_path_factory.mktemp("export") / "smolvlm")
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()


def sample_image(width=130, height=90, seed=0):
    return Image.effect_noise((width, height), 90).convert("RGB") if seed else Image.open(SAMPLE).convert("RGB")


def test_transformers_loads_every_tensor_and_no_other(folder, embedded):
    _, report = transformers.AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    n_parameters = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert n_parameters == sum(parameter.numel() for parameter in embedded.model.parameters())


def test_exported_embedded_model_gives_the_same_caption(folder, theirs, embedded):
    processor = transformers.AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template([{"role": "user", "content": PARTS}], add_generation_prompt=True)
    theirs_inputs = processor(text=text, images=[sample_image()], return_tensors="pt")
    new = theirs.generate(**theirs_inputs, max_new_tokens=64)[:, theirs_inputs["input_ids"].size(1) :]
    assert processor.batch_decode(new, skip_special_tokens=True) == [embedded.caption(SAMPLE)]


@pytest.mark.parametrize("n_images", [0, 1, 2, 3])
def test_transformers_processor_matches_ours(folder, embedded, n_images):
    images = [sample_image(130 + 7 * i, 90, seed=i) for i in range(n_images)]
    content = [{"type": "image"}] * n_images + [{"type": "text", "text": "What is on the left?"}]
    processor = transformers.AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    theirs = processor(text=text, images=images or None, return_tensors="pt")
    ours = inputs_of(embedded, images, "What is on the left?")
    assert torch.equal(theirs["input_ids"], ours["input_ids"])
    if images:  # both resize 8-bit images, and may round a value to either side
        assert ((theirs["pixel_values"][0] + 1) / 2 - ours["images"]).abs().max() <= 1.01 / 255


def test_black_image_is_not_taken_for_padding(theirs, embedded):
    """With pixels in [0, 1] it would be all 0, which they take for padding."""
    inputs = inputs_of(embedded, [Image.new("RGB", (96, 96))], PROMPT)
    assert inputs["images"].abs().max() == 0
    assert_same_logits(embedded.model, theirs, inputs["input_ids"], inputs["images"])


def test_the_folder_has_no_token_type_ids_and_a_template_of_strings_and_parts(folder, embedded):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert list(tokenizer("a star")) == ["input_ids", "attention_mask"]
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_input_names"] == [*tokenizer("a star")]
    processor = transformers.AutoProcessor.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PARTS[::-1]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n<|image|>{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat_template(embedded.model.cfg).endswith(embedded.model.cfg.lm_chat_template)


def test_vllm_detects_contents_of_parts():
    """Find images as it does, by a loop over message['content'], where message is of a loop over messages."""
    cfg = load_config(EMBEDDED)
    content = nodes.Getitem(nodes.Name("message", "load"), nodes.Const("content"), "load")
    for template, has_parts in ((chat_template(cfg), True), (cfg.lm_chat_template, False), (CHAT_TEMPLATE, True)):
        loops = [*jinja2.Environment(trim_blocks=True, lstrip_blocks=True).parse(template).find_all(nodes.For)]
        assert any(loop.iter == nodes.Name("messages", "load") and loop.target.name == "message" for loop in loops)
        assert (content in [loop.iter for loop in loops]) == has_parts
