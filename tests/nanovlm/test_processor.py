"""Pictures and prompts as the model reads them: counted by hand, and told apart row by row."""

import random
from dataclasses import replace

import pytest
import torch
from PIL import Image

from models.config import extra_tokens
from nanovlm.processor import Processor

END, IMAGE, GLOBAL = 2, 512, 513  # as the scenes' tokenizer numbers them
START = 1
R1C1, R1C2, R2C1, R2C2, R3C1, R3C2 = 514, 515, 522, 523, 530, 531  # eight to a row


def noise(width, height, seed=0):
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(width * height * 3))


SQUARE, WIDE, TALL = (16, 16), (30, 14), (30, 48)  # grids of 1 x 1, 1 x 2 and 3 x 2 tiles of 16 pixels


@pytest.fixture(scope="module")
def processor(tiled):
    return tiled[1]


def read(processor, sizes, prompt="Hi?"):
    """The ids of one row, and its number of images."""
    inputs = processor([[noise(*size, seed) for seed, size in enumerate(sizes)]], [prompt])
    assert inputs["attention_mask"].eq(1).all() and len(inputs["input_ids"]) == 1
    return inputs["input_ids"][0].tolist(), 0 if inputs["images"] is None else len(inputs["images"])


def turn(processor, *parts):
    """A user's turn from words and ids, up to where the answer begins."""
    encode = processor.tokenizer.encode
    ids = [id for part in parts for id in (encode(part) if isinstance(part, str) else part)]
    return [START, *ids, END, *encode("\n"), START, *encode("assistant\n")]


def test_a_prompt_alone_is_a_turn(processor):
    assert read(processor, []) == (turn(processor, "user\nHi?"), 0)


def test_one_tile_is_its_own_global_view(processor):
    assert read(processor, [SQUARE]) == (turn(processor, "user\n", [GLOBAL] + [IMAGE] * 4, "Hi?"), 1)


def test_tiles_follow_the_global_view_row_by_row(processor):
    places = [IMAGE] * 4
    wide = [GLOBAL, *places, R1C1, *places, R1C2, *places]
    assert read(processor, [WIDE]) == (turn(processor, "user\n", wide, "Hi?"), 3)
    tall = [GLOBAL, *places]
    for tile in (R1C1, R1C2, R2C1, R2C2, R3C1, R3C2):
        tall += [tile, *places]
    assert read(processor, [TALL]) == (turn(processor, "user\n", tall, "Hi?"), 7)


def test_several_pictures_are_numbered_from_0(processor):
    places = [IMAGE] * 4
    wide = [GLOBAL, *places, R1C1, *places, R1C2, *places]
    expected = turn(
        processor,
        *("user\n<image: 0>", [GLOBAL, *places]),
        *("<image: 1>", wide),
        *("<image: 2>", [GLOBAL, *places]),
        "Which is wide?",
    )
    assert read(processor, [SQUARE, WIDE, SQUARE], "Which is wide?") == (expected, 5)


def test_images_are_the_tiles_in_the_order_of_their_tokens(processor):
    tall = noise(*TALL)
    inputs = processor([[noise(*SQUARE), tall]], ["?"])
    resized = tall.resize((32, 48), Image.Resampling.BICUBIC)
    tiles = [resized.crop((x, y, x + 16, y + 16)) for y in (0, 16, 32) for x in (0, 16)]
    for image, tile in zip(inputs["images"], [noise(*SQUARE), None, *tiles]):
        if tile is not None:
            flat = torch.tensor(list(tile.tobytes())).view(16, 16, 3).permute(2, 0, 1)
            assert torch.equal(image, flat / 255)


def test_there_is_an_embedding_for_every_image_token(tiled):
    model, processor = tiled
    for sizes in ([], [SQUARE], [WIDE], [TALL], [TALL, SQUARE, WIDE], [(500, 400)]):
        inputs = processor([[noise(*size) for size in sizes]], ["What is this <|image|>?"])
        x = model.embed(inputs["input_ids"], inputs["images"])
        places = inputs["input_ids"] == IMAGE
        assert int(places.sum()) == 4 * (0 if inputs["images"] is None else len(inputs["images"]))
        if sizes:
            looked = model.MP(model.vision_encoder(inputs["images"]))
            assert torch.equal(x[places], looked.flatten(0, 1))


def test_a_row_of_a_mixed_batch_says_what_it_says_alone(tiled):
    model, processor = tiled
    pictures = [[], [noise(*TALL, 1)], [noise(*WIDE, 2), noise(*SQUARE, 3), noise(*SQUARE, 4)], [noise(*SQUARE, 5)], []]
    prompts = ["What is 1 + 1?", "Describe this picture.", "Which one? " * 5, "?", "A longer question. " * 12]
    batch = processor(pictures, prompts)
    mask = batch["attention_mask"]
    assert mask[:, -1].all() and (mask.diff(dim=1) >= 0).all() and len(set(mask.sum(1).tolist())) == 5
    together = model.generate(**batch, max_new_tokens=12)
    for row in range(5):
        alone = processor([pictures[row]], [prompts[row]])
        assert torch.equal(batch["input_ids"][row][mask[row] == 1], alone["input_ids"][0])
        assert torch.equal(together[row], model.generate(**alone, max_new_tokens=12)[0])
    assert len(set(map(tuple, together.tolist()))) == 5, "rows that all say the same prove nothing"


def test_a_tile_without_a_name_is_an_error_that_says_which(processor):
    narrow = Processor(replace(processor.cfg, vlm_extra_tokens=extra_tokens(2)), processor.tokenizer)
    narrow([[noise(*WIDE)]], ["?"])
    with pytest.raises(ValueError, match="3 x 2 tiles, but vlm_extra_tokens has no r3c2"):
        narrow([[noise(*TALL)]], ["?"])
    with pytest.raises(ValueError, match="2 rows of images, but 1 prompts"):
        narrow([[], []], ["?"])


def test_a_model_of_one_tile_squeezes_any_picture_into_it(speaker):
    _, processor = speaker
    for size in ((96, 96), (300, 90), (1092, 1092), (7, 400)):  # the resize rule would give 1092 x 1092 two tiles
        ids, images = read(processor, [size])
        assert images == 1 and ids.count(IMAGE) == 36 and ids.count(GLOBAL) == 1


def images_of(processor, size):
    images, grid = processor.preprocess(noise(*size))
    return len(images), grid


@pytest.mark.parametrize(
    ("size", "max_tiles", "grid"),
    [
        ((64, 64), None, (4, 4)), ((64, 64), 16, (4, 4)), ((64, 64), 15, (3, 3)), ((64, 64), 8, (2, 2)),
        ((64, 64), 3, (1, 1)), ((64, 64), 1, (1, 1)), ((64, 20), 8, (2, 4)), ((64, 20), 7, (1, 3)),
        ((300, 2), 2, (1, 2)), ((1092, 1092), 1, (1, 1)), ((1092, 1092), 11, (2, 2)), ((3, 5), 4, (1, 1)),
    ],
)  # fmt: skip
def test_a_picture_has_no_more_tiles_than_its_budget(processor, size, max_tiles, grid):
    spare = Processor(processor.cfg, processor.tokenizer, max_tiles=max_tiles)
    rows, columns = grid
    assert images_of(spare, size) == (rows * columns + (grid != (1, 1)), grid)
    ids, _ = read(spare, [size])
    assert ids.count(IMAGE) == 4 * (rows * columns + (grid != (1, 1)))


def test_a_small_picture_need_not_be_enlarged(processor):
    cfg = replace(processor.cfg, resize_to_max_side_len=True)
    large, small = Processor(cfg, processor.tokenizer), Processor(cfg, processor.tokenizer, upscale=False)
    assert images_of(large, SQUARE) == (17, (4, 4)) and images_of(small, SQUARE) == (1, (1, 1))
    assert images_of(Processor(cfg, processor.tokenizer, max_tiles=6), SQUARE) == (5, (2, 2))
    assert images_of(large, (500, 400)) == images_of(small, (500, 400)) == (17, (4, 4))


def test_a_budget_changes_nothing_where_no_tiles_are_cut(speaker):
    _, processor = speaker
    spare = Processor(processor.cfg, processor.tokenizer, max_tiles=1, upscale=False)
    assert torch.equal(spare.preprocess(noise(300, 90))[0], processor.preprocess(noise(300, 90))[0])


def test_a_budget_of_no_tiles_is_an_error(processor):
    with pytest.raises(ValueError, match="max_tiles=0 is less than 1"):
        Processor(processor.cfg, processor.tokenizer, max_tiles=0)


def test_questions_share_all_that_stands_before_them(tiled):
    _, processor = tiled
    shown, texts = [noise(*TALL, 1), noise(*SQUARE, 2)], ["Which?", "Where is it? " * 3, "Which one?"]
    batch = processor.encode_questions(shown, texts)
    shared, mask = batch["shared"], batch["attention_mask"]
    assert len(batch["images"]) == 8 and mask[:, :shared].all() and mask[:, -1].all()
    for row, text in enumerate(texts):
        alone = processor([shown], [text])
        assert torch.equal(batch["input_ids"][row][mask[row] == 1], alone["input_ids"][0])
        assert torch.equal(batch["images"], alone["images"])
    head = batch["input_ids"][0, :shared]
    assert (batch["input_ids"][:, :shared] == head).all() and head.eq(IMAGE).sum() == 8 * 4
    assert len(set(batch["input_ids"][:, shared].tolist())) > 1, "the next ids differ, or are padding"


@pytest.mark.parametrize("max_tiles", [None, 1, 4, 7])
def test_no_picture_becomes_more_images_than_foretold(processor, max_tiles):
    processor = Processor(processor.cfg, processor.tokenizer, max_tiles)
    sizes = [(16, 16), (64, 64), (640, 640), (200, 90), (90, 200), (33, 64)]
    most = max(len(processor.preprocess(Image.new("RGB", size))[0]) for size in sizes)
    assert most <= processor.max_tiles_per_image and (max_tiles == 7 or most == processor.max_tiles_per_image)
