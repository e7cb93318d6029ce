"""Models for all tests, made once a session: small, with random weights large enough that any mistake shows."""

import os
import shutil

import pytest
import torch

from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from support import TINY, randomize
from support.deadline import limited
from support.posix import pytest_collection_modifyitems  # noqa: F401 (a hook)

torch.set_num_threads(1)  # two threads slow each other tenfold under load
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in processes that tests start, too


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with limited(item):
        return (yield)


pytest_runtest_setup = pytest_runtest_teardown = pytest_runtest_call


@pytest.fixture(scope="session")
def tiny_config():
    """Make a config: two blocks per side, four embeddings per image; keyword arguments change fields."""
    return lambda **changes: VLMConfig(**TINY | changes)


@pytest.fixture(scope="session")
def tiny_model(tiny_config):
    """Make a model of such a config, in eval mode; its image token is 3."""

    def make(seed: int = 0, **changes) -> VisionLanguageModel:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = VisionLanguageModel(tiny_config(**changes), image_token_id=3)
            return randomize(model).eval()

    return make


@pytest.fixture(scope="session")
def make_batch():
    """Make a training batch for such a model: rows of `lengths` text tokens, each behind an image if images."""
    from nanovlm.data.examples import EncodedExample, collate

    def make(seed: int, lengths=(5, 9), images: bool = True) -> dict:
        rng = torch.Generator().manual_seed(seed)
        rows = []
        for n in lengths:
            ids = torch.randint(4, 40, (n,), generator=rng).tolist()
            if images:
                ids = [3, 3, 3, 3, *ids]
            n_targets = n // 2
            targets = [-100] * (len(ids) - n_targets) + torch.randint(4, 40, (n_targets,), generator=rng).tolist()
            pixels = torch.rand(1, 3, 16, 16, generator=rng)
            rows.append(EncodedExample(ids, targets, [1] * len(ids), [pixels] if images else []))
        return collate(rows)

    return make


@pytest.fixture(scope="session")
def encoder_decoder(tiny_config):
    """An encoder-decoder of the same sizes, 16 patches per image and 64 positions, with random weights."""
    from models.kv_study.encoder_decoder import EncoderDecoder

    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = randomize(EncoderDecoder(tiny_config(lm_n_heads=4))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # large biases would outweigh the image: the same caption for all
                parameter.zero_()
    return model


@pytest.fixture(scope="session")
def model_and_processor():
    """A model of the embedded one's sizes with random weights, whose answers end now and then; and its processor."""
    from models.checkpoint import load_config
    from nanovlm import EMBEDDED
    from nanovlm.processing.processor import Processor
    from nanovlm.processing.tokenizer import Tokenizer

    cfg = load_config(EMBEDDED)
    processor = Processor(cfg, Tokenizer.from_pretrained(EMBEDDED, cfg))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VisionLanguageModel(cfg, processor.tokenizer.image_token_id)
        torch.manual_seed(7)
        randomize(model).eval()
    with torch.no_grad():
        model.decoder.head.weight[processor.tokenizer.eos_token_id] *= 1.35
    return model, processor


class FakeHub(dict):
    """Folders by repository and revision; `calls` holds what was downloaded, and the patterns of its files."""

    def __init__(self):
        self.calls = []

    def download(self, name, revision=None, allow_patterns=None):
        self.calls.append((name, revision, allow_patterns))
        return str(self[name, revision])


@pytest.fixture
def hub(monkeypatch):
    hub = FakeHub()
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.download)
    return hub


@pytest.fixture(scope="session")
def silent_model(tmp_path_factory):
    """A folder with a model whose answers are empty: every logit is 0, and token 0 is no text."""
    from nanovlm import Captioner

    captioner = Captioner.from_pretrained(dtype="float32")
    torch.nn.init.zeros_(captioner.model.decoder.norm.weight)
    folder = tmp_path_factory.mktemp("silent")
    captioner.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(model_and_processor, tmp_path_factory):
    from models.checkpoint import save_checkpoint

    model, processor = model_and_processor
    save_checkpoint(folder := tmp_path_factory.mktemp("models") / "random", model, processor.tokenizer.to_json())
    return folder


@pytest.fixture(scope="session")
def tiled(model_and_processor, tiny_config):
    """A tiny model, and its processor, which splits images into up to 4 x 4 tiles of 16 pixels, 4 embeddings each."""
    import tokenizers

    from models.config import extra_tokens
    from nanovlm.processing.processor import Processor
    from nanovlm.processing.tokenizer import Tokenizer

    backend = tokenizers.Tokenizer.from_str(model_and_processor[1].tokenizer.to_json())
    backend.add_special_tokens(list(extra_tokens(8).values()))
    cfg = tiny_config(max_img_size=64, lm_vocab_size=backend.get_vocab_size(), lm_max_position_embeddings=1024)
    tokenizer = Tokenizer(backend, cfg)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VisionLanguageModel(cfg, tokenizer.image_token_id)
        return randomize(model).eval(), Processor(cfg, tokenizer)


@pytest.fixture(scope="session")
def onnx_folder(tmp_path_factory):
    """The embedded model, exported with ONNX graphs by the command line."""
    from nanovlm import EMBEDDED
    from nanovlm.cli import main as cli

    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("export") / "out" / "smolvlm"
    assert cli.main(["export", str(EMBEDDED), "--out", str(folder), "--onnx", "--onnx-dtype", "float32", "int8"]) == 0
    return folder


@pytest.fixture(scope="session")
def adapted(tiny_model):
    """Make a tiny model with adapters, and optionally embeddings, that have been trained."""
    from models.lora import PARTS, adapt, adapters, fully_trained

    def make(parts=PARTS, rank=3, alpha=12.0, embeddings=False, **changes):
        model = tiny_model(**changes)
        torch.manual_seed(5)
        adapt(model, rank, alpha, parts, embeddings)
        with torch.no_grad():
            for p in fully_trained(model).values():
                p.add_(torch.randn_like(p), alpha=0.1)
            for module in adapters(model).values():
                module.lora_B.weight.normal_(std=0.1)
        return model

    return make


@pytest.fixture(scope="module")
def browser():
    """Chromium, without what it does in the background."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright; pip install 'nanovlm[test-web]'")
    flags = [
        "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync",
    ]  # fmt: skip
    with sync_api.sync_playwright() as playwright:
        names = ("chromium", "chromium-browser", "google-chrome", playwright.chromium.executable_path)
        found = next((path for path in map(shutil.which, names) if path), None)
        if found is None:
            pytest.skip("no Chromium here; playwright install chromium, or apt-get install chromium")
        browser = playwright.chromium.launch(executable_path=found, args=flags)
        yield browser
        browser.close()
