"""Caption edits that are killed, or whose disk fails, at any call that changes a file; and files damaged by a crash.

Every such call of an edit, an undo, a redo and a single edit is stopped in turn, with some of what may follow or of
the ways to fail; TORTURE=1 tries all of these at each call. Afterwards no caption may be half written, and undo, redo
and repair have to lead to exactly the bytes that the history promises.
"""

import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import pytest
from PIL import Image

from lora_fp8.data import caption_journal, caption_operations
from lora_fp8.data import captions as room
from lora_fp8.errors import UserError
from webui import dataset_folder
from webui.context import Place, Ui
from webui.pages import dataset

State = dict[str, bytes]
CALLS = ("open", "write", "fsync", "replace", "unlink", "ftruncate", "fchmod")


NEED_ROOM = {"full": ("open", "write"), "full, copy on write": ("open", "write", "fsync", "ftruncate")}
"""Calls that a full disk refuses; on some file systems even a file that shrinks needs room."""


class Killed(BaseException):
    """The process is no more."""


class Disk:
    """Counts the calls that change files, and lets one of them (from number `at` on) fail.

    Args:
        fault: "kill" stops there for ever, half a write being done; a full disk refuses what needs room from there
            on, "dead" everything; "once" refuses that one call; "short" writes one byte less in that call.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fault: str = "", at: int = -1):
        self.fault, self.at, self.calls = fault, at, []
        self.real = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            monkeypatch.setattr(os, name, lambda *given, _name=name, **named: self.call(_name, *given, **named))

    def call(self, name: str, *given, **named):
        if name == "open" and not given[1] & os.O_CREAT:
            return self.real[name](*given, **named)
        number = len(self.calls)
        self.calls.append((name, *given))
        over, here = number >= self.at >= 0, number == self.at
        if self.fault == "short" and here and name == "write":
            return self.real[name](given[0], bytes(given[1])[: max(1, len(given[1]) - 1)])
        if self.fault == "kill" and over:
            if here and name == "write":
                self.real[name](given[0], bytes(given[1])[: len(given[1]) // 2])
            raise Killed
        if over and (self.fault == "dead" or name in NEED_ROOM.get(self.fault, ())):
            raise OSError(errno.EIO if self.fault == "dead" else errno.ENOSPC, "the disk is ill", "somewhere")
        if here and self.fault == "once":
            raise OSError(errno.EIO, "the disk hiccups", "somewhere")
        return None if name == "fsync" else self.real[name](*given, **named)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three pictures; c.png has no caption."""
    root = tmp_path / "set"
    (root / "deep").mkdir(parents=True)
    for name in ("a.png", "deep/b.png", "c.png"):
        Image.new("RGB", (8, 8), "red").save(root / name)
    (root / "a.txt").write_bytes(b"a girl, red hair")
    (root / "deep/b.txt").write_bytes("\ufeff红发, 女孩\r\n".encode("utf-16-le"))
    return root


def state_of(folder: Path) -> State:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.suffix in (".txt", ".caption") and not path.name.startswith(".")
    }


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*.tmp")]


def edit(folder: Path, word: str, only: list[str] | None = None) -> None:
    room.apply(folder, room.preview(folder, [caption_operations.AddTag(word)], only))


def follow(folder: Path, states: list[State]) -> None:
    """The files are those that the history promises, and every way through it gives the exact bytes."""
    entries = room.read_history(folder)
    at = sum(entry.done for entry in entries)
    assert state_of(folder) == states[at]
    for place in range(at - 1, -1, -1):
        room.undo(folder)
        assert state_of(folder) == states[place]
    for place in range(1, len(entries) + 1):
        room.redo(folder)
        assert state_of(folder) == states[place]
    assert leftovers(folder) == []


OPERATIONS: dict[str, tuple[int, Callable[[Path], object]]] = {
    # what is done: how many edits are done before it, and it
    "apply": (1, lambda folder: edit(folder, "two")),
    "single": (1, lambda folder: edit(folder, "two", ["c.png"])),
    "undo": (2, room.undo),
    "redo": (1, room.redo),
    "redo the first": (0, room.redo),  # which makes a caption that was not there, beside two that were
}


@pytest.fixture
def prepared(folder: Path, request: pytest.FixtureRequest) -> tuple[Path, list[State], Callable[[Path], object]]:
    """A folder before the operation, and all states of its history."""
    states = [state_of(folder)]
    single = ["c.png"] if request.param == "single" else None
    for word, only in (("one", None), ("two", single)):
        edit(folder, word, only)
        states.append(state_of(folder))
    done, operation = OPERATIONS[request.param]
    for _ in range(2 - done):
        room.undo(folder)
    if request.param in ("apply", "single"):  # the second edit is yet to be made
        shutil.rmtree(folder / "deep", ignore_errors=False)
        (folder / room.JOURNAL).unlink()
        (folder / "deep").mkdir()
        Image.new("RGB", (8, 8), "red").save(folder / "deep/b.png")
        (folder / "c.txt").unlink()
        for name, raw in states[0].items():
            (folder / name).write_bytes(raw)
        edit(folder, "one")
        assert state_of(folder) == states[1]
    return folder, states, operation


def count_calls(tmp_path: Path, folder: Path, operation: Callable[[Path], object]) -> int:
    """How many calls the operation makes that change files."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        operation(copy)
    shutil.rmtree(copy)
    return len(disk.calls)


THEN = ("repair", "undo", "redo", "edit")
FAULTS = ("full", "full, copy on write", "dead", "once", "short")


def choose_calls(number: int, place: int) -> range:
    """Return all calls with TORTURE=1, else every third: with the neighbours in the table, each call is chosen."""
    return range(number) if os.environ.get("TORTURE") else range(place % 3, number, 3)


@pytest.mark.parametrize("prepared", OPERATIONS, indirect=True)
@pytest.mark.parametrize("then", THEN)
def test_killed_at_any_call_it_is_finished_or_taken_back(prepared, then: str, tmp_path: Path) -> None:
    folder, states, operation = prepared
    for at in choose_calls(count_calls(tmp_path, folder, operation), THEN.index(then)):
        copy = tmp_path / f"killed-{at}"
        shutil.copytree(folder, copy)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            Disk(patch, "kill", at)
            operation(copy)
        for name, raw in state_of(copy).items():
            assert raw in [state.get(name) for state in states], f"call {at}: {name} is half written"
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch)
            known = list(states)
            if then == "repair":
                room.repair(copy)
                assert not room.repair(copy).needed
            elif then == "edit":
                room.open_journal(copy).__enter__()
                done = sum(entry.done for entry in room.read_history(copy))
                edit(copy, "three")
                known = [*states[: done + 1], state_of(copy)]
            else:
                try:
                    (room.undo if then == "undo" else room.redo)(copy)
                except UserError as error:
                    assert f"no caption edit to {then}" in str(error)
            follow(copy, known)
        shutil.rmtree(copy)


@pytest.mark.parametrize("prepared", OPERATIONS, indirect=True)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_fails_changes_nothing_or_says_what_it_changed(prepared, fault: str, tmp_path: Path) -> None:
    folder, states, operation = prepared
    before, entries = state_of(folder), room.read_history(folder)
    for at in choose_calls(count_calls(tmp_path, folder, operation), FAULTS.index(fault)):
        copy, said = tmp_path / f"failed-{at}", ""
        shutil.copytree(folder, copy)
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, fault, at)
            try:
                operation(copy)
            except UserError as error:
                said = str(error)
        after = state_of(copy)
        if fault == "short":
            assert not said and after != before
        elif "captions are changed" in said:
            changed = sum(after.get(name) != before.get(name) for name in {*before, *after})
            assert fault in ("dead", "once", "full, copy on write")
            assert changed <= int(said.split("; ")[1].split(" of ")[0])
            repaired = shutil.copytree(copy, tmp_path / f"repaired-{at}")
            room.repair(repaired)
            follow(repaired, states)
            back = re.search(rf"`lora-fp8 dataset (undo|redo) {copy}` restores them", said)[1]
            (room.undo if back == "undo" else room.redo)(copy)
            assert state_of(copy) == before
        elif said:
            assert "no caption was changed" in said or "without it no caption is changed" in said
            assert after == before
            if fault == "full":
                assert leftovers(copy) == []
            if fault not in ("dead", "full, copy on write"):
                assert room.read_history(copy) == entries
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch)
            room.repair(copy)
            follow(copy, states)
        shutil.rmtree(copy)


@pytest.mark.parametrize("prepared", OPERATIONS, indirect=True)
def test_what_is_acknowledged_was_synced_before(prepared, monkeypatch) -> None:
    """Logged durably, then each new file synced, then renamed, then its folder synced, then the end logged durably."""
    folder, _, operation = prepared
    disk, kept = Disk(monkeypatch), {}
    real = disk.call

    def call(name: str, *given, **named):
        made = real(name, *given, **named)
        if name == "open":
            kept[made] = os.fspath(given[0])
        if name in ("write", "fsync"):
            disk.calls[-1] = (name, os.readlink(f"/proc/self/fd/{given[0]}"))
        return made

    disk.call = call
    operation(folder)
    calls = [(name, str(given[0])) for name, *given in disk.calls]
    journal = str((folder / room.JOURNAL).resolve())
    renamed = [place for place, (name, _) in enumerate(calls) if name == "replace"]
    logged = [place for place, made in enumerate(calls) if made == ("fsync", journal)]
    assert len(logged) == 2
    for place in renamed:
        staged = calls[place][1]
        assert logged[0] < calls.index(("fsync", staged)) < place
        last = max(place for place, made in enumerate(calls) if made == ("write", staged))
        assert last < calls.index(("fsync", staged))
        target = Path(disk.calls[place][2])
        synced = [place for place, made in enumerate(calls) if made == ("fsync", str(target.parent))]
        assert place < synced[-1] < logged[1]


def as_of_earlier_versions(folder: Path) -> None:
    """Rewrite the journal as it was before operations had an end."""
    lines = [json.loads(line) for line in (folder / room.JOURNAL).read_text(encoding="utf-8").splitlines()]
    lines = [{key: value for key, value in line.items() if key != "open"} for line in lines if "end" not in line]
    lines = [{key: value[0] if isinstance(value, list) else value for key, value in line.items()} for line in lines]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / room.JOURNAL).write_text(text, encoding="utf-8")


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "nul": lambda raw: b"\0" * len(raw),
    "torn": lambda raw: raw[: len(raw) // 2].ljust(len(raw), b"\0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("undone", [False, True])
def test_files_that_a_crash_damaged_are_no_changes_of_somebody_else(
    folder: Path, damage: str, earlier: bool, undone: bool
) -> None:
    states = [state_of(folder)]
    for word in ("one", "two"):
        edit(folder, word)
        states.append(state_of(folder))
    if undone:
        room.undo(folder)
    if earlier:
        as_of_earlier_versions(folder)
    whole = state_of(folder)

    def spoil() -> None:
        for name, raw in whole.items():
            (folder / name).write_bytes(DAMAGES[damage](raw))

    spoil()
    found = room.repair(folder, dry_run=True)
    assert sorted(found.restored) == sorted(whole) and state_of(folder) != whole
    assert room.repair(folder) == found and state_of(folder) == whole
    assert not room.repair(folder, dry_run=True).needed
    spoil()
    (room.redo if undone else room.undo)(folder)
    follow(folder, states)


def test_new_captions_that_a_crash_lost_come_back(folder: Path) -> None:
    """Earlier versions did not sync: names of new files could be lost. Today a missing file was deleted by somebody."""
    edit(folder, "one")
    whole = state_of(folder)
    (folder / "c.txt").unlink()
    assert not room.repair(folder).needed
    as_of_earlier_versions(folder)
    assert room.repair(folder).restored == ["c.txt"] and state_of(folder) == whole
    (folder / "c.txt").unlink()
    (folder / "c.png").unlink()
    assert not room.repair(folder).needed


@pytest.mark.parametrize("stopped", ["edit", "undo", "redo"])
def test_what_an_earlier_version_left_half_done_is_taken_back(folder: Path, stopped: str) -> None:
    """Its journal does not tell: only some of the files are on the other side of the edit."""
    states = [state_of(folder)]
    for word in ("one", "two"):
        edit(folder, word)
        states.append(state_of(folder))
    if stopped == "redo":
        room.undo(folder)
    as_of_earlier_versions(folder)
    assert not room.repair(folder, dry_run=True).needed
    half = {name: states[2 if name == "a.txt" else 1][name] for name in states[1]}
    if stopped == "undo":
        half["c.txt"] = b""  # after a power cut
    for name, raw in half.items():
        (folder / name).write_bytes(raw)
    found = room.repair(folder, dry_run=True)
    assert found.title == "add tag 'two' last" and "a.txt" in found.taken_back and state_of(folder) == half
    assert room.repair(folder) == found and state_of(folder) == states[1]
    assert not room.repair(folder, dry_run=True).needed
    follow(folder, states)


def test_captions_that_somebody_wrote_are_no_half_done_edit_of_an_earlier_version(folder: Path) -> None:
    edit(folder, "one")
    as_of_earlier_versions(folder)
    before = state_of(folder)
    for name, raw in {"a.txt": b"a girl", "c.txt": b"mine"}.items():
        (folder / name).write_bytes(raw)
        assert not room.repair(folder).needed
        assert state_of(folder) == before | {name: raw}
        (folder / name).write_bytes(before[name])
    # Of an edit that ended, a caption that is as before was written so by somebody.
    edit(folder, "two")
    (folder / "a.txt").write_bytes(before["a.txt"])
    assert not room.repair(folder).needed and state_of(folder)["a.txt"] == before["a.txt"]


def interrupt(folder: Path, word: str, at: int) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        Disk(patch, "kill", at)
        edit(folder, word)


def interrupt_after_a_rename(folder: Path, tmp_path: Path) -> None:
    """Kill an edit when one caption has its new bytes."""
    before = state_of(folder)
    for at in itertools.count():
        copy = tmp_path / "half-done"
        shutil.copytree(folder, copy)
        interrupt(copy, "one", at)
        if state_of(copy) != before:
            shutil.rmtree(folder)
            copy.rename(folder)
            return
        shutil.rmtree(copy)


def test_real_changes_are_refused_by_name_and_survive_a_repair(folder: Path, tmp_path: Path) -> None:
    before = state_of(folder)
    interrupt_after_a_rename(folder, tmp_path)
    assert [entry.half_done for entry in room.read_history(folder)] == [True]
    with room._locked(folder):  # at work, and not killed
        assert [entry.half_done for entry in room.read_history(folder)] == [False]
    # Half of what was written, in an edit that was never acknowledged: a crash.
    (folder / "a.txt").write_bytes(b"a girl, red")
    (folder / "deep/b.txt").write_bytes(b"mine")
    for step in (room.undo, room.redo):
        with pytest.raises(UserError, match=r"deep/b.txt was changed by another program") as refused:
            step(folder)
        assert "a.txt" not in str(refused.value)
    found = room.repair(folder)
    assert found.others == ["deep/b.txt"] and "a.txt" in found.taken_back and found.title == "add tag 'one' last"
    assert state_of(folder) == before | {"deep/b.txt": b"mine"} and not room.read_history(folder)[0].half_done
    # The same half of a caption whose edit was acknowledged: somebody has shortened it.
    edit(folder, "two")
    (folder / "a.txt").write_bytes(b"a girl, red")
    with pytest.raises(UserError, match="a.txt was changed by another program"):
        room.undo(folder)
    assert not room.repair(folder).needed


def test_temporary_files_of_killed_edits_are_swept_and_no_others(folder: Path) -> None:
    dead, alive = 2**22 + 1, os.getppid()
    ours = [f".a.txt.{dead}.tmp", f"deep/.b.txt.{dead}.old.tmp", f".{room.JOURNAL}.{dead}.tmp"]
    theirs = [f".a.txt.{alive}.tmp", f".a.png.{dead}.tmp", ".a.txt.tmp", f"a.txt.{dead}.tmp", f".a.txt.{dead}.tmp~"]
    for name in ours + theirs:
        (folder / name).write_bytes(b"x")
    (folder / f".c.txt.{dead}.tmp").symlink_to(folder / "a.png")
    (folder / f".d.txt.{dead}.tmp").mkdir()
    assert sorted(room.repair(folder, dry_run=True).swept) == sorted(ours)
    edit(folder, "one")
    assert not any((folder / name).exists() for name in ours) and all((folder / name).exists() for name in theirs)
    assert (folder / f".c.txt.{dead}.tmp").is_symlink() and (folder / f".d.txt.{dead}.tmp").is_dir()


def test_a_staged_file_follows_no_link(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    for name in (f".a.txt.{os.getpid()}.tmp", f".a.txt.{os.getpid()}.old.tmp"):
        (folder / name).symlink_to(outside)
    edit(folder, "one")
    assert outside.read_bytes() == b"secret" and not (folder / "a.txt").is_symlink()


ODD = [None, True, -1, 1e400, 10**30, "x", "\ud800", [], [[]], {"a": []}, "[" * 3000]


@pytest.mark.parametrize("field", ["edit", "t", "title", "files", "group", "names", "changes", "open", "undo", "end"])
def test_odd_values_in_a_journal_are_one_line(folder: Path, field: str) -> None:
    edit(folder, "one")
    first, end = (folder / room.JOURNAL).read_text(encoding="utf-8").splitlines()
    for value in ODD:
        text = json.dumps({**json.loads(first), field: value})
        (folder / room.JOURNAL).write_text(f"{text}\n{end}\n", encoding="utf-8")
        for step in (room.read_history, room.undo, room.redo, room.repair):
            try:
                step(folder)
            except UserError as error:
                assert len(str(error).splitlines()) <= 3
    for line in ("[" * 100_000, "{" * 1000, '{"edit":' * 50_000, "NaN", '{"edit": NaN}', '{"undo": [1, "a"]}'):
        (folder / room.JOURNAL).write_text(line + "\n", encoding="utf-8")
        assert room.read_history(folder) == []
    for kind in ("edit", "undo", "redo"):  # an operation on nothing
        (folder / room.JOURNAL).write_text(json.dumps({kind: [], "open": True}) + "\n", encoding="utf-8")
        assert not room.repair(folder).needed
        edit(folder, f"after an empty {kind}")


def test_odd_changes_in_a_journal_are_one_line_and_escape_nowhere(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_bytes(b"secret")
    names = ("../outside.txt", str(outside), "a\0.txt", "\ud800.txt", "", "x" * 5000 + ".txt")
    packed = [caption_journal.pack([room.Change(name, b"secret", b"owned")]) for name in names]
    for changes in (*packed, packed[0][:-8], "eJw=", "AAAA", "\ud800"):
        for begun in ({}, {"open": True}):
            text = json.dumps({"edit": 1, "changes": changes, **begun})
            for step in (room.undo, room.redo, room.repair):
                (folder / room.JOURNAL).write_text(text + "\n", encoding="utf-8")
                before = state_of(folder)
                try:
                    step(folder)
                except UserError as error:
                    assert len(str(error).splitlines()) <= 2
                assert state_of(folder) == before and outside.read_bytes() == b"secret"


def test_a_held_journal_reads_only_what_others_have_added(folder: Path, monkeypatch) -> None:
    """Captioning costs the same for the last caption as for the first, whoever edits meanwhile."""
    before, read = state_of(folder), []
    with room.open_journal(folder) as journal:
        pread = os.pread
        monkeypatch.setattr(os, "pread", lambda *given: read.append(len(made := pread(*given))) or made)
        for number in range(30):
            found = room.assign(folder, {"c.txt": f"caption {number}"}, "captioned")
            room.apply(folder, found, journal=journal)
            if number == 10:
                edit(folder, "meanwhile", ["a.png"])
            if number == 20:
                monkeypatch.setattr(caption_journal, "JOURNAL_BYTES", 3000)  # others have to read all of it again
        assert journal.last == 31 and (folder / room.JOURNAL).stat().st_size <= 3000
    monkeypatch.undo()
    assert len(room.read_history(folder)) < 31 and (folder / "c.txt").read_bytes() == b"caption 29"
    with room.open_journal(folder) as journal:
        monkeypatch.setattr(os, "pread", lambda *given: read.append(len(made := pread(*given))) or made)
        read.clear()
        for number in range(5):
            found = room.assign(folder, {"c.txt": f"again {number}"}, "captioned")
            room.apply(folder, found, journal=journal)
        assert sum(read) < 30  # the last byte, to see that a line has ended
    assert before["a.txt"] != state_of(folder)["a.txt"]


def test_the_page_repairs_what_it_finds(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    page = dataset.Page(Ui("en", Place(tmp_path / "home", [tmp_path])))
    at = {"folder": str(folder), "cut": {"frames": "", "fps": "auto", "clip": "chunks"}, "chosen": []}
    before = state_of(folder)
    edit(folder, "one")
    journal = folder / room.JOURNAL
    journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])  # killed before its end
    assert 'data-do="repair"' in page.renderer.render_head(dataset_folder.open_folder(folder))
    report = {"findings": [{"kind": "caption_half_done", "level": "warning", "files": [{"file": "", "detail": "x"}]}],
              "counts": {"readable": 3, "pictures": 3, "different_captions": 3, "clips": 0}, "sizes": {}}  # fmt: skip
    assert 'data-do="repair"' in page.renderer.render_findings(SimpleNamespace(report=report))
    said, *_ = page.handlers.handle_button(gr.EventData(None, {"do": "repair"}), at, "sdxl", 0)
    assert "3 captions of the interrupted edit restored" in said["value"]
    assert state_of(folder) == before
    assert "repair" not in page.renderer.render_head(dataset_folder.open_folder(folder, fresh=True))
