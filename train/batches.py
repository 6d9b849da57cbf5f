"""Moving batches to the device, and rotating their positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from diffnet.data import Sample


def keep_on_device(
    samples: Sequence[Sample], device: torch.device, basis_dtype: torch.dtype = torch.float32
) -> list[Sample]:
    """Move samples to a GPU, with their gradients on the basis, if they need at most half of its free memory.

    Otherwise, and on the CPU, the samples are returned unchanged, and the training loop moves batch by batch. The two
    ways round differently, so runs are equal bit by bit only if the same way is taken.

    basis_dtype: dtype to round the basis to, once here instead of in every step
    """
    if device.type != "cuda":
        return list(samples)
    # The basis and its two gradients in float32. Everything else is small.
    needed = sum(3 * 4 * s.operators.evecs.numel() for s in samples)
    if needed > torch.cuda.mem_get_info(device)[0] / 2:
        return list(samples)
    return [_with_gradient_evecs(s.to(device), basis_dtype) for s in samples]


def _with_gradient_evecs(sample: Sample, basis_dtype: torch.dtype) -> Sample:
    return replace(sample, operators=sample.operators.with_gradient_evecs().with_basis_dtype(basis_dtype))


def moved_ahead(batches: Iterable[Sample], device: torch.device) -> Iterator[tuple[Sample, Sample]]:
    """Pairs of each batch and the same batch on the device.

    For a GPU, a thread reads, packs and moves the next batch during the current step.
    """
    ahead = iter(batches)
    if device.type != "cuda":  # on the CPU, the steps need all cores
        yield from ((batch, batch.to(device)) for batch in ahead)
        return

    def fetch() -> tuple[Sample, Sample] | None:
        batch = next(ahead, None)
        return None if batch is None else (batch, batch.to(device))

    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(fetch)
        while (fetched := pending.result()) is not None:
            pending = pool.submit(fetch)
            yield fetched


def rotate(positions: Tensor, lengths: Sequence[int]) -> Tensor:
    """Rotate each mesh about the origin by its own random rotation, uniform over all rotations.

    positions: (V, 3), packed. lengths: vertices of each mesh. The global random generator of the CPU draws.

    Returns (V, 3). Source: Mezzadri 2007, How to generate random matrices from the classical compact groups.
    """
    turned = []
    for points in torch.split(positions, list(lengths)):
        # The Q of a Gaussian matrix is uniform over the orthogonal group once the signs of R's diagonal are removed.
        q, r = torch.linalg.qr(torch.randn(3, 3))
        q = q * r.diagonal().sign()
        turned.append(points @ (q * torch.linalg.det(q)).to(points))
    return torch.cat(turned)
