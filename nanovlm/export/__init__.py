"""Models for other programs: transformers, llama.cpp (GGUF), ONNX runtimes, PEFT adapters."""
