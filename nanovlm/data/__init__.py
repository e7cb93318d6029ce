"""Training data: `open_data` opens what paths hold and holds examples out, `Mixture` orders the others, and `Batches`
encodes them."""

from nanovlm.data.check import check_data
from nanovlm.data.examples import Example, ExampleError
from nanovlm.data.mixture import Batches, Mixture, Subset, open_data, parse_data
from nanovlm.data.rows import open_source
from nanovlm.data.source import Source, Stream
from nanovlm.errors import DataError
from nanovlm.options import ReadOptions

__all__ = [
    "Batches", "DataError", "Example", "ExampleError", "Mixture", "ReadOptions", "Source", "Stream", "Subset",
    "check_data", "open_data", "open_source", "parse_data",
]  # fmt: skip
