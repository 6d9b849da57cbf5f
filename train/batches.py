"""Batches on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import TypeVar

import torch

from diffnet.data import PairSample, Sample, collate_pairs, collate_samples

S = TypeVar("S")
T = TypeVar("T")
_END = object()


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


def packed(
    samples: Sequence[Sample | PairSample], batches: Iterable[list[int]], device: torch.device
) -> Iterator[Sample]:
    """Batches of samples, or of pairs of them, on the device.

    If samples must be moved to a GPU, a thread packs and moves a batch while the GPU works on the one before. A batch
    may be used until the next one is asked for. The GPU may still work on it then.
    """

    def pack(batch: list[int]) -> Sample:
        chosen = [samples[i] for i in batch]
        pairs = [sample for sample in chosen if isinstance(sample, PairSample)]
        return collate_pairs(pairs) if pairs else collate_samples([s for s in chosen if isinstance(s, Sample)])

    if device.type != "cuda" or all(s.operators.device.type == "cuda" for s in samples):
        yield from (pack(batch).to(device) for batch in batches)
        return
    # On the stream of the training steps, copies would wait for these steps.
    copies = copy_stream(device)
    copies.wait_stream(torch.cuda.current_stream(device))  # memory of earlier batches may still be read
    steps: deque[torch.cuda.Event] = deque()

    def load(numbered: tuple[int, list[int]]) -> Sample:
        number, batch = numbered
        sample = pack(batch)
        if number >= 2:
            # Its memory may be that of the last batch but one, so the step on that one must have ended. This also
            # bounds the memory of waiting batches.
            steps.popleft().synchronize()
        with torch.cuda.stream(copies):
            return sample.to(device)  # waits for the copies

    for sample in computed_ahead(load, enumerate(batches)):
        yield sample
        steps.append(torch.cuda.current_stream(device).record_event())


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which batches are moved to a GPU. PyTorch caches memory for each stream, so there is only one."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def computed_ahead(function: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """The results of a function of each item. A thread computes the next one while the caller uses the last."""
    results = map(function, items)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(next, results, _END)
        while (result := pending.result()) is not _END:
            pending = pool.submit(next, results, _END)
            yield result  # type: ignore[misc]
