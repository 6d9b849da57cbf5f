"""Samples on the device of the network: those that fit stay there, the others are read ahead of the steps."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from diffnet.cuda_graphs.sizes import BatchSize, MeshSizes
from diffnet.data import Sample
from diffnet.data.prepared import PreparedSamples
from diffnet.data.samples import PinnedSample
from diffnet.data.stored import LazySequence
from diffnet.geometry.processes import available_cores

MEMORY = 2.0  # GiB of host memory for samples, by default
REST = 500  # bytes for each vertex of a sample besides its eigenvectors, mostly sparse matrices
READERS = 8  # threads; reading and copying work without Python's global lock
COPIERS = 3  # threads for samples whose bytes are only copied; with 8, steps take longer

S = TypeVar("S", covariant=True)


class ReadAhead(LazySequence[S]):
    """Samples that are read when they are asked for, or in threads before that.

    vertex_counts: (N,) int64, of the samples
    source: the samples of meshes that threads read, or None if these are in memory
    """

    @property
    @abstractmethod
    def vertex_counts(self) -> NDArray[np.int64]: ...

    @abstractmethod
    def sizes(self) -> MeshSizes:
        """The sizes of the samples, for buffers that hold any of them."""

    @property
    @abstractmethod
    def source(self) -> DeviceSamples | None: ...

    @abstractmethod
    def take(self, numbers: Sequence[int]) -> ReadAhead[S]:
        """Some of the samples, which share the memory of all."""

    def in_source(self, numbers: Sequence[int]) -> Sequence[int]:
        """The numbers in `source` of the meshes of some samples."""
        return numbers


class DeviceSamples(ReadAhead[Sample]):
    """Samples on a device, or some of them, each with its gradients on the basis if this is a GPU.

    The first samples that fit into a share of the GPU's free memory, or on the CPU into `memory`, stay there. The
    others are moved every time. Both are treated alike, so runs are equal bit by bit, whatever fits.

    basis_dtype: dtype to which a GPU rounds the basis, once here instead of in every step
    memory: GiB of the host for samples that are read
    """

    def __init__(
        self,
        samples: PreparedSamples,
        device: torch.device,
        basis_dtype: torch.dtype = torch.float32,
        memory: float = MEMORY,
        gpu_share: float = 0.5,
    ) -> None:
        self._samples, self._device, self._dtype, self._numbers = samples, device, basis_dtype, np.arange(len(samples))
        self._counts, most = samples.vertex_counts, int(memory * 2**30)
        self._bytes = (4 * samples.k + REST) * self._counts  # of each sample on the host
        if device.type == "cuda":
            # The basis and its two gradients in float32. Everything else is small.
            free = int(gpu_share * torch.cuda.mem_get_info(device)[0])
            self._stays = first_that_fit(12 * samples.k * self._counts, free)
            # Half of the memory keeps samples that wait for the GPU, and half is for reading ahead. PyTorch rounds
            # pinned memory up to powers of two.
            self._pinned = first_that_fit(np.where(self._stays, 2**62, 2 * self._bytes), most // 2)
        else:
            self._stays = first_that_fit(self._bytes, most)
            self._pinned = np.full(len(samples), False)
        self._most_ahead = most // 4
        self._residents: dict[int, Sample] = {}
        self._waiting: dict[int, Sample | PinnedSample] = {}  # in pinned memory
        self._reading: dict[int, Future[Sample | PinnedSample]] = {}
        self._lock = Lock()
        self._readers, self._copiers = (ThreadPoolExecutor(min(n, available_cores())) for n in (READERS, COPIERS))

    @property
    def vertex_counts(self) -> NDArray[np.int64]:
        return self._counts[self._numbers]

    @property
    def source(self) -> DeviceSamples:
        return self

    @property
    def is_resident(self) -> bool:
        """Whether all of them are on the device, and nothing has to be read."""
        return all(map(self._residents.__contains__, self._numbers.tolist()))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self.take(range(*key.indices(len(self))))
        number = int(self._numbers[key])
        resident = self._residents.get(number)
        if resident is not None:
            return resident
        with self._lock:
            reading = self._reading.pop(number, None)
        sample = self._moved(self._read(number) if reading is None else reading.result())
        if self._stays[number]:
            self._residents[number] = sample
        return sample

    def take(self, numbers: Sequence[int]) -> DeviceSamples:
        part = copy(self)
        part._numbers = self._numbers[np.asarray(numbers, np.int64)]
        return part

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Start to read samples, in this order."""
        with self._lock:
            for number in self._numbers[np.asarray(numbers, np.int64)].tolist():
                if not any(number in group for group in (self._residents, self._waiting, self._reading)):
                    # The bytes of whole samples are copied without further work.
                    threads = self._copiers if number in self._samples.whole else self._readers
                    self._reading[number] = threads.submit(self._read, number)

    @property
    def is_busy(self) -> bool:
        """Whether as many samples are read ahead as threads and memory allow."""
        with self._lock:
            ahead = list(self._reading)
        return not ahead or len(ahead) >= 2 * READERS or int(self._bytes[ahead].sum()) >= self._most_ahead

    def forget(self) -> None:
        """Drop samples that have been read ahead and not been asked for."""
        with self._lock:
            for reading in self._reading.values():
                reading.cancel()
            self._reading.clear()

    def sizes(self) -> MeshSizes:
        facts = [self._samples.facts[i] for i in self._numbers.tolist()]
        # Edges are not always counted. There are at most three for each face.
        every = [
            BatchSize(1, f.vertices, f.faces, f.edges or 3 * f.faces, f.entries, f.entries, f.vertices) for f in facts
        ]

        def counted(names: Iterable[str]) -> list[BatchSize]:
            return [BatchSize(1, size.vertices, **{name: getattr(size, name) for name in names}) for size in every]

        return MeshSizes(counted, self._samples.k)

    def _read(self, number: int) -> Sample | PinnedSample:
        """The sample on the CPU, for a GPU in pinned memory."""
        waiting = self._waiting.get(number)
        if waiting is not None:
            return waiting
        if self._device.type != "cuda":
            return self._samples[number]  # type: ignore[no-any-return]
        sample = self._samples.pinned(number)  # PyTorch reuses the memory of earlier samples
        if self._pinned[number]:
            self._waiting[number] = sample
        return sample

    def _moved(self, sample: Sample | PinnedSample) -> Sample:
        """The sample on the device, in the order of the current stream."""
        if isinstance(sample, PinnedSample):
            return sample.prepared(self._device, self._dtype)
        if self._device.type != "cuda":
            return sample
        moved = sample.to(self._device, non_blocking=True)
        return replace(moved, operators=moved.operators.with_gradient_evecs().with_basis_dtype(self._dtype))


def first_that_fit(sizes: NDArray[np.int64], limit: int) -> NDArray[np.bool_]:
    """Which items to take, from the first on, so that their sizes add up to no more than the limit.

    >>> first_that_fit(np.array([3, 4, 1, 2]), 6).tolist()
    [True, False, True, True]
    """
    mask, total = np.zeros(len(sizes), bool), 0
    for i, size in enumerate(sizes.tolist()):
        if total + size <= limit:
            mask[i] = True
            total += size
    return mask


def read_ahead(samples: Sequence[Any], batches: Iterable[list[int]]) -> Iterator[list[int]]:
    """The batches. Threads read the samples of later ones while a batch is used."""
    if not isinstance(samples, ReadAhead) or (source := samples.source) is None or source.is_resident:
        yield from batches
        return
    waiting: deque[list[int]] = deque()
    try:
        for batch in batches:
            source.prefetch(samples.in_source(batch))
            waiting.append(batch)
            while waiting and source.is_busy:
                yield waiting.popleft()
        yield from waiting
    finally:
        source.forget()


def counts_of(samples: Sequence[Any]) -> Sequence[int] | NDArray[np.int64]:
    """The number of vertices of each sample."""
    if isinstance(samples, (ReadAhead, PreparedSamples)):
        return samples.vertex_counts
    return [s.operators.num_vertices for s in samples]


def taken(samples: Sequence[Any], numbers: Sequence[int]) -> Sequence[Any]:
    """Some of the samples."""
    return samples.take(numbers) if isinstance(samples, ReadAhead) else [samples[i] for i in numbers]
