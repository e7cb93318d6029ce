"""Comparison with transformers' SmolVLM."""

import pytest
import tokenizers
import torch

from support import Package

transformers = Package("transformers")


@torch.no_grad()
def assert_same_logits(model, theirs, ids, images, tolerance=1e-5):
    """Ours on pixels in [0, 1], theirs on [-1, 1]; to a part of the largest logit."""
    ours, _ = model(ids, images)
    pixels = (images * 2 - 1)[None]
    expected = theirs(input_ids=ids, pixel_values=pixels, pixel_attention_mask=torch.ones_like(pixels[:, :, 0])).logits
    assert (ours - expected).abs().max() <= tolerance * ours.abs().max()


# The template of SmolVLM-256M-Instruct and its relatives.
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<global-img>", *(f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7))]
ADDED += ["<fake_token_around_image>", "<image>", "<end_of_utterance>"]


def make_tokenizer(added=ADDED, special=SPECIAL):
    """A byte-level BPE as SmolLM2's, of few tokens, by default with SmolVLM's own."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(individual_digits=True), tokenizers.pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        ["What is in this picture? Describe the two of them.", "Assistant: User: \n\n a"], trainer
    )
    backend.add_special_tokens(added)
    return backend


def make_config(kind, vocab_size, ids, *, image_size=16, patch_size=4, scale_factor=2, text=None, vision=None, **top):
    vision_config = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": image_size, "patch_size": patch_size,
    }  # fmt: skip
    text_config = {
        "model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-5, "rope_theta": 100000,
        "max_position_embeddings": 4096, "vocab_size": vocab_size, "pad_token_id": 2,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        vision_config=vision_config | (vision or {}),
        text_config=text_config | (text or {}),
        scale_factor=scale_factor,
        image_token_id=ids["<image>"],
        **top,
    )
    return config


def write_folder(
    folder, kind="SmolVLM", *, longest_edge=64, splitting=True, shard="5GB", dtype=torch.float32, added=ADDED,
    backend=None, **sizes
):  # fmt: skip
    """Write a random model and its processor, all by transformers; returns both."""
    processing = pytest.importorskip("transformers.models.smolvlm.processing_smolvlm")
    processing.num2words = processing.num2words or str  # which it needs for videos only
    backend = backend or make_tokenizer(added)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<end_of_utterance>", pad_token="<|im_end|>",
        padding_side="left", model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    config = make_config(kind, backend.get_vocab_size(), backend.get_vocab(), **sizes)
    tile = config.vision_config.image_size
    image_processor = getattr(transformers, f"{kind}ImageProcessorPil")(
        size={"longest_edge": longest_edge}, max_image_size={"longest_edge": tile}, do_image_splitting=splitting
    )
    seq_len = (tile // config.vision_config.patch_size // config.scale_factor) ** 2
    extra = {"video_processor": transformers.SmolVLMVideoProcessor()} if kind == "SmolVLM" else {}
    processor = getattr(transformers, f"{kind}Processor")(
        image_processor=image_processor, tokenizer=tokenizer, image_seq_len=seq_len, chat_template=TEMPLATE, **extra
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.25)
        model.tie_weights()
    model.generation_config.eos_token_id = backend.token_to_id("<end_of_utterance>")
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    processor.save_pretrained(folder)
    return model, processor


def their_inputs(processor, images, turns, images_per_turn=()):
    """transformers' inputs for a chat of texts, the user's and the assistant's in turn, about images."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": [{"type": "text", "text": text}]}
        for i, text in enumerate(turns)
    ]
    for message, n in zip(messages[::2], images_per_turn or [len(images)]):
        message["content"] = [{"type": "image"}] * n + message["content"]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    return processor(text=prompt, images=[images] if images else None, return_tensors="pt")


VARIANTS = {  # like the published models, only small
    "SmolVLM-256M": {"kind": "Idefics3"},
    "SmolVLM-2.2B": {  # the last pixels of a tile are in no patch, and rows and columns have no tokens
        "kind": "Idefics3", "image_size": 38, "patch_size": 4, "scale_factor": 3, "longest_edge": 152,
        "added": ["<fake_token_around_image>", "<image>", "<end_of_utterance>"],
    },
    "SmolVLM2": {"kind": "SmolVLM", "shard": "30KB"},
    "tied": {"kind": "SmolVLM", "tie_word_embeddings": True, "text": {"tie_word_embeddings": True}},
    "one tile": {"kind": "SmolVLM", "splitting": False},
    "folded": {"kind": "Idefics3", "image_size": 76, "scale_factor": 1, "longest_edge": 76},
    "half": {"kind": "SmolVLM", "dtype": torch.bfloat16},
}  # fmt: skip
