"""`lora-fp8 inspect` and `lora-fp8 convert`: describe a LoRA file, and write it in another key layout."""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import families, settings, verify
from ..adapters import kinds
from ..common.reading import open_regular
from ..errors import Joined, Message, UserError, cannot_write, exists_already
from ..lora_files import export, export_metadata, layouts, safetensors_file
from . import pairs
from .pairs import Lora, Pair


@dataclass(frozen=True)
class About:
    """The description of a LoRA file.

    Attributes:
        file: name of the file.
        bytes: size of the file.
        kind: "lora", "dora", "lokr", "loha" or "oft".
        layout: key layout; "" if it is unknown.
        families: the family that the header names, or else those with layers of these names and shapes.
        ranks, alphas, dtypes: number of layers with each value. An alpha is None if the file has none, a rank is 0 if
            LoKr's matrices are whole.
        norms: norm of each layer's delta, the largest first; for DoRA, before rows are rescaled, for OFT of R - I.
        metadata: the header's metadata, unchanged.
        hashes: sha256 of the file, AutoV2 (its first 10 digits), AutoV3 (first 12 digits of the tensors' hash), and
            "header": True if the header's own hash matches the tensors, None if it has none.
    """

    file: str
    bytes: int
    kind: str
    layout: str
    families: list[str]
    ranks: dict[int, int]
    alphas: dict[float | None, int]
    dtypes: dict[str, int]
    norms: dict[str, float]
    metadata: dict[str, str]
    hashes: dict[str, str | bool | None]

    def to_json(self) -> dict[str, Any]:
        """Return the description as plain JSON types."""
        return {**vars(self), "alphas": {str(alpha): count for alpha, count in self.alphas.items()}}

    def format_lines(self) -> list[str]:
        """Return the description as lines for the terminal."""
        counted: list[tuple[str, Mapping[Any, int]]]
        counted = [("rank", self.ranks), ("alpha", self.alphas), ("dtype", self.dtypes)]
        counts_as_text = [", ".join(f"{value} ({count})" for value, count in counts.items()) for _, counts in counted]
        answers: dict[object, str] = {
            True: Message("right"),
            False: Message("WRONG (the data has another hash)"),
            None: Message("missing"),
        }
        norms = list(self.norms.items())
        values = {
            "file": self.file,
            "size": f"{self.bytes / 2**20:.1f}",
            "kind": kinds.TITLES[self.kind],
            "count": len(norms),
        }
        heading = Message("{file}: {size} MiB, {kind} of {count} layers, unknown layout", **values)
        if self.layout:
            heading = Message(
                "{file}: {size} MiB, {kind} of {count} layers, {layout} layout", layout=self.layout, **values
            )
        return [
            heading,
            Message("architecture: {names}", names=Joined(" or ", self.families) or Message("unknown")),
            *(f"{name}: {text}" for (name, _), text in zip(counted, counts_as_text, strict=True)),
            *(f"norm {norm:.4g}: {name}" for name, norm in (norms if len(norms) <= 6 else [*norms[:3], *norms[-3:]])),
            Message(
                "sha256 {sha256}, AutoV3 {autov3}; the header's hash is {answer}",
                sha256=self.hashes["sha256"],
                autov3=self.hashes["autov3"],
                answer=answers[self.hashes["header"]],
            ),
            *(_escape_unprintable(f"{key} = {value[:200]}") for key, value in sorted(self.metadata.items())),
        ]


def _escape_unprintable(text: str) -> str:
    """Escape unprintable characters of foreign text, such as line breaks and terminal commands."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def inspect(path: Path) -> About:
    """Read and describe a LoRA file of any program.

    Raises:
        UserError: it is not a safetensors file, or an adapter of an unknown kind.
    """
    kind, layers = _read_layers(path)
    tensors, metadata = export.read_adapter(path, sound=False)
    named_family = verify.read_family_name(metadata)
    fitting_families = [named_family] if named_family else find_fitting_families(tensors)
    layout = ""
    if fitting_families:
        layout = layouts.detect_layout(tensors, families.get(fitting_families[0]))
    alphas = {name.removesuffix(".alpha"): float(value) for name, value in tensors.items() if name.endswith(".alpha")}
    norms = {
        module: _compute_norm(parts)
        * (alphas[module] / kinds.read_rank(parts) if module in alphas and kinds.has_rank(parts) else 1)
        for module, parts in layers.items()
    }
    payload = safetensors_file.hash_payload(path)
    with open_regular(path) as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
    own = metadata.get("sshs_model_hash")
    return About(
        file=path.name,
        bytes=path.stat().st_size,
        kind=kind,
        layout=layout,
        families=fitting_families,
        ranks=dict(Counter(kinds.read_rank(parts) for parts in layers.values()).most_common()),
        alphas=dict(Counter(alphas.get(module) for module in layers).most_common()),
        dtypes=dict(
            Counter(pairs.format_dtype(next(iter(parts.values())).dtype) for parts in layers.values()).most_common()
        ),
        norms=dict(sorted(norms.items(), key=lambda item: -item[1])),
        metadata=safetensors_file.read_header(path).metadata,
        hashes={"sha256": sha, "autov2": sha[:10], "autov3": payload[:12], "header": own == payload if own else None},
    )


def _read_layers(path: Path) -> tuple[str, dict[str, dict[str, Tensor]]]:
    """Return the kind, and each layer's tensors by the last part of their names, in our words."""
    tensors, _ = export.read_adapter(path, sound=False)
    if not is_other(tensors):
        named = {module: (pair.a, pair.b) for module, pair in pairs.read(path, sound=False).pairs.items()}
        return "lora", {module: dict(zip(kinds.PARTS["lora"], pair, strict=True)) for module, pair in named.items()}
    weights = {name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")}
    layers = kinds.group_by_layer({layouts.rename_kohya_halves(name): tensor for name, tensor in weights.items()})
    found_kinds = sorted({kinds.detect_kind(parts, module) for module, parts in layers.items()})
    if len(found_kinds) > 1:
        raise UserError(
            Message(
                "{path}: one file mixes {kinds}",
                path=path,
                kinds=Joined(" and ", [kinds.TITLES[kind] for kind in found_kinds]),
            )
        )
    return found_kinds[0], layers


def is_other(tensors: Mapping[str, Tensor]) -> bool:
    """Return True if a file holds another kind than LoRA."""
    return any(layouts.rename_kohya_halves(name).endswith(layouts.OTHER_PARTS) for name in tensors)


def _compute_norm(parts: Mapping[str, Tensor]) -> float:
    """Return the Frobenius norm of a layer's unscaled delta; for pairs, computed from two r x r matrices.

    For OFT it is that of R - I, because its delta depends on the weight.
    """
    if "oft_blocks" in parts:
        return float(kinds.compute_rotation(parts["oft_blocks"]).norm())
    if "lora_A.weight" in parts:
        a, b = parts["lora_A.weight"].double().flatten(1), parts["lora_B.weight"].double().flatten(1)
        return math.sqrt(max(float((b.T @ b * (a @ a.T)).sum()), 0.0))
    if "hada_w1_a" in parts:
        return float(kinds.compute_delta(parts, 1.0).norm())
    factors = kinds.compute_kronecker_factors({name: tensor.double() for name, tensor in parts.items()})
    return math.prod(float(factor.norm()) for factor in factors)


def find_fitting_families(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the families whose released denoiser has all of a file's layers in these shapes."""
    names = []
    for name in families.list_families():
        Family = families.get(name)
        try:
            state, _ = layouts.from_layout(tensors, Family, Family.reference_config)
        except UserError:  # names of another architecture
            continue
        shapes = {**Family.list_layer_shapes(Family.reference_config), **Family.list_text_layer_shapes()}
        layouts.list_modules(state)  # raises UserError for half a pair
        fits = (
            module in shapes and kinds.fits_shape(parts, shapes[module])
            for module, parts in kinds.group_by_layer(state).items()
        )
        if all(fits):
            names.append(name)
    return names


def convert(path: Path, output: Path, layout: str, *, family: str = "", base: str = "", dtype: str = "") -> int:
    """Write a LoRA file in another layout; deltas change only by the rounding to the dtype.

    Args:
        path: the file to convert.
        output: the file to write.
        layout: one of `layouts.LAYOUTS`.
        family: the architecture; empty: take it from the header, or from names and shapes.
        base: model whose sizes the LoRA fits, if they are not the released model's (as `model.path`).
        dtype: dtype of the weights; empty: the file's.

    Returns:
        Number of layers in the new file: fewer if the layout fuses several into one.

    Raises:
        UserError: it is not a LoRA of the family, the family does not have the layout, or the output exists.
        RunFailure: a value does not fit the dtype.
    """
    tensors, metadata = export.read_adapter(path)
    other = is_other(tensors)
    held = _find_common_dtype(tensors) if other else pairs.read(path).dtype
    name = family or verify.read_family_name(metadata) or _require_single(find_fitting_families(tensors), path)
    Family = families.get(name)
    sizes = Family.reference_config
    if base:
        sizes = Family(settings.Model(family=name, path=base), device="cpu", dtype=held).read_denoiser_config()
    state, scaling = layouts.from_layout(tensors, Family, sizes)
    made = layouts.to_layout(state, scaling, Family, sizes, layout)
    about = {"lora_fp8_layout": layout, "modelspec.implementation": export_metadata.find_implementation(Family, layout)}
    if other:
        _write_other(made, output, pairs.parse_dtype(dtype, held), metadata, about)
        return len(layouts.list_modules(state))
    halves = pairs.HALVES[layout == "kohya"]
    converted = {}
    for key in [key for key in made if key.endswith(halves[0])]:
        module = key.removesuffix(halves[0])
        a, b = (made[module + half] for half in halves)
        converted[module] = Pair(a, b, float(made[f"{module}.alpha"]) / a.shape[0] if layout == "kohya" else 1.0)
    written = Lora(converted, halves, layout == "kohya", held, metadata)
    pairs.write(written, output, pairs.parse_dtype(dtype, held), about)
    return len(converted)


def _find_common_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    return Counter(t.dtype for name, t in tensors.items() if not name.endswith(export.KEPT_WIDE)).most_common(1)[0][0]


def _write_other(
    tensors: Mapping[str, Tensor], path: Path, dtype: torch.dtype, metadata: Mapping[str, str], about: Mapping[str, str]
) -> None:
    """Write a file as `pairs.write` does, for the other kinds."""
    if path.exists():
        raise exists_already(path)
    held = {name: tensor if name.endswith(export.KEPT_WIDE) else tensor.to(dtype) for name, tensor in tensors.items()}
    pairs.require_finite(held, dtype)
    kept = {key: value for key, value in metadata.items() if key not in pairs.STALE}
    layers = kinds.group_by_layer({name: tensor for name, tensor in held.items() if not name.endswith(".alpha")})
    alphas = {float(tensor) for name, tensor in held.items() if name.endswith(".alpha")}
    alpha = alphas or {float(kinds.read_rank(parts)) for parts in layers.values()}
    kept |= {"ss_network_alpha": str(alpha.pop()) if len(alpha) == 1 else "Dynamic"}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        safetensors_file.write_file(path, held, kept | dict(about), hashes=True)
    except OSError as error:
        raise cannot_write(path, error) from None


def _require_single(names: list[str], path: Path) -> str:
    if len(names) != 1:
        known = Joined(" or ", names) if names else Message("none that is supported")
        accepted = " | ".join(names or families.list_families())
        raise UserError(
            Message(
                "{path}: its names and shapes do not decide the architecture ({kind}); name it with --family ({names})",
                path=path,
                kind=known,
                names=accepted,
            )
        )
    return names[0]
