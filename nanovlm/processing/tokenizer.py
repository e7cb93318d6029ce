"""Tokenizer: text to ids and back, and chats by the checkpoint's template.

Text that a user writes never becomes special tokens, even if it spells one; document tags of Docling models do.
"""

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from models.checkpoint import TOKENIZER, read_model_text, snapshot_path
from models.checkpoint.folder import is_base_vocabulary, missing_token
from models.checkpoint.format import NO_IMAGE_TOKEN
from models.config import VLMConfig
from nanovlm.errors import CheckpointError, InputError, NanoVLMError
from nanovlm.processing.chat_template import ChatTemplate
from nanovlm.processing.conversation import Chat, Turn, dialogue
from nanovlm.processing.layouts import layout_of

DOCTAGS = "<doctag>"  # in the vocabularies of SmolDocling and granite-docling
DOCUMENT_TAG = re.compile(r"</?[a-z]\w*>")  # as <loc_155> and <chart>
MARK = "\ue000{}.{}\ue001"  # of private characters, and a number that nobody can guess
HIDDEN_END = "\ue002"
SURROGATES = re.compile(r"[^\s\ue000-\ue002]*[\ud800-\udfff][^\s\ue000-\ue002]*")  # a word with some
NO_ID = -1
MAX_GROWTH = 256  # times as long may a text become by the steps of a normalizer or a decoder; Llama's allow 2
ROUND_TRIP_TEXT = "Describe this picture: are there 2 or 3 red cars?"


class Tokenizer:
    """A tokenizer of the `tokenizers` library with nanoVLM's extra tokens and chat template."""

    def __init__(self, backend: tokenizers.Tokenizer, cfg: VLMConfig):
        self.backend = backend
        self.cfg = cfg
        self.layout = layout_of(cfg)
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # "<|im_end|>" as plain text; encode_chat adds the template's tokens
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if (highest := max(vocabulary.values(), default=-1)) >= cfg.lm_vocab_size:
            raise CheckpointError(f"the tokenizer has an id {highest}, but lm_vocab_size={cfg.lm_vocab_size}")
        extra = cfg.special_tokens
        for name, token in extra.items():
            if token not in vocabulary:
                raise CheckpointError(missing_token(cfg, name, len(vocabulary)))
        self.image_token_id = vocabulary[extra["image_token"]] if extra else NO_IMAGE_TOKEN
        # Some tokenizer.json files list them as ordinary tokens, which a user's text could then produce.
        added = list(backend.get_added_tokens_decoder().values())
        known = {*extra.values(), *self.layout.special_tokens(token.content for token in added)} & vocabulary.keys()
        backend.add_special_tokens(sorted(known - {token.content for token in added if token.special}))
        self.skip_special_tokens = DOCTAGS not in vocabulary  # in answers; Docling's mark up documents
        self._add_twins()
        self.answer_prefix, self.eos_token_ids = self._answer_bounds()

    @property
    def eos_token_id(self) -> int:
        """The token that ends an answer, in training and in generated ids."""
        return self.eos_token_ids[0]

    @classmethod
    def from_pretrained(cls, folder: str | Path, cfg: VLMConfig) -> "Tokenizer":
        """Load the tokenizer.json of a model folder or, without one, `from_backbone(cfg.lm_tokenizer)`.

        A language model's own tokenizer.json, of cfg.lm_base_vocab_size tokens, gets the extra tokens, as in nanoVLM.
        """
        path = Path(folder) / TOKENIZER
        if path.exists():
            return cls._read(path, cfg)
        if not cfg.lm_tokenizer:
            raise CheckpointError(f"{folder} has no {TOKENIZER}; download it, too")
        try:
            return cls.from_backbone(cfg.lm_tokenizer, cfg)
        except CheckpointError as error:
            raise CheckpointError(
                f"{folder} has no {TOKENIZER}, and lm_tokenizer cannot be loaded instead: {error}"
            ) from None

    @classmethod
    def from_backbone(cls, name_or_folder: str | Path, cfg: VLMConfig, revision: str | None = None) -> "Tokenizer":
        """Load a language model's tokenizer.json, from a Hub id or a folder, and add cfg.vlm_extra_tokens.

        Tokens it does not have yet get the ids after its last, in the config's order.
        """
        folder = snapshot_path(name_or_folder, revision, [TOKENIZER])
        return cls._read(folder / TOKENIZER, cfg, cfg.special_tokens.values())

    @classmethod
    def _read(cls, path: Path, cfg: VLMConfig, extra: Iterable[str] = ()) -> "Tokenizer":
        content = read_model_text(path)
        try:
            with library_errors(CheckpointError, f"it is not a valid {TOKENIZER}"):
                backend = tokenizers.Tokenizer.from_str(content)
                for part in (backend.normalizer, backend.decoder):
                    if part is not None and (times := growth(json.loads(part.__getstate__()))) > MAX_GROWTH:
                        kind = type(part).__module__.rpartition(".")[2].removesuffix("s")
                        longer = f"{times:.0f} times as long, more than {MAX_GROWTH}"
                        raise CheckpointError(f"its {kind} makes texts {longer}")
                if is_base_vocabulary(backend.get_vocab(with_added_tokens=True), cfg):
                    extra = cfg.special_tokens.values()
                new = [token for token in extra if backend.token_to_id(token) is None]  # the others would lose rstrip
                backend.add_special_tokens(new)
                tokenizer = cls(backend, cfg)
                text = tokenizer.decode(tokenizer.encode(ROUND_TRIP_TEXT))
        except (CheckpointError, InputError) as error:
            raise CheckpointError(f"{path}: {error}") from None
        if text.casefold().split() != ROUND_TRIP_TEXT.casefold().split():
            raise CheckpointError(
                f"{path}: {ROUND_TRIP_TEXT!r} is {text!r} after encoding and decoding: pre_tokenizer or decoder do not "
                "fit the vocabulary; copy the tokenizer.json that the model was trained with"
            )
        return tokenizer

    def __reduce__(self):  # pickled for data loading processes
        return Tokenizer, (self.backend, self.cfg)

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        return self.backend.to_str(pretty=False)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of UTF-8 that a token stands for at most."""
        return max(len(token.encode(errors="replace")) for token in self.backend.get_vocab(with_added_tokens=True))

    def special_id(self, token: str) -> int:
        """The id of a special token; CheckpointError if there is none."""
        id = self.backend.token_to_id(token)
        if id is None:
            raise CheckpointError(f"the tokenizer has no token {token!r}, which the model needs")
        return id

    def _answer_bounds(self) -> tuple[str, tuple[int, ...]]:
        """The text that the chat template writes before an answer, and the ids of which any ends it.

        nanoVLM's are fixed. Other formats' are found by rendering the template with and without an answer.
        """
        if self.layout.end_token_ids is None:
            return "", (self.special_id(self.cfg.end_token),)
        answer = "\N{REPLACEMENT CHARACTER}"  # in no template
        before = self.render(dialogue(["?"]), True)
        after = self.render(dialogue(["?", answer]), False)
        prefix = ""
        ends = list(self.layout.end_token_ids)
        if after.startswith(before) and answer in after:
            prefix, _, rest = after[len(before) :].partition(answer)
            if end := self.special.match(rest):
                ends = [self.special_id(end[0]), *ends]
        if not ends:
            raise CheckpointError("no end token: neither generation_config.json nor the chat template has one")
        return prefix, tuple(dict.fromkeys(ends))

    def _add_twins(self) -> None:
        """Make the encoder: a second backend in which each special token has a twin that no text can spell.

        There a special token is text, whoever wrote it, but its twin always counts, and takes the spaces around it as
        the token does (lstrip, rstrip). So a chat is encoded at once, as in transformers, whatever a user has typed.
        """
        added = self.backend.get_added_tokens_decoder()
        special = {id: token for id, token in added.items() if token.special}
        nonce = secrets.randbits(64)
        self.special = any_of(token.content for token in special.values())
        self._twins = {token.content: MARK.format(nonce, id) for id, token in special.items()}
        self._start_of_answer = MARK.format(nonce, "")
        twins = [tokenizers.AddedToken(self._start_of_answer, normalized=False)]
        for token in special.values():
            sides = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word")}
            twins.append(tokenizers.AddedToken(self._twins[token.content], normalized=False, **sides))
        self._encoder = tokenizers.Tokenizer(self.backend.model)  # shared: to parse 49,152 tokens takes 0.2 seconds
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            setattr(self._encoder, part, getattr(self.backend, part))
        self._encoder.add_tokens([added[id] for id in sorted(added)])
        if self._encoder.get_added_tokens_decoder() != added:  # an unusual file gives them other ids
            self._encoder = tokenizers.Tokenizer.from_str(self.backend.to_str())
        self._encoder.encode_special_tokens = True
        self._encoder.add_tokens(twins)
        self._ids = {self._encoder.token_to_id(self._twins[token.content]): id for id, token in special.items()}
        self._ids[self._encoder.token_to_id(self._start_of_answer)] = NO_ID

    @cached_property
    def typed(self) -> re.Pattern:
        """Matches special tokens that a text may hold: document tags of a Docling model, but no markup and no ends."""
        if self.skip_special_tokens:
            return any_of([])
        ends = [self.backend.id_to_token(id) for id in self.eos_token_ids]
        kept = {*ends, *self.cfg.special_tokens.values(), *self.layout.special_tokens(self._twins)}
        template = self.cfg.lm_chat_template or ""
        tags = filter(DOCUMENT_TAG.fullmatch, self._twins)
        return any_of(tag for tag in tags if tag not in kept and tag not in template)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.cfg.lm_chat_template or "")

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: '<|im_end|>' in it is ten characters, not the end of a turn."""
        return self._encode(self.typed.sub(self._twin, text))

    def _twin(self, match: re.Match) -> str:
        return self._twins[match[0]]

    def _encode(self, text: str) -> list[int]:
        """Ids of a text in which twins stand for special tokens."""
        with library_errors(InputError, f"the model's tokenizer fails at a text of {len(text):,} characters"):
            try:
                ids = self._encoder.encode(text, add_special_tokens=False).ids if text else []
            except TypeError:  # a lone surrogate, which Python decodes from bytes that are not UTF-8
                word = SURROGATES.search(text)  # not all of text, which may be a turn of a chat
                raise InputError(f"{word[0] if word else text!r} is not valid Unicode text") from None
        return [real for id in ids if (real := self._ids.get(id, id)) != NO_ID]

    @cached_property
    def text_prefix(self) -> list[int]:
        """Ids that tokenizer.json's post-processor puts before a text, as Llama 3's <|begin_of_text|>.

        CheckpointError if it puts some behind a text, too, where an answer could not follow.
        """
        plain = self.encode("a")
        ids = self.backend.encode("a", add_special_tokens=True).ids
        n = len(ids) - len(plain)
        if ids[n:] != plain:
            raise CheckpointError(
                "tokenizer.json's post-processor adds tokens behind a text, which no answer can follow"
            )
        return ids[:n]

    def begin(self, ids: list[int]) -> list[int]:
        """The ids of a prompt as transformers' processors begin it: with `text_prefix`, once."""
        prefix = self.text_prefix if self.layout.adds_text_prefix else []
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def encode_answer(self, text: str) -> list[int]:
        """Ids of an answer as the model is to generate it, end token included."""
        plain = self.typed.sub(self._twin, self.answer_prefix + text)
        return [*self._encode(self._start_of_answer + plain), self.eos_token_id]

    def encode_chat(self, chat: Chat, markups: Sequence[str] = ()) -> list[int]:
        """Ids of a rendered conversation up to where the answer begins, in which markups stand for the images.

        Special tokens count as such in the template and in markups; in texts they are plain text. A model without a
        template, as those before June 2025, was trained on single questions: a chat raises InputError.
        """
        if not self.layout.has_chat:
            raise InputError(
                f"a chat of {len(chat)} messages, but config.json has no lm_chat_template: this model was trained "
                "on single questions; ask it one at a time"
            )
        hidden: dict[str, str] = {}  # special tokens that a user spelled, by the mark that stands for each meanwhile

        def hide(match: re.Match) -> str:
            if self.typed.fullmatch(match[0]):
                return match[0]
            mark = self._twins[match[0]][:-1] + HIDDEN_END
            hidden[mark] = match[0]
            return mark

        escaped = []
        for turn in chat:
            parts = [self.special.sub(hide, part) if isinstance(part, str) else part for part in turn.parts]
            escaped.append(Turn(turn.role, parts))
        text = self.special.sub(self._twin, self.render(escaped, True, markups))
        for mark, token in hidden.items():
            text = text.replace(mark, token)
        return self.begin(self._encode(text))

    def render(self, chat: Chat, add_generation_prompt: bool, markups: Sequence[str] = ()) -> str:
        """The conversation as text, with markups in the places of the images."""
        messages = [{"role": turn.role, "content": self.layout.content(turn)} for turn in chat]
        pieces = self._template.render(messages, add_generation_prompt).split(self.cfg.special_tokens["image_token"])
        if len(pieces) != len(markups) + 1:
            raise CheckpointError(f"the chat template has places for {len(pieces) - 1} of {len(markups)} images")
        return pieces[0] + "".join(markup + piece for markup, piece in zip(markups, pieces[1:]))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of an answer, without special tokens but for those of a Docling model."""
        return self.decode_raw(ids).removeprefix(self.answer_prefix)

    def decode_raw(self, ids: Iterable[int]) -> str:
        """The text of ids with the space that some templates have before an answer."""
        with library_errors(CheckpointError, "the model's tokenizer cannot decode its own tokens"):
            return self.backend.decode(list(ids), skip_special_tokens=self.skip_special_tokens)

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Text as its ids arrive, whole characters only; the pieces join to `decode` of all ids."""
        decoder = StreamingDecoder(self)
        for id in ids:
            if text := decoder.add(id):
                yield text
        if text := decoder.rest():
            yield text


def growth(step: Any) -> float:
    """How many times as long the steps in a tokenizer.json's object can make a text, at most."""
    times = 1.0
    for value in step.values() if isinstance(step, dict) else step if isinstance(step, list) else ():
        times *= growth(value)
    if isinstance(step, dict) and step.get("type") in ("Replace", "Prepend"):
        added = step.get("content") or step.get("prepend") or ""
        pattern = (step.get("pattern") or {}).get("String")
        times *= max(1, len(added) / len(pattern) if pattern else len(added) + 1)  # a Regex may match nothing
    return times


@contextmanager
def library_errors(kind: type[NanoVLMError], problem: str) -> Iterator[None]:
    """Turn an error of the tokenizers library, whose panics are no Exceptions, into one of ours."""
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise kind(f"{problem}: {error}") from None
        raise


def any_of(tokens: Iterable[str]) -> re.Pattern:
    """Matches any of the tokens, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


class StreamingDecoder:
    """Incremental detokenizer: ids in one by one, whole characters out, in time linear in the text's length.

    New ids are decoded together with those of the last piece: some decoders look at the token before (Llama's drops the
    space before a text's first word), and byte-level ones need a character's first bytes.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.ids: list[int] = []  # of the last piece, then the pending ones
        self.n_emitted_ids = 0  # of self.ids, and of their text
        self.n_emitted_chars = 0
        self._prefix = tokenizer.answer_prefix  # which the first piece may begin with

    def add(self, id: int) -> str:
        """Append an id; returns the characters that are complete now, and were not before."""
        self.ids.append(id)
        text = self.tokenizer.decode_raw(self.ids)
        if len(text) <= self.n_emitted_chars or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new = self._piece(text)
        self.ids = self.ids[self.n_emitted_ids :]
        self.n_emitted_ids, self.n_emitted_chars = len(self.ids), len(self.tokenizer.decode_raw(self.ids))
        return new

    def rest(self) -> str:
        """The remaining text after the last id."""
        return self._piece(self.tokenizer.decode_raw(self.ids))

    def _piece(self, text: str) -> str:
        new = text[self.n_emitted_chars :].removeprefix(self._prefix)
        self._prefix = ""
        return new
