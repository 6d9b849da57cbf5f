"""Arrays in the memory of a safetensors file: mapped, described, written and checked. Reading runs no code from it."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import sys
import weakref
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

Arrays: TypeAlias = dict[str, NDArray[Any]]
Place: TypeAlias = "tuple[np.dtype[Any], tuple[int, ...], int]"  # dtype, shape and first byte of an array in memory

SMALL = 1 << 17  # bytes; smaller files are read, because many systems allow 65,530 maps
ALIGNMENT = 64  # bytes; memory that PyTorch allocates on the CPU begins at multiples of it
# Memory that PyTorch allocates on a GPU begins at multiples of this. Kernels are compiled for aligned and for unaligned
# pointers, so tensors in one buffer and arrays in a file, which is copied to a GPU as it is, have the same.
GPU_ALIGNMENT = 512
BLOCK = 4096  # bytes; the checksum adds up the words of each block

_NAMES = "F64", "F32", "F16", "U8", "U16", "U32", "I64", "I32"
_DTYPES = {name: np.dtype(f"<{name[0].lower()}{int(name[1:]) // 8}") for name in _NAMES}
_PADDING = "__padding"  # begins the names of arrays of zeros, after which the next array is aligned


def map_file(file: BinaryIO) -> memoryview:
    """The content of an open file, which may be closed then. Writing to the memory doesn't change the file.

    The memory begins at a multiple of ALIGNMENT bytes. Raises OSError. `mmap` keeps each file open, and many systems
    allow a process 1,024 open files. Data sets have more cache entries.
    """
    size = os.fstat(file.fileno()).st_size
    if size < SMALL:
        small = aligned_memory(size)
        return small[: file.readinto(small)]  # type: ignore[attr-defined]
    if sys.version_info >= (3, 13) and os.name != "nt":
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY, trackfd=False))
    if os.name != "posix":
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    library = _library()
    address = library.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    content = (ctypes.c_char * size).from_address(address)
    # At the end of the process, arrays may still be read. The system frees the memory then.
    weakref.finalize(content, library.munmap, address, size).atexit = False
    return np.frombuffer(memoryview(content), np.uint8).data


@cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


def aligned_memory(size: int) -> memoryview:
    """New memory of `size` bytes that begins at a multiple of ALIGNMENT."""
    memory = np.empty(size + ALIGNMENT, np.uint8)  # begins at a multiple of 16
    return memory[-memory.ctypes.data % ALIGNMENT :][:size].data


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """The first byte of each array in one buffer, and the size of the buffer. sizes: of the arrays, in bytes"""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // GPU_ALIGNMENT) * GPU_ALIGNMENT
    return offsets, end


def arrays_at(memory: Any, places: Mapping[str, Place]) -> Arrays:
    """The arrays at these places, which share the memory."""
    return {name: np.ndarray(shape, dtype, memory, first) for name, (dtype, shape, first) in places.items()}


def parsed(memory: memoryview) -> tuple[Arrays, dict[str, str]]:
    """The arrays of a safetensors file in memory, which share this memory, and its metadata.

    Damage raises ValueError, RuntimeError, LookupError, TypeError or AttributeError, or gives other arrays.
    """
    places, metadata = places_in(header_of(memory))
    return arrays_at(memory, places), metadata


def header_of(memory: memoryview) -> bytes:
    """The header of a safetensors file in memory."""
    return bytes(memory[8 : 8 + int.from_bytes(memory[:8], "little")])


def places_in(header: bytes) -> tuple[dict[str, Place], dict[str, str]]:
    """The places of the arrays of a safetensors file, and its metadata. See `parsed`."""
    described = json.loads(header)
    metadata = described.pop("__metadata__", {})
    places = {}
    for name, about in described.items():
        if not name.startswith(_PADDING):
            (first, end), dtype, shape = about["data_offsets"], _DTYPES[about["dtype"]], tuple(about["shape"])
            if end - first != dtype.itemsize * math.prod(shape):
                raise ValueError(f"{name} has {end - first} bytes")
            places[name] = dtype, shape, 8 + len(header) + first
    return places, metadata


def safetensors_of(arrays: Arrays, metadata: Mapping[str, str], alignment: int = ALIGNMENT) -> bytes:
    """The content of a safetensors file. Each array begins at a multiple of `alignment` bytes.

    The format allows no gaps, so there are arrays of zeros between them. `parsed` leaves them out.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    pieces, end = list[Any](), 0

    def add(name: str, array: NDArray[Any]) -> None:
        nonlocal end
        begin, end = end, end + array.nbytes
        dtype = f"{array.dtype.kind.upper()}{8 * array.itemsize}"
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": (begin, end)}
        pieces.append(array.data)

    for name, array in arrays.items():
        if end % alignment:
            add(f"{_PADDING}{end}", np.zeros(-end % alignment, np.uint8))
        add(name, np.asarray(array, order="C"))
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return b"".join([len(text).to_bytes(8, "little"), text, *pieces])


def checksum(arrays: Arrays) -> int:
    """A number that depends on names, dtypes, shapes and content.

    It is the CRC of sums, because NumPy adds up words five times as fast as zlib computes a CRC. The sum of each block
    and the sum at each place in the blocks show any damage of up to three words, and moved and missing blocks.
    """
    crc = 0
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), crc)
        content = np.ascontiguousarray(array).reshape(-1)
        words = content.view(f"u{content.itemsize}")
        whole = content.nbytes // BLOCK * (BLOCK // content.itemsize)
        blocks = words[:whole].reshape(-1, BLOCK // content.itemsize)
        for dim in (0, 1):
            crc = zlib.crc32(blocks.sum(dim, np.uint64 if content.itemsize == 8 else np.uint32).data, crc)
        crc = zlib.crc32(words[whole:].data, crc)
    return crc
