"""Training: configuration, the loop, checkpoints, metrics and distribution."""
