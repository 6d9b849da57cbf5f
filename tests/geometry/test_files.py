"""Writing files."""

from pathlib import Path

import pytest

from diffnet.geometry.files import write_atomically


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, "old é")

    def full(self: Path, content: bytes) -> None:
        with open(self, "wb") as file:
            file.write(content[:2])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text(encoding="utf-8") == "old é"
    assert list(tmp_path.iterdir()) == [path]
