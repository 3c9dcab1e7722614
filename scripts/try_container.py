"""Run the steps of the Dockerfile in a clean Debian root, without Docker and without a GPU: `make container`.

    sudo python scripts/try_container.py FOLDER [--suite bookworm] [--copy PATH ...] [--env NAME=VALUE ...]

FOLDER/base is made by debootstrap if it does not exist; the steps run in a copy of it, FOLDER/root. The instructions
ARG, ENV, COPY, RUN, USER and WORKDIR are followed as Docker does, with TORCH=pypi instead of a CUDA build. Then the
entry point is started as the image's user: the page has to answer the HEALTHCHECK, the bundled miniature has to train
in its queue, and SIGTERM (which `docker stop` sends) has to end all of it.

What this does not show: the base image with CUDA, a GPU inside a container, and Docker's own work (layers, volumes,
networks). --copy and --env bring in what a machine behind a proxy needs, such as its certificates.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
ARGUMENTS = {"TORCH": "pypi", "BASE": "debian"}
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
WAIT_SECONDS = 900
JOB = """
name = "container"
output_dir = "/data/runs"
[model]
family = "sd15"
path = "demo"
[adapter]
rank = 4
[dataset]
resolution = 64
bucket_step = 16
[[dataset.folders]]
path = "{dataset}"
[train]
steps = 3
[optimizer]
lr = 1e-3
"""


def read_instructions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each instruction of a Dockerfile with its text; continued lines are joined."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word.upper(), rest.strip()


class Root:
    """A clean Debian root in which instructions are carried out.

    Attributes:
        path: the root that the steps change.
        environment: variables of the next step.
        user, folder: who runs the next step, and where.
    """

    def __init__(self, folder: Path, suite: str, environment: dict[str, str]):
        base, path = folder / "base", folder / "root"
        self.path, self.environment = path, {"PATH": DEFAULT_PATH, **environment}
        self.user, self.folder, self.arguments = "root", "/", dict(ARGUMENTS)
        if not (base / "var/lib/dpkg/status").exists():
            subprocess.run(["debootstrap", "--variant=minbase", suite, str(base)], check=True)
        shutil.rmtree(path, ignore_errors=True)
        subprocess.run(["cp", "-a", str(base), str(path)], check=True)
        shutil.copyfile("/etc/resolv.conf", path / "etc/resolv.conf")

    def expand(self, text: str) -> str:
        """Replace ${NAME} and $NAME as Docker does outside of RUN."""
        values = {**self.arguments, **self.environment}
        return re.sub(r"\$\{?(\w+)\}?", lambda match: values.get(match[1], ""), text)

    def make_command(self, arguments: list[str]) -> list[str]:
        """Return a command line that runs these arguments inside, with /proc and /dev mounted for it alone."""
        variables = [f"{name}={value}" for name, value in {**self.environment, "HOME": self.get_home()}.items()]
        inside = ["chroot", f"--userspec={self.user}", str(self.path), "/usr/bin/env", "-i", *variables]
        inside += ["/bin/sh", "-c", f'cd {shlex.quote(self.folder)} && exec "$@"', "sh", *arguments]
        mounts = f"mount -t proc proc {self.path}/proc && mount --rbind /dev {self.path}/dev"
        isolate = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        return [*isolate, "/bin/sh", "-c", f'{mounts} && exec "$@"', "sh", *inside]

    def get_home(self) -> str:
        """Return the home folder of the user."""
        return "/root" if self.user == "root" else f"/home/{self.user}"

    def carry_out(self, word: str, text: str) -> None:
        """Carry out one instruction; those that say nothing about the file system are skipped."""
        if word == "ARG":
            name, _, default = text.partition("=")
            self.arguments.setdefault(name, default)
        elif word == "ENV":
            for part in shlex.split(text):
                name, _, value = part.partition("=")
                self.environment[name] = self.expand(value)
        elif word == "USER":
            self.user = text
        elif word == "WORKDIR":
            self.folder = text
        elif word == "COPY":
            target = self.path / text.split()[-1].lstrip("/")
            shutil.rmtree(target, ignore_errors=True)
            ignored = (HERE / ".dockerignore").read_text(encoding="utf-8").split()
            anywhere = shutil.ignore_patterns(*(line.removeprefix("**/") for line in ignored if line.startswith("**/")))
            at_top = shutil.ignore_patterns(*ignored)
            shutil.copytree(
                HERE,
                target,
                ignore=lambda folder, names: (at_top if Path(folder) == HERE else anywhere)(folder, names),
            )
        elif word == "RUN":
            print(f"== RUN {text}", flush=True)
            variables = [f"{name}={value}" for name, value in self.arguments.items()]
            subprocess.run(self.make_command(["/usr/bin/env", *variables, "/bin/sh", "-c", text]), check=True)


def run_entry_point(root: Root, entry: list[str], health: str) -> None:
    """Start the entry point, wait for its health check, train in its queue, and end it as `docker stop` does."""
    root.environment["LORA_FP8_PASSWORD"] = "only for this test"
    log = tempfile.TemporaryFile()
    process = subprocess.Popen(root.make_command(entry), stdout=log, stderr=subprocess.STDOUT)
    enter = ["nsenter", "--target", str(find_inner(process.pid)), "--mount", "--pid"]
    chroot = root.make_command([])
    chroot = chroot[chroot.index("chroot") :]

    def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*enter, *chroot, *arguments], capture_output=True)

    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while run("/bin/sh", "-c", health).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                raise SystemExit(f"the page does not answer:\n{log.read().decode(errors='replace')}")
            time.sleep(1)
        print("== the page answers its HEALTHCHECK", flush=True)
        code = "import lora_fp8, pathlib; print(pathlib.Path(lora_fp8.__file__).parent / 'demo/dataset')"
        dataset = run("python", "-c", code).stdout.decode().strip()
        (root.path / "data/job.toml").write_text(JOB.format(dataset=dataset), encoding="utf-8")
        done = run("lora-fp8", "submit", "/data/job.toml")
        assert done.returncode == 0, done
        finished = root.path / "data/runs/container/verify.json"
        while not finished.exists():
            if time.monotonic() > deadline:
                raise SystemExit(run("lora-fp8", "jobs").stdout.decode())
            time.sleep(1)
        print(run("lora-fp8", "jobs").stdout.decode().strip(), flush=True)
    finally:
        os.kill(find_inner(process.pid), signal.SIGTERM)
        process.wait(WAIT_SECONDS)
    print("== SIGTERM ended the container", flush=True)


def find_inner(pid: int) -> int:
    """Return the first process inside the namespaces that `unshare --fork` made; stop if there is none any more."""
    while True:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_bytes().decode(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue  # it has exited meanwhile
            if int(fields[1]) == pid:
                return int(stat.parent.name)
        if not Path(f"/proc/{pid}/fd/0").exists():
            raise SystemExit("the entry point has exited")
        time.sleep(0.05)


def main() -> None:
    """Run all steps; the exit code is not 0 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--suite", default="bookworm")
    parser.add_argument("--copy", type=Path, action="append", default=[], help="copied to the same place inside")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    if os.geteuid():
        sys.exit("try_container.py: debootstrap and chroot need root")
    environment = dict(pair.split("=", 1) for pair in options.env)
    root = Root(options.folder.absolute(), options.suite, environment)
    for path in options.copy:
        target = root.path / path.absolute().relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, target)
    entry: list[str] = []
    health = ""
    for word, text in read_instructions(HERE / "Dockerfile"):
        if word == "ENTRYPOINT":
            entry = [part.strip('" ') for part in text.strip("[]").split(",")]
        elif word == "HEALTHCHECK":
            health = text.partition("CMD ")[2]
        else:
            root.carry_out(word, text)
    run_entry_point(root, entry, health)


if __name__ == "__main__":
    main()
