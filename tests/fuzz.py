"""Coverage-guided fuzzing of what reads strangers' files and requests, by atheris (extra `fuzz`).

    python -m tests.fuzz requests --minutes 2    # exit 0: nothing was found

A reader may refuse its input by a `NanoVLMError` or `APIError` of one line. Any other exception, a hang or too much
memory is a finding: its input lies in the printed folder, and `python -m tests.fuzz requests FILE` runs it again.
"""

import argparse
import io
import json
import random
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # for support

Check = Callable[[bytes], object]
Target = tuple[list[bytes], Check]  # valid inputs to start from, and what reads an input
ODD = [
    None, True, -1, 0, 2**31, 10**400, 0.5, 1e400, float("nan"),
    "", "x" * 5000, "\0", "\ud800", [], {}, [[]], [None],
]  # fmt: skip
TIMEOUT_S, MEMORY_MB = 20, 6000


def image_file(size: tuple[int, int] = (9, 7), format: str = "png") -> bytes:
    from PIL import Image

    Image.new("RGB", size, "red").save(file := io.BytesIO(), format)
    return file.getvalue()


def model_file(name: str) -> Callable[[Path], Target]:
    """A file of the embedded model, in a folder with links to the others, from which the model is then loaded."""

    def target(folder: Path) -> Target:
        from nanovlm import EMBEDDED, Captioner

        for path in EMBEDDED.iterdir():
            if path.name != name:
                (folder / path.name).symlink_to(path)

        def check(data: bytes) -> None:
            (folder / name).write_bytes(data)
            Captioner.from_pretrained(folder, "cpu", "float32")

        return [(EMBEDDED / name).read_bytes()], check

    return target


def header(folder: Path) -> Target:
    """The header of model.safetensors, before few weights."""
    (content,), check = model_file("model.safetensors")(folder)
    n = 8 + struct.unpack("<Q", content[:8])[0]
    return [content[8:n]], lambda data: check(struct.pack("<Q", len(data)) + data + content[n:])


def image(folder: Path) -> Target:
    from nanovlm.processing.image_loading import load_image

    return [image_file(format=name) for name in ("png", "jpeg", "webp", "gif", "tiff", "bmp")], load_image


def data_file(name: str, *seeds: bytes) -> Callable[[Path], Target]:
    def target(folder: Path) -> Target:
        from nanovlm.data import open_source
        from nanovlm.options import ReadOptions

        (folder / "a.png").write_bytes(image_file())

        def check(data: bytes) -> None:
            (folder / name).write_bytes(data)
            source: Any = open_source(str(folder / name), ReadOptions())
            for i in range(min(len(source), 5)):
                _ = source[i]

        return list(seeds), check

    return target


def requests(folder: Path) -> Target:
    """The body of a request, up to what goes to the model, and its JSON schema up to the grammar."""
    from nanovlm import EMBEDDED, Captioner
    from nanovlm.processing.structured_output import StructuredOutput
    from nanovlm.serving.chat_inputs import encode_chat, read_chat
    from nanovlm.serving.openai_api import ChatRequest

    processor = Captioner.from_pretrained(EMBEDDED).processor
    structured = StructuredOutput(processor.tokenizer)
    parts = [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x"]}}, "required": ["a"]}
    body = {"model": "m", "temperature": 0.5, "stop": ["x"], "seed": 1}
    body |= {"stream": True}
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]}
    chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    def check(data: bytes) -> None:
        request = ChatRequest.parse(data)
        if (schema := request.options().schema) is not None:
            structured.make_processors(schema, 1)
        for layout in (False, True):
            parsed = read_chat(request.messages, layout)
            if not parsed.images and not layout:
                encode_chat(parsed, [], processor)

    return [json.dumps(body | chat).encode()], check


ROW = {"image": "a.png", "text": "A ring.", "metadata": {"n": 1}}
CHAT = {"images": ["a.png"], "texts": [{"user": "What?", "assistant": "A ring."}]}
TALK = {
    "image": "a.png",
    "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A."}],
}
TARGETS: dict[str, Callable[[Path], Target]] = {
    "config": model_file("config.json"),
    "tokenizer": model_file("tokenizer.json"),
    "header": header,
    "image": image,
    "json": data_file("data.json", json.dumps([ROW, TALK]).encode(), json.dumps([CHAT]).encode()),
    "jsonl": data_file("data.jsonl", *(json.dumps(row).encode() + b"\n" for row in (ROW, CHAT, TALK))),
    "csv": data_file("metadata.csv", b"file_name,text\na.png,A ring.\n"),
    "requests": requests,
}


def change_json(value: Any, choose: random.Random) -> Any:
    """The value with one place inside it changed to something odd, left out or doubled."""
    if not isinstance(value, (dict, list)) or not value or choose.random() < 0.1:
        return choose.choice(ODD)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, changed = choose.choice(keys), value.copy()
    what = choose.random()
    if what < 0.1:
        del changed[key]
    elif what < 0.2 and isinstance(changed, list):
        changed.append(changed[key])
    else:
        changed[key] = change_json(value[key], choose)
    return changed


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Change JSON where it is JSON, three times of four; else bytes."""
    import atheris

    choose = random.Random(seed)
    if choose.random() < 0.75:
        try:
            changed = json.dumps(change_json(json.loads(data), choose)).encode()
            return changed if len(changed) <= max_size else data
        except ValueError:
            pass
    return atheris.Mutate(data, max_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=TARGETS)
    parser.add_argument("file", nargs="?", help="run this input alone")
    parser.add_argument("--minutes", type=float, default=2.0)
    args = parser.parse_args()
    import atheris

    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{args.name}-"))
    (folder / "work").mkdir()
    (folder / "corpus").mkdir()
    with atheris.instrument_imports(include=["models", "nanovlm"], enable_loader_override=False):
        seeds, check = TARGETS[args.name](folder / "work")
        from nanovlm.errors import NanoVLMError
        from nanovlm.serving.openai_api import APIError

    def run(data: bytes) -> None:
        try:
            check(data)
        except (NanoVLMError, APIError) as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, f"not one short line: {error!r}"

    for i, seed in enumerate(seeds):
        run(seed)
        (folder / "corpus" / str(i)).write_bytes(seed)
    if args.file:
        return run(Path(args.file).read_bytes())
    longest = max(1 << 16, 2 * max(map(len, seeds)))
    limits = [f"-timeout={TIMEOUT_S}", f"-rss_limit_mb={MEMORY_MB}", f"-max_len={longest}", "-print_final_stats=1"]
    limits += [f"-max_total_time={round(60 * args.minutes)}", f"-artifact_prefix={folder}/finding-"]
    print(f"findings go to {folder}", flush=True)
    atheris.Setup([sys.argv[0], *limits, str(folder / "corpus")], run, custom_mutator=mutate)
    atheris.Fuzz()  # ends the process
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
