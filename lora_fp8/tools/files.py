"""`lora-fp8 inspect` and `lora-fp8 convert`: what a LoRA file is, and the same LoRA in another key layout."""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import config, export, families, layouts, verify
from ..config import UserError
from . import pairs
from .pairs import Lora, Pair


@dataclass(frozen=True)
class About:
    """What a file tells.

    Attributes:
        layout: the key layout; "" where the names are of none that is known.
        families: those whose layers the file's names and shapes are; where the header names one, that alone.
        ranks, alphas, dtypes: how many layers have each; an alpha is None where the file holds none.
        norms: of each layer's B @ A * scale, the largest first.
        metadata: the header's, as it is.
        hashes: sha256 of the file, AutoV2 (its first 10), AutoV3 (first 12 of the tensors'), and whether the header's
            own hash is that of the tensors, None where it has none.
    """

    file: str
    bytes: int
    layout: str
    families: list[str]
    ranks: dict[int, int]
    alphas: dict[float | None, int]
    dtypes: dict[str, int]
    norms: dict[str, float]
    metadata: dict[str, str]
    hashes: dict[str, str | bool | None]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**vars(self), "alphas": {str(alpha): count for alpha, count in self.alphas.items()}}

    def lines(self) -> list[str]:
        """For people."""
        counted = [("rank", self.ranks), ("alpha", self.alphas), ("dtype", self.dtypes)]
        told = [", ".join(f"{value} ({count})" for value, count in found.items()) for _, found in counted]
        right = {True: "right", False: "WRONG: not of these bytes", None: "absent"}[self.hashes["header"]]  # type: ignore[index]
        norms = list(self.norms.items())
        return [
            f"{self.file}: {self.bytes / 2**20:.1f} MiB, {len(norms)} layers, {self.layout or 'no known'} layout",
            f"family: {' or '.join(self.families) or 'none that is known'}",
            *(f"{name}: {text}" for (name, _), text in zip(counted, told, strict=True)),
            *(f"norm {norm:.4g}: {name}" for name, norm in (norms if len(norms) <= 6 else [*norms[:3], *norms[-3:]])),
            f"sha256 {self.hashes['sha256']}, AutoV3 {self.hashes['autov3']}; the header's hash is {right}",
            *(f"{key} = {value[:200]}" for key, value in sorted(self.metadata.items())),
        ]


def inspect(path: Path) -> About:
    """Read a LoRA file of any program and tell what it is.

    Raises:
        UserError: not a safetensors file, or not a LoRA of pairs.
    """
    lora = pairs.read(path)
    tensors, metadata = export.read(path)
    told = verify.family_told(metadata)
    found = [told] if told else fitting(tensors)
    layout = ""
    if found:
        layout = layouts.detect_layout(tensors, families.get(found[0]))
    alphas = {name.removesuffix(".alpha"): float(value) for name, value in tensors.items() if name.endswith(".alpha")}
    norms = {module: _norm(pair) for module, pair in lora.pairs.items()}
    payload = export.payload_hash(path)
    with open(path, "rb") as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
    own = metadata.get("sshs_model_hash")
    return About(
        file=path.name,
        bytes=path.stat().st_size,
        layout=layout,
        families=found,
        ranks=dict(Counter(pair.rank for pair in lora.pairs.values()).most_common()),
        alphas=dict(Counter(alphas.get(module) for module in lora.pairs).most_common()),
        dtypes=dict(Counter(pairs.short(pair.a.dtype) for pair in lora.pairs.values()).most_common()),
        norms=dict(sorted(norms.items(), key=lambda item: -item[1])),
        metadata=metadata,
        hashes={"sha256": sha, "autov2": sha[:10], "autov3": payload[:12], "header": own == payload if own else None},
    )


def _norm(pair: Pair) -> float:
    """Frobenius norm of B @ A * scale, by two matrices of r x r."""
    a, b = pair.a.double().flatten(1), pair.b.double().flatten(1)
    return math.sqrt(max(float((b.T @ b * (a @ a.T)).sum()), 0.0)) * abs(pair.scale)


def fitting(tensors: Mapping[str, Tensor]) -> list[str]:
    """The families whose released denoiser has all of a file's layers, in its shapes."""
    found = []
    for name in families.available():
        Family = families.get(name)
        try:
            state, _ = layouts.from_layout(tensors, Family, Family.reference_config)
        except UserError:  # names of another architecture
            continue
        shapes = {**Family.layer_shapes(Family.reference_config), **Family.text_layer_shapes()}
        fits = (
            module in shapes
            and state[f"{module}.lora_A.weight"].shape[1] == shapes[module][1]
            and state[f"{module}.lora_B.weight"].shape[0] == shapes[module][0]
            for module in layouts.modules(state)
        )
        if all(fits):
            found.append(name)
    return found


def convert(path: Path, output: Path, layout: str, *, family: str = "", base: str = "", dtype: str = "") -> int:
    """Write a LoRA file in another layout; each layer's delta stays as it is but for the rounding to the dtype.

    Args:
        layout: one of `layouts.LAYOUTS`.
        family: the architecture; empty takes it from the header, or from names and shapes.
        base: the model whose sizes the LoRA is for, where they are not the released model's (as `model.path`).
        dtype: of the weights; empty keeps the file's.

    Returns:
        The layers in the new file: fewer where the layout holds several as one.

    Raises:
        UserError: not a LoRA of the family, a layout that it has not, or an output that exists.
        RunFailure: a value does not fit the dtype.
    """
    lora = pairs.read(path)
    tensors, metadata = export.read(path)
    name = family or verify.family_told(metadata) or _only(fitting(tensors), path)
    Family = families.get(name)
    sizes = Family.reference_config
    if base:
        sizes = Family(config.Model(family=name, path=base), device="cpu", dtype=lora.dtype).denoiser_config()
    state, scaling = layouts.from_layout(tensors, Family, sizes)
    made = layouts.to_layout(state, scaling, Family, sizes, layout)
    halves = pairs.HALVES[layout == "kohya"]
    found = {}
    for key in [key for key in made if key.endswith(halves[0])]:
        module = key.removesuffix(halves[0])
        a, b = (made[module + half] for half in halves)
        found[module] = Pair(a, b, float(made[f"{module}.alpha"]) / a.shape[0] if layout == "kohya" else 1.0)
    about = {"lora_fp8_layout": layout, "modelspec.implementation": export.implementation(Family, layout)}
    written = Lora(found, halves, layout == "kohya", lora.dtype, metadata)
    pairs.write(written, output, pairs.dtype_of(dtype, lora.dtype), about)
    return len(found)


def _only(found: list[str], path: Path) -> str:
    if len(found) != 1:
        known = " or ".join(found) if found else "none of ours"
        accepted = " | ".join(found or families.available())
        raise UserError(
            f"{path}: by its names and shapes the architecture is {known}; name it with --family ({accepted})"
        )
    return found[0]
