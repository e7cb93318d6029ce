"""Training data: `open_source` opens what a path holds as a `Source` or a `Stream` of examples;
`split` holds examples out, `Mixture` orders the others, and `Batches` encodes them."""

from nanovlm.data.detect import open_source
from nanovlm.data.mixture import Batches, Mixture, Subset, split
from nanovlm.data.source import Source, Stream
from nanovlm.errors import DataError
from nanovlm.options import ReadOptions

__all__ = ["Batches", "DataError", "Mixture", "ReadOptions", "Source", "Stream", "Subset", "open_source", "split"]
