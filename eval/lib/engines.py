"""Engines that run the same language model on the CPU: this project, transformers and llama.cpp."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from eval.lib.gguf_writer import write_gguf
from models.decoding import GREEDY
from models.language_model import LanguageModel
from models.vision_language_model import PrefillState
from nanovlm import PROMPT
from nanovlm.captioner import Captioner, ImageInput
from nanovlm.device import choose_dtype
from nanovlm.errors import MissingExtraError

BASELINES = ("plain", "transformers", "llama.cpp")
LLAMA_CPP_MAX_TOKENS = 512  # of one sequence, and of one batch


@dataclass(frozen=True)
class EngineOptions:
    """Which engines to compare: this project in every configuration asked for, and baselines."""

    dtypes: Sequence[str] = ("auto",)
    quantize: str | None = None  # quantized weights beside unquantized ones
    compile: bool = False  # the compiled decode step beside the eager one
    against: Sequence[str] = ("plain",)
    batch_size: int = 1


class Engine(Protocol):
    """Greedy decoding of a batch of sequences of equal length; the engine keeps their cache."""

    name: str
    dtype: torch.dtype  # of activations
    weight_bytes: int  # of one entry of a weight matrix

    def prefill(self, ids: list[list[int]]) -> list[int]:
        """Start new sequences with these prompts; returns the next token of each."""

    def decode(self, ids: list[int]) -> list[int]:
        """Append one token to each sequence; returns the next token of each."""


class NanoVLMEngine:
    """This project: the plain model, layer by layer as nanoVLM computes it, or its InferenceModel."""

    def __init__(self, name: str, captioner: Captioner, weight_bytes: int = 4, plain: bool = False):
        self.name, self.captioner, self.weight_bytes, self.plain = name, captioner, weight_bytes, plain
        self.model: Any = captioner.model if plain else captioner.inference
        self.dtype = self.model.dtype
        self.state: PrefillState | None = None

    @torch.inference_mode()
    def prefill(self, ids: list[list[int]]) -> list[int]:
        logits, self.state = self.model.prefill(torch.tensor(ids))
        return GREEDY(logits).tolist()

    @torch.inference_mode()
    def decode(self, ids: list[int]) -> list[int]:
        logits, self.state = self.model.decode(torch.tensor(ids), self.state)
        return GREEDY(logits).tolist()

    @torch.inference_mode()
    def encode_image(self, image: Tensor) -> Tensor:
        """Embeddings (1, T, C) of one preprocessed image (1, 3, S, S)."""
        cfg = self.model.cfg
        return self.model.embed(torch.full((1, cfg.mp_image_token_length), self.model.image_token_id), image)

    @torch.inference_mode()
    def first_token(self, picture: ImageInput) -> int:
        """Preprocess a picture, encode it and prefill the default prompt."""
        inputs = self.captioner.processor.collate([self.captioner.prepare(picture, PROMPT)])
        return int(GREEDY(self.model.prefill(**inputs)[0]))


class TransformersEngine:
    """The same decoder as transformers' LlamaForCausalLM."""

    def __init__(self, decoder: LanguageModel, dtype: torch.dtype):
        try:
            from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
        except ImportError:
            raise MissingExtraError('transformers needs the extra peers: pip install "nanovlm[peers]"') from None
        self.name = f"transformers {str(dtype).removeprefix('torch.')}"
        self.dtype, self.weight_bytes, self.new_cache = dtype, dtype.itemsize, DynamicCache
        cfg = decoder.cfg
        config = LlamaConfig(
            vocab_size=cfg.lm_vocab_size,
            hidden_size=cfg.lm_hidden_dim,
            intermediate_size=cfg.lm_inter_dim,
            num_hidden_layers=cfg.lm_n_blocks,
            num_attention_heads=cfg.lm_n_heads,
            num_key_value_heads=cfg.lm_n_kv_heads,
            max_position_embeddings=cfg.lm_max_position_embeddings,
            rms_norm_eps=cfg.lm_rms_eps,
            rope_theta=cfg.lm_re_base,  # type: ignore[call-arg]  # transformers 5 takes it as transformers 4 did
            tie_word_embeddings=cfg.lm_tie_weights,
        )
        self.model = LlamaForCausalLM(config).eval()
        self.model.load_state_dict({_transformers_name(name): w for name, w in decoder.state_dict().items()})
        self.model.to(dtype)

    def prefill(self, ids: list[list[int]]) -> list[int]:
        self.cache = self.new_cache(config=self.model.config)
        return self._next(ids)

    def decode(self, ids: list[int]) -> list[int]:
        return self._next([[token] for token in ids])

    @torch.inference_mode()
    def _next(self, ids: list[list[int]]) -> list[int]:
        output = self.model(torch.tensor(ids), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].argmax(-1).tolist()


def _transformers_name(name: str) -> str:
    """The name in transformers' Llama of a weight of `models.language_model`."""
    parts = {
        "blocks": "layers",
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attn": "self_attn",
        "out_proj": "o_proj",
        "token_embedding": "embed_tokens",
    }
    renamed = ".".join(parts.get(part, part) for part in name.split("."))
    return "lm_head.weight" if name == "head.weight" else f"model.{renamed}"


class LlamaCppEngine:
    """The same decoder in llama.cpp, from a GGUF file."""

    gguf_types: ClassVar = {torch.float32: "F32", torch.bfloat16: "BF16"}

    def __init__(self, decoder: LanguageModel, gguf_type: str, folder: Path, batch_size: int):
        try:
            import llama_cpp
        except ImportError:
            raise MissingExtraError('llama.cpp needs the extra peers: pip install "nanovlm[peers]"') from None
        self.lib, self.name = llama_cpp, f"llama.cpp {gguf_type}"
        self.weight_bytes = {"F32": 4, "BF16": 2, "Q8_0": 1}[gguf_type]  # scales left out
        self.dtype = torch.float32 if gguf_type == "F32" else torch.bfloat16
        path = folder / f"{gguf_type}.gguf"
        write_gguf(decoder, path, gguf_type)
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept alive for the library
        llama_cpp.llama_log_set(self.quiet, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot read {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch = LLAMA_CPP_MAX_TOKENS * batch_size, LLAMA_CPP_MAX_TOKENS
        params.n_seq_max = batch_size
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.batch = llama_cpp.llama_batch_init(LLAMA_CPP_MAX_TOKENS, 0, 1)
        self.vocab_size, self.length = decoder.cfg.lm_vocab_size, 0

    def prefill(self, ids: list[list[int]]) -> list[int]:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        self.length = 0
        return self._next(ids)

    def decode(self, ids: list[int]) -> list[int]:
        return self._next([[token] for token in ids])

    def _next(self, ids: list[list[int]]) -> list[int]:
        """Append equally many tokens to each sequence, in batches; returns the next token of each."""
        tokens = [(row, i, token) for row, new in enumerate(ids) for i, token in enumerate(new)]
        chosen = []
        for start in range(0, len(tokens), LLAMA_CPP_MAX_TOKENS):
            chunk, batch = tokens[start : start + LLAMA_CPP_MAX_TOKENS], self.batch
            batch.n_tokens = len(chunk)
            for i, (row, offset, token) in enumerate(chunk):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, self.length + offset, 1
                batch.seq_id[i][0], batch.logits[i] = row, offset == len(ids[row]) - 1
            if code := self.lib.llama_decode(self.context, batch):
                raise RuntimeError(f"llama_decode returned {code}")
            chosen += [self._argmax(i) for i in range(len(chunk)) if batch.logits[i]]
        self.length += len(ids[0])
        return chosen

    def _argmax(self, i: int) -> int:
        pointer = self.lib.llama_get_logits_ith(self.context, i)
        buffer = (ctypes.c_float * self.vocab_size).from_address(ctypes.addressof(pointer.contents))
        return int(torch.frombuffer(buffer, dtype=torch.float32).argmax())


def make_engines(folder: Path, temporary: Path, options: EngineOptions) -> "list[Engine]":
    """All engines on the model in folder, baselines first; GGUF files go to a temporary folder.

    Raises MissingExtraError if a baseline's package is not installed.
    """
    plain = Captioner.from_pretrained(folder, "cpu", "float32", compile=False)
    decoder, cpu = plain.model.decoder, torch.device("cpu")
    dtypes = list(dict.fromkeys(choose_dtype(name, cpu) for name in options.dtypes))
    engines: list[Engine] = []
    if "plain" in options.against:
        engines.append(NanoVLMEngine("plain float32", plain, plain=True))
    if "transformers" in options.against:
        engines += [TransformersEngine(decoder, dtype) for dtype in dtypes]
    if "llama.cpp" in options.against:
        types = [LlamaCppEngine.gguf_types[dtype] for dtype in dtypes if dtype in LlamaCppEngine.gguf_types]
        types += ["Q8_0"] if options.quantize == "int8" else []
        engines += [LlamaCppEngine(decoder, kind, temporary, options.batch_size) for kind in types]
    for dtype in dtypes:
        for quantize in dict.fromkeys((None, options.quantize)):
            for compile in (False, True) if options.compile else (False,):
                precision = str(dtype).removeprefix("torch.")
                captioner = Captioner.from_pretrained(folder, "cpu", precision, quantize=quantize, compile=compile)
                name = " ".join(filter(None, ("nanovlm", precision, quantize, "compiled" if compile else "")))
                engines.append(NanoVLMEngine(name, captioner, weight_bytes=1 if quantize else dtype.itemsize))
    return engines
