"""Work through many files: results and rows of a report are written as they come, and a later call can go on."""

from __future__ import annotations

import csv
import hashlib
import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from diffnet.geometry.errors import OptionError
from diffnet.geometry.file_state import FileIdentity, file_identity, hashed
from diffnet.geometry.files import as_text, csv_rows, csv_text, make_folder, named, remove_leftovers, write_atomically
from diffnet.train.console import complain, console, progress_bar, user_message

if TYPE_CHECKING:
    import torch

    from diffnet.data import Preprocessing
    from diffnet.train.ranks import Ranks

REPORT_COLUMNS = ("status", "reason", "seconds", "state", "settings")  # after those that name the files


class Item(NamedTuple):
    """One result to make.

    read: the files that the report names, one for each of its first columns
    result: the file to write, or the table that gets a row
    beside: further files that decide the result, whether they exist or not
    facts: what else decides it
    """

    read: tuple[Path, ...]
    result: Path
    beside: tuple[Path, ...] = ()
    facts: str = ""


class GrowingTable:
    """A CSV file that gets its rows as they come. At the end they are in the order of their positions.

    rows: the first ones, by position. `write` and the first `add` replace an older file. Only rank 0 writes.
    """

    def __init__(self, path: Path, header: Sequence[str], rows: Mapping[int, Sequence[Any]]) -> None:
        self.path, self._header, self.rows = path, header, dict(rows)
        self._started = False

    def write(self) -> None:
        make_folder(self.path.parent)
        write_atomically(self.path, csv_text([self._header, *(self.rows[i] for i in sorted(self.rows))]))
        self._started = True

    def add(self, position: int, row: Sequence[Any]) -> None:
        self.rows[position] = row
        if not self._started:
            self.write()
            return
        try:
            with self.path.open("ab") as file:
                file.write(as_text(csv_text([row])).encode())
        except OSError as e:
            raise named(e, self.path) from e


def read_rows(path: Path, header: Sequence[str]) -> list[list[str]]:
    """The complete rows of a `GrowingTable`, also of a process that was killed. Raises OptionError for another file."""
    content = path.read_bytes()
    try:
        text = content[: content.rfind(b"\n") + 1].decode()
        rows = list(csv_rows(io.StringIO(text, newline="")))
    except (UnicodeDecodeError, csv.Error) as e:
        raise OptionError(f"{path}: the file is damaged ({e}); leave out --resume to begin again") from e
    if rows[:1] != [[as_text(name) for name in header]]:
        raise OptionError(f"{path}: this file is not of the same command; leave out --resume to replace it")
    return [row for row in rows[1:] if len(row) == len(header)]


def settings_of(checkpoint: Path, **options: Any) -> str:
    """A hash of a network and of the options that decide results: 16 hexadecimal digits."""
    digest = hashlib.sha256(checkpoint.read_bytes())
    digest.update(repr(sorted(options.items())).encode(errors="backslashreplace"))
    return digest.hexdigest()[:16]


def _complete(
    items: Sequence[Item], report: Path, settings: str, columns: Sequence[str], table: GrowingTable | None
) -> dict[int, Sequence[str]]:
    """The rows of items that are complete in the report of an earlier call, by position.

    Their result is there, and the files that it was made from have not changed, see `diffnet.geometry.file_state`.

    Raises OptionError for a report of other settings.
    """
    if not report.is_file():
        return {}
    before = {tuple(row[: len(columns)]): row for row in read_rows(report, [*columns, *REPORT_COLUMNS])}
    if any(row[-1] != settings for row in before.values()):
        raise OptionError(
            f"{report}: these results are of another network or other options; leave out --resume to replace them"
        )
    rows = {i: before.get(tuple(as_text(str(path)) for path in item.read)) for i, item in enumerate(items)}
    return {
        i: row
        for i, row in rows.items()
        if row is not None
        and row[-5] == "ok"
        and row[-2] == _state(items[i], row[-2])
        and (items[i].result.is_file() if table is None else i in table.rows)
    }


def work_through(
    items: Sequence[Item],
    work: Callable[[int], Any],
    ranks: Ranks,
    title: str,
    *,
    report: Path | None = None,
    settings: str = "",
    columns: Sequence[str] = ("file",),
    resume: bool = False,
    table: GrowingTable | None = None,
    keep: Callable[[int, Any], Any] = lambda i, value: None,
    ahead: tuple[Preprocessing, Path, int | None, torch.device] | None = None,
) -> list[str]:
    """Call work(i) for each item, with a progress bar. One that can't be used does not stop the others.

    work: writes the result, and leaves a complete file or none
    ranks: those that share the items
    report: the file in which rank 0 writes a row for each item when its result is complete
    settings: see `settings_of`
    columns: the names of the columns for `Item.read`
    resume: whether complete results of an earlier call stay, see `_complete`
    table: the results, if they are not files, with the rows of an earlier call, of which the complete ones stay
    keep: called in rank 0 with the number of each item and with what `work` returned, a value of `Ranks`
    ahead: (options, cache, jobs, device): the cores preprocess the next meshes in `Item.read` into the cache
        meanwhile, but for large ones, which `work` preprocesses on the device. If there are several ranks, each item
        has only one mesh.

    Returns the reasons of the items that failed, to all ranks.
    """

    def complete() -> list[Any]:
        remove_leftovers([*(item.result for item in items), *([] if report is None else [report])])
        rows = {} if report is None or not resume else _complete(items, report, settings, columns, table)
        return list(rows.items())

    earlier: dict[int, Sequence[str]] = dict(ranks.shared(complete))
    if table is not None:
        table.rows = {i: row for i, row in table.rows.items() if i in earlier}
    listed = None
    if report is not None and ranks.is_first:
        listed = GrowingTable(report, [*columns, *REPORT_COLUMNS], earlier)
        listed.write()
    failed: dict[int, str] = {}

    def record(done: Any) -> None:
        i, reason, state, seconds, value = done
        if reason is not None:
            failed[i] = reason
        else:
            keep(i, value)
        if listed is not None:
            status = "ok" if reason is None else "failed"
            listed.add(i, [*items[i].read, status, reason, f"{seconds:.3f}", state, settings])
        bar.advance(shown)

    post = ranks.mailbox(record)

    def one(i: int) -> None:
        started, reason, value = time.perf_counter(), None, None
        state = _state(items[i])
        try:
            value = work(i)
        except Exception as error:
            reason = user_message(error)
            if reason is None:
                raise
        post([i, reason, state, time.perf_counter() - started, value])

    todo = [i for i in range(len(items)) if i not in earlier]
    with progress_bar(console, disable=len(items) == 1) as bar:
        shown = bar.add_task(title, total=len(items), completed=len(earlier))
        try:
            if ahead is None:
                for position in ranks.handed_out(len(todo)):
                    one(todo[position])
            else:
                for i, reason in _preprocessed_ahead(items, todo, one, *ahead, ranks).items():
                    post([i, reason, "", 0.0, None])
            ranks.gathered(None, meanwhile=post)
            post()
        finally:
            if listed is not None:
                listed.write()
    return ranks.shared(lambda: [failed[i] for i in sorted(failed)])


def end(written: Sequence[Path], report: Path | None, failed: Sequence[str], ranks: Ranks) -> None:
    """List the files that were written and the reasons for those that were not. Raises Exit if there are any."""
    if ranks.is_first:
        for path in (*written, *(() if report is None else (report,))):
            console.print(f"wrote {path}", soft_wrap=True)
        for reason in failed:
            complain(reason)
    if failed:
        raise typer.Exit(1)


def _preprocessed_ahead(
    items: Sequence[Item],
    positions: Sequence[int],
    one: Callable[[int], None],
    options: Preprocessing,
    cache: Path,
    jobs: int | None,
    device: torch.device,
    ranks: Ranks,
) -> dict[int, str]:
    """Call one(i) for each of these items when its meshes are in the cache. Returns reasons for those that fail before.

    Workers wait while an item is worked on, so each has at most one mesh ready.
    """
    from diffnet.data import fill_cache

    missing = {i: set(items[i].read) for i in positions}
    items_of: dict[Path, list[int]] = {}
    for i in positions:
        for mesh in missing[i]:
            items_of.setdefault(mesh, []).append(i)
    meshes = list(dict.fromkeys(mesh for i in positions for mesh in items[i].read))

    def ready(position: int) -> None:
        mesh = meshes[position]
        for i in items_of[mesh]:
            missing[i].remove(mesh)
            if not missing[i]:
                one(i)

    shared = None if ranks.is_alone else ranks.handed_out(len(meshes))
    failed = fill_cache(meshes, options, cache, jobs, device=device, leave_large=True, ready=ready, positions=shared)
    reasons = {meshes[position]: reason for position, reason in failed.items()}
    first = {i: next((mesh for mesh in items[i].read if mesh in reasons), None) for i in positions}
    return {i: reasons[mesh] for i, mesh in first.items() if mesh is not None}


def _state(item: Item, before: str = "") -> str:
    """The result and the identities of the files that it is made from, as words. Those in `before` stay if they can."""
    files, identities = (*item.read, *item.beside), before.split()[1:]
    identities += [""] * (len(files) - len(identities))
    words = [_identity(*each) for each in zip(files, identities, strict=False)]
    return " ".join([str(hashed(f"{item.result}{item.facts}")), *words])


def _identity(path: Path, before: str) -> str:
    state, _, content = before.partition(":")
    try:
        identity = file_identity(path, FileIdentity(int(state), content) if content else None)
    except OSError:  # a missing file; if it is needed, reading it gives the reason
        return "missing"
    return before if identity.content == content else f"{identity.state}:{identity.content}"
