"""Tensors: the vision-language model, its caches, its decoding loop and its checkpoints."""
