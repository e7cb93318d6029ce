"""RequestRunner: from images and a prompt or a conversation to requests, through the engine, to their answers."""

import os
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from PIL import Image
from torch import Tensor

from models.decoding import trim_repetition
from models.inference.continuous_batching import ContinuousBatch, Request, TokenOutput
from models.inference.inference_model import InferenceModel
from models.vision_language_model import VisionLanguageModel
from nanovlm.embedded import PROMPT
from nanovlm.options import GenerationOptions, generation_options
from nanovlm.processing.conversation import Chat, dialogue, images_of
from nanovlm.processing.image_loading import is_array, load_or_fetch
from nanovlm.processing.processor import Processor

if TYPE_CHECKING:
    from nanovlm.processing.structured_output import StructuredOutput

# A path, a file's bytes, a PIL image, a tensor (C, H, W), a numpy array (H, W, C), a binary file or an http(s) URL
ImageInput = str | os.PathLike[str] | bytes | Image.Image | Tensor | Any
ImageInputs = ImageInput | Sequence[ImageInput] | None
NO_IMAGE = "a question without an image: the model may describe one that it does not see"


@dataclass
class Stats:
    """Token counts of one call, and its times in seconds since this object was made."""

    prompt_tokens: int = 0  # that were computed, image tokens included: what several prompts share counts once
    new_tokens: int = 0  # of all answers, end tokens included
    first_token_s: float = 0.0
    total_s: float = 0.0
    finish_reasons: list[str] = field(default_factory=list)  # of each answer: stop, length or repetition
    started: float = field(default_factory=time.perf_counter)

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed after each answer's first token; 0 if there was only one token."""
        decode_s = self.total_s - self.first_token_s
        return (self.new_tokens - len(self.finish_reasons)) / decode_s if decode_s > 0 else 0.0


class RequestRunner:
    """A model and its processor: makes requests, runs them together, and reads their answers.

    `Captioner` adds loading, saving and answers by one call. `inference` generates.
    """

    def __init__(
        self,
        model: VisionLanguageModel | InferenceModel,
        processor: Processor,
        *,
        allow_urls: bool = False,  # http(s) URLs may name images, which are then fetched from public addresses
        prompt: str = PROMPT,
        defaults: Mapping[str, Any] | None = None,  # of GenerationOptions, as generation_config.json says
    ):
        self.inference = model if isinstance(model, InferenceModel) else InferenceModel(model)
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.allow_urls = allow_urls
        self.prompt = prompt
        self.defaults = defaults or {}

    @cached_property
    def structured_output(self) -> "StructuredOutput":
        """Grammars of JSON schemas for this model's vocabulary."""
        from nanovlm.processing.structured_output import StructuredOutput  # here, as few answers follow one

        return StructuredOutput(self.tokenizer)

    def request(
        self, image: ImageInputs, prompt: str | None = None, options: GenerationOptions | None = None, **changes: Any
    ) -> Request:
        """Preprocess images and tokenize a prompt. Threads may do so while others generate."""
        return self.requests(image, [prompt], options, **changes)[0]

    def requests(
        self,
        image: ImageInputs,
        prompts: Sequence[str | None],
        options: GenerationOptions | None = None,
        **changes: Any,
    ) -> list[Request]:
        """Make a request for each prompt about the same image. InputError for one too long."""
        options = generation_options(options, changes, self.defaults)
        shown = self.load_images(image)
        if not shown:
            warnings.warn(NO_IMAGE, stacklevel=2)
        parts = self.processor.prepare(shown)
        chats = [dialogue([self.prompt if prompt is None else prompt], parts) for prompt in prompts]
        return [self.chat_request(chat, options, must_fit=True) for chat in chats]

    def chat_request(
        self,
        chat: Chat,
        options: GenerationOptions,
        *,
        must_fit: bool = False,
        default: str | None = None,
        remedy: str = "shorten it",
    ) -> Request:
        """Make a request for the answer to a conversation about `TiledImage`s.

        The answer ends where the context does, or with must_fit the context must hold max_new_tokens. InputError for a
        conversation that is too long, names the remedy, or has no question, for which default stands where it shows
        images.
        """
        ids = self.processor.encode(chat, default) + self._start_ids(options)
        cfg = self.inference.cfg
        if must_fit:
            cfg.validate_length(len(ids), options.max_new_tokens)
        room = cfg.validate_length(len(ids), 1, f"prompt is too long: {len(ids)} tokens", remedy)
        request = Request(ids, images_of(chat), options, min(options.max_new_tokens, room))
        if options.schema is not None:
            request.grammar = self.structured_output.make_processor(options.schema)
        return request

    def choice_requests(self, image: ImageInputs, choices: Sequence[str], prompt: str | None = None) -> list[Request]:
        """Make a request for each choice as the answer to a prompt; see `ranked_choices`."""
        from nanovlm.choices import forced_answers, score_requests

        answers = forced_answers(choices, self.tokenizer)
        longest = max(len(answer.steps) for answer in answers)
        return score_requests(self.request(image, prompt, max_new_tokens=longest), answers)

    def batch(self, batch_size: int = 16, **caches: Any) -> ContinuousBatch:
        """An empty batch that runs batch_size requests at once; see `ContinuousBatch` for caches."""
        ends = self.tokenizer.eos_token_ids
        return ContinuousBatch(self.inference, max_num_seqs=batch_size, eos_token_id=ends, **caches)

    def run(self, requests: Iterable[Request], batch_size: int = 16, n_together: int = 1) -> Iterator[Request]:
        """Yield requests in order, each when it has ended, with its output or its error.

        Requests are taken when slots are free, so at most 2 * batch_size have been taken and not yielded. n_together in
        succession, of one image, are taken at once: the first then still runs when the others copy its beginning. One
        that has an error already is passed through.
        """
        batch = self.batch(batch_size)
        pending = deque[Request]()
        requests = iter(requests)
        while True:
            while pending and pending[0].finished:
                yield pending.popleft()
            free = min(batch_size - batch.running - batch.waiting, 2 * batch_size - len(pending))
            if free >= batch_size // 4:  # prefilled together, prompts are faster
                for request in islice(requests, free - free % n_together):
                    pending.append(request)
                    if not request.finished:
                        batch.add(request)
            if not pending:
                return
            batch.step()

    def run_groups(self, requests: Iterable[Request], n: int, n_images: int) -> Iterator[list[Request]]:
        """Yield the n requests of each image when they have ended.

        Those of the first image are run alone, so that they end soon, and then those of n_images at once.
        """
        requests = iter(requests)
        answered = chain(self.run(islice(requests, n), n), self.run(requests, n * n_images, n))
        while group := list(islice(answered, n)):
            yield group

    def generate(
        self, requests: Sequence[Request], stats: Stats | None = None, batch: ContinuousBatch | None = None
    ) -> Generator[TokenOutput]:
        """Yield the tokens of all requests and fill in stats. Raises the first error of a request."""
        stats = stats or Stats()
        batch = batch or self.batch(max(1, len(requests)))
        for request in requests:
            batch.add(request)
        try:
            while batch.running or batch.waiting:
                outputs = batch.step()
                stats.total_s = time.perf_counter() - stats.started
                stats.first_token_s = stats.first_token_s or stats.total_s
                for output in outputs:
                    if output.error is not None:
                        raise output.error
                    yield output
        finally:
            for request in requests:
                batch.cancel(request)
            stats.prompt_tokens = sum(len(request.ids) - request.n_cached for request in requests)
            stats.new_tokens = sum(len(request.output) for request in requests)
            stats.finish_reasons = [str(request.finished) for request in requests]

    def answer(self, request: Request, options: GenerationOptions | None = None) -> Any:
        """The text of a request that has ended, or the value that it is by a schema. Raises the request's error."""
        if request.error is not None:
            raise request.error
        text = self.text(request, options)
        return text if options is None or options.schema is None else self.structured_output.parse(text)

    def text(self, request: Request, options: GenerationOptions | None = None) -> str:
        """The text of a request's output: from start_with up to the end token or the first repetition."""
        eos = self.tokenizer.eos_token_id
        ids = request.output[: request.output.index(eos)] if eos in request.output else request.output
        trimmed = trim_repetition(ids, request.sampling.repetition_detection)
        return self.tokenizer.decode([*self._start_ids(options or GenerationOptions()), *trimmed])

    def _start_ids(self, options: GenerationOptions) -> list[int]:
        """Ids of the beginning of an answer; without the spaces at its end, which belong to the word that follows."""
        text = options.start_with.rstrip()
        return self.tokenizer.encode_answer(text)[:-1] if text else []

    def check_prompt(self, prompt: str, max_new_tokens: int) -> None:
        """Raise InputError if the prompt and max_new_tokens exceed the model's context even without an image."""
        self.inference.cfg.validate_length(len(self.processor.encode(dialogue([prompt]))), max_new_tokens)

    def prepare(self, image: ImageInputs, prompt: str | None = None) -> tuple[list[int], list[Tensor]]:
        """Token ids of one prompt, and the tiles (n, 3, S, S) of each image."""
        parts = self.processor.prepare(self.load_images(image))
        chat = dialogue([self.prompt if prompt is None else prompt], parts)
        return self.processor.encode(chat), [one.tiles for one in images_of(chat)]

    def load_images(self, images: Any) -> list[Any]:
        """Upright RGB images of one source or several, or the `Video`. Raises ImageError."""
        sources = [] if images is None else [images] if is_one_image(images) else list(images)
        return [one if hasattr(one, "frames") else load_or_fetch(one, self.allow_urls) for one in sources]


def is_one_image(images: Any) -> bool:
    """True of an image or a `Video`, not of several: an array of four dimensions, for example, is a batch."""
    if is_array(images):
        return len(images.shape) < 4
    is_file = hasattr(images, "read") or isinstance(images, (str, bytes, bytearray, memoryview, dict))
    return is_file or not isinstance(images, Iterable)
