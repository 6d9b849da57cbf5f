"""`diffnet train correspondence`. Typer reads the annotations of the command, so they are not strings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer

from diffnet.train.commands.options import BaseOption, PairsOption, RunOption, ZoomOutOption, checked_features
from diffnet.train.commands.training import Loaded, check_data, run_command, training_command
from diffnet.train.options import TrainOptions
from diffnet.train.tasks.options.correspondence import MAX_STRETCH, OPTIONS, Method

CHANNELS: dict[Method, int] = {"supervised": 128, "unsupervised": 256}  # features that a network computes, by default
TRAINED_PAIRS = 10_000  # in all epochs together, by default

MethodOption = Annotated[
    Method, typer.Option(help="supervised learns from correspondences, unsupervised from pairs without any.")
]
PairFeaturesOption = Annotated[
    str | None,
    typer.Option(
        callback=checked_features,
        metavar="PART+PART…",
        help="Input features, see `diffnet train segmentation`. By default curvature+log-hks. If unsupervised, "
        "xyz+normals+wks, or wks alone for training meshes without a common orientation.",
    ),
]
ChannelsOption = Annotated[
    int | None, typer.Option(min=1, help="Features that the network computes. By default 128; 256 if unsupervised.")
]
MapKOption = Annotated[
    int, typer.Option("--map-k", min=1, max=300, help="Eigenpairs of the functional maps. If unsupervised, 200.")
]
FeatureScaleOption = Annotated[
    float,
    typer.Option(min=0, metavar="SIZE", help="Scale features to this root mean square; 0: never. If unsupervised, 1."),
]
AlignOption = Annotated[
    bool | None,
    typer.Option(
        "--align/--no-align",
        help="Give xyz, normals and vectors in the principal axes of each mesh. By default, yes if the method is "
        "unsupervised, --features has them, and the training meshes have no common orientation.",
    ),
]
StretchOption = Annotated[
    float,
    typer.Option(
        min=0,
        max=MAX_STRETCH,
        metavar="S",
        help="Also train on copies of other proportions, each scaled along random axes by exp(−S) to exp(S).",
    ),
]
PairKOption = Annotated[int, typer.Option("--k", min=1, help="Eigenpairs of the network. If unsupervised, 200.")]
PairEpochsOption = Annotated[
    int | None, typer.Option("--epochs", min=1, help="Passes over the training pairs. By default 10,000 pairs in all.")
]
BatchPairsOption = Annotated[int, typer.Option("--batch-pairs", min=1, help="Pairs per step, at least one per rank.")]


@training_command("correspondence", ("variants",))
def train(
    data: Annotated[
        list[str],
        typer.Option(
            help="Folder of meshes in pairs, also several times, or [bold]figures[/], the generated set of pairs."
        ),
    ],
    out: RunOption,
    method: MethodOption = "supervised",
    pairs: PairsOption = None,
    base: BaseOption = "auto",
    features: PairFeaturesOption = None,
    channels: ChannelsOption = None,
    map_k: MapKOption = 100,
    k: PairKOption = 128,
    feature_scale: FeatureScaleOption = 3.0,
    align: AlignOption = None,
    zoomout: ZoomOutOption = False,
    stretch: StretchOption = 0.0,
    epochs: PairEpochsOption = None,
    batch_meshes: BatchPairsOption = 1,
    **shared: Any,
) -> None:
    """Train a network whose features match pairs of meshes, and report the geodesic errors of the test pairs.

    The network is trained on functional maps. supervised needs correspondences: .vts files or template points for each
    mesh, or a map for each pair. unsupervised needs none.

    Writes to --out the files of `diffnet train segmentation`, and errors.csv, errors.png and pages of some pairs. For
    Ctrl-C and --resume, see there. Repeat --pairs and --base with --resume, if they were given.
    """

    def load(options: TrainOptions, before: Mapping[str, Any] | None) -> Loaded:
        import torch

        from diffnet.data import figure_pairs, load_pairs, paired_meshes
        from diffnet.data.pairs.shapes import with_stretched
        from diffnet.geometry.positions.rotation import is_common_orientation
        from diffnet.train.orientation import mesh_axes

        seed, cache = options.seed, shared["cache"]
        for path in data:
            check_data(path, "correspondence")
        bodies = OPTIONS.variant(data[0])
        if len(data) == 1 and bodies is not None:
            found = figure_pairs(seed=seed, bodies=bodies or "figures", jobs=shared["jobs"], cache_dir=cache)
        else:
            one, by = data if len(data) > 1 else data[0], options.group_by
            found = load_pairs(one, pairs, base=base, seed=seed, group_by=by, cache_dir=cache)
        trained = with_stretched(found, options.stretch) if options.stretch else found
        notes: tuple[str, ...] = ()
        if epochs is None and before is None:
            options = replace(options, epochs=max(1, round(TRAINED_PAIRS / len(trained.train_pairs))))
        if align is None and before is None and options.aligns:
            if is_common_orientation(torch.stack([mesh_axes(shape.mesh) for shape in found.train])):
                notes = (
                    "The training meshes stand and look the same way, so the network gets positions as they are. To "
                    "match meshes in other orientations, train with --features wks.",
                )
                options = replace(options, align=False, rotate=bool(options.rotate))
            elif features is None and not options.rotate:
                notes = (
                    "The training meshes show no common orientation, so the network gets no positions. To give it "
                    "positions in the principal axes of each mesh, train with --align.",
                )
                options = replace(options, features="wks")
        usual = CHANNELS[options.method] if before is None else len(before["label_names"])
        return Loaded(paired_meshes(trained, channels or usual), options, notes)

    own = {"method": method, "features": features, "map_k": map_k, "k": k, "feature_scale": feature_scale}
    own |= {"align": align, "zoomout": zoomout, "stretch": stretch, "channels": channels, "epochs": epochs}
    own["batch_meshes"] = batch_meshes
    run_command("correspondence", load, out, {**own, **shared})
