"""Tables of contents: names, sizes and places of records. Each shard ends with one, and the index joins them."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from diffnet.geometry.store.codec import Arrays, checksum, parsed

# What damage of a blob can raise.
DAMAGE = (ValueError, RuntimeError, LookupError, TypeError, AttributeError, OverflowError)


@dataclass(frozen=True, eq=False)
class Records:
    """The records of a shard, or of several.

    names: (N,) bytes, the names of the meshes as the file system has them
    digests: (N,) int64, which tell whether an item of a data set is the one that was written
    ranges: (N, 3) int64, where the first and the second blob begin and the second one ends
    checksums: (N, 2) int64, of the arrays of both blobs
    contents: (N,) int64, the first 16 digits of `content_hash` of the positions and faces
    vertex_counts, face_counts, label_counts: (N,) int64
    classes: (N,) int64, the class of each mesh in a set for classification, else 0
    gradient_entries: (N,) int64, the nonzeros of the gradients
    """

    names: NDArray[np.bytes_]
    digests: NDArray[np.int64]
    ranges: NDArray[np.int64]
    checksums: NDArray[np.int64]
    contents: NDArray[np.int64]
    vertex_counts: NDArray[np.int64]
    face_counts: NDArray[np.int64]
    label_counts: NDArray[np.int64]
    classes: NDArray[np.int64]
    gradient_entries: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.digests)

    def __getitem__(self, key: slice | NDArray[np.int64]) -> Records:
        return Records(*(getattr(self, field.name)[key] for field in fields(self)))

    @classmethod
    def joined(cls, parts: list[Records]) -> Records:
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def arrays(self) -> Arrays:
        """The inverse of `records_in`."""
        arrays = {field.name: np.ascontiguousarray(getattr(self, field.name)) for field in fields(self)}
        arrays["names"] = self.names.view(np.uint8).reshape(len(self), self.names.itemsize)
        return arrays


def records_in(arrays: Arrays, sizes: NDArray[np.int64]) -> Records:
    """The records that arrays hold.

    sizes: (N,) or (), of the shard of each record, in bytes

    Raises ValueError or LookupError for arrays that can't be those of records.
    """
    count = len(arrays["digests"])
    for name, shape in (("ranges", (count, 3)), ("checksums", (count, 2))):
        if arrays[name].shape != shape:
            raise ValueError(f"{name} has the shape {arrays[name].shape}, not {shape}")
    for field in fields(Records)[1:]:
        if arrays[field.name].dtype != np.int64 or len(arrays[field.name]) != count:
            raise ValueError(f"{field.name} should be {count} rows of int64")
    names = arrays["names"]
    if names.dtype != np.uint8 or names.ndim != 2 or len(names) != count or names.shape[1] < 1:
        raise ValueError(f"names should be {count} rows of bytes")
    own = {field.name: arrays[field.name] for field in fields(Records)}
    ends = np.concatenate([np.zeros((count, 1), np.int64), own["ranges"], np.broadcast_to(sizes, count)[:, None]], 1)
    if (ends[:, 1:] < ends[:, :-1]).any():
        raise ValueError("ranges are not inside the shards")
    if own["vertex_counts"].min(initial=1) < 1 or own["face_counts"].min(initial=0) < 0:
        raise ValueError("there are meshes without vertices")
    own["names"] = np.ascontiguousarray(names).view(f"S{names.shape[1]}").reshape(count)
    return Records(**own)


def table_blob(arrays: Arrays, about: dict[str, Any]) -> bytes:
    """A safetensors blob of arrays and of values that JSON can hold, with a checksum."""
    arrays = arrays | {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    return save(arrays, {"checksum": str(checksum(arrays))})


def parsed_table(blob: bytes) -> tuple[Arrays, dict[str, Any]]:
    """The inverse of `table_blob`. Damage raises one of DAMAGE."""
    arrays, metadata = parsed(memoryview(bytearray(blob)))
    if metadata["checksum"] != str(checksum(arrays)):
        raise ValueError("the checksum differs")
    about = json.loads(arrays.pop("about").tobytes())
    if not isinstance(about, dict):
        raise ValueError("it doesn't say what it holds")
    return arrays, about
