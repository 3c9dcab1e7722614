"""Run a training step on torch's meta device: every shape, dtype and byte of a model, and nothing computed.

    with on_meta(), Tally() as tally:
        loss = model(x).square().mean()
        loss.backward()
    tally.most      largest number of bytes alive at one time, of those allocated inside
    tally.flops

Values that decide shapes (lengths, positions, short masks) stay on the CPU as real tensors, so that a model can read
them. Everything else is on the meta device. If activations decide what is computed (a router of experts), the step
cannot be estimated: `Undecided`.
"""

import contextlib
import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from ..errors import Message

META = torch.device("meta")
SMALL = 2**16
"""Most elements of a new floating tensor that stays real: frequencies, timesteps, lengths."""
MOST_REAL = 2**26
"""Most elements of a tensor that stays real. A mask of each pair of a clip's tokens has billions."""
E4M3 = torch.float8_e4m3fn
INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
"""Operations whose results may depend on the values of masks."""
MOST_RESULTS = 2**16
"""Most operations whose results are remembered; a model has some hundreds."""
_results: dict[Hashable, "_Result"] = {}


class Undecided(Exception):
    """The model looks at values that a dry run does not have."""


class Tally(TorchDispatchMode):
    """Count FLOPs, and the largest number of bytes alive at one time, of tensors allocated while it is active.

    torch's FlopCounterMode keeps references to tensors, which would then count as alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # operations on the tensors inside a subclass are counted below it
        kwargs = kwargs or {}
        self._count((args, kwargs), new=False)
        out = _run_operation(func, args, kwargs)
        self._count(out, new=True)
        if formula := flop_registry.get(func._overloadpacket):
            self.flops += formula(*args, **kwargs, out_val=out)
        return out

    def _count(self, tree: Any, new: bool) -> None:
        for tensor in _find_tensors(tree):
            storage = tensor.untyped_storage()
            key, num_bytes = storage._cdata, storage.nbytes() if new else 0
            if key in self._known:
                continue
            self._known.add(key)
            self.now += num_bytes
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def _run_operation(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation: on the CPU while all its tensors are real, otherwise on the meta device.

    Raises:
        Undecided: the result depends on values that are not computed.
    """
    tensors = list(_find_tensors((args, kwargs)))
    meta = any(tensor.is_meta or tensor.numel() > MOST_REAL for tensor in tensors)
    device = kwargs.get("device")
    to_meta = device is not None and torch.device(device).type == "meta"
    if not meta:
        if to_meta and tensors:  # .to(device): values that decide shapes stay readable
            out = func(*args, **(kwargs | {"device": torch.device("cpu")}))
            return out if _stays_real(out) else out.to(META)
        if to_meta:
            out = func(*args, **kwargs)
            return func(*args, **(kwargs | {"device": torch.device("cpu")})) if _stays_real(out) else out
        return func(*args, **kwargs)
    if func is torch.ops.aten._local_scalar_dense.default:
        raise Undecided(Message("the computation depends on the value of an activation"))
    if device is not None:
        kwargs = kwargs | {"device": META}
    key = _make_key(func, args, kwargs)
    if key is not None and (known := _results.get(key)):
        return known.make()
    if func._overloadpacket in INDEXED:
        args = (args[0], [_move_to_meta(index) for index in _expand_masks(args[1])], *args[2:])
    args, kwargs = tree_map(lambda leaf: leaf.to(META) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    try:
        out = func(*args, **kwargs)
    except NotImplementedError as error:  # nonzero, unique and their like
        raise Undecided(str(error).splitlines()[0]) from None
    if key is not None and (result := _Result.of(out, tensors)):
        if len(_results) >= MOST_RESULTS:
            _results.clear()
        _results[key] = result
    return out


def _find_tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or results of an operation, as `tree_leaves` does at ten times the time."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _find_tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _find_tensors(item)


# ------------------------------------------------------------------------------------------------- remembered results


@dataclass(frozen=True)
class _Result:
    """What an operation returns for arguments of certain shapes, without the tensors.

    On the meta device torch computes shapes in Python for most operations, and the blocks of a model repeat them.

    Attributes:
        parts: (shape, strides, dtype) of each tensor, or another value as it is.
        kind: type of a result of several parts; None: the result is the only part.
    """

    parts: tuple[Any, ...]
    kind: type | None

    @classmethod
    def of(cls, out: Any, tensors: list[Tensor]) -> "_Result | None":
        """Describe a result; None if it shares memory with `tensors`, or is not made by `make` as it was."""
        if type(out) not in (Tensor, tuple, list):
            return None
        outputs = (out,) if isinstance(out, Tensor) else tuple(out)
        taken, parts = {tensor.untyped_storage()._cdata for tensor in tensors}, []
        for part in outputs:
            if type(part) is not Tensor:
                if isinstance(part, Tensor | tuple | list | dict):
                    return None
                parts.append(part)
                continue
            storage, described = part.untyped_storage(), (part.shape, part.stride(), part.dtype)
            same_size = storage.nbytes() == _make_empty(*described).untyped_storage().nbytes()
            if not part.is_meta or part.is_complex() or storage._cdata in taken or not same_size:
                return None
            taken.add(storage._cdata)
            parts.append(described)
        return cls(tuple(parts), None if isinstance(out, Tensor) else type(out))

    def make(self) -> Any:
        """Return the result with new tensors."""
        made = [_make_empty(*part) if isinstance(part, tuple) else part for part in self.parts]
        return made[0] if self.kind is None else self.kind(made)


def _make_empty(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=META)


@cache
def _is_functional(func: Any) -> bool:
    """Return True if the operation changes none of its arguments and returns no view of them."""
    schema = func._schema
    return not any(value.alias_info for value in (*schema.arguments, *schema.returns))


def _make_key(func: Any, args: Any, kwargs: dict[str, Any]) -> Hashable | None:
    """Return all that the shapes of an operation's results depend on; None if that may be more than shapes."""
    if not _is_functional(func) or func._overloadpacket in INDEXED:
        return None
    try:
        return func, _describe(args), _describe(kwargs)
    except TypeError:
        return None


def _describe(value: Any) -> Hashable:
    """Return the shapes of the tensors in a value, and the types and values of the rest.

    Raises:
        TypeError: a tensor is no plain one, or a value cannot be a key.
    """
    if isinstance(value, Tensor):
        # A tensor without dimensions may count as a number, which promotes others less; a complex one may be conjugate.
        if type(value) not in (Tensor, nn.Parameter) or not value.dim() or value.is_complex():
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_describe, value))
    if isinstance(value, dict):
        return tuple((name, _describe(item)) for name, item in value.items())
    hash(value)
    return type(value), value  # 1, 1.0 and True are equal, and give other dtypes


def _stays_real(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() or tensor.numel() <= SMALL


def _expand_masks(indices: Any) -> list[Tensor | None]:
    """Replace each mask among indices by its positions, one index for each dimension of the mask."""
    expanded: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            if index.is_meta:
                raise Undecided(Message("the number of rows depends on a computed mask"))
            expanded += index.nonzero(as_tuple=True)
        else:
            expanded.append(index)
    return expanded


def _move_to_meta(index: Tensor | None) -> Tensor | None:
    return index.to(META) if index is not None else None


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Replace what the meta device lacks, for as long as the context lasts.

    That is attention in one fused kernel as on a GPU, autocast, and linear layers with FP8 weights, which autocast does
    not convert on the meta device.
    """
    plain_linear, autocast = F.linear, torch.autocast

    def attend(  # noqa: PLR0913  # as scaled_dot_product_attention
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        if attn_mask is None:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        wide = (*query.shape[:3], key.shape[2])
        bias = torch.empty(attn_mask.shape, dtype=query.dtype, device=META).expand(wide)
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.dtype == E4M3:
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return plain_linear(x, weight, bias)

    def cast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return autocast("cpu" if device_type == "meta" else device_type, *args, **kwargs)

    with (
        mock.patch.object(F, "scaled_dot_product_attention", attend),
        mock.patch.object(F, "linear", linear),
        mock.patch.object(torch, "autocast", cast),
        mock.patch.object(torch.amp, "autocast", cast),
    ):
        yield
