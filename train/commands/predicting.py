"""`diffnet predict`, `diffnet evaluate` and `diffnet robustness`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffnet.data.folders.files import listing
from diffnet.data.options import Base
from diffnet.geometry.elements.labels import LEAST_AREA
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import as_text, check_folder_path, csv_text, make_folder, write_atomically
from diffnet.geometry.mesh.vtk import read_ahead
from diffnet.interrupts import ExitAtCtrlC
from diffnet.options import option
from diffnet.train.commands.many_files import GrowingTable, Item, end, read_rows, settings_of, work_through
from diffnet.train.commands.mesh_files import files_of_first, find_meshes, is_batch, output_files, report_file
from diffnet.train.commands.options import (
    MESH_FILES,
    PATTERN,
    CheckpointOption,
    ConditionOption,
    LabelsAtOption,
    MapFormatOption,
    RunOptions,
    checkpoint_option,
    described_input,
    options_of_many_files,
    parameters,
    with_parameters,
)
from diffnet.train.commands.training import find_data, find_sets, print_results, without_unusable
from diffnet.train.console import console
from diffnet.train.options import TASK_OPTIONS, TrainOptions, tasks_with
from diffnet.train.options.labels import FurtherScore
from diffnet.train.options.task_options import SetOptions

if TYPE_CHECKING:
    from diffnet.train.tasks.task import NetworkInput, Predicted, Task


@with_parameters(*parameters(SetOptions, ("files",), changes={"files": PATTERN}), *options_of_many_files())
def predict(
    meshes: Annotated[
        list[Path], typer.Argument(metavar="PATH…", help=f"{MESH_FILES} files, or folders to search for them.")
    ],
    checkpoint: CheckpointOption,
    out: Path = option(
        ...,
        "File to write: a mesh, also with the arrays of the input (.ply or .vtp), or labels as .txt, .npy, .csv, .json "
        "(not at edges), .seg (at faces) or .eseg (at edges). Numbers of a regression are .ply, .vtp, .npy or .csv. "
        "For several meshes or a folder, --out is a folder, and files keep their paths below the folder that all "
        "meshes have in common. Outputs for whole meshes are one table (.csv).",
    ),
    form: str | None = option(
        None,
        "Form of the files in a folder, such as txt. Default: vtp for VTK files, else ply, or csv for numbers at "
        "edges.",
        flag="--format",
        metavar="EXTENSION",
    ),
    html: Path | None = option(None, "Also write an interactive page for a browser."),
    png: Path | None = option(None, "Also write a picture."),
    probabilities: Path | None = option(
        None,
        "Also write the probabilities of all classes at each element: NumPy arrays (.npz) or a table (.csv). Meshes of "
        "--out then have them, too.",
    ),
    threshold: float | None = option(
        None,
        "Of two classes: elements have the second one from this probability on. By default, 0.5.",
        least=0,
        most=1,
        metavar="PROBABILITY",
    ),
    smooth: float = option(
        0.0, "Weight of short boundaries between the labels. 1 is a good start.", least=0, metavar="WEIGHT"
    ),
    instances: bool = option(
        False, "Also number the connected parts of each label, in .ply, .vtp, .npy, .csv or .json files."
    ),
    least_area: float = option(
        LEAST_AREA,
        "With --instances: parts with a smaller share of the area of the mesh get the label around them.",
        least=0,
        most=1,
        metavar="SHARE",
    ),
    background: str | None = option(
        None,
        "With --instances: a class, by name or number, without them. It and debris get 0, instances 1, 2, …",
        metavar="CLASS",
    ),
    class_names: str | None = option(
        None, "Names of the classes, for a checkpoint that has none.", metavar="NAME,NAME…"
    ),
    labels_at: LabelsAtOption = None,
    condition: ConditionOption = None,
    **options: Any,
) -> None:
    """Predict the labels or the numbers of meshes with a trained network.

    Labels are the numbers of the training files. If these files have names, classes are numbered from 0. A PLY file has
    the names in comments.

    Of several meshes, one that can't be used does not stop the others. It is listed at the end, and the exit code is 1.
    report.csv in the folder, or TABLE.report.csv beside a table, lists all meshes with reasons and times. With --cache,
    worker processes preprocess the next meshes meanwhile. Under torchrun, all ranks share the meshes.
    """
    reading = read_ahead(meshes)
    with ExitAtCtrlC():
        from diffnet.data.feature_names import array_names
        from diffnet.data.folders.rows import conditions_of, with_fields
        from diffnet.data.folders.sources import array_files
        from diffnet.data.numbers import check_vertex_numbers
        from diffnet.geometry import load_mesh
        from diffnet.geometry.elements.labels import MAX_WEIGHT
        from diffnet.train.device import pick_device
        from diffnet.train.inference.network_input import load_network
        from diffnet.train.inference.predict import predictor
        from diffnet.train.orientation import is_tilted, warn_of_tilted
        from diffnet.train.ranks import connected
        from diffnet.train.tasks.task import Predicted, task_named

    cache, jobs, resume = options["cache"], options["jobs"], options["resume"]
    if not smooth <= MAX_WEIGHT:
        raise OptionError(f"--smooth should be at most {MAX_WEIGHT:g}, got {smooth}")
    with connected() as ranks:
        network = load_network(checkpoint, class_names and [name.strip() for name in class_names.split(",")], labels_at)
        expected = described_input(checkpoint, network)
        task = task_named(expected.options.task).on_meshes()
        sources = files_of_first(ranks, lambda: find_meshes(meshes, out, options["files"]))
        files = output_files(meshes, sources, out, task.formats(expected.labels_at), form, expected.labels_at)
        conditions = conditions_of(sources, condition or [], expected.options.condition_names)
        report = report_file(out) if is_batch(meshes) else None
        if threshold is not None and (smooth > 0 or len(expected.label_names) != 2):
            why = "it doesn't go with --smooth" if smooth > 0 else f"it has {len(expected.label_names)}"
            raise OptionError(f"--threshold is for a network with two classes; {why}")
        requests = {"--threshold": threshold is not None, "--smooth": smooth > 0, "--instances": instances}
        requests["--probabilities"] = probabilities is not None
        _check_classes(requests, task, expected)
        _check_instances(instances, files[0], least_area, background)
        least = least_area if instances else None
        behind = None if background is None else _class_of(background, expected)
        views = [path for path in (html, png, probabilities) if path is not None]
        if resume and (report is None or views):
            raise OptionError(
                "--resume is for a folder of meshes or several of them, without --html, --png and --probabilities, "
                "which need all predictions"
            )
        all_files = [*files, *views, *([] if report is None else [report])]
        check_outputs(all_files, [*sources, checkpoint])
        check_suffix("--html", html, ".html")
        check_suffix("--png", png, ".png")
        check_suffix("--probabilities", probabilities, ".npz", ".csv")
        for folder in {path.parent for path in all_files}:
            check_folder_path(folder)
        settings = expected.options
        one_table = not task.formats(expected.labels_at)
        results = files * len(sources) if one_table else files
        items = [
            Item(
                (source,),
                result,
                tuple(place for name in array_names(settings.features) for place in array_files(source, name)),
                str(values or ""),
            )
            for source, result, values in zip(sources, results, conditions, strict=True)
        ]
        header = task.table([], expected)[0]
        is_resumed = resume and one_table and files[0].is_file()
        earlier = {row[0]: row for row in read_rows(files[0], header)} if is_resumed else {}
        numbers = {as_text(str(source)): i for i, source in enumerate(sources)}
        rows = {numbers[name]: row for name, row in earlier.items() if name in numbers}
        table = GrowingTable(files[0], header, rows) if one_table else None
        device = pick_device(options["device"])
        predicted_of = predictor(network, device, cache, probabilities is not None, smooth, least, behind, threshold)
        predictions: dict[int, Predicted] = {}
        tilted: list[str] = []
        written: list[Path] = []

        def work(i: int) -> Any:
            predicted = predicted_of(sources[i], with_fields(sources[i], conditions[i], settings.condition_names))
            for file in (files[i], probabilities) if expected.labels_at == "vertices" else ():
                if file is not None and file.suffix.lower() not in (".ply", ".vtp"):  # which hold the vertices
                    check_vertex_numbers(predicted.mesh, file, "Write a .ply file, or save the mesh as")
            row = task.table([predicted], expected)[1] if one_table else None
            if not one_table:
                make_folder(files[i].parent)
                task.write_file(files[i], predicted, expected)
            tilt = is_tilted(predicted.mesh, settings.upright)
            shown = None if not views else predicted if ranks.is_alone else predicted[1:]  # a mesh is large
            return row, tilt, shown

        def keep(i: int, value: Any) -> None:
            row, tilt, shown = value
            if tilt:
                tilted.append(str(sources[i]))
            if table is not None:
                table.add(i, row)
            else:
                written.append(files[i])
            if shown is not None:
                predictions[i] = shown if ranks.is_alone else Predicted(load_mesh(sources[i]), *shown)

        ahead = None
        if cache is not None and len(sources) > 1 and expected.normalize and settings.max_faces is None:
            ahead = settings.preprocessing, cache, jobs, device
        reading.join()
        failed = work_through(
            items,
            work,
            ranks,
            "predicting",
            report=report,
            settings=settings_of(
                checkpoint,
                class_names=class_names,
                labels_at=labels_at,
                smooth=smooth,
                **({} if threshold is None else {"threshold": threshold}),
                files=files[0].suffix,
                least_area=least,
                background=background,
            ),
            resume=resume,
            table=table,
            keep=keep,
            ahead=ahead,
        )
        warn_of_tilted(tilted)
        if table is not None and table.rows and ranks.is_first:
            table.write()
            written.append(table.path)
        if predictions:
            for path in views:
                make_folder(path.parent)
                written.append(path)
            shown_ones = [predictions[i] for i in sorted(predictions)]
            task.write_views(shown_ones, expected, html, png)
            if probabilities is not None:
                _write_probabilities(probabilities, shown_ones, expected.label_names)
    end(written, report, failed, ranks)


def _check_classes(requests: dict[str, bool], task: Task[Any, Any], network: NetworkInput) -> None:
    """Raises OptionError for requests, by flag, that the outputs of a network don't have."""
    for name, is_given in requests.items():
        if is_given and task.standardized:
            raise OptionError(f"{name} is for networks that predict classes, and this one predicts numbers")
        if is_given and name != "--probabilities" and network.labels_at == "meshes":
            raise OptionError(f"{name} is for networks that label vertices, faces or edges; this one classifies meshes")


def _check_instances(instances: bool, file: Path, least_area: float, background: str | None) -> None:
    """Raises OptionError for files without instances, and for options of instances without them."""
    if instances and file.suffix.lower() in (".txt", ".seg", ".eseg"):
        raise OptionError(
            "--instances needs files with two numbers for each element: .ply, .vtp, .npy, .csv or .json; "
            f"got {file.suffix}"
        )
    for name, is_given in {"--least-area": least_area != LEAST_AREA, "--background": background is not None}.items():
        if is_given and not instances:
            raise OptionError(f"{name} is for --instances; add it")


def _class_of(text: str, network: NetworkInput) -> int:
    """The output channel of a class, which is given by its name or its number. Raises OptionError."""
    for names in (network.label_names, [str(number) for number in network.label_numbers]):
        if text in names:
            return names.index(text)
    raise OptionError(
        f"--background is {text}, which is no class of the network; it has {listing(network.label_names)}"
    )


def _write_probabilities(path: Path, predictions: Sequence[Predicted], label_names: list[str]) -> None:
    """Write the probabilities of all classes.

    `.npz`: an array (N, C) float32 for each mesh, named by its file, and `label_names` (C,)
    `.csv`: lines with the file, the number of the element from 0, and a probability for each class
    """
    import io

    import numpy as np

    arrays: dict[str, Any] = {
        as_text(p.mesh.name): p.probabilities.numpy() for p in predictions if p.probabilities is not None
    }
    if path.suffix.lower() == ".csv":
        rows: list[list[Any]] = [["file", "element", *label_names]]
        for name, shares in arrays.items():
            rows += ([name, i, *(f"{share:.6g}" for share in row)] for i, row in enumerate(shares.tolist()))
        write_atomically(path, csv_text(rows))
        return
    content = io.BytesIO()
    np.savez_compressed(content, **arrays, label_names=np.array(label_names))
    write_atomically(path, content.getvalue())


def check_outputs(written: Sequence[Path], read: Sequence[Path]) -> None:
    """Raises OptionError if a file would be written twice, or would overwrite an input."""
    sources = {(status.st_dev, status.st_ino): source for source in read if (status := _status(source))}
    seen: set[Path] = set()
    for path in written:
        if path in seen:
            raise OptionError(f"{path}: two results would be written to this file")
        seen.add(path)
        status = _status(path)
        source = sources.get((status.st_dev, status.st_ino)) if status else None
        if source is not None:
            of = "this file" if path == source else f"this is the file {source}, which"
            raise OptionError(f"{path}: {of} is read and would be overwritten")


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # there is no file, and reading or writing it gives the reason otherwise
        return None


def check_suffix(option: str, path: Path | None, *suffixes: str) -> None:
    """Raises OptionError if an option is given, and its file has another extension than these."""
    if path is not None and path.suffix.lower() not in suffixes:
        raise OptionError(f"{option} should be a {' or '.join(suffixes)} file, got {path}")


_SET_OPTIONS = "layout", "files", "pairs", "base", "registered"
_NOT_FOR_MAPS = "save_maps", "format", "score", "files", "labels", "targets", "zoomout", "skip_unusable"


@with_parameters(
    *parameters(SetOptions, _SET_OPTIONS),
    *parameters(TrainOptions, ("labels", "targets", "zoomout"), changes={"labels": {"default": None}}),
    *parameters(RunOptions, ("device", "cache", "jobs", "skip_unusable"), panel=None),
)
def evaluate(
    data: list[str] = option(
        ...,
        "Folder of labeled meshes, of shards or of meshes in pairs, a table of meshes (.csv or .tsv), or the name of "
        "the built-in set of the network's task: bodies or shapes.",
    ),
    out: Path = option(..., "Folder for results.json, predictions.html and a chart."),
    checkpoint: Annotated[Path | None, checkpoint_option()] = None,
    score: FurtherScore | None = option(
        None,
        "A further score: teeth for TLA, TSA and TIR of the challenge 3DTeethSeg'22; or roc-auc or average-precision "
        "for more than two classes.",
    ),
    maps: Path | None = option(
        None,
        "Instead of a network: score maps of any program, FIRST_SECOND.txt, .csv, .npy or .map with a vertex of the "
        "second mesh of a pair for each vertex of the first, or a negative number for none.",
        metavar="FOLDER",
    ),
    maps_base: Base = option("auto", "Number of the first vertex in the files of --maps, 0 or 1; auto finds it."),
    save_maps: Path | None = option(
        None, "Also write the map of each pair, as `diffnet match` does.", metavar="FOLDER"
    ),
    form: MapFormatOption = None,
    **options: Any,
) -> None:
    """Score a trained network on labeled meshes or on pairs of meshes, without training.

    The meshes in test/ or of test.txt are scored, and no others are read. Without a split, all are scored. Of the
    generated set shapes, it is the test part with the seed of the training. Labels, and columns of targets, match by
    name. Labels at other elements than the network's are converted. --targets is for regression, and --labels for
    classes; the default is that of the training. --pairs, --base, --registered, --zoomout and
    --save-maps are for correspondence.
    """
    if (checkpoint is None) == (maps is None):
        raise OptionError("give a network with --checkpoint, or maps with --maps")
    if maps is not None:
        others = {"save_maps": save_maps, "format": form, "score": score, **options}
        if unused := [name for name in _NOT_FOR_MAPS if others[name]]:
            raise OptionError(f"--{unused[0].replace('_', '-')} is for a network; leave it out with --maps")
        _score_maps(data, maps, out, maps_base, options)
        return
    assert checkpoint is not None
    with ExitAtCtrlC():
        from diffnet import DiffusionNet
        from diffnet.train.device import pick_device
        from diffnet.train.fine_tuning import load_any_network
        from diffnet.train.inference.scoring import check_empty, run_evaluation
        from diffnet.train.ranks import connected
        from diffnet.train.tasks.task import task_named

    targets, labels, zoomout, cache = (options[name] for name in ("targets", "labels", "zoomout", "cache"))
    with connected() as ranks:
        device = pick_device(options["device"])
        ranks.shared(lambda: check_empty(out))
        network = load_any_network(checkpoint)
        if network.metadata.get("kind") == "original":
            network = DiffusionNet.load(checkpoint)  # a file of the original itself, without classes, is refused
        expected = described_input(checkpoint, network)
        task = task_named(expected.options.task)
        requests = {name: options[name] for name in ("targets", "labels", "pairs", "registered", "zoomout")}
        requests["base"] = options["base"] != "auto"
        for name, is_given in requests.items():
            if is_given and task.name not in (tasks := tasks_with(name)):
                raise OptionError(f"--{name} is for {' and '.join(tasks)}, and the network is one of {task.name}")
        make_folder(cache)
        places = find_sets(data, task.name)
        seed = network.metadata.get("seed")
        if not isinstance(seed, int) or seed < 0:
            seed = 0
            if data == places == [TASK_OPTIONS[task.name].builtin]:
                unknown = f"{checkpoint} does not record the seed of its training"
                console.print(f"{unknown}; {data[0]} are those of seed 0", soft_wrap=True)
        how = SetOptions(
            **{name: options[name] for name in _SET_OPTIONS},
            cache=cache,
            targets=targets or expected.options.targets,
            labels=labels or expected.options.labels,
            conditions=expected.options.conditions,
            seed=seed,
            channels=len(expected.label_names),
            needs_train=False,
            jobs=options["jobs"],
        )
        where: dict[str, Any] = {"device": device, "cache_dir": cache, "jobs": how.jobs, "ranks": ranks, "score": score}
        where |= {"console": console, "zoomout": zoomout, "save_maps": save_maps, "map_format": form or "txt"}

        def run() -> dict[str, Any]:
            dataset = ranks.after_first(lambda: task.load(places, how, expected.options))
            console.print(f"{task.size(dataset)} to score{f', divided {dataset.source}' if dataset.source else ''}")
            for text in dataset.left_out:
                console.print(f"left out: {text}", soft_wrap=True)
            return run_evaluation(dataset, network, out, **where)

        results = without_unusable(options["skip_unusable"], how.without, run)
    if ranks.is_first:
        print_results(task, results, out)


def _score_maps(data: list[str], maps: Path, out: Path, base: Base, options: Mapping[str, Any]) -> None:
    """`diffnet evaluate` of maps, without a network."""
    with ExitAtCtrlC():
        from diffnet.train.inference.scoring import score_maps
        from diffnet.train.tasks.correspondence import TASK

    cache, places = options["cache"], find_sets(data, TASK.name)
    make_folder(cache)
    how = SetOptions(**{name: options[name] for name in _SET_OPTIONS}, cache=cache, needs_train=False)
    pairs = TASK.load(places, how, TrainOptions(task=TASK.name, partial=True, normalize="none")).pairs
    results = score_maps(pairs, maps, out, base=base, cache_dir=cache, jobs=options["jobs"], console=console)
    print_results(TASK, results, out)


@with_parameters(*parameters(SetOptions, ("layout", "files")), *parameters(RunOptions, ["device"], panel=None))
def robustness(
    checkpoint: Annotated[Path, checkpoint_option("A run of diffnet train segmentation, its best.pt or last.pt.")],
    data: str = option(..., "The data set of the run: its folder, or bodies."),
    out: Path = option(..., "Folder for results.json."),
    **options: Any,
) -> None:
    """Measure how many predicted labels stay the same when the test meshes change.

    The changes are scaling, rotation, renumbering, mirroring, subdivision, decimation, point clouds, noise, missing
    faces, a cut-off part and triangle soup.
    """
    with ExitAtCtrlC():
        from diffnet.train.device import pick_device
        from diffnet.train.inference.robustness import run_robustness

    device, how = pick_device(options["device"]), {name: options[name] for name in ("layout", "files")}
    run_robustness(checkpoint, find_data(data, "segmentation"), out, device, console, **how)
