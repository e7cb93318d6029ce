"""Models for other programs: transformers, llama.cpp (GGUF), ONNX runtimes, PEFT adapters."""

GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
ONNX_TYPES = {"float32": "", "float16": "_fp16", "int8": "_quantized"}  # ends of files' names, as in transformers.js
