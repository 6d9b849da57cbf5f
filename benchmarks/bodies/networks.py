"""Makes the built-in networks: body-parts and body-maps.

    python -m diffnet.benchmarks.bodies.networks OUT [--workers N] [--try NAME=SET …]

It makes bodies in OUT (an hour on two cores), trains on them (three minutes on a GPU) and writes the networks to
`diffnet/pretrained`. What OUT has already is not made again. Each network also scores the sets after --try: folders of
bodies with parts or with pairs. Its file tells these scores as `test_NAME`.

It needs `pip install diffnet[bodies]`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from diffnet import DiffusionNet
from diffnet.pretrained import FOLDER

PAIRS = 7_000  # to train on, of the 28,680 of 240 meshes
ABOUT = {
    "data": "bodies of the parametric model anny, with random shapes, poses, meshers, noise, holes and turns",
    "data_license": "CC0-1.0",
    "license": "MIT",
}


@dataclass(frozen=True)
class Recipe:
    """How a network is made.

    kind: of the bodies, see `folders`
    meshes: to train on and to test
    vertices: of a mesh, at least and at most
    score: the entry of results.json that counts
    """

    kind: str
    task: str
    meshes: tuple[int, int]
    vertices: tuple[int, int]
    score: str


RECIPES = {
    "body-parts": Recipe("parts", "segmentation", (200, 25), (600, 3000), "test_accuracy"),
    "body-maps": Recipe("maps", "correspondence", (240, 20), (2000, 5000), "mean_error_x100"),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=list(RECIPES), help="one network instead of both")
    parser.add_argument("--workers", type=int, default=1, help="bodies to make at once")
    parser.add_argument("--try", dest="sets", action="append", default=[], metavar="NAME=SET")
    options = parser.parse_args(arguments)
    for name in [options.only] if options.only else RECIPES:
        recipe = RECIPES[name]
        make_bodies(recipe, options.out / recipe.kind, options.workers)
        write_network(name, options.out, [text.split("=", 1) for text in options.sets])


def make_bodies(recipe: Recipe, out: Path, workers: int) -> None:
    """Write the bodies, and for maps the pairs to train on and to test."""
    done = out / "done.txt"
    if done.exists():
        return
    sizes = ["--train", recipe.meshes[0], "--test", recipe.meshes[1], "--vertices", *recipe.vertices]
    run("diffnet.benchmarks.bodies.folders", recipe.kind, out, *sizes, "--workers", workers)
    if recipe.kind == "maps":
        parts = [sorted(file.stem for file in (out / part).glob("*.ply")) for part in ("train", "test")]
        train, test = (list(combinations(names, 2)) for names in parts)
        pairs = random.Random(0).sample(train, PAIRS) + test
        (out / "pairs.txt").write_text("".join(f"{a} {b}\n" for a, b in pairs))
    done.touch()


def write_network(name: str, out: Path, sets: list[list[str]]) -> None:
    """Train a network, score it, and write it as a built-in one."""
    recipe, folder = RECIPES[name], out / name
    if not (folder / "results.json").exists():
        run("diffnet", "train", recipe.task, "--data", out / recipe.kind, "--out", folder, "--width", 128)
    scores = {"test_own": score(recipe, folder)}
    for label, data in sets:
        is_pairs = (Path(data) / "corres").is_dir()
        if is_pairs == (recipe.kind == "maps"):
            place = folder / label
            run("diffnet", "evaluate", "--checkpoint", folder / "last.pt", "--data", data, "--out", place)
            scores[f"test_{label}"] = score(recipe, place)
    network = DiffusionNet.load(folder / "last.pt")
    network.save(FOLDER / f"{name}.safetensors", **ABOUT, **scores)
    print(name, scores)


def score(recipe: Recipe, folder: Path) -> float:
    """The score in the folder of a run or of an evaluation."""
    value = json.loads((folder / "results.json").read_text())[recipe.score]
    return round(float(value), 4)


def run(module: str, *arguments: object) -> None:
    """Run a program of Python. Its failure ends this one."""
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], check=True)


if __name__ == "__main__":
    main()
