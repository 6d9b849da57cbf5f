"""Copies many tensors to a GPU or to pinned memory as one flat buffer, because each single copy has a fixed cost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

# Bytes. Memory that PyTorch allocates on a GPU has this alignment. Kernels are compiled for aligned and for unaligned
# pointers, so tensors in a flat buffer have the same.
ALIGNMENT = 512

# Bytes. Copying a piece to pinned memory overlaps with the transfer of the previous piece.
PIECE = 4 * 2**20


def to_gpu(
    tensors: Sequence[Tensor], device: torch.device, dtype: torch.dtype | None = None, *, non_blocking: bool = False
) -> list[Tensor]:
    """Copy tensors from the CPU to a GPU. The results are contiguous views of one buffer on the GPU.

    tensors: without gradients
    dtype: converts floating-point tensors to this dtype
    non_blocking: whether to return before the GPU has finished. Tensors in pinned memory must not change until then.

    Tensors that were pinned together, see `pinned`, are copied at once. All others pass through pinned memory, piece by
    piece.
    """
    sources = [_converted(x, dtype) for x in tensors]
    common = common_buffer(sources)
    if common is not None:
        flat = torch.empty(len(common), dtype=torch.uint8, device=device)
        flat.copy_(common, non_blocking=True)
        offsets = [int(x.storage_offset()) * x.itemsize for x in sources]
    else:
        offsets, size = layout(sources)
        flat = torch.empty(size, dtype=torch.uint8, device=device)
        arrays = [_as_bytes(x) for x in sources]
        for first in range(0, size, PIECE):
            # PyTorch reuses pinned memory only once all copies from it have ended.
            piece = empty_pinned(min(PIECE, size - first))
            write(arrays, offsets, first, piece)
            flat[first : first + len(piece)].copy_(piece, non_blocking=True)
    copies = views(flat, sources, offsets)
    if not non_blocking:
        torch.cuda.current_stream(device).synchronize()
    return copies


def pinned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors on the CPU to one buffer of pinned memory. The results are contiguous views of it.

    Raises RuntimeError if PyTorch finds no GPU.
    """
    sources = [_converted(x, None) for x in tensors]
    offsets, size = layout(sources)
    flat = empty_pinned(size)
    write([_as_bytes(x) for x in sources], offsets, 0, flat)
    return views(flat, sources, offsets)


def layout(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the offset of each tensor in a flat buffer, in bytes, and the size of the buffer."""
    offsets, end = [], 0
    for x in tensors:
        offsets.append(end)
        end += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


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
            out[begin - first : end - first].copy_(array[begin - offset : end - offset])


def views(flat: Tensor, like: Sequence[Tensor], offsets: Sequence[int]) -> list[Tensor]:
    """Return the tensors that lie in a flat buffer, with the shapes, strides and dtypes of `like`."""
    typed = {x.dtype: flat.view(x.dtype) for x in like}
    # `.data`, because views share a version counter: writing to one of them would invalidate what autograd has saved
    # of the others.
    return [
        typed[x.dtype].as_strided(x.shape, x.stride(), offset // x.itemsize).data
        for x, offset in zip(like, offsets, strict=True)
    ]


def own_memory(x: Tensor) -> Tensor:
    """Return a copy of a view of a larger buffer, else the tensor. Pickle would write the whole buffer for a view."""
    if x.untyped_storage().nbytes() <= x.nbytes:
        return x
    return x.detach().clone().requires_grad_(x.requires_grad)


def empty_pinned(size: int) -> Tensor:
    """Return `size` bytes of pinned memory. Raises RuntimeError if PyTorch finds no GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _converted(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return (x.to(dtype) if dtype is not None and x.is_floating_point() else x).contiguous()


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def common_buffer(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the buffer of pinned memory, (bytes,) uint8, if all tensors lie in it and fill most of it, else None."""
    storage = tensors[0].untyped_storage()
    start = storage.data_ptr()
    if any(x.untyped_storage().data_ptr() != start for x in tensors) or not tensors[0].is_pinned():
        return None
    aligned = (
        all(x.storage_offset() * x.itemsize % ALIGNMENT == 0 for x in tensors) and storage.nbytes() % ALIGNMENT == 0
    )
    if not aligned or storage.nbytes() > 2 * sum(x.nbytes for x in tensors) + ALIGNMENT * len(tensors):
        return None
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
