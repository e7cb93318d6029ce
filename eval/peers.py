"""Decoding beside others: this repository, transformers and llama.cpp, with the same random weights, taking turns.

    python -m eval.peers --shape 230M

Each reads a prompt of 70 tokens and then says the likeliest token again and again; ms are medians over all rounds, of a
token of every sequence. transformers in float32 stands for upstream nanoVLM, whose decoding takes as long within 5%.
"of memory" is the share of the speed at which this machine reads memory, that the weights alone account for: 100% is
the limit for one sequence. llama.cpp takes part if the extra peers is installed; float32 must say the same throughout.
Packages are made once, a minute or two each, if they are not in the cache.
"""

import copy
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from eval.lib.command import make_parser, positive, progress, report
from eval.lib.hardware import environment, memory_bandwidth
from eval.lib.shapes import SHAPES
from models.decoding import GREEDY
from models.inference.inference_model import make_fast
from models.language_model import LanguageModel
from models.vision_language_model import VisionLanguageModel

CONTEXT = 70  # tokens
REFERENCE = "transformers float32"
GGUF = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}


class Peer(Protocol):
    def read(self, ids: list[list[int]], start_pos: int) -> list[int]:
        """Each sequence goes on with its ids at start_pos; what stood there is forgotten. Returns the likeliest."""


class Ours:
    def __init__(self, model: VisionLanguageModel):
        self.model, self.prefix = model, None

    @torch.inference_mode()
    def read(self, ids: list[list[int]], start_pos: int) -> list[int]:
        new = torch.tensor(ids)
        if start_pos == 0:
            logits, self.prefix = self.model.prefill(new)
        else:
            logits, self.prefix = self.model.decode(new[:, 0], self.prefix.first(start_pos))
        return GREEDY(logits).tolist()


class Transformers:
    def __init__(self, decoder: LanguageModel, dtype: torch.dtype):
        from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

        cfg, self.new_cache = decoder.cfg, DynamicCache
        config = LlamaConfig(
            vocab_size=cfg.lm_vocab_size, hidden_size=cfg.lm_hidden_dim, intermediate_size=cfg.lm_inter_dim,
            num_hidden_layers=cfg.lm_n_blocks, num_attention_heads=cfg.lm_n_heads,
            num_key_value_heads=cfg.lm_n_kv_heads, max_position_embeddings=cfg.lm_max_position_embeddings,
            rms_norm_eps=cfg.lm_rms_eps, rope_theta=cfg.lm_re_base, tie_word_embeddings=cfg.lm_tie_weights,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).eval()
        names = {
            "blocks": "layers", "norm1": "input_layernorm", "norm2": "post_attention_layernorm", "attn": "self_attn",
            "out_proj": "o_proj", "token_embedding": "embed_tokens",
        }  # fmt: skip
        state = {}
        for name, tensor in decoder.state_dict().items():
            name = ".".join(names.get(part, part) for part in name.split("."))
            state["lm_head.weight" if name == "head.weight" else f"model.{name}"] = tensor
        self.model.load_state_dict(state)
        self.model.to(dtype)

    @torch.inference_mode()
    def read(self, ids: list[list[int]], start_pos: int) -> list[int]:
        if start_pos == 0:
            self.cache = self.new_cache(config=self.model.config)
        out = self.model(torch.tensor(ids), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1).tolist()


@dataclass
class Result:
    """One peer: milliseconds of its steps, the ids that it said in the first round, and what a step reads."""

    name: str
    weight_bytes: int
    ms: list[float] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


def peers(shape: str, chosen: Sequence[str], rows: int, folder: Path) -> dict[str, tuple[Callable[[], Peer], int]]:
    """Name -> how it is made, and the bytes of weights that a step reads."""
    torch.manual_seed(0)
    exact = VisionLanguageModel(SHAPES[shape][0], -1).eval()
    entries = sum(p.numel() for p in exact.decoder.parameters())  # the embedding is the head, which is read whole
    size = {"float32": 4 * entries, "bfloat16": 2 * entries, "int8": entries}

    def ours(dtype: str, packaged: bool) -> Ours:
        if packaged:
            progress(f"{dtype}: compiling, if its package is not there")
        model = copy.deepcopy(exact).to(torch.float32 if dtype == "float32" else torch.bfloat16)
        return Ours(make_fast(model, dtype == "int8", compile=packaged))

    def llamacpp(dtype: str) -> Peer:
        from eval.lib.llamacpp import LlamaCpp, write_gguf

        path = folder / f"{GGUF[dtype]}.gguf"
        write_gguf(exact.decoder, path, GGUF[dtype])
        return LlamaCpp(path, torch.get_num_threads(), rows)

    made = {}
    for dtype in ("float32", "bfloat16", "int8"):
        if dtype != "int8":
            as_torch = getattr(torch, dtype)
            made[f"transformers {dtype}"] = lambda d=as_torch: Transformers(exact.decoder, d), size[dtype]
        if importlib.util.find_spec("llama_cpp") and importlib.util.find_spec("gguf"):
            made[f"llama.cpp {GGUF[dtype]}"] = lambda d=dtype: llamacpp(d), size[dtype]
        made[f"ours {dtype}"] = lambda d=dtype: ours(d, False), size[dtype]
        if rows == 1:
            made[f"ours {dtype}, package"] = lambda d=dtype: ours(d, True), size[dtype]
    if unknown := [name for name in chosen if name not in made]:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(map(repr, made))}")
    return {name: made[name] for name in made if name in chosen or name == REFERENCE or not chosen}


def turns(makers: dict[str, tuple[Callable[[], Peer], int]], rows: int, tokens: int, rounds: int) -> list[Result]:
    """All peers in turn, rounds times: each reads a prompt, unmeasured, and then decodes so many tokens."""
    there = [(make(), Result(name, size)) for name, (make, size) in makers.items()]
    prompts = torch.randint(1000, (rows, CONTEXT), generator=torch.Generator().manual_seed(1)).tolist()
    for round in range(rounds):
        for peer, result in there:
            said = [peer.read(prompts, 0)]
            for position in range(CONTEXT, CONTEXT + tokens):
                started = time.perf_counter()
                said.append(peer.read([[token] for token in said[-1]], position))
                result.ms.append((time.perf_counter() - started) * 1000)
            if round == 0:
                result.ids = said
        progress(f"round {round + 1} of {rounds}")
    return [result for _, result in there]


def table(results: list[Result], rows: int, limit: float) -> str:
    reference = next(result for result in results if result.name == REFERENCE)
    line = "{:26}{:>9}{:>10}{:>13}{:>11}  {}".format
    lines = [line("", "ms/step", "tokens/s", "times first", "of memory", "same ids")]
    for result in results:
        share = result.weight_bytes / (result.median / 1000) / limit
        pairs = [pair for a, b in zip(result.ids, reference.ids) for pair in zip(a, b)]
        same = f"{sum(a == b for a, b in pairs)} of {len(pairs)}"
        lines.append(
            line(
                result.name, f"{result.median:.2f}", f"{1000 * rows / result.median:.0f}",
                f"{reference.median / result.median:.2f}x", f"{share:.0%}", same,
            )
        )  # fmt: skip
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("peers", __doc__)
    add = parser.add_argument
    add("peers", nargs="*", metavar="PEER", help="only these, by their names in the table (all)")
    add("--shape", default="230M", choices=("230M", "460M"), help="whose language model (230M: SmolLM2-135M's)")
    add("--rows", type=positive, default=1, metavar="N", help="sequences at once (1)")
    add("--tokens", type=positive, default=32, metavar="N", help="each decodes in a round (32)")
    add("--rounds", type=positive, default=5, metavar="N", help="(5)")
    args = parser.parse_args(argv)
    limit = memory_bandwidth()
    with tempfile.TemporaryDirectory() as folder:
        try:
            makers = peers(args.shape, args.peers, args.rows, Path(folder))
        except ValueError as error:
            parser.error(str(error))
        results = turns(makers, args.rows, args.tokens, args.rounds)
    where = f"memory is read at {limit / 1e9:.1f} GB/s; {environment()}"
    return report({"peers": [asdict(result) for result in results]}, table(results, args.rows, limit), where, args.json)


if __name__ == "__main__":
    sys.exit(main())
