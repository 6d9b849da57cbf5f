"""Files that are mapped into memory without being kept open.

`mmap` keeps each file open, and many systems allow a process 1,024 open files. Data sets have more cache entries.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from functools import cache
from typing import Any, BinaryIO

import numpy as np

SMALL = 1 << 17  # bytes; smaller files are read, because many systems allow 65,530 maps
ALIGNMENT = 64  # bytes; memory that PyTorch allocates on the CPU begins at multiples of it


def map_file(file: BinaryIO) -> memoryview:
    """The content of an open file, which may be closed then. Writing to the memory doesn't change the file.

    The memory begins at a multiple of ALIGNMENT bytes. Raises OSError.
    """
    size = os.fstat(file.fileno()).st_size
    if size < SMALL:
        memory = np.empty(size + ALIGNMENT, np.uint8)  # begins at a multiple of 16
        small = memory[-memory.ctypes.data % ALIGNMENT :][:size].data
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
