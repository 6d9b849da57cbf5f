"""`diffnet train segmentation`. Typer reads the annotations of the command, so they are not strings."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from diffnet.data.folders.layouts import Layout
from diffnet.data.labeled import LabelsAt
from diffnet.train.commands.options import RunOption
from diffnet.train.commands.training import Loaded, check_data, run_command, training_command
from diffnet.train.options import TrainOptions
from diffnet.train.tasks.commands.labels import (
    LABELS_PANEL,
    ClassWeightsOption,
    IgnoreOption,
    LabelLossOption,
    LabelSmoothingOption,
    MirrorLabelsOption,
    ScoreOption,
    with_label_options,
)
from diffnet.train.tasks.options.segmentation import OPTIONS

OutputsAtOption = Annotated[
    LabelsAt | None,
    typer.Option(
        help="Elements that the network labels; other labels are converted. Default: those of the labels.",
        rich_help_panel=LABELS_PANEL,
    ),
]


@training_command("segmentation")
def train(
    data: Annotated[
        str, typer.Option(help="Folder of labeled meshes or of shards, or [bold]figures[/], the generated set.")
    ],
    out: RunOption,
    layout: Annotated[Layout, typer.Option(help="Layout of the folder; auto detects it.")] = "auto",
    outputs_at: OutputsAtOption = None,
    label_loss: LabelLossOption = "cross-entropy",
    label_smoothing: LabelSmoothingOption = 0.0,
    score: ScoreOption = "accuracy",
    ignore: IgnoreOption = None,
    class_weights: ClassWeightsOption = None,
    mirror_labels: MirrorLabelsOption = None,
    **shared: Any,
) -> None:
    """Train a segmentation network, and report its results on the test meshes.

    Writes to --out: last.pt and best.pt (checkpoints), metrics.csv, tensorboard/, and at the end results.json,
    confusion.png, curves.png and predictions.html.

    Ctrl-C and SIGTERM stop the run. With --resume, it continues after the last complete epoch with its options, so only
    --data and --out are repeated, and --layout if it was given. Only --epochs may change, with --schedule step.

    A run locks its folder. On network file systems without locks, start only one run in a folder.
    """

    def load(options: TrainOptions, before: Mapping[str, Any] | None) -> Loaded:
        from diffnet.data import figures, index_dataset, with_labels_at

        at = outputs_at if outputs_at or before is None else before["labels_at"]
        check_data(data, "segmentation")
        variant = OPTIONS.variant(data)
        if variant is not None:
            made = figures(seed=options.seed, shift=variant or None)
            return Loaded(with_labels_at(made, at or "vertices"), options)
        meshes = index_dataset(
            data, shared["cache"], layout, seed=options.seed, group_by=options.group_by, jobs=shared["jobs"]
        )
        return Loaded(meshes if at is None else with_labels_at(meshes, at), options)

    given = with_label_options(
        shared,
        ignore,
        label_loss=label_loss,
        label_smoothing=label_smoothing,
        score=score,
        class_weights=class_weights,
        mirror_labels=mirror_labels,
    )
    run_command("segmentation", load, out, given)
