"""A model class for lmms-eval: `python -m lmms_eval --model nanovlm_captioner --model_args pretrained=FOLDER`.

lmms-eval finds it through this package's entry point in the group lmms_eval.models. Its own model `nanovlm` is another
one, of lmms-engine. Prompts are those of nanoVLM's eval/lmms_eval_wrapper.py, which differ from lmms-eval's for some
tasks; `prompts=default` in --model_args keeps lmms-eval's.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanovlm.captioner import Captioner
from nanovlm.embedded import EMBEDDED
from nanovlm.errors import ImageError, InputError, MissingExtraError
from nanovlm.options import GenerationOptions
from nanovlm.processing.processor import EncodedPrompt

try:
    from lmms_eval.api.model import lmms
except ImportError:  # the class can then be imported, but not made
    lmms = object

MODEL_ID = "nanovlm_captioner"
MAX_NEW_TOKENS = 50  # nanoVLM's, of tasks that name no number

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskPrompt:
    """How nanoVLM changes lmms-eval's question of a task."""

    prefix: str = ""
    suffix: str = ""
    answer: str = ""  # the beginning of the answer, which the model continues
    replacements: tuple[tuple[str, str], ...] = ()  # in this order

    def __call__(self, question: str) -> str:
        question = self.prefix + question
        for old, new in self.replacements:
            question = question.replace(old, new)
        return question + self.suffix


PLAIN = TaskPrompt()
CHOICES = TaskPrompt(
    answer="Answer:",
    replacements=(
        ("\nOptions:", "\nChoices:"),
        ("\nA. ", "\nChoices:\nA. "),
        ("Please select the correct answer from the options above.", "Answer with the letter."),
        ("Answer with the option's letter from the given choices directly", "Answer with the letter directly"),
    ),
)
MMMU = TaskPrompt(
    answer="Answer:",
    replacements=(
        ("Question:", ""),
        ("Answer with the option's letter from the given choices directly.", "Answer with the letter directly."),
        ("\nA. ", "\nChoices:\nA. "),
    ),
)
DOCVQA = TaskPrompt(
    "Give a short and terse answer to the following question. Do not paraphrase or reformat the text you see in the "
    "image. Do not include any full stops. Just give the answer without additional explanation. Question: "
)
TEXTVQA = TaskPrompt(
    "Answer the following question about the image using as few words as possible. Follow these additional "
    "instructions:\n-Always answer a binary question with Yes or No.\n-When asked what time it is, reply with the time "
    "seen in the image.\n-Do not put any full stops at the end of the answer.\n-Do not put quotation marks around the "
    "answer.\n-An answer with one or two words is favorable.\n-Do not apply common sense knowledge. The answer can be "
    "found in the image.\nQuestion: "
)
BRIEF = TaskPrompt(suffix="\nGive a very brief answer.")
PROMPTS = {
    **dict.fromkeys(("ai2d", "mmstar", "scienceqa", "seedbench"), CHOICES),
    **dict.fromkeys(("mmmu_val", "mmmu_test"), MMMU),
    **dict.fromkeys(("docvqa_val", "docvqa_test"), DOCVQA),
    **dict.fromkeys(("textvqa_val", "textvqa_test"), TEXTVQA),
    **dict.fromkeys(("infovqa_val", "mme", "ocrbench"), BRIEF),
}  # chartqa is not among them: nanoVLM's own key for it, chartvqa, is no task of lmms-eval


class NanoVLM(lmms):
    """lmms-eval's interface over Captioner, for tasks whose output_type is generate_until.

    Arguments, by --model_args: pretrained is a folder or a Hub id; prompts is nanovlm, default (lmms-eval's) or auto:
    nanovlm for nanoVLM's formats; options are fields of `ModelOptions`, such as dtype, max_tiles and quantize.
    A request that cannot be answered, as its image cannot be read or its prompt is too long, is logged and answered "".
    """

    is_simple = True

    def __init__(
        self,
        pretrained: str = str(EMBEDDED),
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        prompts: str = "auto",
        **options: Any,
    ):
        if lmms is object:
            raise MissingExtraError("the model class needs lmms-eval: pip install 'nanovlm[lmms-eval]'")
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise InputError(f"batch_size={batch_size} is not supported; pass a number of 1 or more")
        if prompts not in ("auto", "nanovlm", "default"):
            raise InputError(f"prompts={prompts} is none of auto, nanovlm, default")
        self.captioner = Captioner.from_pretrained(pretrained, device or "auto", **options)
        cfg = self.captioner.processor.cfg
        self.prompts = PROMPTS if prompts == "nanovlm" or (prompts == "auto" and cfg.format.name != "smolvlm") else {}
        # Without a chat, every question ends with "Answer:".
        self.has_answer_prefix = self.captioner.processor.layout.has_chat
        self.batch_size = int(batch_size)
        self.device = self.captioner.inference.device
        self._rank, self._world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The answers to lmms-eval's requests, in batches of equal generation settings."""
        from lmms_eval.utils import Collator
        from tqdm import tqdm

        order = Collator([request.args for request in requests], _longest_first, grouping=True)
        answers: list[str] = []
        with tqdm(total=len(requests), desc="nanovlm", disable=self._rank != 0) as bar:
            for batch in order.get_batched(n=self.batch_size):
                texts = self._answer(batch)
                for (question, settings, *_), text in zip(batch, texts):
                    self.cache_hook.add_partial("generate_until", (question, settings), text)
                answers += texts
                bar.update(len(batch))
        return order.get_original(answers)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        raise NotImplementedError(
            f"{MODEL_ID} has no loglikelihood; choose tasks whose output_type is generate_until, as mmstar"
        )

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        raise NotImplementedError(f"{MODEL_ID} answers single questions; choose tasks of one round, as mmstar")

    def _answer(self, batch: Sequence[tuple]) -> list[str]:
        """The answers to one batch: tuples of question, settings, doc_to_visual, document id, task and split."""
        options = _options(batch[0][1])
        rows = [self._prepare(request, options.max_new_tokens) for request in batch]
        ready = [row for row in rows if row is not None]
        remaining = iter(self.captioner.generate(ready, options=options) if ready else ())
        return ["" if row is None else _cut(next(remaining), settings) for row, (_, settings, *_) in zip(rows, batch)]

    def _prepare(self, request: tuple, max_new_tokens: int) -> EncodedPrompt | None:
        """Ids and tiles of a request; None, and a warning, if it cannot be answered."""
        question, _, doc_to_visual, doc_id, task, split = request
        prompt = self.prompts.get(task, PLAIN)
        try:
            images = list(doc_to_visual(self.task_dict[task][split][doc_id]) or ())
            ids, tiles = self.captioner.prepare(images, prompt(question))
            if prompt.answer and self.has_answer_prefix:
                ids = ids + self.captioner.tokenizer.encode(prompt.answer)
            self.captioner.inference.validate_length(len(ids), max_new_tokens)
        except (ImageError, InputError) as error:
            logger.warning("%s, document %s, gets an empty answer: %s", task, doc_id, error)
            return None
        return ids, tiles


def _longest_first(arguments: tuple) -> tuple[int, str]:
    return -len(arguments[0]), arguments[0]


def _options(settings: dict[str, Any]) -> GenerationOptions:
    """Those of a task: greedy unless it sets do_sample and a temperature, as in nanoVLM."""
    temperature = float(settings.get("temperature") or 0) if settings.get("do_sample") else 0.0
    return GenerationOptions(
        max_new_tokens=int(settings.get("max_new_tokens") or MAX_NEW_TOKENS),
        temperature=temperature,
        top_p=float(settings.get("top_p") or 1.0) if temperature else 1.0,
    )


def _cut(text: str, settings: dict[str, Any]) -> str:
    """The text before the first of the task's stop strings."""
    until = settings.get("until") or ()
    for stop in [until] if isinstance(until, str) else until:
        text = text.split(stop)[0] if stop else text
    return text


def manifest() -> Any:
    """What lmms-eval's registry asks of the entry point."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(MODEL_ID, simple_class_path=f"{__name__}.{NanoVLM.__name__}")
