"""`diffnet train segmentation`. Typer reads the annotations of the command, so they are not strings."""

from typing import Annotated, Any

import typer

from diffnet.data.folders.layouts import Layout
from diffnet.data.labeled import LabelsAt
from diffnet.train.commands.options import RunOption
from diffnet.train.commands.training import Loaded, run_command, training_command
from diffnet.train.options import TrainOptions
from diffnet.train.tasks.commands.labels import (
    ClassWeightsOption,
    IgnoreOption,
    LabelSmoothingOption,
    with_label_options,
)

OutputsAtOption = Annotated[
    LabelsAt | None,
    typer.Option(help="Elements that the network labels; other labels are converted. Default: those of the labels."),
]


@training_command("segmentation")
def train(
    data: Annotated[str, typer.Option(help="Folder of labeled meshes, or [bold]figures[/], the generated set.")],
    out: RunOption,
    layout: Annotated[Layout, typer.Option(help="Layout of the folder; auto detects it.")] = "auto",
    outputs_at: OutputsAtOption = None,
    label_smoothing: LabelSmoothingOption = 0.0,
    ignore: IgnoreOption = None,
    class_weights: ClassWeightsOption = None,
    **shared: Any,
) -> None:
    """Train a segmentation network, and report its results on the test meshes.

    Writes to --out: last.pt and best.pt (checkpoints), metrics.csv, tensorboard/, and at the end results.json,
    confusion.png, curves.png and predictions.html.

    Ctrl-C stops the run. The same command with --resume continues after the last complete epoch.

    A run locks its folder. On network file systems without locks, start only one run in a folder.
    """

    def load(options: TrainOptions) -> Loaded:
        from diffnet.data import figures, load_dataset, with_labels_at

        if data == "figures":
            return Loaded(with_labels_at(figures(seed=options.seed), outputs_at or "vertices"), options)
        meshes = load_dataset(data, layout, seed=options.seed, cache_dir=shared["cache"], labels_at=outputs_at)
        return Loaded(meshes, options)

    given = with_label_options(shared, label_smoothing, ignore, class_weights)
    run_command("segmentation", load, out, given)
