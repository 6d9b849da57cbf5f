"""Whether ranks can train together, whether a run can be resumed, and hashes of meshes, by which this is known."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch

from diffnet import __version__
from diffnet.data import LabeledMesh, LabeledMeshes
from diffnet.data.labeled import counted
from diffnet.data.stored import StoredMeshes, content_hash, names_of, remembered
from diffnet.geometry.errors import OptionError
from diffnet.train.checkpoint import Checkpoint, CheckpointError
from diffnet.train.options import TrainOptions
from diffnet.train.ranks import Ranks

FINGERPRINT = "2:"  # how those of `fingerprint_of` begin


def check_divided(options: TrainOptions, ranks: Ranks, meshes: int | None = None) -> None:
    """Raises OptionError if ranks can't share the batches.

    meshes: the number of meshes or pairs to fit, if it is known
    """
    world = ranks.place.world_size
    if world == 1:
        return
    if options.batch_meshes is not None and options.batch_meshes < world:
        raise OptionError(
            f"batch_meshes should be at least {world}, one mesh for each rank, got {options.batch_meshes}; it counts "
            "those of all ranks"
        )
    if meshes is not None and meshes < world:
        raise OptionError(
            f"there are {world} ranks, and only {counted(meshes, 'mesh or pair', 'meshes or pairs')} to train on"
        )


def check_alike(
    ranks: Ranks,
    meshes: LabeledMeshes,
    content: Sequence[Sequence[Sequence[str]]],
    fingerprint: str,
    options: TrainOptions,
    *reached: int | None,
) -> None:
    """Raises OptionError, which names a rank, if it has other data, options, versions or checkpoints than rank 0."""
    versions = f"diffnet {__version__}, PyTorch {torch.__version__}"
    facts = {"versions": versions, **options.as_dict(), "epochs and steps": reached, "data": fingerprint}
    first, *others = ranks.gathered(facts)
    for rank, other in enumerate(others, 1):
        differences = [name for name in first if first[name] != other.get(name)]
        if differences == ["data"]:  # all ranks get here
            names = [name for part in (meshes.train, meshes.test) for name in names_of(part)]
            hashes = [" ".join(entry) for part in content for entry in part]
            both = ranks.gathered(list(zip(names, hashes, strict=True)))
            pairs = zip_longest(both[0], both[rank])
            mesh = next((theirs or ours for ours, theirs in pairs if ours != theirs), None)
            which = "" if mesh is None else f": {mesh[0]} differs, and maybe others"
            raise OptionError(f"rank {rank} has other data than rank 0{which}")
        texts = [f"{n} is {other.get(n)!r} on rank {rank} and {first[n]!r} on rank 0" for n in differences]
        if texts:
            raise OptionError("; ".join(texts[:-1] if differences[-1] == "data" else texts))


def check_same_options(stored: Checkpoint, options: TrainOptions, out: Path) -> None:
    """Raises OptionError if the options differ from those of the stored run.

    Only the number of epochs may differ, and only if the schedule does not depend on it.
    """
    before = stored["options"]
    for name, value in options.as_dict().items():
        if (name != "epochs" or before["schedule"] == "cosine") and before[name] != value:
            why = "the cosine schedule depends on it" if name == "epochs" else "a resumed run keeps its options"
            started = "without it" if before[name] is None else f"with {before[name]}"
            raise OptionError(f"{name} is {value}, and the run in {out} was started {started}; {why}")


def check_same_data(stored: Checkpoint, fresh: Checkpoint, out: Path) -> None:
    """Raises CheckpointError if a resumed run has other data. `of_stored_run` has compared the statistics."""
    if not stored["data"].startswith(FINGERPRINT):
        raise CheckpointError(
            f"{out / 'last.pt'}: this run was started by diffnet 0.1, and only that version can resume it. Its network "
            "still predicts"
        )
    for name, difference in (("label_names", "other labels"), ("labels_at", "other labels"), ("data", "other meshes")):
        if stored[name] != fresh[name]:
            raise CheckpointError(f"{out / 'last.pt'}: this run was started on a data set with {difference}")


def fingerprint_of(data: LabeledMeshes, content: Sequence[Sequence[Sequence[str]]], pairs: bytes) -> str:
    """A hash of the meshes of a data set, their labels or pairs, and their order. content: `contents_of` the parts"""
    digest = hashlib.sha256(pairs)
    for part, entries in zip((data.train, data.test), content, strict=True):
        meaning = part.meaning if isinstance(part, StoredMeshes) else ""
        digest.update(f"{len(part)} meshes {meaning}".encode(errors="surrogatepass"))
        for name, hashes in zip(names_of(part), entries, strict=True):
            digest.update(name.encode(errors="surrogatepass") + f" {hashes}".encode())  # a name need not be text
    return FINGERPRINT + digest.hexdigest()


DIGITS = 16  # hexadecimal, of the hash of the positions and the faces of a mesh in a checkpoint


def contents_of(items: Sequence[LabeledMesh], jobs: int | None = None) -> list[list[str]]:
    """For each mesh, a hash of its positions and faces, whose first DIGITS checkpoints store, and one of its labels.

    They are known of indexed sets. Others are read, see `remembered`.
    """
    contents = items.contents if isinstance(items, StoredMeshes) else None
    return remembered(_content_of, items, "content", jobs=jobs) if contents is None else contents


def _content_of(item: LabeledMesh) -> list[str]:
    return [content_hash(item.mesh.verts, item.mesh.faces), content_hash(np.asarray(item.labels))]
