"""Packing operators into batches, and moving them to a GPU. Times are wall-clock times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor

from diffnet import Operators, collate
from diffnet.benchmarks.harness.peers import first_made
from diffnet.benchmarks.harness.registry import Case, Options, Run, Unavailable, benchmark
from diffnet.benchmarks.harness.synthetic import synthetic_operators

MESHES = 4  # in a batch


@benchmark("collate")
def collate_cases(options: Options) -> Iterator[Case]:
    """Packing four meshes that lie on the device.

    `collate` leaves fields that networks may not need for later. The second peer reads all of them, the third does so
    with a batch of PyTorch Geometric, and the fourth does what a step in bf16 needs. The last one copies the tensors of
    all fields without making them operators.
    """
    k = options.k or 128
    for v in options.vertices or (10_000,):
        meshes = [_operators(v, k, options.device) for _ in range(MESHES)]
        prepared = [replace(o) for o in meshes]
        if options.device.type == "cuda":
            for o in prepared:
                o.prepared(torch.bfloat16)
        peers: dict[str, Run] = {
            "collate": partial(collate, meshes),
            "collate, all fields read": partial(_collate_and_read, meshes),
            "PyTorch Geometric, all fields read": _geometric_batches(meshes),
            "collate and prepared": partial(_collate_and_prepare, prepared),
            "torch.cat of every field": partial(_concatenate, [_tensors(o) for o in meshes]),
        }
        yield Case({"vertices": v, "k": k}, peers, wall_clock=True)


@benchmark("transfer", metrics=("ms", "GB/s"))
def transfer_cases(options: Options) -> Iterator[Case]:
    """Moving operators from the CPU to the device, and one copy of as many bytes of pinned memory."""
    k = options.k or 128
    for v in options.vertices or (10_000, 200_000):
        operators = _operators(v, k, torch.device("cpu"))
        tensors = _tensors(operators)
        size = sum(x.nbytes for x in tensors)
        peers: dict[str, Run] = {
            "one pinned copy": first_made(partial(_pinned_copy, size, options.device)),
            ".to": partial(operators.to, options.device),
            ".to, pinned": first_made(partial(_pinned_operators, operators, options.device)),
            "tensor by tensor": partial(_each_to, tensors, options.device),
        }
        yield Case({"vertices": v, "k": k}, peers, bytes=float(size), wall_clock=True)


def _operators(v: int, k: int, device: torch.device) -> Operators:
    """Operators as `precompute` returns them: without gradients on the basis, and with the transposes of patterns."""
    operators = replace(synthetic_operators(v, k, device), gradient_evecs=None)
    operators.gradient.pattern.prepare()
    return operators


def _tensors(operators: Operators) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    operators.map_tensors(lambda x: found.setdefault(id(x), x))
    return list(found.values())


def _collate_and_read(meshes: Sequence[Operators]) -> list[object]:
    return _all_fields(collate(meshes))


def _geometric_batches(meshes: Sequence[Operators]) -> Run:
    try:
        from torch_geometric.data import Batch  # takes more than a second
    except ImportError:
        return _not_installed
    from diffnet.data.pyg import DataWithOperators

    data = [DataWithOperators(pos=o.mass.new_zeros(o.num_vertices, 3), operators=o) for o in meshes]
    return lambda: _all_fields(Batch.from_data_list(data).operators)


def _not_installed() -> None:
    raise Unavailable("PyTorch Geometric is not installed")


def _all_fields(operators: Operators) -> list[object]:
    return [getattr(operators, field.name) for field in fields(operators)]


def _collate_and_prepare(meshes: Sequence[Operators]) -> Operators:
    return collate(meshes).prepared(torch.bfloat16)


def _concatenate(tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.cat([x.reshape(-1) for x in each]) for each in zip(*tensors, strict=True)]


def _pinned_copy(size: int, device: torch.device) -> Run:
    if device.type != "cuda":
        raise Unavailable("pinned memory needs a GPU")
    return partial(torch.empty(size, dtype=torch.uint8, pin_memory=True).to, device)


def _pinned_operators(operators: Operators, device: torch.device) -> Run:
    if device.type != "cuda":
        raise Unavailable("pinned memory needs a GPU")
    return partial(operators.pin_memory().to, device)


def _each_to(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    return [x.to(device, copy=True) for x in tensors]
