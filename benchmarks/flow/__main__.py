"""A set of flows past bodies, and networks that learn it, each for the same time.

    python -m diffnet.benchmarks.flow make --out FOLDER
    python -m diffnet.benchmarks.flow train --data FOLDER --out RESULTS

`make` writes meshes with pressure and velocity, and cases.csv with conditions and forces (`cases.py` has the model).
`train` writes flow.csv with a row for each network and seed, and keeps rows of other networks and seeds that are there.
--seconds is the time for each network, and --turns how many turns of each case about its stream are trained on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from diffnet.benchmarks.flow.cases import make_cases
from diffnet.benchmarks.flow.networks import NetworkName, make_network
from diffnet.benchmarks.flow.training import load_cases, make_batches, rotate_about_stream, scores, train
from diffnet.benchmarks.harness.results import Row, read_csv, write_csv
from diffnet.data import available_cores


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make, learn = commands.add_parser("make"), commands.add_parser("train")
    make.add_argument("--out", type=Path, required=True)
    for option, count in {"--train": 300, "--test": 60, "--seed": 0, "--jobs": available_cores()}.items():
        make.add_argument(option, type=int, default=count)
    make.add_argument("--vertices", type=int, nargs=2, default=(750, 1000), help="of a component, from and to")
    learn.add_argument("--data", type=Path, required=True)
    learn.add_argument("--out", type=Path, required=True)
    learn.add_argument("--networks", nargs="+", choices=get_args(NetworkName), default=get_args(NetworkName))
    learn.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    learn.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    learn.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="a CPU takes fp32")
    numbers = {"--seconds": 120.0, "--rate": 2e-3, "--peer-rate": 1e-3, "--turns": 8, "--batch-meshes": 4}
    for option, number in {**numbers, "--k": 128, "--tokens": 16}.items():
        learn.add_argument(option, type=type(number), default=number)
    learn.add_argument("--size", type=int, nargs=2, default=(128, 4), help="width and blocks of diffnet")
    learn.add_argument("--peer-size", type=int, nargs=2, default=(256, 8), help="width and blocks of the peer")
    options = parser.parse_args(arguments)
    if options.command == "make":
        make_cases(options.out, options.train, options.test, options.vertices, options.seed, options.jobs)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Train the networks in turn, and write flow.csv after each."""
    device, table = torch.device(options.device), options.out / "flow.csv"
    cases, test = load_cases(options.data, options.k, device)
    rng = np.random.default_rng(0)
    turns = [rotate_about_stream(case, rng.uniform(0, 2 * np.pi)) for _ in range(options.turns) for case in cases]
    training = make_batches(turns, options.batch_meshes)
    autocast = torch.autocast(device.type, torch.bfloat16, device.type == "cuda" and options.precision == "bf16")
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = [{**row} for row in read_csv(table)] if table.exists() else []
    for seed in options.seeds:
        for name in options.networks:
            torch.manual_seed(seed)
            is_peer = name == "transolver"
            size, rate = (options.peer_size, options.peer_rate) if is_peer else (options.size, options.rate)
            network = make_network(name, size, options.tokens).to(device)
            row: Row = {"network": name, "seed": seed, "seconds": options.seconds, "rate": rate}
            row |= {"width": size[0], "blocks": size[1], "parameters": sum(p.numel() for p in network.parameters())}
            row |= train(network, training, options.seconds, rate, autocast)
            row |= scores(network, make_batches(test, 1), autocast)
            print(row, flush=True)
            rows = [*(old for old in rows if (old["network"], str(old["seed"])) != (name, str(seed))), row]
            write_csv(table, rows)


if __name__ == "__main__":
    main()
