"""The NVIDIA GPUs of this machine, by the driver's library and without torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """A GPU, as the driver describes it. None stands for what the driver does not report of it.

    A GPU that shares the memory of the CPU (GB10) has no memory of its own, a part of a GPU (MIG) no utilization, and
    some cards no temperature.

    Attributes:
        name: of the card.
        uuid: of the card, "GPU-" and hexadecimal digits.
        total, free: bytes of memory.
        busy: utilization in percent.
        degrees: temperature in degrees Celsius.
    """

    name: str
    uuid: str = ""
    total: int | None = None
    free: int | None = None
    busy: int | None = None
    degrees: int | None = None


def read_gpus() -> list[Gpu]:
    """Describe each GPU; [] without nvidia-ml-py, a driver or a GPU."""
    nvml = _open_library()
    if nvml is None:
        return []

    def ask(question: Callable[..., Any], *about: Any) -> Any:
        try:
            return question(*about)
        except nvml.NVMLError:
            return None

    gpus = []
    for number in range(ask(nvml.nvmlDeviceGetCount) or 0):
        card = ask(nvml.nvmlDeviceGetHandleByIndex, number)
        if card is None:  # it has fallen off the bus
            continue
        memory, load = ask(nvml.nvmlDeviceGetMemoryInfo, card), ask(nvml.nvmlDeviceGetUtilizationRates, card)
        gpus.append(
            Gpu(
                name=str(ask(nvml.nvmlDeviceGetName, card) or ""),
                uuid=str(ask(nvml.nvmlDeviceGetUUID, card) or ""),
                total=int(memory.total) if memory else None,
                free=int(memory.free) if memory else None,
                busy=int(load.gpu) if load else None,
                degrees=ask(nvml.nvmlDeviceGetTemperature, card, nvml.NVML_TEMPERATURE_GPU),
            )
        )
    return gpus


def read_driver() -> tuple[str, str]:
    """Return the version of the driver and of the newest CUDA that it runs; "" and "" without one."""
    nvml = _open_library()
    if nvml is None:
        return "", ""
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    return str(nvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}"


def _open_library() -> Any:
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
