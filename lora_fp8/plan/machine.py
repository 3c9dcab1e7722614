"""Describe this machine: what can train here, and what is in the way. `lora-fp8 doctor` prints it.

Whatever is missing or broken is a finding, never an error: torch may be absent, or its CUDA unusable. What a GPU can
compute is asked from the functions that training asks (`precision.choose`, `training.memory`).
"""

import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from .. import __version__, settings
from ..common import system
from ..common.gpu import read_driver, read_gpus
from ..common.numbers import format_bytes
from ..errors import Joined, Message
from ..run.disk_space import find_write_obstacle
from .known_problems import find_known_problems

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes", "triton", "torchao", "gradio")
REQUIRED = PACKAGES[:6]
"""Packages without which nothing trains. bitsandbytes has the default optimizer."""
LEAST_FREE = 2 * 2**30
"""Free bytes below which a disk is reported: a run's checkpoints and cache rarely take less."""
HUB_SECONDS = 5.0
TRIALS: dict[str, dict[str, Any]] = {
    "quantize.storage = 'fp8', 'int8', 'nf4', 'bf16'": {"quantize": {"compute": "upcast"}},
    "quantize.compute = 'fp8'": {"quantize": {"compute": "fp8"}},
    "quantize.recipe = 'block'": {"quantize": {"compute": "fp8", "recipe": "block"}},
    "quantize.kernels = 'triton'": {"quantize": {"compute": "fp8", "kernels": "triton"}},
    "quantize.backend = 'torchao'": {"quantize": {"backend": "torchao", "compute": "upcast"}},
    "quantize.backend = 'te'": {"quantize": {"backend": "te", "compute": "fp8"}},
    "memory.compile = 'blocks'": {"memory": {"compile": "blocks"}},
    "memory.offload": {"memory": {"offload": 0.5}},
    "memory.cuda_graphs": {"memory": {"cuda_graphs": True}},
}
"""What is tried on each device: the settings that it stands for, by section."""


@dataclass(frozen=True)
class Gpu:
    """A graphics card, as the driver and torch describe it."""

    name: str
    memory_bytes: int | None
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None
    """compute capability, as torch reports it; None if torch cannot use the card"""


@dataclass
class Machine:
    """What is known of this machine."""

    versions: dict[str, str] = field(default_factory=dict)
    """package -> version; "" if it is not installed"""
    broken: dict[str, str] = field(default_factory=dict)
    """package -> why it cannot be imported"""
    system: str = ""
    driver: str = ""
    """version of the NVIDIA driver; "" without one"""
    driver_cuda: str = ""
    """newest CUDA that the driver runs"""
    torch_cuda: str = ""
    """CUDA that torch is built for; "" for a build without it"""
    torch_archs: tuple[str, ...] = ()
    """architectures that torch has kernels for: "sm_90", "compute_120\""""
    is_usable: bool = False
    """True if torch can use a GPU"""
    gpus: list[Gpu] = field(default_factory=list)
    abilities: dict[str, dict[str, str]] = field(default_factory=dict)
    """device -> setting -> why it does not work there, "" if it does"""
    compiler: str = ""
    disks: list[dict[str, Any]] = field(default_factory=list)
    hub: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """what keeps a training from running as it should"""
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        return {"ok": not self.problems, **asdict(self)}

    def format_lines(self) -> list[str]:
        """Return the description for the terminal."""
        lines: list[str] = [Message("Versions")]
        for name, version in self.versions.items():
            lines.append(_format_row(name, version or Message("not installed")))
        lines += [_format_row("system", self.system), "", Message("GPU")]
        lines += [Message("  {line}", line=line) for line in self._describe_gpus()]
        for device, abilities in self.abilities.items():
            lines += ["", Message("What works on {device}", device=device)]
            for name, why in abilities.items():
                lines.append(Message("  no   {line}", line=why) if why else Message("  yes  {name}", name=name))
        compiler = self.compiler or Message("not found")
        lines += ["", Message("Disk, compiler and hub"), Message("  C compiler: {name}", name=compiler)]
        lines += [
            Message(
                "  {path}: {size} free ({what})",
                path=disk["path"],
                size=format_bytes(disk["free_bytes"]),
                what=disk["what"],
            )
            for disk in self.disks
        ]
        lines.append(Message("  {line}", line=self._describe_hub()))
        lines += ["", *(Message("warning: {line}", line=line) for line in self.warnings)] if self.warnings else []
        lines += ["", *(Message("problem: {line}", line=line) for line in self.problems)] if self.problems else []
        verdict = (
            Message("A training can run here.") if not self.problems else Message("Fix the problems listed above.")
        )
        return [*lines, "", verdict]

    def _describe_gpus(self) -> Iterator[str]:
        if not self.gpus:
            yield Message("no GPU: training runs on the CPU, which is enough for the demo only")
        for gpu in self.gpus:
            about: list[str] = [Message("memory of unknown size")]
            if gpu.memory_bytes is not None:
                about = [f"{gpu.memory_bytes / 2**30:.1f} GiB"]
            if gpu.free_bytes is not None:
                about.append(Message("{size} free", size=format_bytes(gpu.free_bytes)))
            if gpu.capability:
                about.append(Message("compute capability {number}", number=".".join(map(str, gpu.capability))))
            yield Message("{name}: {facts}", name=gpu.name, facts=Joined(", ", about))
        if self.driver:
            yield Message("driver {version}, up to CUDA {cuda}", version=self.driver, cuda=self.driver_cuda)

    def _describe_hub(self) -> Message:
        about = {"endpoint": self.hub["endpoint"]}
        token = Message("token stored") if self.hub["token"] else Message("no token (gated models need one)")
        if self.hub["offline"]:
            return Message(
                "hub: {endpoint} was not contacted, because HF_HUB_OFFLINE is set; {token}", **about, token=token
            )
        if self.hub["error"]:
            why = self.hub["error"]
            return Message("hub: {endpoint} cannot be reached ({why}); {token}", **about, why=why, token=token)
        return Message("hub: {endpoint} responds; {token}", **about, token=token)


def examine(folders: dict[str, Path]) -> Machine:
    """Examine this machine.

    Args:
        folders: name -> folder of which the free space is reported, such as the cache. They need not exist.
    """
    machine = Machine(system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}")
    machine.versions = {"python": platform.python_version()} | {name: _find_version(name) for name in PACKAGES}
    machine.driver, machine.driver_cuda = read_driver()
    cards = read_gpus()  # of the driver, which knows cards that torch cannot use
    machine.gpus = [Gpu(card.name, card.total, card.free) for card in cards]
    _ask_torch(machine, {card.uuid: card.free for card in cards})
    if "bitsandbytes" not in machine.broken and machine.versions["bitsandbytes"] and machine.versions["torch"]:
        _try_import(machine, "bitsandbytes")
    machine.compiler = os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc") or ""
    machine.disks = [_examine_disk(name, folder) for name, folder in folders.items()]
    machine.hub = _ask_hub()
    machine.problems += _find_problems(machine)
    machine.warnings += _find_warnings(machine)
    for finding in find_known_problems(machine):
        (machine.problems if finding.blocks else machine.warnings).append(finding.text)
    return machine


def describe_environment(device: Any) -> dict[str, Any]:
    """Return what a run records of where it is trained: versions, hardware and this program's commit.

    No name of a person, computer or folder is among them, as a report with them is shown to others.

    Args:
        device: a `torch.device`.
    """
    names = ("lora-fp8", *PACKAGES, "prodigyopt", "nvidia-ml-py")
    about: dict[str, Any] = {
        "versions": {"python": platform.python_version()} | {name: v for name in names if (v := _find_version(name))},
        "system": f"{platform.system()} {platform.release()}",
        "cpus": system.count_cpus(),
        "ram_bytes": psutil.virtual_memory().total,
        "commit": _read_commit(),
    }
    about["versions"]["lora-fp8"] = __version__
    if device.type == "cuda":
        import torch

        card = torch.cuda.get_device_properties(device)
        about |= {"gpu": card.name, "gpu_bytes": card.total_memory, "cuda": str(torch.version.cuda or "")}
    return about


def _read_commit() -> str:
    """Return the commit of the checkout that this program runs from, "-dirty" behind it if files differ; "" without."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    options = ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        answer = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *options],
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):  # git is not installed, or the disk is slow
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def get_folders(output_dir: str = "runs", cache_dir: str = "cache") -> dict[str, Path]:
    """Return the folders that a training writes into."""
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub")
    places = {"output_dir": output_dir, "dataset.cache_dir": cache_dir, "HF_HUB_CACHE": hub}
    return {name: Path(os.path.abspath(os.path.expanduser(place))) for name, place in places.items()}


def _find_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _try_import(machine: Machine, name: str) -> Any:
    """Import a package. Why it cannot be is recorded: its libraries may be broken in any way."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        machine.broken[name] = f"{type(error).__name__}: {''.join(str(error).strip().splitlines()[:1])}"
        return None


def _ask_torch(machine: Machine, free: Mapping[str, int | None]) -> None:
    """Ask torch which devices it can use, and our own code what each can do.

    Args:
        machine: gets the answers.
        free: UUID of a card -> its free bytes.
    """
    if not machine.versions["torch"]:
        return
    torch = _try_import(machine, "torch")
    if torch is None:
        return
    machine.versions["torch"] = str(torch.__version__)
    machine.torch_cuda = str(torch.version.cuda or "")
    try:
        machine.is_usable = bool(torch.cuda.is_available())
        machine.torch_archs = tuple(torch.cuda.get_arch_list()) if machine.is_usable else ()
        seen = [
            Gpu(
                str(about.name),
                int(about.total_memory),
                free.get(f"GPU-{about.uuid}"),
                (int(about.major), int(about.minor)),
            )
            for number in range(torch.cuda.device_count() if machine.is_usable else 0)
            for about in (torch.cuda.get_device_properties(number),)
        ]
    except Exception as error:  # a driver that does not fit raises many types
        machine.broken["torch.cuda"] = f"{type(error).__name__}: {''.join(str(error).strip().splitlines()[:1])}"
        machine.is_usable, seen = False, []
    machine.gpus = seen or machine.gpus
    devices = {f"GPU {number}": torch.device("cuda", number) for number in range(len(seen))} or {
        "CPU": torch.device("cpu")
    }
    machine.abilities = {name: _try_settings(device) for name, device in devices.items()}


def _try_settings(device: Any) -> dict[str, str]:
    """Return each of `TRIALS` with the reason why this device refuses it, "" if it does not."""
    from ..precision import choose
    from ..training import memory

    refusals = {}
    for name, sections in TRIALS.items():
        quantize = settings.Quantize.model_validate(sections.get("quantize", {"compute": "upcast"}))
        section = settings.Memory.model_validate(sections.get("memory", {}))
        refusals[name] = choose.find_problem(quantize, device) or memory.find_problem(section, device)
    return refusals


def _examine_disk(name: str, folder: Path) -> dict[str, Any]:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return {
        "what": name,
        "path": str(folder),
        "free_bytes": shutil.disk_usage(there).free,
        "refusal": find_write_obstacle(folder) or "",
    }


def _ask_hub() -> dict[str, Any]:
    """Ask the hub for an answer, with its client's own settings: endpoint, proxies, token."""
    content = {"endpoint": os.environ.get("HF_ENDPOINT", ""), "offline": False, "token": False, "error": ""}
    try:
        from huggingface_hub import constants, get_token
        from huggingface_hub.utils import get_session
    except Exception as error:
        return content | {"error": f"huggingface_hub: {type(error).__name__}"}
    content |= {"endpoint": constants.ENDPOINT, "offline": constants.HF_HUB_OFFLINE, "token": get_token() is not None}
    if constants.HF_HUB_OFFLINE:
        return content
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception as error:  # of the HTTP library, of sockets or of a proxy's settings
        content["error"] = type(error).__name__
    return content


def _find_problems(machine: Machine) -> Iterator[Message]:
    for name in REQUIRED:
        if not machine.versions[name]:
            yield Message("{name} is not installed: pip install {name}", name=name)
    for name, why in machine.broken.items():
        yield Message("{name} cannot be used ({why}). Install it again", name=name, why=why)
    for disk in machine.disks:
        if disk["refusal"]:
            yield Message(
                "{what} = {path} cannot be written ({why}). Name another folder",
                what=disk["what"],
                path=repr(disk["path"]),
                why=disk["refusal"],
            )


def _find_warnings(machine: Machine) -> Iterator[Message]:
    for path, disks in _group_by_free_space(machine):
        yield Message(
            "{size} are free for {what}, which is too little",
            size=format_bytes(path),
            what=Joined(", ", [disk["what"] for disk in disks]),
        )
    if machine.hub["error"]:
        yield Message(
            "{endpoint} cannot be reached. Set HTTPS_PROXY, or a mirror: HF_ENDPOINT=https://hf-mirror.com",
            endpoint=machine.hub["endpoint"],
        )
    if not machine.compiler and machine.versions["triton"]:
        yield Message("Triton needs a C compiler, but there is none. Install gcc, or set CC")


def _group_by_free_space(machine: Machine) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    low: dict[int, list[dict[str, Any]]] = {}
    for disk in machine.disks:
        if disk["free_bytes"] < LEAST_FREE:
            low.setdefault(disk["free_bytes"], []).append(disk)
    yield from low.items()


def _format_row(name: str, text: str) -> Message:
    return Message("  {name}  {text}", name=name.ljust(12), text=text)
