"""Copies many tensors to a GPU or to pinned memory as one flat buffer, because each single copy has a fixed cost."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffnet.geometry.store.codec import ALIGNMENT, Arrays, Place, layout
from diffnet.ops.common.memo import can_remember

# Bytes. Copying a piece to pinned memory overlaps with the transfer of the previous piece. Each piece has a fixed cost,
# so pieces grow to MAX_PIECE.
MIN_PIECE = 4 * 2**20
MAX_PIECE = 16 * 2**20


def to_gpu(tensors: Sequence[Tensor], device: torch.device, *, non_blocking: bool = False) -> list[Tensor]:
    """Copy tensors from the CPU to a GPU. The results are contiguous views of one buffer on the GPU.

    They pass through pinned memory, piece by piece. For tensors that already lie there, see `copies_of`.

    tensors: without gradients
    non_blocking: whether to return before the GPU has finished. Tensors in pinned memory must not change until then.
    """
    sources = [x.contiguous() for x in tensors]
    offsets, size = layout(x.nbytes for x in sources)
    flat = torch.empty(size, dtype=torch.uint8, device=device)
    arrays = [_as_bytes(x) for x in sources]
    first = 0
    while first < size:
        # PyTorch reuses pinned memory only once all copies from it have ended.
        piece = empty_pinned(min(max(MIN_PIECE, first), MAX_PIECE, size - first))
        write(arrays, offsets, first, piece)
        flat[first : first + len(piece)].copy_(piece, non_blocking=True)
        first += len(piece)
    copies = views(flat, sources, offsets)
    if not non_blocking:
        torch.cuda.current_stream(device).synchronize()
    return copies


def pinned(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Copy tensors on the CPU to one buffer of pinned memory, (bytes,) uint8.

    Returns the buffer, and contiguous views of it. Raises RuntimeError if PyTorch finds no GPU.
    """
    sources = [x.contiguous() for x in tensors]
    offsets, size = layout(x.nbytes for x in sources)
    flat = empty_pinned(size)
    write([_as_bytes(x) for x in sources], offsets, 0, flat)
    return flat, views(flat, sources, offsets)


def copies_of(buffer: Tensor, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Start to copy a buffer of pinned memory to a GPU, and return a function that gives the copy of a tensor.

    The copy starts before the tensors are known, so the host makes their views while the GPU copies. Tensors outside of
    the buffer and tensors with gradients are copied one by one. Wait for the current stream before the buffer changes.

    buffer: as returned by `pinned`
    """
    flat = torch.empty(len(buffer), dtype=torch.uint8, device=device)
    flat.copy_(buffer, non_blocking=True)
    start = buffer.untyped_storage().data_ptr()

    def copy_of(x: Tensor) -> Tensor:
        if x.requires_grad or x.untyped_storage().data_ptr() != start:
            return x.to(device, non_blocking=True)
        return _tensor_at(flat, x.dtype, int(x.storage_offset()), x.shape, x.stride())

    return copy_of


def to_host(tensors: dict[str, Tensor]) -> Arrays:
    """Copies of tensors as NumPy arrays, in pinned memory if the tensors are on a GPU."""
    copies = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)
        for name, tensor in tensors.items()
    }
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return {name: copy.numpy() for name, copy in copies.items()}


def write(arrays: Sequence[Tensor], offsets: Sequence[int], first: int, out: Tensor) -> None:
    """Write the part of a flat buffer that begins at byte `first` to `out`, (bytes,) uint8.

    arrays: the bytes of each tensor, 1-D uint8
    """
    last = first + len(out)
    for i in range(bisect_right(offsets, first) - 1, len(arrays)):
        array, offset = arrays[i], offsets[i]
        if offset >= last:
            break
        begin, end = max(offset, first), min(offset + len(array), last)
        if begin < end:
            whole = end - begin == len(array)
            _copy(out[begin - first : end - first], array if whole else array[begin - offset : end - offset])


def _copy(to: Tensor, source: Tensor) -> None:
    """Copy bytes. In threads beside the main one, which share the cores, NumPy copies with one core.

    PyTorch would start as many threads as there are cores for each of them: 8 threads then copy at a third of the rate.
    """
    if threading.current_thread() is threading.main_thread():
        to.copy_(source)
    else:
        np.copyto(to.numpy(), source.numpy())


def views(flat: Tensor, like: Sequence[Tensor], offsets: Sequence[int]) -> list[Tensor]:
    """Return the tensors that lie in a flat buffer, with the shapes, strides and dtypes of `like`."""
    items = zip(like, offsets, strict=True)
    return [_tensor_at(flat, x.dtype, offset // x.itemsize, x.shape, x.stride()) for x, offset in items]


class TensorsAt(Mapping[str, Tensor]):
    """The tensors at these places of a buffer, (bytes,) uint8. Each is made when it is first read."""

    def __init__(self, flat: Tensor, places: Mapping[str, Place]) -> None:
        self._flat, self._places = flat, places
        self._tensors: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            dtype, shape, first = self._places[name]
            self._tensors[name] = _tensor_at(self._flat, _torch_dtype(dtype), first // dtype.itemsize, shape)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _tensor_at(
    flat: Tensor, dtype: torch.dtype, first: int, shape: Sequence[int], stride: Sequence[int] = ()
) -> Tensor:
    """The tensor whose first element has this number in a buffer. It is contiguous, unless a stride is given.

    It is no view, because views share a version counter: autograd could not use the others after a write to one of
    them. It also takes fewer operations.
    """
    return torch.empty(0, dtype=dtype, device=flat.device).set_(flat.untyped_storage(), first, shape, stride)


def aligned(x: Tensor) -> Tensor:
    """Return the tensor, or a copy if it is on the CPU and is not contiguous or doesn't begin at ALIGNMENT.

    Libraries may round products differently if a factor begins elsewhere, so equal tensors would give other bits.
    """
    if type(x) is not Tensor or x.device.type != "cpu" or not can_remember():
        return x
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def compact_tensor(x: Tensor) -> Tensor:
    """Return a copy of a view of a larger buffer, else the tensor. Pickle would write the whole buffer for a view."""
    if x.untyped_storage().nbytes() <= x.nbytes:
        return x
    return x.detach().clone().requires_grad_(x.requires_grad)


def empty_pinned(size: int) -> Tensor:
    """Return `size` bytes of pinned memory. Raises RuntimeError if PyTorch finds no GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _as_bytes(x: Tensor) -> Tensor:
    return (x if x.ndim == 1 else x.view(-1)).view(torch.uint8)
