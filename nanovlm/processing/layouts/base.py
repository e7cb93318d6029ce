"""Layout: how a format turns images into tiles, and lays out images and text in a prompt."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

from PIL import Image
from torch import Tensor

from models.config import VLMConfig
from nanovlm.errors import InputError
from nanovlm.processing.image_loading import MAX_PIXELS, as_tensor

Grid = tuple[int, int]  # rows and columns of an image's tiles


class _MessageText(TypedDict):
    role: str
    content: str


class Message(_MessageText, total=False):
    """A message of a chat; images holds, for each image before its text, the markup that stands for it.

    parts holds the text in pieces, with None where an image stands; without parts, images come first.
    """

    images: Sequence[str]
    parts: Sequence[str | None]


class Layout(ABC):
    """How a format turns images into tiles, and lays out images and text in a prompt."""

    has_chat = True  # without a chat template, a prompt is "Question: ... Answer:"
    has_processor = False  # transformers' SmolVLM processor can lay out the prompts
    adds_text_prefix = False  # prompts begin with the tokens that the tokenizer puts before a text
    images_in_turns = False  # images stand anywhere in the messages of any role; else all come before all text

    def __init__(self, cfg: VLMConfig):
        self.cfg = cfg

    @abstractmethod
    def max_tiles_per_image(self, max_tiles: int | None) -> int:
        """The largest number of tiles of one image, the view of the whole image included."""

    @abstractmethod
    def preprocess(self, image: Image.Image, max_tiles: int | None) -> tuple[Tensor, Grid]:
        """Tiles of an RGB image, (n, 3, S, S) float32, and their grid; see `Processor`."""

    @abstractmethod
    def image_markups(self, grids: Sequence[Grid]) -> list[str]:
        """The text that stands for each image in a chat: the names of its tiles, each followed by its image tokens."""

    @abstractmethod
    def special_tokens(self, added: Iterable[str]) -> list[str]:
        """Tokens that text must not produce, beside cfg.special_tokens; added are those of the tokenizer."""

    @abstractmethod
    def answer_bounds(self, tokenizer: Any) -> tuple[str, tuple[int, ...]]:
        """What the chat template writes before an answer, and the ids of which any ends it."""

    def message_content(self, message: Message) -> Any:
        """A message's content as the chat template takes it."""
        return "".join(message.get("images", ())) + message["content"]

    def insert_images(self, rendered: str, messages: Sequence[Message]) -> str:
        """A rendered chat in which each image is its markup."""
        return rendered


def check_size(image: Image.Image, width: int, height: int, setting: str) -> None:
    """InputError if an image would be resized beyond MAX_PIXELS, which `setting` of the checkpoint decides."""
    if width * height > MAX_PIXELS:
        raise InputError(
            f"an image of {image.width} x {image.height} would be resized to {width} x {height}, more than "
            f"{MAX_PIXELS:,} pixels; lower {setting}"
        )


def split(image: Image.Image, tile: int) -> Tensor:
    """The tiles of an RGB image, row by row: (n, 3, tile, tile), uint8."""
    rows, columns = image.height // tile, image.width // tile
    parts = as_tensor(image).view(3, rows, tile, columns, tile)
    return parts.permute(1, 3, 0, 2, 4).reshape(-1, 3, tile, tile).contiguous()
