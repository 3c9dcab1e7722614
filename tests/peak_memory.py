"""The peak of a process's memory from a point on, as Linux counts it. For child processes of tests, whose scripts
import this file: what the libraries take up while they are imported differs between machines and is not counted.
"""

from pathlib import Path


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def begin() -> int:
    """Forget the peak so far; return the resident bytes now.

    Not ru_maxrss: nothing resets that, and over exec it keeps the peak of the process that started this one.
    """
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _status("VmRSS")


def peak() -> int:
    """Return the most bytes that were resident since `begin`."""
    return _status("VmHWM")
