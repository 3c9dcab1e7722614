"""What differs between Linux, macOS and Windows, in one place: signals, processes of their own, limits and renames.

On Linux each function makes exactly the calls that its docstring names. Elsewhere psutil does the work, or Windows gets
the nearest thing that it has. Locks are in `locks`, and what durability means on Windows is in `writing`.
"""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # tested before each use

WINDOWS = os.name == "nt"
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGBREAK") if hasattr(signal, name))
"""Signals that ask a process to stop; Windows sends SIGBREAK for Ctrl-Break and for a request of another process."""
HANGUP = tuple(getattr(signal, name) for name in ("SIGHUP",) if hasattr(signal, name))
CAN_ASK_TO_STOP = not WINDOWS
"""SIGTERM is a request. On Windows it ends a process at once, so a run is asked by the file control/stop alone."""
CAN_FORK = hasattr(os, "fork")
CAN_LOCK_FOLDERS = hasattr(os, "O_DIRECTORY")
CAN_SYNC_FOLDERS = not WINDOWS
CAN_LIMIT_MEMORY = resource is not None and sys.platform != "darwin"  # macOS takes the limit and does not enforce it
NO_GPUS = "-1" if WINDOWS else ""
"""Value of CUDA_VISIBLE_DEVICES that hides all GPUs; Windows has no empty environment variables."""
BUSY_SECONDS = 5.0
"""How long a rename waits for readers of its target on Windows, which refuses to replace an open file."""
PR_SET_CHILD_SUBREAPER = 36


def make_detach_options() -> dict[str, Any]:
    """Return the arguments of subprocess.Popen for a process that ignores this terminal's Ctrl-C and outlives it."""
    if not WINDOWS:
        return {"start_new_session": True}
    names = ("CREATE_NEW_PROCESS_GROUP", "CREATE_NO_WINDOW")
    return {"creationflags": sum(getattr(subprocess, name, 0) for name in names)}


def find_ui_language() -> str:
    """Return the language of Windows' own windows, such as "zh_CN"; "" elsewhere, where the environment says it."""
    if sys.platform != "win32":
        return ""
    import ctypes
    import locale

    return locale.windows_locale.get(ctypes.windll.kernel32.GetUserDefaultUILanguage(), "")


def find_cache_folder() -> Path:
    """Return the folder for what the program remembers between runs; it may not exist yet."""
    default = os.environ.get("LOCALAPPDATA") or "~/.cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or default).expanduser() / "lora_fp8"


def let_gpu_memory_grow() -> None:
    """Let torch enlarge blocks of GPU memory instead of adding new ones, unless the environment says how it allocates.

    Batches of many shapes then leave fewer holes. Must come before torch is imported; only Linux can do it.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if sys.platform == "linux" and not any(name in os.environ for name in names):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def kill(pid: int) -> None:
    """End a process at once (SIGKILL, or TerminateProcess on Windows).

    Raises:
        ProcessLookupError: it has exited.
        PermissionError: it is another user's.
    """
    if hasattr(signal, "SIGKILL"):
        os.kill(pid, signal.SIGKILL)
        return
    import psutil

    try:
        psutil.Process(pid).kill()
    except psutil.NoSuchProcess:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
    except psutil.AccessDenied:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM)) from None


def process_exists(pid: int) -> bool:
    """Return True if a process has this id, whoever owns it (signal 0, which on Windows would be Ctrl-C)."""
    if WINDOWS:
        import psutil

        return psutil.pid_exists(pid)
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def adopt_orphans() -> bool:
    """Let descendants whose parent exits become children of this process (Linux only). Return True if they will."""
    if WINDOWS or sys.platform != "linux":
        return False
    import ctypes

    return ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def reap_children() -> bool:
    """Collect children that have exited, adopted ones too. Return True if none is left, or if there is no need."""
    if WINDOWS:
        return True
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def count_cpus() -> int:
    """Return how many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def limit_memory(most: int) -> None:
    """Limit this process's address space, in bytes, if CAN_LIMIT_MEMORY; else its parent watches `read_memory`."""
    if CAN_LIMIT_MEMORY:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def read_memory(pid: int) -> int:
    """Return the resident bytes of a process; 0 if it has exited."""
    import psutil

    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def reset_peak_memory() -> None:
    """Start a new measurement of this process's peak memory, where the system can (Linux)."""
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): resets VmHWM to VmRSS


def read_peak_memory() -> int:
    """Return the peak of this process's resident memory in bytes since `reset_peak_memory` (Linux) or its start."""
    with contextlib.suppress(FileNotFoundError):
        # Not ru_maxrss: it keeps, over exec, the peak of the process that started this one.
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 2**10
    if resource is not None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    import psutil

    memory = psutil.Process().memory_info()
    return getattr(memory, "peak_wset", memory.rss)


def replace(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a file over another (os.replace); on Windows, wait for those who have either open.

    Raises:
        OSError: as os.replace.
    """
    _wait_for_readers(os.replace, source, target) if WINDOWS else os.replace(source, target)


def rename(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a file or folder (os.rename); on Windows, wait for those who have a file in it open.

    Raises:
        OSError: as os.rename.
    """
    _wait_for_readers(os.rename, source, target) if WINDOWS else os.rename(source, target)


def _wait_for_readers(move: Callable[[Any, Any], None], source: Any, target: Any) -> None:
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return move(source, target)
        except PermissionError:  # a reader has it open, or a virus scanner
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def read_at(descriptor: int, count: int, offset: int) -> bytes:
    """Read bytes of an open file from an offset (pread); Windows moves the file's position instead."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, count, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    parts = []
    while count > 0 and (part := os.read(descriptor, count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def combine_flags(*names: str) -> int:
    """Return flags of os.open by their names, as far as the system has them, and O_BINARY on Windows."""
    value = getattr(os, "O_BINARY", 0)
    for name in names:
        value |= getattr(os, name, 0)
    return value
