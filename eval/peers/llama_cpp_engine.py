"""A SmolVLM-layout model in llama.cpp: text model and multimodal library (mtmd), from the files of `nanovlm export`."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from PIL import Image
from torch import Tensor

from eval.peers import Engine, import_peer, with_head
from models.inference.kernels.load import cpu_info
from nanovlm import PROMPT
from nanovlm.captioner import Captioner
from nanovlm.processing.image_loading import load_image
from nanovlm.request_runner import ImageInput

BATCH_TOKENS = 512  # of one call of llama_decode
CONTEXT_TOKENS = 4096  # of one sequence
WEIGHT_BYTES = {  # of an entry of the layers, and of the head
    "f32": (4, 4), "f16": (2, 2), "bf16": (2, 2), "q8_0": (1.0625, 1.0625), "q4_0": (0.5625, 1.0625),
}  # fmt: skip
F32 = 0  # ggml's number of the type


class LlamaCppEngine(Engine):
    """The model of a captioner, exported as gguf_type to a folder and loaded by llama.cpp, on the CPU."""

    resizes_images = True

    def __init__(self, captioner: Captioner, gguf_type: str, folder: Path, batch_size: int = 1):
        self.lib, self.mtmd = (import_peer(name, "llama.cpp") for name in ("llama_cpp", "llama_cpp.mtmd_cpp"))
        from nanovlm.export.gguf import export_gguf  # here, as it needs the extra gguf

        self.name = f"llama.cpp {gguf_type}"
        self.cfg = captioner.model.cfg
        self.length = 0
        self.weight_bytes = with_head(*WEIGHT_BYTES[gguf_type], self.cfg)
        self.dtype = torch.float32 if gguf_type == "f32" else torch.bfloat16
        self.image = torch.empty(0)
        self.tile = None
        _mute()
        text, mmproj = export_gguf(captioner, folder, "model", gguf_type)
        threads = torch.get_num_threads()

        params = self.lib.llama_model_default_params()
        # llama.cpp's AMX kernels for q8_0 and q4_0, compiled by GCC, end the process (llama-cpp-python 0.3.36). The
        # switch turns off repacked weights, too, so it stays on where there is no AMX.
        params.use_extra_bufts = gguf_type not in ("q8_0", "q4_0") or "amx_int8" not in cpu_info("flags")
        self.model = _loaded(self.lib.llama_model_load_from_file(str(text).encode(), params), text)

        params = self.lib.llama_context_default_params()
        params.n_ctx = CONTEXT_TOKENS * batch_size
        params.n_batch = BATCH_TOKENS
        params.n_seq_max = batch_size
        params.n_threads = params.n_threads_batch = threads
        if gguf_type == "f32":
            params.type_k = params.type_v = F32  # the default cache is float16
        self.context = self.lib.llama_init_from_model(self.model, params)

        params = self.mtmd.mtmd_context_params_default()
        params.use_gpu = params.print_timings = params.warmup = False
        params.n_threads = threads
        self.vision = _loaded(self.mtmd.mtmd_init_from_file(str(mmproj).encode(), self.model, params), mmproj)
        self.batch = self.lib.llama_batch_init(BATCH_TOKENS, 0, 1)

    def encode_image(self, image: Tensor) -> Tensor:
        """Embeddings (1, T, C) of one image (1, 3, S, S), which is read as 8-bit pixels; preprocessed once."""
        if image is not self.image:
            self.image, self.tile = image, self._tile(image)
        _check("mtmd_encode_chunk", self.mtmd.mtmd_encode_chunk(self.vision, self.tile))
        shape = (1, self.mtmd.mtmd_input_chunk_get_n_tokens(self.tile), self.cfg.lm_hidden_dim)
        return _tensor(self.mtmd.mtmd_get_output_embd(self.vision), shape).clone()

    def _tile(self, image: Tensor) -> Any:
        """The last of mtmd's tiles of an image in SmolVLM's scale: the whole image."""
        pixels = ((image[0] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
        with self.tokenized([Image.fromarray(pixels)], PROMPT) as chunks:
            count = self.mtmd.mtmd_input_chunks_size(chunks)
            get = self.mtmd.mtmd_input_chunks_get
            kind = self.mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE
            every = [get(chunks, i) for i in range(count)]
            tiles = [chunk for chunk in every if self.mtmd.mtmd_input_chunk_get_type(chunk) == kind]
            return self.mtmd.mtmd_input_chunk_copy(tiles[-1])

    def first_token(self, image: ImageInput) -> int:
        """Preprocess an image, encode it and prefill the default prompt, all in llama.cpp."""
        self.clear()
        end = self.lib.llama_pos(0)
        with self.tokenized([image], PROMPT) as chunks:
            code = self.mtmd.mtmd_helper_eval_chunks(
                self.vision, self.context, chunks, 0, 0, BATCH_TOKENS, True, ctypes.byref(end)
            )
            _check("mtmd_helper_eval_chunks", code)
        self.length = end.value
        return int(self._logits(-1).argmax())

    @contextmanager
    def tokenized(self, images: Sequence[ImageInput], prompt: str) -> Iterator[Any]:
        """mtmd's chunks of text tokens and preprocessed tiles of a chat of one turn."""
        bitmaps = (self.mtmd.mtmd_bitmap_p_ctypes * len(images))(*map(self._bitmap, images))
        chunks = self.mtmd.mtmd_input_chunks_init()
        text = self.chat_text(prompt, len(images)).encode()
        source = self.mtmd.mtmd_input_text(text=text, text_len=len(text), add_special=True, parse_special=True)
        try:
            code = self.mtmd.mtmd_tokenize(self.vision, chunks, ctypes.byref(source), bitmaps, len(images))
            _check("mtmd_tokenize", code)
            yield chunks
        finally:
            self.mtmd.mtmd_input_chunks_free(chunks)
            for bitmap in bitmaps:
                self.mtmd.mtmd_bitmap_free(bitmap)

    def _bitmap(self, image: ImageInput) -> Any:
        image = load_image(image)
        pixels = (ctypes.c_uint8 * (3 * image.width * image.height)).from_buffer_copy(image.tobytes())
        return self.mtmd.mtmd_bitmap_init(image.width, image.height, pixels)

    def chat_text(self, prompt: str, n_images: int) -> str:
        """The prompt by the file's own chat template, with a marker for each image, as llama.cpp renders it."""
        template = self.lib.llama_model_chat_template(self.model, None).decode()
        text = {"type": "text", "text": n_images * self.mtmd.mtmd_default_marker().decode() + prompt}
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        messages = [{"role": "user", "content": [text]}]
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True)

    def clear(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        self.length = 0

    def append(self, ids: list[list[int]]) -> Tensor:
        tokens = [(row, i, token) for row, new in enumerate(ids) for i, token in enumerate(new)]
        logits: list[Tensor] = []
        for start in range(0, len(tokens), BATCH_TOKENS):
            chunk = tokens[start : start + BATCH_TOKENS]
            batch = self.batch
            batch.n_tokens = len(chunk)
            for i, (row, offset, token) in enumerate(chunk):
                batch.token[i] = token
                batch.pos[i] = self.length + offset
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = row
                batch.logits[i] = offset == len(ids[row]) - 1
            _check("llama_decode", self.lib.llama_decode(self.context, batch))
            rows = [self._logits(i) for i in range(len(chunk)) if batch.logits[i]]
            logits += rows if len(tokens) <= BATCH_TOKENS else [row.clone() for row in rows]  # the next call overwrites
        self.length += len(ids[0])
        return torch.stack(logits) if len(ids) > 1 else logits[0][None]

    def _logits(self, i: int) -> Tensor:
        return _tensor(self.lib.llama_get_logits_ith(self.context, i), (self.cfg.lm_vocab_size,))


def _tensor(pointer: Any, shape: tuple[int, ...]) -> Tensor:
    """llama.cpp's floats as a tensor that shares their memory."""
    return torch.from_numpy(np.ctypeslib.as_array(pointer, shape))


@cache
def _mute() -> Any:
    """Turn llama.cpp's log off. The cache keeps the callback alive, which the library goes on calling."""
    import llama_cpp
    from llama_cpp import mtmd_cpp

    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    for set_log in (llama_cpp.llama_log_set, mtmd_cpp.mtmd_log_set, mtmd_cpp.mtmd_helper_log_set):
        set_log(quiet, None)
    return quiet


def _loaded(handle: Any, path: Path) -> Any:
    if not handle:
        raise RuntimeError(f"llama.cpp cannot read {path}")
    return handle


def _check(function: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{function} returned {code}")
