"""The fast inference path: CPU kernels, quantization, the decode step and continuous batching."""
