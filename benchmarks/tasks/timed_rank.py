"""Commands of diffnet on one rank, and the times of the steps of `diffnet train`. `scaling` starts this.

    torchrun --nproc-per-node 2 -m diffnet.benchmarks.tasks.timed_rank FOLDER

FOLDER/commands.json is a list of commands, which run one after another. FOLDER/rank-R.jsonl gets a line for each.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import all_reduce

from diffnet.geometry.processes import take_phases
from diffnet.interrupts import raise_at_sigterm
from diffnet.train import cli, loop, run
from diffnet.train.checkpoint import Checkpoint
from diffnet.train.place import place


class Times:
    """When the steps of a training ended on this rank, and when it began and ended to exchange gradients.

    On a GPU, a time is an event in its stream. So the CPU runs ahead of the GPU as it does without them.

    sent: bytes of one exchange
    """

    def __init__(self, device: torch.device) -> None:
        self.sent = 0
        self._device = device
        self._steps: list[tuple[int, Any]] = []  # with the epoch of each, from 0
        self._exchanges: list[tuple[Any, Any]] = []  # one for each step, if there are several ranks
        self._last: tuple[Any, Any, int] | None = None  # and its bytes

    def after_step(self, epochs: float) -> None:
        self._steps.append((math.ceil(epochs) - 1, self._now()))
        if self._last is not None:  # what follows the last step of an epoch is no exchange of gradients
            *times, self.sent = self._last
            self._exchanges.append((times[0], times[1]))

    def exchange(self, sums: Tensor, reduce: Callable[[Tensor], Any]) -> None:
        begun = self._now()
        reduce(sums)
        self._last = begun, self._now(), sums.nbytes

    def epochs(self) -> list[dict[str, list[float]]]:
        """For each epoch, the seconds from step to step, and those of all exchanges."""
        found: list[dict[str, list[float]]] = []
        exchanges = iter(self._exchanges)
        for i, (epoch, ended) in enumerate(self._steps):
            while len(found) <= epoch:
                found.append({"steps": [], "exchanges": []})
            if i > 0 and self._steps[i - 1][0] == epoch:
                found[epoch]["steps"].append(self._seconds(self._steps[i - 1][1], ended))
            found[epoch]["exchanges"] += [self._seconds(*times) for times in [next(exchanges, None)] if times]
        return found

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, begun: Any, ended: Any) -> float:
        return float(begun.elapsed_time(ended) / 1000 if self._device.type == "cuda" else ended - begun)


def timed(command: list[str]) -> dict[str, Any]:
    """Run a command in this process. Raises SystemExit if it fails."""
    trainings: list[Times] = []

    def train(*arguments: Any, device: torch.device, after_step: Callable[[float], Any], **options: Any) -> Checkpoint:
        times = Times(device)
        trainings.append(times)

        def after(epochs: float) -> None:
            times.after_step(epochs)
            after_step(epochs)

        return loop.train(*arguments, device=device, after_step=after, **options)

    def reduce(sums: Tensor) -> None:
        trainings[-1].exchange(sums, all_reduce)

    take_phases()  # of commands before
    started = time.perf_counter()
    with (
        patch.object(run, "train", train),
        patch("diffnet.train.epoch.all_reduce", reduce),
        patch.object(sys, "argv", ["diffnet", *command]),
    ):
        try:
            cli.main()
        except SystemExit as end:
            if end.code:
                raise
    seconds = time.perf_counter() - started
    epochs = [epoch for times in trainings for epoch in times.epochs()]
    sent = sum(times.sent for times in trainings)
    return {"seconds": seconds, "epochs": epochs, "sent": sent, "phases": take_phases()}


def main() -> None:
    """Run all commands of a folder."""
    raise_at_sigterm()
    folder, rank = Path(sys.argv[1]), place().rank
    (folder / f"rank-{rank}.pid").write_text(f"{os.getpid()}")
    with (folder / f"rank-{rank}.jsonl").open("w") as file:
        for command in json.loads((folder / "commands.json").read_text()):
            print(json.dumps(timed(command)), file=file, flush=True)
            gc.collect()  # a run keeps its samples and graphs in cycles
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
