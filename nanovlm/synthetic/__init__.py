"""Drawn scenes: a few coloured shapes on a background, with a picture, a caption and questions for each.

`random_scene` says what is where, `draw` makes the picture, `caption` and `questions` the words. Everything is a
pure function of its seed, so a data set is a range of integers and costs no disk.
"""

from nanovlm.synthetic.captions import caption, questions
from nanovlm.synthetic.drawing import draw
from nanovlm.synthetic.scene import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    SIZES,
    WITHHELD,
    Scene,
    Shape,
    names_withheld,
    random_scene,
)

__all__ = [
    "BACKGROUNDS",
    "COLOURS",
    "SHAPES",
    "SIZES",
    "WITHHELD",
    "Scene",
    "Shape",
    "caption",
    "draw",
    "names_withheld",
    "questions",
    "random_scene",
]
