"""Real servers on the loopback, started by a test: an sshd with keys of its own, and a Slurm cluster of two nodes.

`scripts/install_servers.sh` installs the programs. Where one cannot start, the test fails with what the server said.
"""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

INSTALL = "run scripts/install_servers.sh, which installs the servers that this test starts"
SBIN = "/usr/sbin:/sbin"


def find_program(name: str) -> str:
    """The path of a server's program, or a failure that says what to do."""
    path = shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}")
    if path is None:
        pytest.fail(f"{name} is not installed: {INSTALL}")
    return path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server:
    """A server in the foreground, with its output in a file."""

    def __init__(self, folder: Path, *command: str, environment: dict[str, str] | None = None):
        self.log = folder / f"{Path(command[0]).name}.output"
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
            )

    def require(self, *logs: Path) -> None:
        if self.process.poll() is not None:
            texts = [path.read_text(errors="replace")[-2000:] for path in (self.log, *logs) if path.exists()]
            pytest.fail(f"{self.process.args} ended with {self.process.returncode}:\n" + "\n".join(texts))

    def end(self) -> None:
        children = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


class SshServer(Server):
    """An sshd that knows one key. `host` is its name for the `ssh` that is first on the PATH."""

    host = "machine"

    def __init__(self, folder: Path):
        folder.mkdir()
        self.folder, self.port = folder, free_port()
        for name in ("host_key", "user_key"):
            command = [find_program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        host_key = (folder / "host_key.pub").read_text(encoding="utf-8")
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {host_key}", encoding="utf-8")
        (folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nPermitRootLogin yes\n"
            "PasswordAuthentication no\n",
            encoding="utf-8",
        )
        known = f"UserKnownHostsFile {folder}/known_hosts\nStrictHostKeyChecking yes\nIdentitiesOnly yes\n"
        (folder / "ssh_config").write_text(
            f"Host {self.host}\nHostName 127.0.0.1\nPort {self.port}\nIdentityFile {folder}/user_key\n{known}"
            f"Host 127.0.0.1\nPort {self.port}\n{known}",
            encoding="utf-8",
        )
        # ssh reads the config of whoever runs it, wherever $HOME is: the one of the test is an option.
        wrapper = folder / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {find_program("ssh")} -F "{folder}/ssh_config" "$@"\n', encoding="utf-8")
        wrapper.chmod(0o755)
        if os.getuid() == 0:
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # where sshd locks itself in before a login
        super().__init__(folder, find_program("sshd"), "-D", "-e", "-f", str(folder / "sshd_config"))
        wait_until(self._answers, lambda: self.log.read_text(encoding="utf-8"))

    def _answers(self) -> bool:
        self.require()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as connection:
            return connection.recv(4) == b"SSH-"
        return False

    def cut_connections(self) -> int:
        """End all connections at once, as a network that fails does; what they started goes on. -> their number."""
        connections = psutil.Process(self.process.pid).children(recursive=True)
        connections = [process for process in connections if process.name() == "sshd"]
        for process in connections:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return len(connections)


class SlurmCluster:
    """munged, slurmctld and a slurmd a node: this machine is both nodes, each with two GPUs that do not exist."""

    nodes = ("near", "far")

    def __init__(self, folder: Path):
        self.folder, name, user = folder, socket.gethostname(), pwd.getpwuid(os.getuid()).pw_name
        key, sock = folder / "munge" / "key", folder / "munge" / "socket"
        for part in ("munge", "state", "spool-near", "spool-far"):
            (folder / part).mkdir(mode=0o700)
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n", encoding="utf-8")
        self.config = folder / "slurm.conf"
        self.config.write_text(
            f"ClusterName=test\nSlurmctldHost={name}(127.0.0.1)\nSlurmUser={user}\nSlurmdUser={user}\n"
            f"SlurmctldPort={free_port()}\n"
            # A job that is queued again waits for the end of its credential: two minutes, if nothing is said.
            f"AuthType=auth/munge\nCredType=cred/munge\nAuthInfo=socket={sock},cred_expire=10\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool-%n\n"
            f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd-%n.pid\n"
            f"SlurmctldLogFile={folder}/slurmctld.log\nSlurmdLogFile={folder}/slurmd-%n.log\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\n"
            "AccountingStorageType=accounting_storage/none\nMpiDefault=none\nSwitchType=switch/none\n"
            "SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\nReturnToService=2\nKillWait=600\n"
            "SlurmdTimeout=0\nInactiveLimit=0\nGresTypes=gpu\n"
            "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1\n"
            + "".join(
                f"NodeName={node} NodeHostname={name} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1 Gres=gpu:2\n"
                for node in self.nodes
            )
            + f"PartitionName=main Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE State=UP\n",
            encoding="utf-8",
        )
        self.environment = {"SLURM_CONF": str(self.config)}
        self.servers: list[Server] = []
        try:
            munge = [f"--{what}={folder}/munge/{what.split('-')[0]}" for what in ("log-file", "pid-file", "seed-file")]
            self._start("munged", "--force", "--foreground", f"--key-file={key}", f"--socket={sock}", *munge)
            wait_until(lambda: self._run("munge", "-S", str(sock), "-n").returncode == 0, self.describe, poll=0.2)
            self._start("slurmctld", "-D", "-f", str(self.config))
            for node in self.nodes:
                self._start("slurmd", "-D", "-f", str(self.config), "-N", node)
            idle = f"{len(self.nodes)} idle"
            wait_until(lambda: self.slurm("sinfo", "--noheader", "--format=%D %T") == idle, self.describe, poll=0.2)
        except BaseException:
            self.end()
            raise

    def _start(self, program: str, *arguments: str) -> None:
        self.servers.append(Server(self.folder, find_program(program), *arguments, environment=self.environment))

    def _run(self, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        for server in self.servers:
            server.require(*self.folder.glob("*.log"))
        command = [find_program(program), *arguments]
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    def slurm(self, program: str, *arguments: str) -> str:
        """The output of a program of Slurm; "" if it fails."""
        done = self._run(program, *arguments)
        return done.stdout.strip() if done.returncode == 0 else ""

    def describe(self) -> str:
        """What the servers wrote, for a failure."""
        logs = [*self.folder.glob("*.log"), *self.folder.glob("*.output"), self.folder / "munge" / "log"]
        return "\n".join(f"== {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())

    def end(self) -> None:
        for server in reversed(self.servers):
            server.end()


@contextlib.contextmanager
def ssh_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    server = SshServer(folder)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    try:
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def slurm_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """Start a cluster of two nodes, on which commands of Slurm act meanwhile."""
    # Not in a test's folder: the path of a socket may have 107 bytes, and Slurm adds 30.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        yield from _run_cluster(Path(folder), monkeypatch)


def _run_cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(folder)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    try:
        yield cluster
    finally:
        for job in cluster.slurm("squeue", "--noheader", "--format=%i").split():
            cluster.slurm("scancel", "--signal=KILL", "--full", job)
            cluster.slurm("scancel", job)
        deadline = time.monotonic() + 30
        while cluster.slurm("squeue", "--noheader") and time.monotonic() < deadline:
            time.sleep(0.1)
        cluster.end()


SETUP = (
    f"export PATH='{Path(sys.executable).parent}':$PATH PYTHONPATH='{Path(__file__).parent.parent}' "
    "OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1"
)
"""What a login on "another machine", which is this one, has to do to have this program."""
