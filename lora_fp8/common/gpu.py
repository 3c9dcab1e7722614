"""The GPUs of this machine, by NVIDIA's library and without torch."""


def read_gpus() -> list[tuple[str, int]]:
    """Return (name, bytes of memory) of each GPU; [] without nvidia-ml-py, a driver or a GPU."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return []
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        return [(pynvml.nvmlDeviceGetName(gpu), int(pynvml.nvmlDeviceGetMemoryInfo(gpu).total)) for gpu in handles]
    except pynvml.NVMLError:
        return []
