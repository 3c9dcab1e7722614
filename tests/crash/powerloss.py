"""Disks that a power loss may leave behind, made from the trace of what a program wrote.

    disk = Disk(before, trace, root)               `before`: what stood below `root` when the recording began
    state = disk.after(crash, "ordered", rng)      {name: bytes, or None for a folder} after the power went at a call
    lay_out(state, folder)

Nothing is written to a real disk but files that look as after the loss, so that a state costs milliseconds.

"ordered" is ext4 as most machines have it (data=ordered, delayed allocation): the journal commits changes of names in
their order, and any fsync commits all of them until then. Data that nobody synced may be missing, though the file has
its name (its length is 0 or ends at some page), with one exception: a rename over an existing file brings the data of
the new file with it (auto_da_alloc). Source: Documentation/filesystems/ext4 and Documentation/admin-guide/ext4.rst of
the Linux kernel. Left out: the same exception for a file that is emptied and written anew, so that the model allows
more losses than ext4 does.

"strict" is what POSIX promises, and no more (fsync(2); Pillai et al., "All File Systems Are Not Created Equal", OSDI
2014): names in a folder are there after an fsync of this folder, data after an fsync of this file. Of everything else
any part may be there: of the changes of names in a folder any subset (a rename within one folder is one change), of
the data any page, with zeros where the file has its length and not its bytes.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rig import Call

PAGE = 4096
MODELS = ("ordered", "strict")
State = dict[str, bytes | None]


@dataclass(eq=False)
class Node:
    """A file or a folder, which keeps being itself when its name changes.

    Attributes:
        names: of a folder: what is in it now.
        kept: of a file: its bytes before the trace.
        changes: of a file: (call, offset, data); data is None where it was cut or grown to `offset`.
        syncs: calls after which all until then was on the disk: of a file its bytes, of a folder its names.
        replaced: of a file: calls that renamed it over another.
    """

    names: "dict[str, Node] | None" = None
    kept: bytes = b""
    changes: list[tuple[int, int, bytes | None]] = field(default_factory=list)
    syncs: list[int] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Renaming:
    """One change of names: in these folders these names now mean these nodes; None is a name that is gone."""

    call: int
    bindings: tuple[tuple[Node, str, Node | None], ...]


class Disk:
    """What a trace did, so that it can be cut off anywhere.

    Args:
        before: names relative to `root`; None is a folder.
        trace: the recorded calls.
        root: the folder that was watched.
    """

    def __init__(self, before: State, trace: list[Call], root: Path):
        self.root = str(root)
        self.top = Node({})
        self.initial: list[Renaming] = []
        self.renamings: list[Renaming] = []
        self.forced = [0]  # calls that commit the journal
        self.marks: list[tuple[int, str]] = []
        for name, data in sorted(before.items()):
            folder, last = self._place(name)
            node = Node({}) if data is None else Node(kept=data)
            self._bind(self.initial, -1, (folder, last, node))
        self.length = 0
        for call in trace:
            if call.op == "mark":
                self.marks.append((self.length, call.path))
                continue
            self.length += 1
            if not call.error:
                self._take(self.length, call)

    def acknowledged(self, crash: int) -> list[str]:
        """Return the marks that were set before the power went after this many calls."""
        return [text for call, text in self.marks if call <= crash]

    def after(self, crash: int, model: str, rng: random.Random) -> State:
        """Return one state that the model allows when the power goes after so many calls."""
        last_forced = max(call for call in self.forced if call <= crash)
        committed = rng.choice((last_forced, crash, rng.randint(last_forced, crash)))
        names: dict[tuple[Node, str], Node | None] = {}
        for change in [*self.initial, *self.renamings]:
            if model == "ordered":
                there = change.call <= committed
            else:
                there = change.call <= crash and (self._durable(change, crash) or rng.random() < 0.5)
            if there:
                names |= {(folder, name): node for folder, name, node in change.bindings}
        state: State = {}
        waiting = [("", self.top)]
        while waiting:
            where, folder = waiting.pop()
            for (parent, name), node in names.items():
                if parent is not folder or node is None:
                    continue
                path = f"{where}{name}"
                if node.names is not None:
                    state[path] = None
                    waiting.append((f"{path}/", node))
                elif model == "ordered":
                    state[path] = _ordered(node, crash, committed, rng)
                else:
                    state[path] = _strict(node, crash, rng)
        return state

    # -- inside

    @staticmethod
    def _durable(change: Renaming, crash: int) -> bool:
        if change.call < 0:
            return True
        folders = {id(folder): folder for folder, _, _ in change.bindings}.values()
        return all(any(change.call <= sync <= crash for sync in folder.syncs) for folder in folders)

    def _place(self, name: str) -> tuple[Node, str]:
        """Return the folder that a relative name is in now, and its last part."""
        *parts, last = name.split("/")
        folder = self.top
        for part in parts:
            assert folder.names is not None
            folder = folder.names[part]
        return folder, last

    def _relative(self, path: str) -> str | None:
        if not path.startswith(f"{self.root}/") or path.endswith(" (deleted)"):
            return None
        return path[len(self.root) + 1 :].rstrip("/")

    def _node(self, path: str) -> Node | None:
        if path == self.root:
            return self.top
        name = self._relative(path)
        if name is None:
            return None
        folder, last = self._place(name)
        return (folder.names or {}).get(last)

    @staticmethod
    def _bind(to: list[Renaming], call: int, *bindings: tuple[Node, str, Node | None]) -> None:
        for folder, name, node in bindings:
            assert folder.names is not None
            if node is None:
                folder.names.pop(name, None)
            else:
                folder.names[name] = node
        to.append(Renaming(call, bindings))

    def _take(self, number: int, call: Call) -> None:
        name = self._relative(call.path)
        if call.op in ("sync", "syncall"):
            nodes = list(self._all()) if call.op == "syncall" else [self._node(call.path)]
            for node in filter(None, nodes):
                node.syncs.append(number)
            self.forced.append(number)
        elif name is None:
            return
        elif call.op in ("create", "mkdir"):
            self._bind(self.renamings, number, (*self._place(name), Node({} if call.op == "mkdir" else None)))
        elif call.op in ("unlink", "rmdir"):
            self._bind(self.renamings, number, (*self._place(name), None))
        elif call.op in ("rename", "link"):
            node, second = self._node(call.path), self._relative(call.second)
            assert node is not None and second is not None, call
            target = self._place(second)
            if (target[0].names or {}).get(target[1]) is not None:
                node.replaced.append(number)
            gone = [(*self._place(name), None)] if call.op == "rename" else []
            self._bind(self.renamings, number, *gone, (*target, node))
        elif node := self._node(call.path):
            if call.op == "write":
                node.changes.append((number, call.offset, call.data))
            elif call.op in ("empty", "truncate"):
                node.changes.append((number, call.offset, None))

    def _all(self) -> Iterator[Node]:
        waiting = [self.top]
        while waiting:
            yield (node := waiting.pop())
            waiting += (node.names or {}).values()


def _apply(data: bytearray, offset: int, piece: bytes | None) -> None:
    if piece is None:
        data[offset:] = bytes(max(0, offset - len(data)))
        return
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(piece)] = piece


def _pieces(changes: list[tuple[int, int, bytes | None]]) -> Iterator[tuple[int, int, bytes | None]]:
    """Cut writes at the ends of pages."""
    for call, offset, data in changes:
        if data is None:
            yield call, offset, None
            continue
        at = 0
        while at < len(data):
            end = min(len(data), at + PAGE - (offset + at) % PAGE)
            yield call, offset + at, data[at:end]
            at = end


def _durable_bytes(node: Node, until: int) -> bytearray:
    data = bytearray(node.kept)
    for call, offset, piece in node.changes:
        if call <= until:
            _apply(data, offset, piece)
    return data


def _ordered(node: Node, crash: int, committed: int, rng: random.Random) -> bytes:
    """The bytes of a file under ext4: what is on the disk for certain, and some more pages from the beginning on."""
    certain = max([-1, *(s for s in node.syncs if s <= crash), *(r for r in node.replaced if r <= committed)])
    data = _durable_bytes(node, certain)
    open_changes = []
    for change in node.changes:
        if certain < change[0] <= crash:
            if change[2] is None and change[0] > committed:
                break  # not cut yet on the disk; what was written afterwards is nowhere that can be seen
            open_changes.append(change)
    pieces = list(_pieces(open_changes))
    many = rng.choice((0, len(pieces), rng.randint(0, len(pieces))))
    for position, (_, offset, piece) in enumerate(pieces):
        if piece is None or position < many:
            _apply(data, offset, piece)
    return bytes(data)


def _strict(node: Node, crash: int, rng: random.Random) -> bytes:
    """The bytes of a file under POSIX: what was synced, and of the rest any part."""
    certain = max([-1, *(s for s in node.syncs if s <= crash)])
    data = _durable_bytes(node, certain)
    pieces = list(_pieces([change for change in node.changes if certain < change[0] <= crash]))
    share = rng.choice((0.0, 1.0, 0.5))
    zeros = rng.random() < 0.5  # the length is there, the bytes are not
    for _, offset, piece in pieces:
        if rng.random() < share:
            _apply(data, offset, piece)
        elif zeros and piece is not None and len(data) < offset + len(piece):
            data.extend(bytes(offset + len(piece) - len(data)))
    return bytes(data)


def snapshot(folder: Path) -> State:
    """Return what is below a folder."""
    return {
        path.relative_to(folder).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def lay_out(state: State, folder: Path) -> None:
    """Make these files and folders below a folder."""
    for name, data in sorted(state.items()):
        if data is None:
            (folder / name).mkdir(parents=True, exist_ok=True)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
