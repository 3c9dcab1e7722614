"""`lora-fp8 ui`: serve the site until Ctrl-C. Jobs belong to the worker and continue without it."""

import ctypes
import errno
import gc
import os
import socket
import sys
import tempfile
import threading
import time
import warnings
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_fp8 import jobs
from lora_fp8.common import system
from lora_fp8.common.messages import get_language, translate
from lora_fp8.errors import Message, UserError, reason

from . import sanitize
from .context import Place
from .login import Login

LOOPBACK = ("127.0.0.1", "::1", "localhost")
DEMO = Path(jobs.__file__).resolve().parent.parent / "demo"
PASSWORD = "LORA_FP8_PASSWORD"
REVIVE_AGAIN_S = 60  # after a worker that would not start


def run(
    host: str = "127.0.0.1",
    port: int = 7860,
    roots: Sequence[Path] = (),
    user: str = "",
    names: Sequence[str] = (),
    open_browser: bool = False,
) -> None:
    """Serve the page until Ctrl-C or SIGTERM.

    Args:
        host, port: where it listens; port 0 takes a free one.
        roots: folders that the page may use, beside ./runs, the demo's files and those of its settings.
        user: who may log in, with the password of $LORA_FP8_PASSWORD (or of the file that $LORA_FP8_PASSWORD_FILE
            names); "" needs no login, which is for this machine alone.
        names: accepted Host names beside this machine's own.
        open_browser: open the page in a browser.

    Raises:
        UserError: the port is taken, a root is not a folder, or others could reach the page without a password.
    """
    home = jobs.find_home().resolve()
    password = _take_password()
    if host not in LOOPBACK and not (user and password):
        raise UserError(
            Message(
                "--host {host}: other machines could train and read files on this one; set {variable} and give "
                "--user NAME, or leave it at 127.0.0.1 and use ssh -L",
                host=host,
                variable=PASSWORD,
            )
        )
    if bool(user) != bool(password):
        missing = Message("--user NAME is not given")
        if user:
            missing = Message("{variable} is not set", variable=PASSWORD)
        raise UserError(Message("a login needs a user and a password: {what}", what=missing))
    for root in roots:
        sanitize.require_folder(root, f"--root {root}")
    place = Place(home, [*roots, Path("runs"), DEMO], fixed=host not in LOOPBACK)
    listening = listen(host, port)
    with listening:
        address = _format_address(host, listening.getsockname()[1])
        _set_up(home)
        login = Login(user, password, home / "sessions.json") if user else None
        server = _make_server(place, login, [host, socket.gethostname(), *names], host not in LOOPBACK)
        started = threading.Event()
        threading.Thread(target=_finish_start, args=(place, address, started, open_browser), daemon=True).start()
        try:
            server.on_started = started.set
            server.run(sockets=[listening])
        except KeyboardInterrupt:  # uvicorn has shut down cleanly and passes the signal on
            pass
    _print_line(Message("the page is closed; jobs continue (`lora-fp8 jobs` lists them)"))


def _print_line(line: Message) -> None:
    print(translate(get_language(), line), flush=True)


def _take_password() -> str:
    """Read the password and remove it from the environment, so that child processes and /proc do not show it."""
    if kept := _find_environment_string(PASSWORD):
        ctypes.memset(kept, 0, len(os.fsencode(os.environ.get(PASSWORD, ""))))
    given, file = os.environ.pop(PASSWORD, ""), os.environ.pop(f"{PASSWORD}_FILE", "")
    if given or not file:
        return given
    try:
        return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            Message("{variable}_FILE: {path} cannot be read ({why})", variable=PASSWORD, path=file, why=error)
        ) from None


def _find_environment_string(name: str) -> int:
    """Return the address of a variable's value in this process's own environment; 0 where there is none."""
    if system.WINDOWS:  # where a process's environment is not shown to other users
        return 0
    getenv = ctypes.CDLL(None).getenv
    getenv.restype, getenv.argtypes = ctypes.c_size_t, [ctypes.c_char_p]
    return getenv(name.encode())


def listen(host: str, port: int) -> socket.socket:
    """Open the socket, so that a taken port is reported before anything is loaded."""
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise UserError(
            Message("--host {host}: {why}; give a name or address of this machine", host=host, why=error.strerror)
        ) from None
    # With the protocol said: only then asyncio sends the second part of an answer at once, and not after the first was
    # acknowledged, for which the other side takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # On Windows, SO_REUSEADDR would let two pages share a port.
    option = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
    listener.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        listener.bind(where)
        listener.listen(128)
    except OSError as error:
        listener.close()
        what = reason(error)
        if error.errno == errno.EADDRINUSE:
            what = Message("the address is used by {holder}; choose another port", holder=_find_port_holder(port))
        raise UserError(Message("--host {host} --port {port}: {line}", host=host, port=port, line=what)) from None
    return listener


def _find_port_holder(port: int) -> str:
    """Describe the process that listens on the port, as far as this user may know."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr
            if listens and listens.port == port and connection.pid:
                process = psutil.Process(connection.pid)
                return Message(
                    "process {pid} ({command})",
                    pid=process.pid,
                    command=" ".join(process.cmdline())[:120] or process.name(),
                )
    except psutil.Error:
        pass
    return Message("another process")


def _format_address(host: str, port: int) -> str:
    reachable = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{port}/"


def _set_up(home: Path) -> None:
    """Create an empty folder to run in and a private one for uploads: Gradio serves every file in either."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in ("empty", "uploads"):
        (home / name).mkdir(exist_ok=True, mode=0o700)
    os.chdir(home / "empty")
    tempfile.tempdir = str(home / "uploads")  # not $TMPDIR, which jobs inherit
    os.environ["GRADIO_TEMP_DIR"] = str(home / "uploads")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    warnings.filterwarnings("ignore", message="SSR mode is not supported")  # nor asked for


def _make_server(place: Place, login: Login | None, names: Sequence[str], addresses: bool) -> Any:
    import uvicorn

    gc.disable()  # nothing made while the page is built is garbage; collecting takes a tenth of the time
    from . import app

    class Server(uvicorn.Server):
        on_started = staticmethod(lambda: None)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            gc.freeze()
            gc.enable()
            self.on_started()

    site = app.build(place, login=login, names=names, addresses=addresses)
    return Server(uvicorn.Config(site, log_level="warning", server_header=False, timeout_graceful_shutdown=1))


def _finish_start(place: Place, address: str, started: threading.Event, open_browser: bool) -> None:
    """Do what can wait until the page answers, then keep a worker alive as long as the page runs."""
    from . import file_routes

    started.wait()
    _print_line(Message("lora_fp8 is at {address}  (Ctrl-C closes the page; jobs continue)", address=address))
    if open_browser:
        webbrowser.open(address)
    try:
        jobs.ensure_worker(place.home)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
    file_routes.prune_thumbnails(place)
    while True:
        time.sleep(1)
        _revive_worker(place.home)


def _revive_worker(home: Path) -> None:
    """Start a worker if the last one was killed: the queue would wait for ever. A stopped one stays stopped."""
    if not jobs.was_worker_killed(home):
        return
    try:
        jobs.ensure_worker(home)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        time.sleep(REVIVE_AGAIN_S)
