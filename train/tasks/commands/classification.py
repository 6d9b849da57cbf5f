"""`diffnet train classification`. Typer reads the annotations of the command, so they are not strings."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from diffnet.train.commands.options import RunOption
from diffnet.train.commands.training import Loaded, check_data, run_command, training_command
from diffnet.train.options import TrainOptions
from diffnet.train.tasks.commands.labels import (
    ClassWeightsOption,
    IgnoreOption,
    LabelLossOption,
    LabelSmoothingOption,
    MirrorLabelsOption,
    ScoreOption,
    with_label_options,
)
from diffnet.train.tasks.options.classification import OPTIONS


@training_command("classification")
def train(
    data: Annotated[
        str,
        typer.Option(
            help="Folder of classes or of shards, a table file,label (.csv), or [bold]shapes[/], the generated set of "
            "classes."
        ),
    ],
    out: RunOption,
    label_loss: LabelLossOption = "cross-entropy",
    label_smoothing: LabelSmoothingOption = 0.2,
    score: ScoreOption = "accuracy",
    ignore: IgnoreOption = None,
    class_weights: ClassWeightsOption = None,
    mirror_labels: MirrorLabelsOption = None,
    **shared: Any,
) -> None:
    """Train a network that classifies whole meshes, and report its results on the test meshes.

    --data holds CLASS/train/ and CLASS/test/, or CLASS/ with meshes, or a table labels.csv with lines file,label or
    file,label,split. Without a split, a random fifth of each class is for testing.

    For --out, Ctrl-C and --resume, see `diffnet train segmentation`.
    """

    def load(options: TrainOptions, before: Mapping[str, Any] | None) -> Loaded:
        from diffnet.data import index_classes, shapes

        check_data(data, "classification")
        variant = OPTIONS.variant(data)
        if variant is not None:
            return Loaded(shapes(seed=options.seed, shift=variant or None), options)
        return Loaded(
            index_classes(data, shared["cache"], seed=options.seed, group_by=options.group_by, jobs=shared["jobs"]),
            options,
        )

    given = with_label_options(
        shared,
        ignore,
        label_loss=label_loss,
        label_smoothing=label_smoothing,
        score=score,
        class_weights=class_weights,
        mirror_labels=mirror_labels,
    )
    run_command("classification", load, out, given)
