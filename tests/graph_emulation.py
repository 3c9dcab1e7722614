"""CUDA graphs on the CPU: a pass is recorded as the list of its operations, and replayed on the same tensors.

As on a GPU, recording leaves no trace of having run, a replay reads what its input tensors hold by then, Python does
not run again, and what a graph cannot hold (reading a value, copying a Python number to the device) ends the recording.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    made: list["Graph"] = []

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0
        Graph.made.append(self)

    def pool(self) -> int:
        return 1

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for operation, args, kwargs, recorded in self.operations:
            outs = tree_leaves(operation(*args, **kwargs))
            for old, new in zip(tree_leaves(recorded), outs, strict=True):
                if isinstance(old, Tensor) and old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    old.copy_(new)


class Recorder(TorchDispatchMode):
    """Notes every operation while it is active."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.made: set[int] = set()  # storages that the pass itself allocated
        self.before: dict[int, tuple[Any, Any]] = {}  # storages that it changed, and how they were

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default):
            raise RuntimeError("operation not permitted when stream is capturing: a value is read")
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, Tensor):
                storage = given.untyped_storage()
                if storage._cdata not in self.made and storage._cdata not in self.before:
                    self.before[storage._cdata] = (storage, storage.clone())
        out = func(*args, **kwargs)
        inputs = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        results = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        self.made |= {one.untyped_storage()._cdata for one in results} - inputs
        self.graph.operations.append((func, args, kwargs, out))
        return out

    def undo(self) -> None:
        for storage, before in self.before.values():
            storage.copy_(before)


@contextlib.contextmanager
def graph(made: Graph, pool: object = None, capture_error_mode: str = "global") -> Iterator[None]:
    """Stand in for `torch.cuda.graph`."""
    assert capture_error_mode == "thread_local" and pool in (None, made.pool())
    recorder = Recorder(made)

    def forbid(what: str) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")

        return refuse

    with contextlib.ExitStack() as stack:
        for name in ("tensor", "as_tensor", "from_numpy"):
            stack.enter_context(mock.patch.object(torch, name, forbid("numbers are copied from the host")))
        for name in ("tolist", "numpy", "cpu"):
            stack.enter_context(mock.patch.object(Tensor, name, forbid("a value is read")))
        stack.enter_context(recorder)
        yield
    recorder.undo()
