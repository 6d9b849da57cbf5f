"""`diffnet train regression`. Typer reads the annotations of the command, so they are not strings."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from diffnet.train.commands.options import RunOption, TargetsOption
from diffnet.train.commands.training import Loaded, run_command, training_command
from diffnet.train.options import TrainOptions
from diffnet.train.tasks.options.regression import Loss

LossOption = Annotated[
    Loss, typer.Option(help="Mean squared error, mean absolute error, or Huber's loss, which is between the two.")
]
ScalarTargetsOption = Annotated[
    bool,
    typer.Option(
        "--scalar-targets",
        help="All targets are numbers that stay as they are when a mesh is turned or mirrored. Columns that look like "
        "a vector, such as u_x, u_y, u_z, need this or --no-rotate.",
    ),
]


@training_command("regression")
def train(
    data: Annotated[
        str,
        typer.Option(help="Folder of meshes with targets, a table file,COLUMN,… of whole meshes (.csv), or shards."),
    ],
    out: RunOption,
    targets: TargetsOption = None,
    loss: LossOption = "mse",
    scalar_targets: ScalarTargetsOption = False,
    **shared: Any,
) -> None:
    """Train a network that predicts numbers, and report its results on the test meshes.

    Targets are at vertices, faces or edges, in files beside the meshes (--targets), or belong to whole meshes, in a
    table targets.csv with lines file,COLUMN,… or file,COLUMN,…,split. nan, and an empty cell, is a missing target.

    A folder is divided into training and test meshes by train/ and test/, by train.txt and test.txt, or at random.

    For --out, Ctrl-C and --resume, see `diffnet train segmentation`.
    """

    def load(options: TrainOptions, before: Mapping[str, Any] | None) -> Loaded:
        from diffnet.data import index_targets

        found = index_targets(
            data, shared["cache"], options.targets, seed=options.seed, group_by=options.group_by, jobs=shared["jobs"]
        )
        return Loaded(found, options)

    own = {"targets": targets, "loss": loss, "scalar_targets": scalar_targets}
    run_command("regression", load, out, {**own, **shared})
