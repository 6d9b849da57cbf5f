"""Finds a race that Triton's software pipelining can make.

A tile that is copied to shared memory ahead gets one more buffer if the matrix units of Hopper read it there, because
they may still read when the next copy starts. A tile that is also read into registers does not get this buffer, and the
next copy overwrites it while it is multiplied. Seen in Triton 3.6 and 3.7.
"""

from __future__ import annotations

import re


def overwritten_buffers(ttgir: str) -> list[str]:
    """The buffers of a kernel that matrix units may still read when they are overwritten.

    ttgir: the kernel in Triton's last representation that knows buffers
    """
    if not re.search(r"warp_group_dot_wait .*pendings = [1-9]", ttgir):
        return []  # each product is waited for before the next copy
    source: dict[str, str | None] = {}
    multiplied: set[str | None] = set()
    read: set[str | None] = set()
    for line in ttgir.splitlines():
        match = re.match(r"\s*(?:(%[\w.#-]+)(?::\d+)? = )?([\w.]+) (.*)", line)
        if match is None:
            continue
        name, operation, rest = match.groups()
        operands = re.findall(r"%[\w.-]+(?:#\d+)?", rest.partition(" : ")[0])
        if operation == "ttg.local_alloc" and re.match(r": \(\).*x(bf16|f16)", rest):
            source[name] = name
        elif operation.startswith("ttg.memdesc_"):
            source[name] = source.get(operands[0])
        elif operation == "ttng.warp_group_dot":
            multiplied.update(map(source.get, operands))
        elif operation == "ttg.local_load":
            read.add(source.get(operands[0]))
    return sorted(name for name in multiplied & read if name is not None)
