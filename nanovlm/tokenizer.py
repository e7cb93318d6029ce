"""Text to ids and back: a tokenizer.json, a chat template, and a rule: what a user writes is text."""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import tokenizers
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.checkpoint import TOKENIZER, snapshot_path
from models.config import VLMConfig
from nanovlm.errors import CheckpointError

NO_TOKEN = -1  # the places of images in the first era, whose vocabulary has no token for them


class Tokenizer:
    """The `tokenizers` library's tokenizer with this project's rules about special tokens and chats."""

    def __init__(self, backend: tokenizers.Tokenizer, cfg: VLMConfig):
        self.backend, self.cfg = backend, cfg
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # plain text by default; `encode` finds the template's own by itself
        highest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if highest >= cfg.lm_vocab_size:
            raise CheckpointError(f"the tokenizer has an id {highest}, but lm_vocab_size={cfg.lm_vocab_size}")
        extra = cfg.vlm_extra_tokens or {}
        for name, token in extra.items():
            if backend.token_to_id(token) is None:
                raise CheckpointError(f"vlm_extra_tokens names {name}={token!r}, but the tokenizer has no such token")
        self.image_token_id = backend.token_to_id(extra["image_token"]) if extra else NO_TOKEN
        self.eos_token_id = self.special_id(cfg.end_token)
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        # A file may hold them as ordinary tokens, but then a user who writes one would say it.
        backend.add_special_tokens([token for token in (*extra.values(), cfg.end_token) if token not in special])

    @classmethod
    def from_pretrained(cls, folder: str | Path, cfg: VLMConfig) -> "Tokenizer":
        """The tokenizer.json in a model's folder or, without one, `from_backbone` of cfg.lm_tokenizer."""
        path = Path(folder) / TOKENIZER
        if path.exists():
            return cls._read(path, cfg)
        try:
            return cls.from_backbone(cfg.lm_tokenizer, cfg)
        except CheckpointError as error:
            raise CheckpointError(f"{folder} has no {TOKENIZER}, and its lm_tokenizer is no help: {error}") from None

    @classmethod
    def from_backbone(cls, name_or_folder: str | Path, cfg: VLMConfig, revision: str | None = None) -> "Tokenizer":
        """The tokenizer.json of a language model, a Hub id or a folder, with the extra tokens.

        Those that it does not know get the ids after its last, in the config's order.
        """
        folder = snapshot_path(name_or_folder, revision, [TOKENIZER])
        return cls._read(folder / TOKENIZER, cfg, (cfg.vlm_extra_tokens or {}).values())

    @classmethod
    def _read(cls, path: Path, cfg: VLMConfig, extra: Iterable[str] = ()) -> "Tokenizer":
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; a model's folder needs its {TOKENIZER}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} is no {TOKENIZER}: {error}") from None
        backend.add_special_tokens(list(extra))
        try:
            return cls(backend, cfg)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def __reduce__(self):  # how a process that prepares batches gets its own
        return Tokenizer, (self.backend, self.cfg)

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """The text of tokenizer.json."""
        return self.backend.to_str(pretty=False)

    def special_id(self, token: str) -> int:
        id = self.backend.token_to_id(token)
        if id is None:
            raise CheckpointError(f"the tokenizer has no token {token!r}, which the model needs")
        return id

    @cached_property
    def _special(self) -> re.Pattern:
        tokens = {token.content for token in self.backend.get_added_tokens_decoder().values() if token.special}
        return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)")

    @cached_property
    def _template(self):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        try:
            return environment.from_string(self.cfg.lm_chat_template)
        except TemplateError as error:
            raise CheckpointError(f"lm_chat_template is no jinja2 template: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: '<|im_end|>' in it is ten characters that a user wrote, not the end of a turn."""
        try:
            return self.backend.encode(text, add_special_tokens=False).ids if text else []
        except TypeError:  # a lone surrogate, as which Python reads bytes that are no UTF-8
            raise ValueError(f"{text!r} is no Unicode text") from None

    def encode_chat(self, messages: Iterable[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a rendered chat, messages {'role', 'content'} and maybe 'images', markup to put before the content.

        Special tokens count as such in the template and in 'images'; in the content they are plain text. A model
        without a template, as those before June 2025, was trained on single questions: a chat is a ValueError.
        """
        # What the user wrote is rendered with its look-alikes replaced by characters that stand nowhere else; then
        # the text is cut at the special tokens left, which are the template's, and the look-alikes return.
        messages = list(messages)
        if self.cfg.lm_chat_template is None:
            raise ValueError(
                f"a chat of {len(messages)} messages, but config.json has no lm_chat_template: this model was trained "
                "on single questions; ask it one at a time"
            )
        written = "".join(message["content"] for message in messages)
        looks = sorted(set(self._special.findall(written)))
        spare = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in written)
        hidden = dict(zip(looks, spare))

        def hide(text: str) -> str:
            return self._special.sub(lambda match: hidden[match[0]], text)

        def show(text: str) -> str:
            for look, character in hidden.items():
                text = text.replace(character, look)
            return text

        safe = [{"role": m["role"], "content": m.get("images", "") + hide(m["content"])} for m in messages]
        template = self._template
        try:
            rendered = template.render(messages=safe, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is a program: it may divide by zero, recurse ...
            reason = " ".join(str(error).split())
            raise CheckpointError(f"lm_chat_template cannot render this chat: {reason}") from None
        if not rendered:
            raise CheckpointError("lm_chat_template renders this chat as no text at all")
        ids, start = [], 0
        for match in self._special.finditer(rendered):
            ids += self.encode(show(rendered[start : match.start()])) + [self.special_id(match[0])]
            start = match.end()
        return ids + self.encode(show(rendered[start:]))

    def decode(self, ids: Iterable[int]) -> str:
        """Text without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Text as its ids arrive, whole characters only; the pieces join to `decode` of all ids."""
        spelling = StreamingDecoder(self)
        for id in ids:
            if text := spelling.add(id):
                yield text
        if text := spelling.rest():
            yield text


class StreamingDecoder:
    """A text whose ids arrive one by one; each is decoded behind those of the last piece, never behind all.

    So a decoder that looks at what stands before a token (Llama's drops the space before a text's first word) does, and
    one that joins bytes to characters begins with a whole one.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.ids = tokenizer, []
        self.told, self.n_told = 0, 0  # of these ids, and characters of their text

    def add(self, id: int) -> str:
        """The characters that are whole now, and were not before."""
        self.ids.append(id)
        text = self.tokenizer.decode(self.ids)
        if len(text) <= self.n_told or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new, self.ids = text[self.n_told :], self.ids[self.told :]
        self.told, self.n_told = len(self.ids), len(self.tokenizer.decode(self.ids))
        return new

    def rest(self) -> str:
        """What is left when no more ids come."""
        return self.tokenizer.decode(self.ids)[self.n_told :]


def _raise_exception(message: str):
    raise TemplateError(message)
