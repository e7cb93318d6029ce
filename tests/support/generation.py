"""Prompts of text and images for the tiny model."""

import torch

from models.inference import ContinuousBatch, InferenceModel
from models.inference.caches import TiledImage
from models.inference.continuous_batching import Request
from nanovlm.processing.conversation import dialogue, images_of

IMAGE, PER_IMAGE = 3, 4  # id of the image token, and number of image tokens per image
IDS = torch.tensor([[5, 3, 3, 3, 3, 7, 9]])  # a prompt with one image
IMAGES = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def prompt(*rows, seed=0):
    """Model inputs for rows like "itt", an image and two text tokens; padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    texts = [[] for _ in rows]
    for text, row in zip(texts, rows):
        for kind in row:
            text += [IMAGE] * PER_IMAGE if kind == "i" else torch.randint(4, 40, (1,), generator=generator).tolist()
    T = max(map(len, texts))
    return {
        "input_ids": torch.tensor([[0] * (T - len(text)) + text for text in texts]),
        "images": torch.rand(n, 3, 16, 16, generator=generator) if (n := "".join(rows).count("i")) else None,
        "attention_mask": torch.tensor([[0] * (T - len(text)) + [1] * len(text) for text in texts]),
    }


def only_row(inputs, row):
    """One row of such inputs by itself, without its padding."""
    n_images = (inputs["input_ids"] == IMAGE).sum(-1) // PER_IMAGE
    real = inputs["attention_mask"][row] == 1
    images = inputs["images"]
    return {
        "input_ids": inputs["input_ids"][row, real][None],
        "images": None if images is None else images.split(n_images.tolist())[row] if n_images[row] else None,
    }


class Forced:
    """A grammar that forces tokens, and keeps the logits that it is given."""

    def __init__(self, tokens):
        self.tokens, self.logits = tokens, []

    def __call__(self, output, logits):
        self.logits.append(logits)
        return torch.zeros_like(logits).index_fill(1, torch.tensor(self.tokens[len(output)]), 1)


def logits_of(model, n=6, ids=IDS, images=IMAGES):
    """Logits (n + 1, vocabulary) float32 of a prefill of ids (1, T) and n decode steps with fixed tokens."""
    tokens = [*range(8, 9 + n)]
    if isinstance(model, InferenceModel):
        shown = [] if images is None else [TiledImage(images.to(model.dtype))]
        request = Request(ids[0].tolist(), shown, max_new_tokens=n + 1, grammar=Forced(tokens))
        run(ContinuousBatch(model), request)
        if request.error is not None:
            raise request.error
        return torch.cat(request.grammar.logits).float()
    with torch.inference_mode():
        logits, prefix = model.prefill(ids, None if images is None else images.to(model.dtype))
        rows = [logits]
        for token in tokens[:-1]:
            logits, prefix = model.decode(torch.tensor([token]), prefix)
            rows.append(logits)
    return torch.cat(rows).float()


def run(batch, *requests):
    """Add requests, and step until none waits or runs: the ids of each of these."""
    for request in requests:
        batch.add(request)
    while batch.waiting or batch.running:
        batch.step()
    return [request.output for request in requests]


def prompt_of(processor, images, *texts):
    """Ids of a conversation about images, of texts by user and assistant in turn; and the tiles of each image."""
    chat = dialogue(texts, processor.prepare(images))
    return processor.encode(chat), [image.tiles for image in images_of(chat)]


def inputs_of(captioner, images, question):
    """Model inputs of one question about images: input_ids (1, T), and images (N, 3, S, S) or None."""
    ids, tiles = prompt_of(captioner.processor, images, question)
    return {"input_ids": torch.tensor([ids]), "images": torch.cat(tiles) if tiles else None}
