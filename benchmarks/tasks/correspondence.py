"""Geodesic errors of `diffnet train correspondence` on a set, beside those after ZoomOut.

    python -m diffnet.benchmarks.tasks.correspondence --out FOLDER [--data FOLDER] [--seeds 0 1 2] [options]

FOLDER gets correspondence.csv, with one line for each method and seed, and all runs. The column zoomout_x100 has the
errors after ZoomOut. Other options are those of `diffnet train correspondence`, for all rows. Without --data, the set
is the built-in one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from diffnet.benchmarks.harness.results import write_csv
from diffnet.benchmarks.tasks.programs import argument_parser, results, run_diffnet
from diffnet.train.options.correspondence import Method

METHODS: tuple[Method, ...] = get_args(Method)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--data", default="bodies", help="a folder, or bodies")
    parser.add_argument("--only", choices=METHODS, nargs="+", default=list(METHODS), help="of the methods")
    options, more = parser.parse_known_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for method in options.only:
        for seed in options.seeds:
            start = time.perf_counter()
            run = options.out / f"{method}-{seed}"
            same = ["--data", options.data, "--cache", options.out / "cache"]
            run_diffnet("train", "correspondence", *same, "--out", run, "--seed", seed, "--method", method, *more)
            seconds = round(time.perf_counter() - start, 2)
            refined = options.out / f"{method}-{seed}-zoomout"
            run_diffnet("evaluate", *same, "--checkpoint", run / "last.pt", "--out", refined, "--zoomout")
            zoomout = results(refined)["mean_error_x100"]
            row = {**scores(results(run)), "zoomout_x100": zoomout, "command_seconds": seconds}
            rows.append({"row": method, "seed": seed, **row})
    write_csv(options.out / "correspondence.csv", rows)
    for method in options.only:
        errors, refined = (
            [line[name] for line in rows if line["row"] == method] for name in ("mean_error_x100", "zoomout_x100")
        )
        print(
            f"{method}: mean error ×100 {np.mean(errors):.3f}, from {min(errors):.3f} to {max(errors):.3f}; after "
            f"ZoomOut {np.mean(refined):.3f}"
        )
    print(f"wrote {options.out / 'correspondence.csv'}")


def scores(content: dict[str, Any]) -> dict[str, Any]:
    """The columns of a run, from the content of its results.json."""
    same = ("mean_error_x100", "flipped_pairs", "auc", "test_pairs", "train_pairs")
    return {
        **{name: content[name] for name in (*same, "preprocessing_seconds", "training_seconds")},
        "unflipped_x100": 100 * content["unflipped_mean_error"],
        "epochs": content["options"]["epochs"],
    }


if __name__ == "__main__":
    main()
