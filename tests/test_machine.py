"""`lora-fp8 doctor`: what it says of machines with other cards, drivers and packages, faked where they are asked."""

import importlib.metadata
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from hub_server import HubServer

from lora_fp8 import cli
from lora_fp8.common.gpu import Gpu, read_gpus
from lora_fp8.plan import machine
from lora_fp8.plan.known_problems import KNOWN
from webui.context import Place, Ui
from webui.pages import runs

GIB = 2**30


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes  # noqa: F401 - it asks torch for its devices when it is imported: not the faked ones

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """driver("RTX 4090", cuda=12080): what nvidia-ml-py answers. Each of several cards has a GiB less free memory."""

    def refuse(*about: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def install(name: str, cuda: int = 13000, cards: int = 1, refused: tuple[str, ...] = ()) -> None:
        fake = types.ModuleType("pynvml")
        answers = {
            "nvmlInit": lambda: None,
            "nvmlSystemGetCudaDriverVersion": lambda: cuda,
            "nvmlSystemGetDriverVersion": lambda: "580.65",
            "nvmlDeviceGetCount": lambda: cards,
            "nvmlDeviceGetHandleByIndex": lambda number: number,
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=24 * GIB, free=(23 - handle) * GIB),
            "nvmlDeviceGetName": lambda handle: name,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=7),
            "nvmlDeviceGetTemperature": lambda handle, sensor: 41,
            "NVML_TEMPERATURE_GPU": pynvml.NVML_TEMPERATURE_GPU,
            "NVMLError": pynvml.NVMLError,
        }
        for key, answer in (answers | dict.fromkeys(refused, refuse)).items():
            setattr(fake, key, answer)
        monkeypatch.setitem(sys.modules, "pynvml", fake)

    return install


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """card("RTX 4090", (8, 9)): what torch answers."""
    import torch

    def install(
        name: str, capability: tuple[int, int], archs: str = "sm_80 sm_90 sm_120 compute_120", cards: int = 1
    ) -> None:
        about = {"name": name, "total_memory": 24 * GIB, "major": capability[0], "minor": capability[1]}
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
        monkeypatch.setattr(torch.cuda, "get_arch_list", archs.split)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**about, uuid=str(device))
        )
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return install


def examine(tmp_path: Path) -> machine.Machine:
    return machine.examine({"output_dir": tmp_path / "runs"})


def test_a_card_of_today_can_do_everything_that_its_generation_can(
    tmp_path: Path, driver: Callable, card: Callable
) -> None:
    driver("NVIDIA GeForce RTX 4090")
    card("NVIDIA GeForce RTX 4090", (8, 9))
    found = examine(tmp_path)
    assert found.problems == []
    (gpu,) = found.gpus
    assert (gpu.capability, gpu.memory_bytes, gpu.free_bytes) == ((8, 9), 24 * GIB, 23 * GIB)
    able = {name: not why for name, why in found.abilities["GPU 0"].items()}
    assert able["quantize.compute = 'fp8'"] and able["memory.offload"] and able["memory.cuda_graphs"]
    assert "Hopper" in found.abilities["GPU 0"]["quantize.recipe = 'block'"], "Ada has no kernel for blocks"
    text = "\n".join(found.format_lines())
    assert "compute capability 8.9" in text and "driver 580.65, up to CUDA 13.0" in text
    assert text.endswith("A training can run here.")


def test_each_of_several_equal_cards_has_its_own_free_memory(tmp_path: Path, driver: Callable, card: Callable) -> None:
    driver("NVIDIA GeForce RTX 4090", cards=2)
    card("NVIDIA GeForce RTX 4090", (8, 9), cards=2)
    assert [gpu.free_bytes for gpu in examine(tmp_path).gpus] == [23 * GIB, 22 * GIB]


def test_what_a_driver_does_not_report_of_a_card_is_left_out(tmp_path: Path, driver: Callable, card: Callable) -> None:
    """GB10 shares the memory of the CPU, and a part of a card (MIG) has no utilization."""
    refused = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature")
    driver("NVIDIA GB10", refused=refused)
    assert "NVIDIA GB10: memory of unknown size" in "\n".join(examine(tmp_path).format_lines())
    assert read_gpus() == [Gpu("NVIDIA GB10", "GPU-0")]
    ui = Ui("en", Place(tmp_path, [tmp_path], fixed=False))
    assert '<span title="NVIDIA GB10">GPU 0 </span>' in runs.render_machine(ui)
    card("NVIDIA GB10", (12, 1))
    (gpu,) = examine(tmp_path).gpus
    assert (gpu.memory_bytes, gpu.free_bytes) == (24 * GIB, None)


def test_a_card_without_fp8_cores_says_what_to_use(tmp_path: Path, driver: Callable, card: Callable) -> None:
    driver("NVIDIA GeForce RTX 3090")
    card("NVIDIA GeForce RTX 3090", (8, 6))
    found = examine(tmp_path)
    assert found.problems == [] and "8.9 and newer have" in found.abilities["GPU 0"]["quantize.compute = 'fp8'"]
    assert found.abilities["GPU 0"]["quantize.storage = 'fp8', 'int8', 'nf4', 'bf16'"] == ""


def test_hopper_has_blocks(tmp_path: Path, card: Callable) -> None:
    card("NVIDIA H100", (9, 0))
    assert examine(tmp_path).abilities["GPU 0"]["quantize.recipe = 'block'"] == ""


@pytest.mark.parametrize(
    ("capability", "archs", "fits"),
    [
        ((12, 0), "sm_80 sm_86 sm_90", False),  # RTX 50 with a build for CUDA 12.6
        ((12, 0), "sm_80 sm_90 compute_90", True),  # its PTX is compiled for the card
        ((8, 9), "sm_80 sm_90", True),  # binaries of 8.0 run on 8.9
        ((8, 0), "sm_86 sm_90", False),
        ((6, 1), "sm_75 sm_80 sm_90", False),
    ],
)
def test_a_build_of_torch_without_kernels_for_the_card(
    capability: tuple[int, int], archs: str, fits: bool, tmp_path: Path, card: Callable
) -> None:
    card("a card", capability, archs)
    told = [line for line in examine(tmp_path).problems if "no kernels for this GPU" in line]
    assert bool(told) is not fits


def test_a_torch_without_cuda_beside_a_card(tmp_path: Path, driver: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    driver("NVIDIA GeForce RTX 4090")
    found = examine(tmp_path)
    assert ["build without CUDA" in line for line in found.problems] == [True]
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA GeForce RTX 4090"] and found.gpus[0].capability is None


@pytest.mark.parametrize(
    ("cuda", "line"), [(11080, "newer CUDA version than the NVIDIA driver"), (12060, "CUDA_VISIBLE_DEVICES")]
)
def test_a_torch_that_cannot_use_the_card(
    cuda: int, line: str, tmp_path: Path, driver: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    driver("NVIDIA GeForce RTX 4090", cuda)
    (problem,) = examine(tmp_path).problems
    assert line in problem


def test_a_cuda_that_raises_is_reported_and_not_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("Unexpected error from cudaGetDeviceCount()\nmore")

    monkeypatch.setattr("torch.cuda.is_available", fail)
    (problem,) = examine(tmp_path).problems
    assert "torch.cuda cannot be used (RuntimeError: Unexpected error from cudaGetDeviceCount())" in problem


def test_without_torch_and_with_a_broken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises ImportError
    (problem,) = [line for line in examine(tmp_path).problems if line.startswith("torch ")]
    assert "torch cannot be used" in problem
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = examine(tmp_path)
    assert "torch is not installed: pip install torch" in found.problems
    assert found.format_lines()[-1] == "Fix the problems listed above."


def test_the_hub_is_asked_with_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer() as hub:
        hub.use(monkeypatch, tmp_path / "home")
        told = examine(tmp_path)
        assert told.hub["error"] == "" and told.hub["endpoint"].startswith("http://127.0.0.1"), told.hub
        assert any("responds" in line for line in told.format_lines())
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    told = examine(tmp_path)
    assert told.hub["error"] and any("hf-mirror.com" in line for line in told.warnings) and told.problems == []


def test_a_full_and_a_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_privilege: None) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=GIB))
    (tmp_path / "locked").mkdir(mode=0o500)
    found = machine.examine({"output_dir": tmp_path / "locked" / "runs"})
    assert any("1 GiB are free for output_dir, which is too little" in line for line in found.warnings)
    assert any("cannot be written" in line and "Permission denied" in line for line in found.problems)


@pytest.mark.parametrize(("language", "word"), [("en", "A training can run here."), ("zh", "可以在这台机器上训练。")])
def test_the_command_in_both_languages_and_as_json(
    language: str, word: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LORA_FP8_LANG", language)
    monkeypatch.setattr("sys.argv", ["lora-fp8", "doctor"])
    cli.main()
    assert capfd.readouterr().out.endswith(f"{word}\n")
    monkeypatch.setattr("sys.argv", ["lora-fp8", "doctor", "--json"])
    cli.main()
    content = json.loads(capfd.readouterr().out)
    assert content["ok"] and content["versions"]["torch"] and "CPU" in content["abilities"]
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2 and not json.loads(capfd.readouterr().out)["ok"]


def test_every_known_problem_says_what_to_do() -> None:
    assert all(known.text.count(". ") or ": pip install" in known.text for known in KNOWN)
