"""Captions of many images: finding them, batching, output files and resuming.

>>> from nanovlm import Captioner
>>> from nanovlm.bulk import OutputOptions, caption_images
>>> caption_images(Captioner.from_pretrained(), ["photos"], output=OutputOptions(out="photos/metadata.jsonl"))
"""

from nanovlm.bulk.options import BulkOptions, BulkReport, OutputOptions
from nanovlm.bulk.run import caption_images

__all__ = ["BulkOptions", "BulkReport", "OutputOptions", "caption_images"]
