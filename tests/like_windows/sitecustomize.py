"""With this folder on PYTHONPATH, Python answers our own code as on Windows, as far as Linux can. Libraries see Linux.

What `lora_fp8` and `webui` import is looked through: modules that Windows lacks are refused, os, signal, sys and ctypes
lack what they lack there, and some calls do what they do there:

* os.name is "nt", sys.platform "win32". Paths stay those of Linux.
* os.kill ends a process at once, whatever the signal; the signals 0 and 1 are events of the console there.
* os.open refuses folders, and O_BINARY must be given, else line ends would be changed.
* os.fsync refuses a file that is open for reading only.
* A file that this process has open or mapped can be neither renamed, replaced nor deleted.
* /proc and /sys do not exist.
* SIGBREAK, which Ctrl-Break sends, is SIGUSR2 here, so that a test can send it.
"""

import builtins
import ctypes
import errno
import fcntl
import importlib
import os
import signal
import stat
import sys
import threading
import types

OURS = ("lora_fp8", "webui")
MODULES = frozenset(("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog", "readline"))
OF_OS = frozenset(
    """
    O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_LARGEFILE O_NOATIME O_NOCTTY O_NOFOLLOW O_NONBLOCK O_NDELAY
    O_PATH O_SYNC SCHED_IDLE WNOHANG WCONTINUED WUNTRACED WEXITSTATUS WIFEXITED WIFSIGNALED WTERMSIG
    chown chroot confstr ctermid fchdir fchmod fchown fdatasync fork forkpty fpathconf fstatvfs getegid
    geteuid getgid getgroups getloadavg getpgid getpgrp getpriority getresuid getsid getuid initgroups
    killpg lchmod lchown lockf major minor mkfifo mknod nice openpty pathconf pidfd_open pipe2
    posix_fadvise posix_fallocate posix_spawn pread preadv pwrite pwritev readv register_at_fork
    sched_getaffinity sched_setaffinity sched_yield sendfile setegid seteuid setgid setgroups setpgid
    setpriority setreuid setsid setuid sync sysconf tcgetpgrp tcsetpgrp ttyname uname wait wait3 wait4
    waitid writev getxattr setxattr memfd_create
    """.split()
)
SIGNALS = frozenset(("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIGBREAK"))
OF_SIGNAL = frozenset(("alarm", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "sigwait", "siginterrupt"))
O_BINARY = 1 << 30
TREES = ("/proc", "/sys")

_import = builtins.__import__


class Like(types.ModuleType):
    """A module as it is on Windows: with these attributes, and without those."""

    def __init__(self, module, lacking, having):
        super().__init__(module.__name__)
        self.__dict__["_like"] = module, lacking, having

    def __getattr__(self, name):
        module, lacking, having = self.__dict__["_like"]
        if name in having:
            return having[name]
        if lacking(name):
            raise AttributeError(f"module '{module.__name__}' has no attribute '{name}' on Windows")
        return getattr(module, name)

    def __setattr__(self, name, value):
        setattr(self.__dict__["_like"][0], name, value)

    def __delattr__(self, name):
        delattr(self.__dict__["_like"][0], name)

    def __dir__(self):
        module, lacking, having = self.__dict__["_like"]
        return [name for name in {*dir(module), *having} if not lacking(name)]


def kill(pid, number):
    assert number > 1, "on Windows this would send Ctrl-C or Ctrl-Break to a group of the console"
    os.kill(pid, signal.SIGKILL)


def open_(path, flags, mode=0o777):
    assert flags & O_BINARY, f"{path} would be opened as text on Windows"
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return os.open(path, flags & ~O_BINARY, mode)


def fsync(file):
    if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    os.fsync(file)


def set_handler(number, handler):
    if number not in (signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGINT, signal.SIGSEGV, signal.SIGTERM,
                      signal.SIGUSR2):  # fmt: skip
        raise ValueError("invalid signal value")
    return signal.signal(number, handler)


def load(name, *args, **kwargs):
    if name is None:
        raise TypeError("argument of type 'NoneType' is not iterable")
    return ctypes.CDLL(name, *args, **kwargs)


def is_unix_signal(name):
    is_signal = name.startswith("SIG") and not name.startswith("SIG_") and name.isupper()
    return name in OF_SIGNAL or (is_signal and name not in SIGNALS)


LIKE = {
    "os": Like(
        os, OF_OS.__contains__, {"name": "nt", "kill": kill, "open": open_, "fsync": fsync, "O_BINARY": O_BINARY}
    ),
    "signal": Like(signal, is_unix_signal, {"signal": set_handler, "SIGBREAK": signal.SIGUSR2}),
    "sys": Like(sys, ().__contains__, {"platform": "win32"}),
    "ctypes": Like(ctypes, ().__contains__, {"CDLL": load}),
}


def is_ours(names):
    """Return True for the globals of a module of ours, also if it was started by `python -m`."""
    name = names.get("__package__") if names.get("__name__") == "__main__" else names.get("__name__")
    return str(name or "").split(".")[0] in OURS


def import_(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and globals is not None and is_ours(globals):
        first = name.split(".")[0]
        if first in MODULES:
            raise ModuleNotFoundError(f"No module named '{name}' on Windows", name=name)
        if first in LIKE and (name == first or not fromlist):
            _import(name, globals, locals, fromlist, level)
            return LIKE[first]
    return _import(name, globals, locals, fromlist, level)


def caller_is_ours():
    """Return True if the innermost function outside of the standard library is one of ours."""
    frame = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if is_ours(frame.f_globals):
            return True
        if name != __name__ and name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("_frozen"):
            return False
        frame = frame.f_back
    return False


def is_open_here(path):
    """Return True if this process has this file open, or mapped into memory."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    if not stat.S_ISREG(status.st_mode):
        return False
    real = os.path.realpath(path)
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    if any(os.path.realpath(link) == real for link in links):
        return True
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        return any(line.rstrip("\n").endswith(f" {real}") for line in file)


looking = threading.local()
"""Has an attribute while this file itself looks into /proc."""


def watch(event, args):
    if hasattr(looking, "now"):
        return
    if event in ("open", "os.listdir", "os.scandir") and str(args[0]).startswith(TREES):
        if isinstance(args[0], str) and caller_is_ours():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), args[0])
    elif event in ("os.rename", "os.remove") and caller_is_ours():
        for path in args[: 2 if event == "os.rename" else 1]:
            looking.now = True
            is_open = is_open_here(path)
            del looking.now
            if is_open:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


importlib.import_module("posixpath")
builtins.__import__ = import_
sys.addaudithook(watch)
