"""Converters between this project's checkpoints and foreign formats, one file each."""
