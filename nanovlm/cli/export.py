"""`nanovlm export`: write a model in the layout of transformers' SmolVLM, or as GGUF files for llama.cpp."""

import argparse
import json
import logging
from pathlib import Path

from models.common import files
from nanovlm.cli.options import flag_of
from nanovlm.console import print_error, printable
from nanovlm.errors import UsageError
from nanovlm.export import GGUF_TYPES, ONNX_TYPES
from nanovlm.options import DTYPES, check_output_folder, is_model_name

HELP = "Write a model in the layout of transformers' SmolVLM, or as GGUF files for llama.cpp."
EXAMPLE = "nanovlm export out/mine --out out/smolvlm"

MARKER = "nanovlm_export.json"  # in a folder that an export may write again
# What an export writes, replaces or removes.
WRITTEN = (
    "*config.json", "tokenizer.json", "*tokens*.json", "chat_template.*", "*.safetensors*", "*.gguf", "onnx", "adapter",
)  # fmt: skip

logger = logging.getLogger(__name__)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder or a Hub id, owner/name")
    add("--out", required=True, metavar="FOLDER", help="folder for the exported files")
    add("--revision", help="branch, tag or commit of a Hub model")
    text = "of a LoRA run: export the base model, and for PEFT the adapters in FOLDER/adapter, not both merged"
    add("--adapters", action="store_true", help=text)
    add("--base", metavar="MODEL", help="with --adapters: the base model (default: the one that the run recorded)")
    add("--dtype", default="float32", choices=DTYPES, help="dtype of the weights (default: float32)")
    add("--onnx", action="store_true", help="also write ONNX graphs to FOLDER/onnx, for ONNX Runtime and OpenVINO")
    text = f"types of the ONNX graphs: {', '.join(ONNX_TYPES)} (default: float32)"
    add("--onnx-dtype", nargs="+", choices=tuple(ONNX_TYPES), metavar="DTYPE", help=text)
    add("--gguf", action="store_true", help="write two GGUF files for llama.cpp instead: text model and mmproj")
    add("--gguf-type", choices=GGUF_TYPES, help="type of the matrices in GGUF files (default: f16)")


def run(args: argparse.Namespace) -> int:
    out = Path(args.out)
    check_output_folder(args.out)
    if Path(args.model).is_dir() and Path(args.model).resolve() == out.resolve():
        raise UsageError(f"--out {out} is the model's own folder; name another")
    if (found := files_of_a_model(out)) and not (out / MARKER).exists():
        raise UsageError(f"--out {out} holds {found[0]}, which is of no former export; name another folder")
    if not is_model_name(args.model):
        raise UsageError(f"{args.model} must be a folder with config.json, or a Hub id like owner/name")
    for flag, needed in (("onnx_dtype", "onnx"), ("base", "adapters"), ("gguf_type", "gguf")):
        if getattr(args, flag) and not getattr(args, needed):
            raise UsageError(f"{flag_of(flag)} needs {flag_of(needed)}")
    if args.gguf and (args.onnx or args.adapters):
        raise UsageError("--gguf writes no SmolVLM folder, which --onnx and --adapters add to; run the command twice")
    is_new = not out.exists()
    files.replace(out / MARKER, json.dumps({"model": str(args.model)}) + "\n")  # first: an export may be killed
    try:
        export(args)
    finally:
        if not files_of_a_model(out):
            files.remove(out / MARKER)
            if is_new:
                files.remove_folder(out)
    print_error(f"{printable(str(out))} holds the exported model")
    return 0


def files_of_a_model(folder: Path) -> list[str]:
    """Names of files in a folder that an export writes, too."""
    return sorted(path.name for pattern in WRITTEN for path in folder.glob(pattern) if path.name != MARKER)


def export(args: argparse.Namespace) -> None:
    from models.lora.files import ADAPTER_CONFIG, adapter_folder
    from nanovlm.captioner import Captioner
    from nanovlm.export.adapters import export_with_adapters
    from nanovlm.export.onnx import check_onnx_extra, export_onnx
    from nanovlm.export.transformers import export_notes, export_smolvlm
    from nanovlm.processing.convert import convert_layout

    if args.onnx:
        check_onnx_extra()
    if args.gguf:
        from nanovlm.export.gguf import export_gguf  # which needs the extra gguf
    if args.adapters:
        captioner = export_with_adapters(args.model, args.out, args.base, args.dtype)
    else:
        captioner = Captioner.from_pretrained(args.model, "cpu", args.dtype, revision=args.revision)
    if args.gguf:
        captioner.note_edits()
        if captioner.model.cfg.format is None:
            captioner = Captioner(*convert_layout(captioner.model, captioner.tokenizer), prompt=captioner.prompt)
            logger.warning(
                "note: llama.cpp lays out tiles and chats as SmolVLM does, and this model was trained with nanoVLM's: "
                "compare its answers, or train what `nanovlm export` writes without --gguf"
            )
        export_gguf(captioner, args.out, Path(args.model).resolve().name, args.gguf_type or "f16")
        return
    if not args.adapters:
        export_smolvlm(captioner, args.out)
    if args.onnx:
        export_onnx(captioner, args.out, args.onnx_dtype or ["float32"])
    if not args.adapters and (adapter_folder(Path(args.model)) / ADAPTER_CONFIG).exists():
        logger.warning("note: the LoRA adapters are merged into the weights; --adapters exports them for PEFT")
    for note in export_notes(captioner.model.cfg):
        logger.warning("note: %s", note)
