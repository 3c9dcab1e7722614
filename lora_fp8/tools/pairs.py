"""A LoRA file as pairs, whatever its key layout, and the best pair of a smaller rank.

A layer's delta is B @ A * scale, and only that is what a file does. How it is split into A, B and alpha is free, so the
tools keep the delta and write scale 1: alpha = rank where the file's layout has alphas, and no alpha where it has none.

Names stay those of the file (`lora_unet_..._to_q`, `transformer....to_q`), so that files of other programs, and text
encoders' layers, go through unchanged. What is not a plain pair (DoRA, LoHa, LoKr) is refused by name.

Shapes: r rank, in and out features; a convolution's A is (r, in, kh, kw) and its B (out, r, 1, 1).
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .. import export
from ..config import UserError
from ..run import RunFailure
from ..wording import sides

HALVES = ((".lora_A.weight", ".lora_B.weight"), (".lora_down.weight", ".lora_up.weight"))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STALE = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256", "modelspec.date")  # of the old bytes


@dataclass(frozen=True)
class Pair:
    """One layer's LoRA: A (r, in[, kh, kw]), B (out, r[, 1, 1]), and what B @ A is multiplied with."""

    a: Tensor
    b: Tensor
    scale: float = 1.0

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the layer's weight: (out, in[, kh, kw])."""
        return (self.b.shape[0], *self.a.shape[1:])

    def delta(self) -> Tensor:
        """B @ A * scale in float32, of the weight's shape: what the layer gains."""
        return (self.b.flatten(1).float() @ self.a.flatten(1).float()).reshape(self.shape) * self.scale


@dataclass
class Lora:
    """A LoRA file's content.

    Attributes:
        pairs: by the layer's name in the file.
        halves: how the file calls A and B.
        has_alpha: whether its layout has alphas.
        dtype: of the weights, the one that most of them have.
        metadata: of the file's header.
    """

    pairs: dict[str, Pair]
    halves: tuple[str, str]
    has_alpha: bool
    dtype: torch.dtype
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest of all layers."""
        return max(pair.rank for pair in self.pairs.values())


def read(path: Path, *, sound: bool = True) -> Lora:
    """Read a LoRA file of any layout that consists of A and B, or down and up.

    Args:
        sound: as in `export.read_adapter`.

    Raises:
        UserError: not a safetensors file, no pairs, half a pair, or an adapter of another kind.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    tensors, metadata = export.read_adapter(path, sound=sound)
    halves = next((h for h in HALVES if any(name.endswith(h) for name in tensors)), None)
    if halves is None:
        some = export.first_few(sorted(tensors)) or "no tensor"
        raise UserError(
            f"{path}: not a LoRA of pairs, it holds {some} (LoHa and LoKr have none; a whole model neither)"
        )
    known = (*halves, ".alpha")
    if foreign := sorted(name for name in tensors if not name.endswith(known)):
        raise UserError(
            f"{path}: {export.first_few(foreign)} is not part of a plain LoRA (DoRA's lengths, a Tucker core or "
            "another layout); give a file of lora_A/lora_B or lora_down/lora_up pairs only"
        )
    plain = {}
    for name, tensor in tensors.items():
        for half, internal in zip(halves, HALVES[0], strict=True):
            if name.endswith(half):
                plain[name.removesuffix(half) + internal] = tensor
    pairs = {}
    for module in export.modules(plain):  # UserError where half a pair is missing
        a, b = (plain[module + half] for half in HALVES[0])
        alpha = tensors.get(f"{module}.alpha")
        if b.ndim > 2 and b.shape[2:] != (1,) * (b.ndim - 2):
            raise UserError(f"{path}: {module}: lora_B is {sides(b.shape)}; only kernels of one pixel are known there")
        pairs[module] = Pair(a, b, 1.0 if alpha is None else float(alpha) / a.shape[0])
    alphas = [name.removesuffix(".alpha") for name in tensors if name.endswith(".alpha")]
    if stray := sorted(module for module in alphas if module not in pairs):
        raise UserError(f"{path}: {export.first_few(stray)} has alpha and no weights")
    dtypes = Counter(pair.a.dtype for pair in pairs.values())
    return Lora(pairs, halves, bool(alphas) or halves == HALVES[1], dtypes.most_common(1)[0][0], metadata)


def write(lora: Lora, path: Path, dtype: torch.dtype, about: Mapping[str, str]) -> None:
    """Write a file in the layout of `lora`, each delta as it is, at scale 1.

    Args:
        dtype: what the weights are rounded to.
        about: metadata beside those of `lora`, which lose what told of the old bytes.

    Raises:
        UserError: the place exists or cannot be written.
        RunFailure: a value does not fit the dtype, or is NaN.
    """
    if path.exists():
        raise UserError(f"{path}: exists already; choose another name with --output")
    tensors: dict[str, Tensor] = {}
    for module, pair in lora.pairs.items():
        b = pair.b.float() * pair.scale if pair.scale != 1 else pair.b
        for half, tensor in zip(lora.halves, (pair.a, b), strict=True):
            tensors[module + half] = tensor.to(dtype).contiguous()
        if lora.has_alpha:
            tensors[f"{module}.alpha"] = torch.tensor(float(pair.rank))
    if wrong := export.not_finite(tensors):
        raise RunFailure(f"{export.first_few(wrong)} is not finite in {short(dtype)}; write it with --dtype fp32")
    ranks = {pair.rank for pair in lora.pairs.values()}
    rank = str(ranks.pop()) if len(ranks) == 1 else "Dynamic"  # kohya's word for ranks that differ
    kept = {key: value for key, value in lora.metadata.items() if key not in STALE}
    written = {**kept, "ss_network_dim": rank, "ss_network_alpha": rank, **about}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        export.write_file(path, tensors, written, hashes=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def named(path: Path) -> dict[str, str]:
    """Metadata of a file that is a new work: its name for people and for prompts."""
    return {"modelspec.title": path.stem, "ss_output_name": export.slug(path.stem)}


def short(dtype: torch.dtype) -> str:
    """ "bf16" for torch.bfloat16, as on the command line; other dtypes by torch's name."""
    names = {held: name for name, held in DTYPES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def dtype_of(name: str, default: torch.dtype) -> torch.dtype:
    """The dtype that `--dtype` names; empty is the default.

    Raises:
        UserError: none of bf16, fp16, fp32; or the default is a dtype that is only read.
    """
    if name and name not in DTYPES:
        raise UserError(f"--dtype {name!r}: accepted are {', '.join(DTYPES)}")
    if not name and default not in export.SAFETENSORS_DTYPES:
        raise UserError(f"the file is in {short(default)}, which is not written; say --dtype bf16, fp16 or fp32")
    return DTYPES[name] if name else default


# -- the best pair of a smaller rank


@dataclass(frozen=True)
class Spectrum:
    """A delta by its singular values: delta = left @ diag(values) @ right.

    Attributes:
        left: (out, r), orthonormal columns; right: (r, in * kh * kw), orthonormal rows.
        values: (r,), falling; all in float64.
        shape: of the layer's weight.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    shape: tuple[int, ...]

    @property
    def energy(self) -> float:
        """The squared Frobenius norm of the delta."""
        return float(self.values.square().sum())

    def kept(self, rank: int) -> float:
        """The share of the energy that the first `rank` values hold; 1 for a delta of zero."""
        return float(self.values[:rank].square().sum()) / self.energy if self.energy else 1.0

    def rank_for(self, share: float, energy: float | None = None) -> int:
        """The smallest rank that keeps this share of the energy, at least 1 and at most all that are known here.

        Args:
            energy: of the whole delta, where `values` are only the largest of it.
        """
        whole = max(self.energy if energy is None else energy, math.ulp(0.0))
        shares = self.values.square().cumsum(0) / whole
        return min(int((shares < share - 1e-12).sum()) + 1, len(self.values))

    def pair(self, rank: int) -> Pair:
        """The best pair of this rank (Eckart and Young, 1936), float32; the values' roots go to both halves."""
        root = self.values[:rank].sqrt()
        a, b = root[:, None] * self.right[:rank], self.left[:, :rank] * root
        kernel = self.shape[2:]
        a = a.reshape(-1, *self.shape[1:])
        return Pair(a.float(), b.reshape(*b.shape, *(1 for _ in kernel)).float())


def spectrum(pair: Pair) -> Spectrum:
    """Singular values and vectors of B @ A * scale without making it: QR of both factors, SVD of the r x r core."""
    a, b = pair.a.flatten(1).double(), pair.b.flatten(1).double()
    left, upper = torch.linalg.qr(b)
    right, lower = torch.linalg.qr(a.T)
    u, values, v = torch.linalg.svd(upper @ lower.T * pair.scale, full_matrices=False)
    return Spectrum(left @ u, values, v @ right.T, pair.shape)


def check_size(rank: int, energy: float) -> None:
    """That `--rank` and `--energy` mean something: at least one is given.

    Raises:
        UserError: neither, or a value outside of its range.
    """
    if not rank and not energy:
        raise UserError("say how small: --rank 16 or --energy 0.98 (the share of each delta to keep), or both")
    if rank < 0:
        raise UserError(f"--rank {rank}: a rank is at least 1")
    if not 0 <= energy <= 1:
        raise UserError(f"--energy {energy:g}: a share between 0 and 1, such as 0.98")
