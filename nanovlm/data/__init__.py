"""Training data: `open_data` opens what paths hold and holds examples out, `Mixture` orders the others, and
`ExampleBatches` encodes them."""

from nanovlm.data.check import check_data
from nanovlm.data.examples import Example, ExampleError
from nanovlm.data.mixture import ExampleBatches, Mixture, open_data
from nanovlm.data.rows import open_source
from nanovlm.data.source import Source, StreamedSource
from nanovlm.errors import DataError
from nanovlm.options import ReadOptions, parse_data

__all__ = [
    "DataError", "Example", "ExampleBatches", "ExampleError", "Mixture", "ReadOptions", "Source", "StreamedSource",
    "check_data", "open_data", "open_source", "parse_data",
]  # fmt: skip
