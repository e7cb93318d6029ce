"""How often the embedded model is right, on freshly drawn scenes that its training never saw.

    python -m eval.captions --scenes 1000
    python -m eval.captions --turns 6 --scenes 200    # questions one after another, beside the same alone
    python -m eval.captions --throughput    # how fast instead, see eval/throughput.py

Three figures: captions that match word for word, the same on scenes that show a colour and shape never trained
together, and answers to questions. Pictures are PNG files of 96 to 512 pixels a side, read like anybody's.
"""

import io
import math
import sys
import time
from collections import Counter
from random import Random

from eval import throughput
from eval.lib.command import make_parser, positive, report
from eval.lib.hardware import environment
from eval.lib.shapes import SHAPES
from nanovlm import EMBEDDED, PROMPT
from nanovlm.captioner import Captioner
from nanovlm.chat_session import ChatSession
from nanovlm.synthetic import Scene, caption, draw, questions, random_scene

SIDES = (96, 512)
MOST_TURNS = 20  # every scene answers as many questions, and more


def png(scene: Scene, rng: Random) -> bytes:
    """The scene as a file of a random size between 4:3 and 3:4."""
    width = rng.randint(*SIDES)
    height = min(SIDES[1], max(SIDES[0], round(width * rng.uniform(0.75, 1.33))))
    file = io.BytesIO()
    draw(scene, width, height).save(file, "png")
    return file.getvalue()


def measure(captioner: Captioner, n_scenes: int, n_questions: int, seed: str, batch_size: int = 64) -> dict:
    """Ask about n_scenes scenes of each split; shares of exact matches, by kind for questions, and what was missed."""
    rng, result, missed = Random(f"eval {seed}"), {}, []

    def ask(name: str, asked: list[tuple[bytes, str, str]]) -> None:
        pictures, prompts, truths = zip(*asked)
        started = time.perf_counter()
        said = list(captioner.captions(pictures, prompts, batch_size=batch_size))
        right = [answer == truth for answer, truth in zip(said, truths)]
        result[name] = {"right": sum(right), "of": len(right), "seconds": round(time.perf_counter() - started, 1)}
        missed.extend((name, *miss) for *miss, fits in zip(prompts, truths, said, right) if not fits)
        if name == "questions":
            kinds = [" ".join(prompt.split()[:2]) for prompt in prompts]
            of, hits = Counter(kinds), Counter(kind for kind, fits in zip(kinds, right) if fits)
            result["kinds"] = {kind: {"right": hits[kind], "of": n} for kind, n in of.most_common()}

    scenes = [random_scene(rng) for _ in range(n_scenes)]
    files = [png(scene, rng) for scene in scenes]
    ask("captions", [(file, PROMPT, caption(scene)) for file, scene in zip(files, scenes)])
    unseen = [random_scene(rng, withheld=True) for _ in range(n_scenes)]
    ask("withheld", [(png(scene, rng), PROMPT, caption(scene)) for scene in unseen])
    pairs = [(f, q, a) for f, scene in zip(files, scenes) for q, a in questions(scene, rng)[:n_questions]]
    ask("questions", pairs)
    return result | {"missed": missed}


def measure_turns(captioner: Captioner, n_scenes: int, n_turns: int, seed: str) -> dict[str, list[int]]:
    """How many of the first answers about n_scenes scenes are right, of the second ones, and so on: of questions asked
    alone, one after another, and so after a caption. What was said before stands in a conversation, right or wrong."""
    rng = Random(f"turns {seed}")
    right = {way: [0] * n_turns for way in ("alone", "one after another", "after a caption")}
    for _ in range(n_scenes):
        scene = random_scene(rng)
        picture = png(scene, rng)
        asked, truths = zip(*questions(scene, rng)[:n_turns])
        bare, captioned = ChatSession(captioner, [picture]), ChatSession(captioner, [picture])
        "".join(captioned.ask(PROMPT))
        said = [captioner.ask(picture, asked)]
        said += [["".join(talk.ask(question)) for question in asked] for talk in (bare, captioned)]
        for counts, answers in zip(right.values(), said):
            counts[:] = [n + (answer == truth) for n, answer, truth in zip(counts, answers, truths)]
    return right


def line(name: str, counts: dict) -> str:
    """A share with its 95% Wilson interval, which stays honest near 100%."""
    right, of, z = counts["right"], counts["of"], 1.96
    p = right / of
    centre = (p + z * z / (2 * of)) / (1 + z * z / of)
    reach = z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    interval = f"{100 * (centre - reach):.1f} to {100 * (centre + reach):.1f}"
    return f"{name:28} {100 * p:6.2f}%  ({right} of {of}, 95% interval {interval})"


def main() -> int:
    parser = make_parser("captions", __doc__)
    parser.add_argument("--model", default=EMBEDDED, help="a folder or Hub id (the embedded model)")
    parser.add_argument("--scenes", type=positive, default=1000, help="fresh, and as many of withheld pairs (1000)")
    parser.add_argument("--questions", type=positive, default=3, help="asked of each scene (3)")
    parser.add_argument("--turns", type=positive, metavar="N", help="ask N questions of each scene in a conversation")
    parser.add_argument("--seed", default="1", help="which scenes (1)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--throughput", action="store_true", help="pictures a minute, of a folder of mixed ones")
    parser.add_argument("--shape", choices=SHAPES, help="with --throughput: a published size, random weights")
    parser.add_argument("--pictures", type=positive, default=500, metavar="N", help="in that folder (500)")
    parser.add_argument("--misses", type=int, default=0, metavar="N", help="show N misses")
    args = parser.parse_args()
    if args.turns and args.turns > MOST_TURNS:
        parser.error(f"--turns {args.turns} is more than {MOST_TURNS}, for which every scene has questions")
    if args.shape and not args.throughput:
        parser.error(f"--shape {args.shape} has random weights, which are never right; add --throughput")
    try:
        if args.shape:
            captioner = throughput.of_shape(args.shape, args.device, args.dtype)
        else:
            captioner = Captioner.from_pretrained(args.model, args.device, args.dtype)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    where = environment(captioner.model.device, captioner.model.dtype)
    if args.throughput:
        result = throughput.measure(captioner, args.pictures, args.seed)
        return report(result, throughput.table(result), where, args.json)
    if args.turns:
        right = measure_turns(captioner, args.scenes, args.turns, args.seed)
        lines = [f"{f'of {args.scenes} answers':18}" + "".join(f"{turn:8}" for turn in range(1, args.turns + 1))]
        for way, counts in right.items():
            lines.append(f"{way:18}" + "".join(f"{100 * n / args.scenes:7.1f}%" for n in counts))
        return report({"of": args.scenes, "right": right}, "\n".join(lines), where, args.json)
    result = measure(captioner, args.scenes, args.questions, args.seed)
    names = {"captions": "captions", "withheld": "captions, withheld pairs", "questions": "answers to questions"}
    lines = ["exact matches, greedy", *(line(name, result[split]) for split, name in names.items())]
    lines += ["  " + line(kind, counts) for kind, counts in result["kinds"].items()]
    for split, prompt, truth, said in result["missed"][: args.misses]:
        lines.append(f"missed in {split}: {prompt!r}\n  truth {truth}\n  said  {said}")
    return report(result, "\n".join(lines), where, args.json)


if __name__ == "__main__":
    sys.exit(main())
