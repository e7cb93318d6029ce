"""Somebody's own pictures and words, as they are: what kind of data lies at a path is found by looking.

`open_source` makes of a folder, a file or a Hub id a `Source`, whose examples are numbered and made one at a time, or a
`Stream`; `mixture` says which example stands at which place of a training, and which are held out.
"""

from nanovlm.data.detect import open_source
from nanovlm.data.mixture import Batches, Mixture, Subset, split
from nanovlm.data.source import DataError, ReadOptions, Source, Stream

__all__ = ["Batches", "DataError", "Mixture", "ReadOptions", "Source", "Stream", "Subset", "open_source", "split"]
