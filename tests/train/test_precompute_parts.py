"""Parts of `diffnet precompute` for array jobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import trimesh
from command import complaint, output

from diffnet.train.commands.mesh_files import part_of


def test_parts_are_balanced_and_do_not_depend_on_the_order(tmp_path: Path) -> None:
    sizes = np.random.default_rng(0).integers(0, 4000, 40)
    files = [tmp_path / f"{i}.off" for i in range(41)]  # the last one is missing
    for file, size in zip(files, sizes, strict=False):
        file.write_bytes(bytes(int(size)))
    parts = [part_of(files, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(file for part in parts for file in part) == sorted(files)
    totals = [sum(file.stat().st_size for file in part if file.exists()) for part in parts]
    assert max(totals) - min(totals) < 0.02 * sum(totals)
    for i, part in enumerate(parts, start=1):
        assert part == [file for file in files if file in part]
        assert part_of(files[::-1], f"{i}/3") == part[::-1]
    assert part_of(files, "1/1") == files
    many = [part_of(files[:2], f"{i}/999999999") for i in (1, 2, 3, 999999999)]
    assert [len(part) for part in many] == [1, 1, 0, 0]


def test_precompute_in_parts(tmp_path: Path) -> None:
    for i in range(5):
        ball = trimesh.creation.icosphere(1)
        ball.vertices *= np.random.default_rng(i).uniform(0.6, 1.4, 3)
        ball.export(tmp_path / f"{i}.off")
    cache = tmp_path / "cache"
    arguments = ["precompute", tmp_path, "--cache", cache, "--k", 4, "--jobs", 1, "--part"]
    for part in ("0/4", "5/4", "a/b", "1/0", "1", "1/4/2", ""):
        message = complaint(*arguments, part)
        assert message == f"--part should be I/N with I from 1 to N, such as 1/4, got {part!r}"
    assert not cache.exists()

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in cache.rglob("*.operators.*")}

    out = output(*arguments, "1/2").replace("\n", " ")
    first = written()
    assert f"{len(first)} of {len(first)} meshes of part 1/2 are in {cache}" in out
    assert len(first) in (2, 3)
    next(iter(first)).unlink()
    kept = written()
    output(*arguments, "1/2")  # computes what is missing
    assert written().keys() == first.keys()
    assert written().items() >= kept.items()
    output(*arguments, "2/2")
    assert len(written()) == 5
