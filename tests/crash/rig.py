"""Run a scene with one of its file-changing calls failing, or the process killed in front of it.

    rig = Rig(build(folder), folder)                    compiles shim.c, starts a process with it preloaded
    trace = rig.play("captions", place, record=file)    the whole scene; every file-changing call below `place` recorded
    rig.play("captions", place, "kill", at=17)          the same, killed in front of the 17th of these calls
    rig.close()

The process imports everything once and forks a child for each play, so that a play costs what the scene does and not
the imports. The shim works below Python: it sees what SQLite and any other library writes, too. `scenes.py` has what is
played, `powerloss.py` makes disks from recorded traces.

    FAULTS
    kill        SIGKILL in front of the call
    torn        SIGKILL after half of the bytes of a write are written
    full once   the call fails with ENOSPC, the next ones do not
    full        this call and all later ones that need room fail with ENOSPC
    broken      the call fails with EIO
    short       a write writes half of its bytes and says so, as it may
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FAULTS = ("none", "kill", "torn", "full once", "full", "broken", "short")
"""In the order of `enum fault` in shim.c."""
WRITES = ("write", "open", "create", "empty")
GROWS = ("write", "create", "mkdir", "link", "sync", "truncate")
"""Calls that a full disk refuses."""


@dataclass(frozen=True)
class Call:
    """One record of a trace.

    Attributes:
        op: "create", "empty", "open" (with O_CREAT, existing), "write", "truncate", "sync", "syncall", "rename",
            "unlink", "rmdir", "mkdir", "link"; or "mark", which is a note in `path` and no call.
        error: errno, 0 where the call succeeded.
        offset: of a write; the length of a truncate.
        path, second: absolute; `second` of a rename or link is the new name.
    """

    op: str
    error: int
    offset: int
    path: str
    second: str
    data: bytes


@dataclass
class Outcome:
    """How a play ended.

    Attributes:
        code: exit code, negative for a signal.
        text: what it printed on stderr.
        marks: names of the acts that were acknowledged, that is, whose call returned.
        trace: all records, if they were asked for.
    """

    code: int
    text: str
    marks: list[str]
    trace: list[Call] = field(default_factory=list)


def build(folder: Path) -> Path | None:
    """Compile the shim into a folder. Returns None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    library = folder / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "shim.c")], check=True)
    return library


def read_trace(file: Path) -> list[Call]:
    """Read the records of a trace. Half a record at the end, of a process that was killed, is left out."""
    raw, at, calls = file.read_bytes() if file.exists() else b"", 0, []
    while (end := raw.find(b"\n", at)) >= 0:
        op, *numbers = raw[at:end].decode().split("\t")
        error, offset, *lengths = map(int, numbers)
        parts, at = [], end + 1
        for length in lengths:
            parts.append(raw[at : at + length])
            at += length
        if at > len(raw):
            break
        calls.append(Call(op, error, offset, os.fsdecode(parts[0]), os.fsdecode(parts[1]), parts[2]))
    return calls


class Rig:
    """The process that plays scenes.

    Args:
        shim: the library made by `build`.
        folder: for its own files.
    """

    def __init__(self, shim: Path, folder: Path):
        self.folder = folder
        environment = {**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}
        command = [sys.executable, str(HERE / "rig.py"), str(folder)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def play(self, scene: str, place: Path, fault: str = "none", at: int = 0, **more: Any) -> Outcome:
        """Play a scene in the folder `place`, with a fault at the `at`-th file-changing call (the first is 1) below it.

        Args:
            match: count only calls whose path contains this.
            first: number of the act to start with.
            plant: name of a mistake that is planted first, see `scenes.MISTAKES`.
            record: keep the whole trace, which `Outcome.trace` then has.
            settings: what the scene is made from, see `scenes`.
        """
        request = {"scene": scene, "place": os.path.realpath(place), "fault": FAULTS.index(fault), "at": at, **more}
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request, default=str) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the rig's own process ended; see its message above"
        calls = read_trace(self.folder / "trace")
        marks = [call.path for call in calls if call.op == "mark"]
        text = (self.folder / "stderr").read_text(errors="replace")
        return Outcome(json.loads(line)["code"], text, marks, calls if more.get("record") else [])

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


# ------------------------------------------------------------------------------------- in the process with the shim


def _serve(folder: Path) -> None:
    import gc

    import scenes

    for line in sys.stdin:
        request = json.loads(line)
        scene = scenes.get(request["scene"], request.get("settings", {}))
        scene.load()
        gc.freeze()  # what is imported is no garbage: children need not look through it
        pid = os.fork()
        if not pid:
            _play(scene, request, folder)
        print(json.dumps({"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)


def _play(scene: Any, request: dict[str, Any], folder: Path) -> None:
    """In a child: plant, arm, act, leave. Nothing of the parent's is run, flushed or removed."""
    code = 1
    try:
        import scenes

        from lora_fp8.cli.commands import run_guarded

        errors = os.open(folder / "stderr", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(errors, 2)
        os.dup2(errors, 1)
        trace = os.open(folder / "trace", os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND)
        if request.get("plant"):
            scenes.plant(request["plant"])
        shim, place = ctypes.CDLL(None), Path(request["place"])

        def mark(text: str) -> None:
            shim.rig_mark(text.encode())

        match, record = request.get("match", "").encode(), int(bool(request.get("record")))
        shim.rig_arm(os.fsencode(place), match, request["fault"], ctypes.c_long(request["at"]), trace, record)
        run_guarded(lambda: scene.act(place, request.get("first", 0), mark))
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
