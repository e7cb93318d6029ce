"""What the tests of several rooms start from: models that are small, and random enough to tell mistakes apart."""

import pytest
import torch

from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from support import TINY, randomise

torch.set_num_threads(1)  # two threads slow each other tenfold under load


@pytest.fixture(scope="session")
def tiny_config():
    """Makes a config of a model with two blocks a side and four embeddings an image."""
    return lambda **changes: VLMConfig(**TINY | changes)


@pytest.fixture(scope="session")
def tiny_model(tiny_config):
    """Makes a model of such a config, in eval mode; its image token is 3."""

    def make(seed: int = 0, **changes) -> VisionLanguageModel:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = VisionLanguageModel(tiny_config(**changes), image_token_id=3)
            return randomise(model).eval()

    return make


@pytest.fixture(scope="session")
def words_and_images():
    """Makes a batch for such a model: rows of so many words, an image before each unless images=False."""
    from nanovlm.data.examples import EncodedExample, collate

    def make(seed: int, lengths=(5, 9), images: bool = True) -> dict:
        draw = torch.Generator().manual_seed(seed)
        rows = []
        for n in lengths:
            ids = [3] * 4 * images + torch.randint(4, 40, (n,), generator=draw).tolist()
            asked = n // 2  # of the words, as many are answers
            targets = [-100] * (len(ids) - asked) + torch.randint(4, 40, (asked,), generator=draw).tolist()
            rows.append(EncodedExample(ids, targets, [1] * len(ids), [torch.rand(1, 3, 16, 16, generator=draw)] * images))
        return collate(rows)

    return make


@pytest.fixture(scope="session")
def encoder_decoder(tiny_config):
    """An encoder-decoder of the same measures, 16 patches a picture and 64 positions, with random weights."""
    from models.kv_study.encoder_decoder import EncoderDecoder

    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = randomise(EncoderDecoder(tiny_config(lm_n_heads=4))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # else they drown the picture, and one word is said of everything
                parameter.zero_()
    return model


@pytest.fixture(scope="session")
def speaker():
    """A model of the embedded one's shape and its processor; with random weights it babbles, and ends now and then."""
    from nanovlm.synthetic.recipe import make_model

    with torch.random.fork_rng():
        model, processor = make_model(0)
        torch.manual_seed(1)
        randomise(model).eval()
    with torch.no_grad():
        model.decoder.head.weight[processor.tokenizer.eos_token_id] *= 1.3
    return model, processor


@pytest.fixture(scope="session")
def model_folder(speaker, tmp_path_factory):
    """The same on disk."""
    from models.checkpoint import save_checkpoint

    model, processor = speaker
    save_checkpoint(folder := tmp_path_factory.mktemp("models") / "speaker", model, processor.tokenizer.to_json())
    return folder


@pytest.fixture(scope="session")
def tiled(speaker, tiny_config):
    """A tiny model and its processor, which cuts pictures into up to 4 x 4 tiles of 16 pixels, 4 embeddings each."""
    import tokenizers

    from models.config import extra_tokens
    from nanovlm.processor import Processor
    from nanovlm.tokenizer import Tokenizer

    backend = tokenizers.Tokenizer.from_str(speaker[1].tokenizer.to_json())
    backend.add_special_tokens(list(extra_tokens(8).values()))
    cfg = tiny_config(max_img_size=64, lm_vocab_size=backend.get_vocab_size(), lm_max_position_embeddings=1024)
    tokenizer = Tokenizer(backend, cfg)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VisionLanguageModel(cfg, tokenizer.image_token_id)
        return randomise(model).eval(), Processor(cfg, tokenizer)
