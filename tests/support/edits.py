"""Edits of the core's files, and what every door must answer of an edited model; also run by processes of their own."""

import importlib
import json
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from nanovlm.bulk import caption_rows
from nanovlm.captioner import Captioner
from nanovlm.chat_session import ChatSession
from nanovlm.options import CaptionOptions
from nanovlm.synthetic import draw, random_scene
from nanovlm.training.config import TrainConfig
from nanovlm.training.optimizer import accelerated

N_NEW = 24
PROMPTS = ["Describe the image.", "What is at the top?", "How many objects are there, and is there a red ring?"]
CHOICES = ("a large green ring", "blue", "two")
IMAGES = [draw(random_scene(Random(seed)), 128, 128) for seed in range(3)]
SETTINGS = {"max_new_tokens": N_NEW, "repetition_detection": (0, 0, 0)}


@dataclass(frozen=True)
class Edit:
    """Other lines in a function of a file of models/."""

    file: str
    function: str  # a function, or a class and its method
    old: str
    new: str
    changes_training: bool = field(default=True, kw_only=True)
    when_made: bool = field(default=False, kw_only=True)  # a model that is there already does not have it

    @property
    def module(self) -> types.ModuleType:
        return importlib.import_module(f"models.{self.file}")

    def apply(self, text: str) -> str:
        assert text.count(self.old) == 1, (self.file, self.old)
        return text.replace(self.old, self.new)

    def patch(self, monkeypatch) -> None:
        """Put the edited function in the place of the original, wherever the core has it by name."""
        path = self.module.__file__
        edited = types.ModuleType(self.module.__name__)
        exec(compile(self.apply(Path(path).read_text(encoding="utf-8")), path, "exec"), edited.__dict__)
        holder, _, name = self.function.rpartition(".")
        if holder:
            live = getattr(self.module, holder)
            method = vars(getattr(edited, holder))[name]
            if getattr(method, "__closure__", None) and method.__code__.co_freevars == ("__class__",):  # of super()
                method.__closure__[0].cell_contents = live
            monkeypatch.setattr(live, name, method)
            return
        original = getattr(self.module, name)
        for module in [module for key, module in sys.modules.items() if key.startswith("models.")]:
            if vars(module).get(name) is original:
                monkeypatch.setattr(module, name, getattr(edited, name))


SDPA = "    return F.scaled_dot_product_attention(\n"
BLOCKS = """            x, block_kv_cache = block(x, cos, sin, mask, block_kv_cache)
"""
LAST = "        return self.decoder.head(hidden[:, -1]), PrefillState(kv_cache, mask)\n"
DECODED = "        return self.prefill_embeds(self.embed_tokens(ids[:, None]), None, prefix)\n"
EDITS = {
    "a sliding window": Edit("attention", "attention", when_made=True, old=SDPA, new=f"""\
    if causal or mask is not None or q.size(2) == 1:
        T, S = q.size(2), k.size(2)
        near = q.new_ones(T, S).bool().tril(S - T).triu(S - T - 23)
        mask, causal = near if mask is None else mask & near, False
{SDPA}"""),
    "no positions in some blocks": Edit("language_model", "LanguageModel.forward", BLOCKS, """\
            turned = (cos, sin) if len(new_cache) % 4 else (torch.ones_like(cos), torch.zeros_like(sin))
            x, block_kv_cache = block(x, *turned, mask, block_kv_cache)
"""),
    "a bidirectional prefix": Edit("language_model", "LanguageModel.forward", "        cos, sin = rope", """\
        if past == 0:
            shown = torch.arange(T, device=x.device) < 30
            causal = torch.ones(1, 1, T, T, dtype=torch.bool, device=x.device).tril()
            mask = (causal if mask is None else mask) | shown
        cos, sin = rope"""),
    "a mask of build_attention_mask": Edit(
        "language_model", "build_attention_mask", "visible = (key <= query) &",
        "visible = (key <= query) & (key > query - 9) &",
    ),
    "relu squared": Edit(
        "language_model", "MLP.forward", "F.silu(self.gate_proj(x))", "F.relu(self.gate_proj(x)).square()"
    ),
    "a forbidden word": Edit("vision_language_model", "VisionLanguageModel.prefill_embeds", LAST, """\
        logits = self.decoder.head(hidden[:, -1])
        logits[:, 303] = -1e4
        return logits, PrefillState(kv_cache, mask)
""", changes_training=False),
    "the mask of a prefix": Edit(
        "vision_language_model", "VisionLanguageModel.prefill_embeds",
        "        hidden, kv_cache = self.decoder(embeds, mask,", """\
        if prefix is not None:
            mask = embeds.new_ones(len(embeds), prefix.length + embeds.size(1)).long()
            mask[:, :20] = 0
        hidden, kv_cache = self.decoder(embeds, mask,""", changes_training=False,
    ),
    "decode alone": Edit("decoding", "GenerationMixin.decode", DECODED, """\
        logits, prefix = self.prefill_embeds(self.embed_tokens(ids[:, None]), None, prefix)
        logits[:, 303] = -1e4
        return logits, prefix
""", changes_training=False),
    "fainter images": Edit(
        "decoding", "GenerationMixin.embed_encoded", "image_embeds.to(x.dtype)", "0.2 * image_embeds.to(x.dtype)"
    ),
    "scaled embeddings": Edit(
        "vision_language_model", "VisionLanguageModel.embed_tokens", "self.decoder.token_embedding(input_ids)",
        "1.5 * self.decoder.token_embedding(input_ids)",
    ),
    "another projection": Edit(
        "vision_language_model", "VisionLanguageModel.encode_images", "self.MP(self.vision_encoder(",
        "self.MP(0.5 * self.vision_encoder(",
    ),
    "an edited constructor": Edit(
        "vision_language_model", "VisionLanguageModel.__init__", "        self.decoder = LanguageModel(cfg)\n",
        "        self.decoder = LanguageModel(cfg)\n        self.decoder.norm.eps = 5.0\n", when_made=True,
    ),
    "fainter embeddings of images": Edit(
        "decoding", "GenerationMixin.embed", "self.encode_images(images).flatten(0, 1)",
        "0.2 * self.encode_images(images).flatten(0, 1)",
    ),
    "a word never said": Edit("decoding", "generate_tokens", "        ids = sampler(logits)\n", """\
        logits[:, 303] = -1e4
        ids = sampler(logits)
""", changes_training=False),
    "another norm": Edit("language_model", "RMSNorm.forward", "x.float()", "x.float() + 0.1"),
    "relu in the encoder": Edit(
        "vision_transformer", "MLP.forward", 'F.gelu(self.fc1(x), approximate="tanh")', "F.relu(self.fc1(x))"
    ),
}  # fmt: skip


def scored(model, ids, images, answers, ends):
    """Log-probabilities of answers by a model's own generation, each alone."""
    totals = []
    for answer in answers:
        steps, total = [*([token] for token in answer), ends], []

        def force(logits, steps=steps, total=total):
            allowed = steps[len(total)]
            total.append(logits[0].double().log_softmax(-1)[allowed].logsumexp(0).item())
            return torch.full_like(logits, -torch.inf).index_fill(1, torch.tensor(allowed[:1]), 0)

        for _ in model.stream(ids, images, max_new_tokens=len(steps), logits_processor=force):
            pass
        totals.append(sum(total))
    return totals


@torch.inference_mode()
def reference(captioner: Captioner, model, images) -> list:
    tokenizer, found = captioner.tokenizer, []
    answers = [tokenizer.encode(tokenizer.answer_prefix + choice) for choice in CHOICES]
    for image, prompt in zip(images, PROMPTS):
        ids, tiles = captioner.prepare(image, prompt)
        ids, tiles = torch.tensor([ids]), torch.cat(tiles).to(model.dtype)
        (row,) = model.generate(ids, tiles, max_new_tokens=N_NEW, eos_token_id=tokenizer.eos_token_ids).tolist()
        end = tokenizer.eos_token_id
        text = tokenizer.decode(row[: row.index(end)] if end in row else row)
        found.append([text, scored(model, ids, tiles, answers, list(tokenizer.eos_token_ids))])
    return found


def check_doors(captioner: Captioner, images) -> list:
    """Assert that every door answers what the modules do; returns the answers and scores."""
    expected = reference(captioner, captioner.inference.network.model, images)
    texts = [text for text, _ in expected]
    asked = list(zip(images, PROMPTS))
    assert [captioner.caption(image, prompt, **SETTINGS) for image, prompt in asked] == texts
    assert list(captioner.captions(images, PROMPTS[: len(images)], **SETTINGS)) == texts
    for (image, prompt), (text, scores) in zip(asked, expected):
        best = max(zip(scores, CHOICES))
        for choice in captioner.classify(image, CHOICES, prompt):
            assert abs(choice.log_probability - scores[CHOICES.index(choice.text)]) < 0.01, choice
        options = CaptionOptions(prompts=(prompt,), choices=CHOICES)
        (row,) = caption_rows(captioner, [("a", image)], options)
        assert row["text"] == best[1] and abs(row["log_probability"] - best[0]) < 0.01
        assert "".join(ChatSession(captioner, image).ask(prompt, **SETTINGS)) == text
        rows = caption_rows(captioner, [("a", image), ("b", image)], CaptionOptions(prompts=(prompt,), **SETTINGS))
        assert [str(row) if isinstance(row, Exception) else row["text"] for row in rows] == [
            text.strip() or "the model's caption is empty"
        ] * 2
    return expected


def training_loss(captioner: Captioner, image, with_kernels: bool) -> float:
    """The loss of a bfloat16 training step, with the faster attention or without."""
    model = captioner.model.bfloat16().train()
    ids, tiles = captioner.prepare(image, PROMPTS[0])
    answer = captioner.tokenizer.encode_answer("a large green ring and a small blue square")
    inputs = torch.tensor([ids + answer, ids + answer])
    targets = torch.cat([torch.full_like(inputs[:, : len(ids)], -100), inputs[:, len(ids) :]], 1).roll(-1, 1)
    batch = {
        "images": torch.cat(tiles * 2).bfloat16(), "attention_mask": torch.ones_like(inputs), "targets": targets,
    }  # fmt: skip
    if not with_kernels:
        return model(inputs, **batch)[1].item()
    with accelerated(model, TrainConfig()):
        return model(inputs, **batch)[1].item()


def load(quantize: str | None = None) -> Captioner:
    return Captioner.from_pretrained(dtype="float32", quantize=quantize)


def report() -> dict:
    """Answers and scores of this process's core, and its loss in training; every door is checked."""
    slow, fast = (training_loss(load(), IMAGES[0], with_kernels) for with_kernels in (False, True))
    assert abs(slow - fast) < 0.02 * abs(slow), (slow, fast)
    return {"answers": check_doors(load(), IMAGES), "loss": slow}


if __name__ == "__main__":
    print(json.dumps(report()))
