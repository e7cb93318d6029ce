"""Checkpoint formats: one file for each foreign layout of configuration and tensors."""
