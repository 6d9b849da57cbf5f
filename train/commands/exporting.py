"""`diffnet export`, and `diffnet precompute --npz`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import make_folder, npz_bytes, write_atomically
from diffnet.interrupts import ExitAtCtrlC
from diffnet.train.commands.many_files import Item, end, work_through
from diffnet.train.commands.mesh_files import find_meshes, output_files, part_of
from diffnet.train.commands.options import CheckpointOption, LabelsAtOption, described_input
from diffnet.train.commands.predicting import check_outputs, check_suffix
from diffnet.train.console import console


def export(
    checkpoint: CheckpointOption,
    out: Annotated[Path, typer.Option(help="File to write (.pt2).")],
    labels_at: LabelsAtOption = None,
) -> None:
    """Write a network as a file of plain PyTorch operations, which runs without diffnet.

    `torch.export.load(FILE).module()` is the network. Its inputs are tensors, which `diffnet precompute --npz` writes.
    """
    check_suffix("--out", out, ".pt2")
    check_outputs([out], [checkpoint])
    with ExitAtCtrlC():
        from diffnet.train.export import export_network
        from diffnet.train.fine_tuning import load_any_network

    network = load_any_network(checkpoint, labels_at)
    make_folder(out.parent)
    export_network(network, out)
    console.print(f"wrote {out}", soft_wrap=True)


def write_inputs(
    context: typer.Context,
    paths: list[Path],
    npz: Path,
    checkpoint: Path | None,
    condition: list[str] | None,
    cache: Path,
    part: str | None,
) -> None:
    """Write the inputs of an exported network for each mesh. Raises OptionError for options that it decides."""
    if checkpoint is None:
        raise OptionError("--npz needs --checkpoint, the network that takes the arrays")
    names = ("paths", "npz", "checkpoint", "condition", "cache", "part")
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name != "DEFAULT" and option.name not in names:
            raise OptionError(f"--npz preprocesses as the network of --checkpoint needs it; leave out {option.opts[0]}")
    with ExitAtCtrlC():
        from diffnet.data.folders.rows import conditions_of, with_fields
        from diffnet.geometry import load_mesh
        from diffnet.train.export import exported_inputs
        from diffnet.train.fine_tuning import load_any_network
        from diffnet.train.inference.predict import input_sample
        from diffnet.train.ranks import connected

    network = load_any_network(checkpoint)
    expected = described_input(checkpoint, network)
    sources = find_meshes(paths, without=npz)
    files = output_files(paths, sources, npz, [".npz"], None, expected.labels_at)
    meshes = part_of(sources, part)
    items = [Item((source,), file) for source, file in zip(sources, files, strict=True) if source in meshes]
    check_outputs(files, [*sources, checkpoint])
    columns = expected.options.condition_names
    conditions = conditions_of([item.read[0] for item in items], condition or [], columns)

    def work(i: int) -> None:
        mesh, values = items[i].read[0], with_fields(items[i].read[0], conditions[i], columns)
        sample = input_sample(load_mesh(mesh), expected, cache, conditions=values)
        arrays: dict[str, Any] = exported_inputs(network, sample.features, sample.operators, sample.conditions)
        make_folder(items[i].result.parent)
        write_atomically(items[i].result, npz_bytes({name: x.numpy() for name, x in arrays.items()}))

    written: list[Path] = []
    with connected() as ranks:
        failed = work_through(items, work, ranks, "preprocessing", keep=lambda i, _: written.append(items[i].result))
    end(written, None, failed, ranks)
