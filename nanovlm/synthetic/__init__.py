"""Synthetic scenes: a few colored shapes on a background, with an image, a caption and questions for each.

`random_scene` decides what is where, `draw` makes the image, `caption` and `questions` the text. Everything is a pure
function of a seed, so a dataset is a range of integers and needs no disk.
"""

# ruff: noqa: F401 - the names that other packages use
from nanovlm.synthetic.captions import caption, questions
from nanovlm.synthetic.drawing import draw
from nanovlm.synthetic.scene import BACKGROUNDS, COLORS, WITHHELD, Scene, random_scene
