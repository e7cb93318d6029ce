"""Captions of many images: reading ahead, batching, output files and resuming."""
