"""`diffnet match`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffnet.data.folders.division import meshes_of_set
from diffnet.data.pairs.files import WRITTEN, map_names, pair_lines, write_map
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import check_folder_path, make_folder, npz_bytes, write_atomically
from diffnet.geometry.mesh.mesh import mesh_stem
from diffnet.interrupts import ExitAtCtrlC
from diffnet.options import option
from diffnet.train.commands.many_files import Item, end, settings_of, work_through
from diffnet.train.commands.mesh_files import report_file
from diffnet.train.commands.options import (
    MESH_FILES,
    CheckpointOption,
    MapFormatOption,
    described_input,
    options_of_many_files,
    parameters,
    with_parameters,
)
from diffnet.train.commands.predicting import check_outputs, check_suffix
from diffnet.train.console import console
from diffnet.train.options import TrainOptions

if TYPE_CHECKING:
    from diffnet.train.inference.matching import Matched
    from diffnet.train.tasks.task import NetworkInput

COLUMNS = ("first", "second")  # of the report


@with_parameters(*parameters(TrainOptions, ["zoomout"]), *options_of_many_files())
def match(
    checkpoint: CheckpointOption,
    out: Path = option(
        ...,
        "File to write (.txt, .csv or .npy): for each vertex of B, the number of a vertex of A, from 0. A folder for "
        "--pairs.",
    ),
    a: Annotated[Path | None, typer.Argument(metavar="A", help=f"A mesh: {MESH_FILES}.")] = None,
    b: Annotated[Path | None, typer.Argument(metavar="B", help="Another mesh, with any number of vertices.")] = None,
    pairs: Path | None = option(
        None,
        "Instead of A and B: a text file with two meshes in each line, as paths below its own folder or as names of a "
        "set. For each vertex of the first, FIRST_SECOND.txt in --out has a vertex of the second.",
        metavar="FILE",
    ),
    data: Path | None = option(
        None, "With --pairs: the folder of the meshes. By default that of the file.", metavar="FOLDER"
    ),
    form: MapFormatOption = None,
    functional_map: Path | None = option(
        None,
        "Also write the functional map, and the eigenpairs and areas of both meshes (.npz). A folder for --pairs.",
        metavar="FILE",
    ),
    html: Path | None = option(None, "Also write a page with B and A, where B has the colors and texture of A."),
    png: Path | None = option(None, "Also write a picture of B and A with the texture of A."),
    fine_tune: int = option(
        0, "First train on these two meshes for N steps, without supervision.", least=0, metavar="N"
    ),
    **options: Any,
) -> None:
    """Match two meshes: find a vertex of A for each vertex of B.

    Of the pairs in a file, one that can't be matched does not stop the others. report.csv in the folder lists all pairs
    with reasons and times. With --cache, worker processes preprocess the next meshes meanwhile.
    """
    options |= {"fine_tune": fine_tune, "functional_map": functional_map}
    if pairs is not None:
        if a is not None or html is not None or png is not None:
            raise OptionError("--pairs is without A, B, --html and --png")
        _match_pairs(pairs, data or pairs.parent, checkpoint, out, form, options)
        return
    if a is None or b is None:
        raise OptionError("give two meshes, A and B, or a file with --pairs")
    for name, is_given in {"--resume": options["resume"], "--data": data, "--format": form}.items():
        if is_given:
            raise OptionError(f"{name} is for --pairs")
    _match_two(a, b, checkpoint, out, {"html": html, "png": png}, options)


def _match_two(
    a: Path, b: Path, checkpoint: Path, out: Path, views: Mapping[str, Path | None], options: Mapping[str, Any]
) -> None:
    with ExitAtCtrlC():
        from diffnet.train.console import progress_bar
        from diffnet.train.device import pick_device
        from diffnet.train.inference.matching import load_matching_network, match_meshes
        from diffnet.train.ranks import ALONE
        from diffnet.train.report.transfer import pair_colors
        from diffnet.train.tasks.task import write_views

    if out.is_dir():
        raise OptionError(f"--out should be a file, and {out} is a folder")
    functional_map, fine_tune = options["functional_map"], options["fine_tune"]
    for name, view in views.items():
        check_suffix(f"--{name}", view, f".{name}")
    check_suffix("--functional-map", functional_map, ".npz")
    outputs = [path for path in (out, functional_map, *views.values()) if path is not None]
    check_outputs(outputs, [a, b, checkpoint])
    check_suffix("--out", out, *WRITTEN)
    for path in outputs:
        check_folder_path(path.parent)
    network = load_matching_network(checkpoint)
    _check_functional_map(functional_map, described_input(checkpoint, network))
    with progress_bar(console, disable=fine_tune == 0) as bar:
        shown = bar.add_task("fine-tuning", total=fine_tune)
        matched = match_meshes(
            a,
            b,
            network,
            pick_device(options["device"]),
            zoomout=options["zoomout"],
            fine_tune=fine_tune,
            cache_dir=options["cache"],
            after_step=lambda: bar.advance(shown),
        )
    _write(matched, out, functional_map)
    for path in outputs:
        make_folder(path.parent)
    matches, names = matched.matches, (mesh_stem(b), mesh_stem(a))
    meshes = [matched.b, matched.a]
    colors = pair_colors(matched.b, matched.a, matches)
    write_views(meshes, fields=colors, kind="colors", heading=" to ".join(names), titles=names, **views)
    partners = len(set(matches.tolist()) - {-1})
    text = f"{(matches >= 0).sum()} vertices of {b.name} have partners among {partners} vertices of {a.name}"
    console.print(text, soft_wrap=True)
    end(outputs, None, [], ALONE)


def _check_functional_map(path: Path | None, network: NetworkInput) -> None:
    """Raises OptionError if a functional map is wanted of a network that computes none."""
    if path is not None and network.options.partial:
        raise OptionError("--functional-map: a network for partial shapes computes no functional map")


def _write(matched: Matched, file: Path, functional_map: Path | None) -> None:
    """Write the functional map with its bases, if it has a path, and then the map of points."""
    c = matched.functional_map
    if functional_map is not None:
        assert c is not None
        arrays = {"functional_map": c.numpy()}
        for side, o, k in zip("ab", matched.operators, reversed(c.shape), strict=True):
            arrays[f"evals_{side}"], arrays[f"evecs_{side}"] = o.evals[0, :k].numpy(), o.evecs[:, :k].numpy()
            arrays[f"mass_{side}"] = o.mass.numpy()
        make_folder(functional_map.parent)
        write_atomically(functional_map, npz_bytes(arrays))
    write_map(file, matched.matches, [matched.a, matched.b])


def _match_pairs(
    pairs: Path, folder: Path, checkpoint: Path, out: Path, form: str | None, options: Mapping[str, Any]
) -> None:
    """Match the pairs in a file, each as in a set of pairs: the first mesh is B of `diffnet match`, the second is A."""
    with ExitAtCtrlC():
        from diffnet.train.device import pick_device
        from diffnet.train.inference.matching import load_matching_network, match_meshes
        from diffnet.train.ranks import connected

    functional_maps = options["functional_map"]
    for name, place in {"--out": out, "--functional-map": functional_maps}.items():
        if place is not None:
            if place.suffix and not place.is_dir():
                raise OptionError(f"{name} should be a folder for --pairs, got {place}")
            check_folder_path(place)
    with connected() as ranks:
        meshes, cache_dir = read_pairs(pairs, folder), options["cache"]
        report = report_file(out, COLUMNS)
        names = map_names(meshes)
        items = [Item(pair, out / f"{name}.{form or 'txt'}") for pair, name in zip(meshes, names, strict=True)]
        beside = [None if functional_maps is None else functional_maps / f"{name}.npz" for name in names]
        sources = dict.fromkeys(mesh for pair in meshes for mesh in pair)
        outputs = [*(item.result for item in items), *(path for path in beside if path), report]
        check_outputs(outputs, [*sources, checkpoint, pairs])
        network = load_matching_network(checkpoint)
        expected, device = described_input(checkpoint, network), pick_device(options["device"])
        _check_functional_map(functional_maps, expected)
        how = {name: options[name] for name in ("zoomout", "fine_tune")}

        def work(i: int) -> None:
            b, a = meshes[i]
            _write(match_meshes(a, b, network, device, cache_dir=cache_dir, **how), items[i].result, beside[i])

        ahead = None
        if cache_dir is not None and expected.normalize and ranks.is_alone:
            ahead = expected.options.preprocessing, cache_dir, options["jobs"], device
        more = {} if functional_maps is None else {"functional_maps": str(functional_maps)}
        failed = work_through(
            items,
            work,
            ranks,
            "matching",
            report=report,
            settings=settings_of(checkpoint, **how, **more),
            columns=COLUMNS,
            resume=options["resume"],
            ahead=ahead,
        )
    end([], report, failed, ranks)


def read_pairs(path: Path, folder: Path) -> list[tuple[Path, Path]]:
    """The meshes in the lines of a file, each pair once. Raises DataError, see `pair_lines`.

    folder: where their paths start, or a set with meshes of these names
    """
    meshes_in = cache(lambda place: {mesh_stem(mesh): mesh for mesh in meshes_of_set(place)})

    def mesh_of(name: str) -> Path:
        mesh = folder / name
        if mesh.is_file():
            return mesh
        return meshes_in(mesh.parent).get(mesh.name, meshes_in(mesh.parent).get(mesh_stem(mesh), mesh))

    return list(dict.fromkeys((mesh_of(first), mesh_of(second)) for _, (first, second) in pair_lines(path)))
