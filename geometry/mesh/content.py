"""The content of a file before it is parsed: decompression, content that is no mesh, and line ends."""

from __future__ import annotations

import gzip
import io
import math
import os
import re
import zlib

from diffnet.geometry.errors import IN_BRACKETS, raised_as

# A small .gz file can expand to more than the memory holds, and parsing takes several times as much.
MAX_UNPACKED = "DIFFNET_MAX_UNPACKED_GIB"  # the environment variable that sets the limit

_SIGNATURES = (
    (b"\x1f\x8b", "is compressed by gzip. Add .gz to the file's name, or decompress it"),
    (b"PK\x03\x04", "is a zip archive. Unpack it"),
    (b"BZh", "is compressed by bzip2. Decompress it"),
    (b"\xfd7zXZ\x00", "is compressed by xz. Decompress it"),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstd. Decompress it"),
    (b"7z\xbc\xaf\x27\x1c", "is a 7z archive. Unpack it"),
    (b"\xff\xfe", "is UTF-16 or UTF-32 text. Save it as UTF-8"),
    (b"\xfe\xff", "is UTF-16 text. Save it as UTF-8"),
    (b"\x00\x00\xfe\xff", "is UTF-32 text. Save it as UTF-8"),
    (b"version https://git-lfs", "is a pointer of Git LFS. Run `git lfs pull` to get the file"),
)
_MARKUP = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype|html|head|body|!--|\?xml)", re.IGNORECASE)
_TEXT_FORMATS = (".obj", ".off", ".gltf")
VTK_FORMATS = (".vtk", ".vtp", ".vtu")
# The third line of a legacy VTK file tells text from binary data.
_ASCII_VTK = re.compile(rb"# vtk[^\r\n]*(\r\n|\r|\n)[^\r\n]*(\r\n|\r|\n)\s*ASCII\b", re.IGNORECASE)
_LONE_CR = re.compile(rb"\r(?!\n)")


def check_unpacked(size: int) -> None:
    """Raise ValueError for more bytes than MAX_UNPACKED allows, by default 2 GiB."""
    setting = os.environ.get(MAX_UNPACKED, "2")
    try:
        limit = float(setting)
    except ValueError:
        limit = math.nan
    if not limit > 0:
        raise ValueError(f"the environment variable {MAX_UNPACKED} should be a number above 0, got {setting[:40]!r}")
    if size > limit * 2**30:
        raise ValueError(
            f"it has more than {limit:g} GiB when unpacked. To read it all the same, set the environment variable "
            f"{MAX_UNPACKED} to a larger number"
        )


def decompress(data: bytes) -> bytes:
    """The content of a gzip file. Raises ValueError if it is damaged or too large; see `check_unpacked`.

    The content is counted first, so that one that is too large takes no memory. Parsing takes far longer than that.
    """
    faults = OSError, EOFError, zlib.error
    damaged = raised_as(ValueError, "not a gzip file, or a damaged one", *faults, form=IN_BRACKETS)
    with damaged, gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        while file.read(2**20):
            check_unpacked(file.tell())
        size = file.tell()
        file.seek(0)
        return file.read(size)


def check_content(data: bytes, suffix: str) -> None:
    """Raise ValueError for content that is not of this format, such as an archive, UTF-16 text or a web page."""
    if suffix == ".stl" and is_binary_stl(data):
        return  # its first 80 bytes can be anything
    for signature, what in _SIGNATURES:
        if data.startswith(signature):
            raise ValueError(f"the content is not {suffix[1:]}: it {what}")
    roots = {".surf.gii": b"<GIFTI", **dict.fromkeys(VTK_FORMATS, b"<VTKFile")}
    if _MARKUP.match(data) and roots.get(suffix, b"\0") not in data[:4096]:
        raise ValueError(
            f"the content is not {suffix[1:]}: it is a web page or other markup. The download may have failed"
        )
    if suffix in _TEXT_FORMATS and b"\0" in data[:1024] and not data.startswith(b"OFF BINARY"):
        raise ValueError(
            f"the content is not {suffix[1:]}: it is binary, or text in another encoding than UTF-8. Save it as UTF-8"
        )


def with_line_feeds(data: bytes, suffix: str) -> bytes:
    """The data with line ends that a reader of this format knows. A carriage return alone ends a line on old Macs."""
    text = suffix in (".obj", ".off") or (suffix == ".stl" and not is_binary_stl(data))
    text = text or (suffix == ".vtk" and _ASCII_VTK.match(data) is not None)
    return _LONE_CR.sub(b"\n", data) if text and b"\r" in data and _LONE_CR.search(data) else data


def is_binary_stl(data: bytes) -> bool:
    """Whether the size is the one that the header of a binary STL file declares."""
    return len(data) >= 84 and len(data) == 84 + 50 * stl_count(data)


def stl_count(data: bytes) -> int:
    """The number of triangles that the header of a binary STL file declares."""
    return int.from_bytes(data[80:84], "little")
