"""Records training passes as CUDA graphs, which a GPU replays without waiting for Python.

Launching the GPU operations of a FLUX pass, 10,000 of them when compiled and 19,000 in FP8 when not, takes the CPU
longer than the GPU works on them (benchmarks/gpu_nvidia-h100-80gb-hbm3). A graph holds all launches of a pass, and one
call starts them.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import Message, RunFailure

Pass = Callable[[Any], Tensor]
"""A function of inputs, nested containers with tensors, that returns a tensor. What else it does must happen on the
GPU, in tensors that stay where they are, and be the same for all inputs with the same shapes."""
MOST = 12
"""Recordings that are kept at most. Each takes GPU memory for its launches, beside the memory that all share."""


class Recorder:
    """Runs passes, and replays those whose inputs have had the same shapes before.

    The first pass of a kind runs unrecorded: there the GPU's libraries allocate what they keep, and Triton chooses its
    kernels. The second is recorded. All recordings share the memory of their intermediate results.
    """

    def __init__(self) -> None:
        self._recordings: dict[Hashable, Recording | None] = {}

    def run(self, function: Pass, inputs: Any) -> Tensor:
        """Run the pass, or its recording. It must be the same function each time, until `forget`.

        Raises:
            RunFailure: a recorded pass does what a recording cannot hold.
        """
        leaves, structure = pytree.tree_flatten(inputs)
        kind = (structure, *(_describe(leaf) for leaf in leaves))
        if kind not in self._recordings:
            self._recordings[kind] = None
            return function(inputs)
        recording = self._recordings[kind]
        if recording is None:
            if self.count == MOST:
                return function(inputs)
            recording = self._recordings[kind] = self._record(function, leaves, structure)
        return recording.replay(leaves)

    @property
    def count(self) -> int:
        """Return the number of recordings that are kept."""
        return sum(recording is not None for recording in self._recordings.values())

    def format_lines(self) -> list[str]:
        """Return lines for the log."""
        return [Message("passes of up to {count} image sizes are replayed as CUDA graphs", count=MOST)]

    def forget(self) -> None:
        """Free all recordings and their memory."""
        self._recordings.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _record(self, function: Pass, leaves: list[Any], structure: pytree.TreeSpec) -> "Recording":
        pool = next((recording.pool for recording in self._recordings.values() if recording is not None), None)
        try:
            return Recording(function, leaves, structure, pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RunFailure(
                Message(
                    "memory.cuda_graphs = true: a pass of this model cannot be recorded ({why}); use "
                    "memory.cuda_graphs = false",
                    why=str(error).strip().partition("\n")[0],
                )
            ) from error


class Recording:
    """One recorded pass.

    Attributes:
        pool: the memory of its intermediate results.
    """

    def __init__(self, function: Pass, leaves: list[Any], structure: pytree.TreeSpec, pool: Any = None) -> None:
        """Record the pass without running it."""
        self._inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads, such as NCCL's, may call CUDA meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._result = function(pytree.tree_unflatten(self._inputs, structure))
        self.pool = self._graph.pool()

    def replay(self, leaves: list[Any]) -> Tensor:
        """Run the pass with other inputs."""
        for own, given in zip(self._inputs, leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(given)
        self._graph.replay()
        return self._result.clone()  # another recording may use the same memory


def _describe(leaf: Any) -> Hashable:
    """Return all of a leaf of the inputs but a tensor's values."""
    return (leaf.shape, leaf.dtype, leaf.stride(), leaf.device) if isinstance(leaf, Tensor) else leaf
