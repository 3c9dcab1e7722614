"""Train on a GPU that does not exist: tensors that say that they are on cuda:0, and refuse to meet others.

    python tests/pretended/gpu.py FOLDER CONFIG...      one JSON line for each config, with its losses or its error

Each such tensor holds a tensor of the CPU, which computes. What a real GPU refuses is refused: operands on two devices,
a generator of the CPU, `numpy()`. So a tensor that was left on the wrong side is found without a GPU. It says nothing
about speed, memory, kernels, or what streams do in the meantime. FOLDER keeps the compiled gpu.cpp.
"""

import contextlib
import ctypes
import importlib.util
import json
import subprocess
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TORCH = Path(str(importlib.util.find_spec("torch").origin)).parent
HERE = Path(__file__).resolve().parent


def load_hooks(folder: Path) -> None:
    """Compile and load gpu.cpp; before torch is imported, as torch looks for such hooks only once."""
    library = folder / "gpu.so"
    if not library.exists():
        options = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{TORCH}/include", f"-L{TORCH}/lib"]
        subprocess.run(["g++", str(HERE / "gpu.cpp"), *options, "-lc10", "-ltorch_cpu", "-o", str(library)], check=True)
    for path in (TORCH / "lib/libc10.so", TORCH / "lib/libtorch_cpu.so", library):
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


if __name__ == "__main__":
    load_hooks(Path(sys.argv[1]))

# What asks for a GPU when it is imported would look for CUDA's own functions.
import bitsandbytes  # noqa: F401
import torch
import torch.utils._python_dispatch as python_dispatch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lora_fp8 import config, errors, train
from lora_fp8.distributed import processes

GPU = torch.device("cuda", 0)
MIXED = {"copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_", "_pin_memory", "is_pinned"}
"""Operations that take tensors of both sides, on a real GPU too: copies, and indices of the CPU."""
NAME = "NVIDIA H100 80GB HBM3"


class OnGpu(torch.Tensor):
    """A tensor that says that it is on the GPU; `inner` is the tensor of the CPU that it holds."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnGpu":
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), device=GPU, **layout)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"OnGpu({self.inner!r})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: "OnGpu") -> None:
        torch.Tensor.data.__set__(self, value)
        self.inner = value.inner


class Gpu(python_dispatch.TorchDispatchMode):
    """While this is active, tensors can be made on the GPU and moved to it."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class _Made(TorchFunctionMode):
    """Lets `torch.tensor(..., device=)` make tensors on the GPU: torch copies them where no `Gpu` sees it."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is torch.tensor and device is not None and torch.device(device).type == "cuda":
            return func(*args, **kwargs | {"device": None}).to(device)
        return func(*args, **kwargs)


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the tensors of the CPU, and return results on the side that a real GPU would give them."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, OnGpu)]
    others = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.dim()]
    name, kwargs = func._overloadpacket.__name__, dict(kwargs)
    if ours and others and name not in MIXED:
        raise RuntimeError(
            f"{func}: expected all tensors to be on the same device, found {[(*tensor.shape,) for tensor in ours]} on "
            f"cuda:0 and {[(*tensor.shape,) for tensor in others]} on the CPU"
        )
    device = kwargs.get("device")
    is_there = bool(ours) if device is None else torch.device(device).type == "cuda"
    if name == "copy_":
        is_there = isinstance(args[0], OnGpu)
    elif is_there and kwargs.get("generator") is not None:
        raise RuntimeError(f"{func}: expected a 'cuda' device type for generator but found 'cpu'")
    if device is not None and is_there:
        kwargs["device"] = torch.device("cpu")
    kwargs |= {"pin_memory": False} if "pin_memory" in kwargs else {}
    inside = tree_map(lambda leaf: leaf.inner if isinstance(leaf, OnGpu) else leaf, (args, kwargs))
    out = func(*inside[0], **inside[1])
    if name == "_to_copy" and out is inside[0][0]:
        out = out.clone()  # it changes sides
    if not is_there:
        return out
    out = tree_map(lambda leaf: OnGpu(leaf) if isinstance(leaf, torch.Tensor) else leaf, out)
    return python_dispatch.return_and_correct_aliasing(func, args, kwargs, out) if ours else out


class Event:
    """A CUDA event or stream: all work is done when it is asked for."""

    device, cuda_stream = GPU, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    record = synchronize = wait_event = wait_stream = wait

    def query(self) -> bool:
        return True


def pretend() -> None:
    """Make `torch.cuda` speak of one H100, and let processes train on it."""
    cuda = torch.cuda
    properties = types.SimpleNamespace(name=NAME, total_memory=80 << 30, major=9, minor=0, multi_processor_count=132)
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": NAME,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "mem_get_info": (79 << 30, 80 << 30),
        "memory_allocated": 1 << 30,
        "max_memory_allocated": 1 << 30,
        "current_stream": Event(),
        **dict.fromkeys(("stream", "device_of", "device"), contextlib.nullcontext()),
        **dict.fromkeys(("empty_cache", "synchronize", "reset_peak_memory_stats", "set_rng_state", "_lazy_init")),
        **dict.fromkeys(("manual_seed", "manual_seed_all")),
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *args, answer=answer, **kwargs: answer)
    cuda.get_rng_state = lambda *args: torch.zeros(16, dtype=torch.uint8)
    cuda.Stream = cuda.Event = Event
    torch.Tensor.record_stream = lambda self, stream: None
    torch.Tensor.pin_memory = lambda self, *args: self
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # `.data` would keep the kind of tensor
    begin = processes.Processes.__init__

    def begin_on_gpu(self: processes.Processes) -> None:
        cuda.is_available = lambda: False  # accelerate would start CUDA
        begin(self)
        cuda.is_available = lambda: True
        self.device = GPU

    processes.Processes.__init__ = begin_on_gpu


def train_each(files: list[str]) -> Iterator[dict[str, Any]]:
    """Train the job of each file. Yields its losses and the verdicts of verification, or its error."""
    for file in files:
        events: list[dict[str, Any]] = []
        try:
            with Gpu(), _Made():
                train.run(config.load(Path(file)), progress=False, echo=events.append)
        except (RuntimeError, errors.UserError, TypeError, NotImplementedError) as error:
            lines = traceback.format_tb((error.__cause__ or error).__traceback__)
            yield {"error": f"{type(error).__name__}: {str(error)[:500]}", "traceback": "".join(lines)[-4000:]}
            continue
        losses = [event["loss"] for event in events if event["event"] == "step"]
        device = next(event["device"] for event in events if event["event"] == "start")
        yield {"device": device, "losses": losses, "ok": [e["ok"] for e in events if e["event"] == "verify"]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    pretend()
    for answer in train_each(sys.argv[2:]):
        print(json.dumps(answer), flush=True)
