"""A LoRA file as pairs, whatever its key layout, and the best pair of a smaller rank.

A layer's delta is B @ A * scale, and nothing else of a file has an effect. The split into A, B and alpha is arbitrary,
so the tools keep the delta and write scale 1: alpha = rank if the file's layout has alphas, and no alpha if it has
none.

Names stay those of the file (`lora_unet_..._to_q`, `transformer....to_q`), so files of other programs, and text
encoders' layers, pass through unchanged. Layers that are not plain pairs (DoRA, LoHa, LoKr) are refused by name.

Shapes: r rank, in and out features; a convolution's A is (r, in, kh, kw) and its B (out, r, 1, 1).
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..errors import Message, RunFailure, UserError, cannot_write, exists_already, first_few, missing_file
from ..lora_files import export, export_metadata, layouts, safetensors_file
from ..precision.dtypes import DTYPES

HALVES = ((".lora_A.weight", ".lora_B.weight"), (".lora_down.weight", ".lora_up.weight"))
STALE = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256", "modelspec.date")  # describe the old bytes


@dataclass(frozen=True)
class Pair:
    """A layer's LoRA: A (r, in[, kh, kw]), B (out, r[, 1, 1]), and the factor of B @ A."""

    a: Tensor
    b: Tensor
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """Return the rank of the pair."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the layer's weight: (out, in[, kh, kw])."""
        return (self.b.shape[0], *self.a.shape[1:])

    def compute_delta(self) -> Tensor:
        """Return B @ A * scale in float32, in the weight's shape."""
        return (self.b.flatten(1).float() @ self.a.flatten(1).float()).reshape(self.shape) * self.scale


@dataclass
class Lora:
    """The content of a LoRA file.

    Attributes:
        pairs: pairs by the layer's name in the file.
        halves: the file's names of A and B.
        has_alpha: True if its layout stores alpha as tensors; alpha in the header of diffusers' files does not count.
        dtype: dtype of most of the weights.
        metadata: metadata of the header.
    """

    pairs: dict[str, Pair]
    halves: tuple[str, str]
    has_alpha: bool
    dtype: torch.dtype
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Return the largest rank of all layers."""
        return max(pair.rank for pair in self.pairs.values())


def read(path: Path, *, sound: bool = True) -> Lora:
    """Read a LoRA file of any layout that consists of A and B, or down and up.

    Args:
        path: the file.
        sound: as in `export.read_adapter`.

    Raises:
        UserError: it is not a safetensors file, has no pairs or half a pair, or is an adapter of another kind.
    """
    if not path.is_file():
        raise missing_file(path)
    tensors, metadata = export.read_adapter(path, sound=sound)
    halves = next((h for h in HALVES if any(name.endswith(h) for name in tensors)), None)
    if halves is None:
        some = first_few(sorted(tensors)) or Message("no tensors")
        raise UserError(
            Message(
                "{path}: this is not a LoRA with pairs of matrices, it contains {names} (LoHa, LoKr and whole "
                "models have no pairs)",
                path=path,
                names=some,
            )
        )
    known = (*halves, ".alpha")
    if foreign := sorted(name for name in tensors if not name.endswith(known)):
        raise UserError(
            Message(
                "{path}: {names} does not belong to a plain LoRA (DoRA's lengths, a Tucker core or another layout); "
                "give a file of lora_A/lora_B or lora_down/lora_up pairs only",
                path=path,
                names=first_few(foreign),
            )
        )
    pairs = _pair_up(tensors, halves)
    alphas = [name.removesuffix(".alpha") for name in tensors if name.endswith(".alpha")]
    if stray := sorted(module for module in alphas if module not in pairs):
        raise UserError(Message("{path}: {names} has an alpha, but no weights", path=path, names=first_few(stray)))
    dtypes = Counter(pair.a.dtype for pair in pairs.values())
    as_tensors = any(name.endswith(".alpha") for name in safetensors_file.read_header(path).entries)
    return Lora(pairs, halves, as_tensors or halves == HALVES[1], dtypes.most_common(1)[0][0], metadata)


def _pair_up(tensors: Mapping[str, Tensor], halves: tuple[str, str]) -> dict[str, Pair]:
    """Return the pairs of a file's tensors by layer.

    Raises:
        UserError: there is half a pair.
    """
    plain = {}
    for name, tensor in tensors.items():
        for half, internal in zip(halves, HALVES[0], strict=True):
            if name.endswith(half):
                plain[name.removesuffix(half) + internal] = tensor
    pairs = {}
    for module in layouts.list_modules(plain):  # raises UserError for half a pair
        a, b = (plain[module + half] for half in HALVES[0])
        alpha = tensors.get(f"{module}.alpha")
        pairs[module] = Pair(a, b, 1.0 if alpha is None else float(alpha) / a.shape[0])
    return pairs


def write(lora: Lora, path: Path, dtype: torch.dtype, about: Mapping[str, str]) -> None:
    """Write a file in the layout of `lora`, with unchanged deltas at scale 1.

    Args:
        lora: the content.
        path: the file to write.
        dtype: dtype of the weights.
        about: metadata to add to those of `lora`, from which entries about the old bytes are removed.

    Raises:
        UserError: the file exists or cannot be written.
        RunFailure: a value does not fit the dtype, or is NaN.
    """
    if path.exists():
        raise exists_already(path)
    tensors: dict[str, Tensor] = {}
    for module, pair in lora.pairs.items():
        b = pair.b.float() * pair.scale if pair.scale != 1 else pair.b
        for half, tensor in zip(lora.halves, (pair.a, b), strict=True):
            tensors[module + half] = tensor.to(dtype).contiguous()
        if lora.has_alpha:
            tensors[f"{module}.alpha"] = torch.tensor(float(pair.rank))
    require_finite(tensors, dtype)
    ranks = {pair.rank for pair in lora.pairs.values()}
    rank = str(ranks.pop()) if len(ranks) == 1 else "Dynamic"  # kohya's word for differing ranks
    kept = {key: value for key, value in lora.metadata.items() if key not in STALE}
    written = {**kept, "ss_network_dim": rank, "ss_network_alpha": rank, **about}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        safetensors_file.write_file(path, tensors, written, hashes=True)
    except OSError as error:
        raise cannot_write(path, error) from None


def require_finite(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Check that all values of a file fit its dtype. Raises RunFailure."""
    if wrong := export.find_nonfinite(tensors):
        raise RunFailure(
            Message(
                "{names} is not finite in {dtype}; write it with --dtype fp32",
                names=first_few(wrong),
                dtype=format_dtype(dtype),
            )
        )


def make_name_metadata(path: Path) -> dict[str, str]:
    """Return the metadata that name a new file: its title and the name for prompts."""
    return {"modelspec.title": path.stem, "ss_output_name": export_metadata.make_slug(path.stem)}


def format_dtype(dtype: torch.dtype) -> str:
    """Return a dtype's name on the command line, such as "bf16"; other dtypes have torch's name."""
    names = {held: name for name, held in DTYPES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def parse_dtype(name: str, default: torch.dtype) -> torch.dtype:
    """Return the dtype that `--dtype` names; empty is the default.

    Raises:
        UserError: the name is not bf16, fp16 or fp32; or the default is a dtype that cannot be written.
    """
    if name and name not in DTYPES:
        raise UserError(
            Message(
                "--dtype {given}: there is no such dtype; accepted: {names}", given=repr(name), names=", ".join(DTYPES)
            )
        )
    if not name and default not in safetensors_file.SAFETENSORS_DTYPES:
        raise UserError(
            Message(
                "the file is in {dtype}, which cannot be written; choose --dtype bf16, fp16 or fp32",
                dtype=format_dtype(default),
            )
        )
    return DTYPES[name] if name else default


# -- the best pair of a smaller rank


@dataclass(frozen=True)
class Spectrum:
    """The singular value decomposition of a delta: delta = left @ diag(values) @ right.

    Attributes:
        left: (out, r), orthonormal columns.
        right: (r, in * kh * kw), orthonormal rows.
        values: (r,), descending; all are float64.
        shape: shape of the layer's weight.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    shape: tuple[int, ...]

    @property
    def energy(self) -> float:
        """Return the squared Frobenius norm of the delta."""
        return float(self.values.square().sum())

    def compute_kept(self, rank: int) -> float:
        """Return the share of the energy in the first `rank` values; 1 for a delta of zero."""
        return float(self.values[:rank].square().sum()) / self.energy if self.energy else 1.0

    def find_rank(self, share: float, energy: float | None = None) -> int:
        """Return the smallest rank that keeps this share of the energy, between 1 and the number of `values`.

        Args:
            share: 0 to 1.
            energy: energy of the whole delta, if `values` are only its largest.
        """
        whole = max(self.energy if energy is None else energy, math.ulp(0.0))
        shares = self.values.square().cumsum(0) / whole
        return min(int((shares < share - 1e-12).sum()) + 1, len(self.values))

    def make_pair(self, rank: int) -> Pair:
        """Return the best pair of this rank (Eckart and Young, 1936), float32; both halves get the values' roots."""
        root = self.values[:rank].sqrt()
        a, b = root[:, None] * self.right[:rank], self.left[:, :rank] * root
        kernel = self.shape[2:]
        a = a.reshape(-1, *self.shape[1:])
        return Pair(a.float(), b.reshape(*b.shape, *(1 for _ in kernel)).float())


def compute_spectrum(pair: Pair) -> Spectrum:
    """Decompose B @ A * scale without forming it: QR of both factors, then SVD of the r x r core."""
    a, b = pair.a.flatten(1).double(), pair.b.flatten(1).double()
    left, upper = torch.linalg.qr(b)
    right, lower = torch.linalg.qr(a.T)
    u, values, v = torch.linalg.svd(upper @ lower.T * pair.scale, full_matrices=False)
    return Spectrum(left @ u, values, v @ right.T, pair.shape)


def check_size(rank: int, energy: float) -> None:
    """Check that `--rank` or `--energy` is given and in range.

    Raises:
        UserError: neither is given, or a value is out of range.
    """
    if not rank and not energy:
        raise UserError(
            Message(
                "the target size is missing; give --rank, such as 16, or --energy, such as 0.98 (the share of each "
                "delta to keep), or both"
            )
        )
    if rank < 0:
        raise UserError(Message("--rank {value}: a rank must be at least 1", value=rank))
    if not 0 <= energy <= 1:
        raise UserError(
            Message("--energy {value}: the share must be between 0 and 1, such as 0.98", value=f"{energy:g}")
        )
