"""`diffnet robustness`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from diffnet.interrupts import ExitAtCtrlC
from diffnet.train.commands.options import RunOptions, checkpoint_option, parameters, with_parameters
from diffnet.train.console import console


@with_parameters(*parameters(RunOptions, ["device"], panel=None))
def robustness(
    checkpoint: Annotated[Path, checkpoint_option("A run of diffnet train segmentation, its best.pt or last.pt.")],
    data: Annotated[str, typer.Option(help="The data set of the run: its folder, or figures.")],
    out: Annotated[Path, typer.Option(help="Folder for results.json.")],
    **options: Any,
) -> None:
    """Measure how many predicted labels stay the same when the test meshes change.

    The changes are scaling, rotation, renumbering, mirroring, subdivision, decimation, point clouds, noise, missing
    faces, a cut-off part and triangle soup.
    """
    with ExitAtCtrlC():
        from diffnet.train.device import pick_device
        from diffnet.train.inference.robustness import run_robustness

    run_robustness(checkpoint, data, out, pick_device(options["device"]), console)
