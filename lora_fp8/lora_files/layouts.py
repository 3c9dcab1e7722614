"""The key layouts of LoRA files: converts the internal naming to the names that other programs read, and back.

Internally, an adapter is a dict of `<diffusers module path>.lora_A.weight` (r, in[, kh, kw]) and `....lora_B.weight`
(out, r[, 1, 1]), and a scaling (alpha / rank) for all modules or for each. Files have one of three layouts:

* `diffusers`: `unet.` or `transformer.` + module path + `.lora_A/.lora_B.weight`.
* `comfy`: `diffusion_model.` + the layer's name in the original code + `.lora_A/.lora_B.weight`. ComfyUI reads it for
  every architecture, and diffusers for most of the newer ones.
* `kohya`: `lora_unet_<name>.lora_down/.lora_up.weight` and `.alpha`, read by A1111, Forge, ComfyUI, InvokeAI, Draw
  Things and diffusers. The weights are written as trained, with their alpha, so nothing is rounded (except in a UNet's
  file with several alphas: `_equalize_alphas_`).

In the first two layouts the scaling is multiplied into B (in float32) and no alpha is written: this is the only form
that diffusers, ComfyUI and the hosts read with the same strength.

How a layer is named in each: `layer_names`.

If the original code has several layers fused into one (q, k and v), their LoRAs become the LoRA of the fused layer
without loss: the A's are stacked, the B's form a block diagonal, the rank is the sum of the ranks, and alpha grows with
the rank. Members that were not trained are rows of zeros.

DoRA, LoKr, LoHa and OFT have their own tensors (`kinds`) under the same layer names. Not every layout supports them:
`explain_unsupported` tells which does not, and why. alpha is written wherever LyCORIS writes it; diffusers accepts
none.

This module has pure functions of tensors and names; `export` handles files. The arguments and results of `to_layout`
and `from_layout` must not change: other tools build on them. Sources: kohya-ss/sd-scripts' names; ComfyUI's rule for
them.
"""

import fnmatch
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..adapters import kinds
from ..common.numbers import format_shape
from ..errors import Joined, Message, UserError, first_few
from .layer_names import LAYOUTS, find_text_encoder, get_prefix, get_prefixes, get_rule, has_layout

HALVES = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight"}
"""kohya's names of the two matrices -> the names in the other layouts."""


PAIR = tuple(f".{name}" for name in HALVES.values())


def find_kinds(state: Mapping[str, Tensor]) -> set[str]:
    """Return the kinds of adapter in internal naming. Unknown tensors count as LoRA, whose reader refuses them by name.

    Raises:
        UserError: a layer's tensors are incomplete.
    """
    if not any(name.endswith(OTHER_PARTS) for name in state):
        return {"lora"}
    return {kinds.detect_kind(parts, layer) for layer, parts in kinds.group_by_layer(state).items()}


OTHER_PARTS = tuple(f".{part}" for part in kinds.ALL_PARTS if part not in kinds.PARTS["lora"])


def explain_unsupported(
    kind: str, modules: Iterable[str], family: Any, denoiser_config: Mapping[str, Any], layout: str
) -> str | None:
    """Return why a layout does not support a kind of adapter on these layers, or None if it does."""
    if kind == "lora":
        return None
    if kind == "dora":
        if layout == "diffusers":
            return None
        return Message(
            "programs that read it interpret DoRA's lengths differently (A1111: per column of the weight, ComfyUI: "
            "relative to the length without the update)"
        )
    title = kinds.TITLES[kind]
    if layout == "diffusers":
        read = family.split_names_in_comfy or (kind == "lokr" and family.lokr_of_diffusers)
        return (
            None
            if read
            else Message("no program reads {kind} of {title} under these names", kind=title, title=family.title)
        )
    name_of, _ = get_rule(family, denoiser_config, layout)
    swapped = _find_swapped(family, denoiser_config, layout)
    for module in modules:
        name, members = name_of(module)
        if len(members) > 1:
            return Message(
                "it stores {count} layers as one ({name}), and their {kinds}s cannot be combined into one {kinds}",
                count=len(members),
                name=name,
                kinds=title,
            )
        if module in swapped:
            return Message(
                "it stores the rows of {name} in another order, in which no {kind} exists", name=module, kind=title
            )
    return None


def rename_kohya_halves(name: str) -> str:
    """Return a tensor's name with kohya's names of the two matrices replaced by ours."""
    for theirs, ours in HALVES.items():
        if name.endswith(f".{theirs}"):
            return name.removesuffix(theirs) + ours
    return name


def list_modules(state: Mapping[str, Tensor]) -> list[str]:
    """Return the sorted module paths of an adapter in internal naming.

    Raises:
        UserError: an A without its B or the reverse, a pair of different ranks, an unknown name, or an incomplete layer
            of another kind.
    """
    if any(not name.endswith(PAIR) for name in state) and find_kinds(state) - {"lora"}:
        layers = kinds.group_by_layer(state)
        for layer, parts in layers.items():
            kinds.detect_kind(parts, layer)
        return list(layers)
    halves: dict[str, set[str]] = {}
    for name in state:
        module, dot, half = name.rpartition(".lora_")
        if not dot or half not in ("A.weight", "B.weight"):
            raise UserError(
                Message(
                    "{name}: this is not a LoRA tensor (expected <module>.lora_A.weight or .lora_B.weight)", name=name
                )
            )
        halves.setdefault(module, set()).add(half)
    for module, present in halves.items():
        if len(present) != 2:
            raise UserError(
                Message(
                    "{name}: the pair has {half}, but not the other half",
                    name=module,
                    half=f"lora_{present.pop()[0]}",
                )
            )
        a, b = state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"]
        if a.ndim < 2 or b.ndim < 2 or a.shape[0] != b.shape[1]:
            raise UserError(
                Message(
                    "{name}: lora_A of {a} and lora_B of {b} have different ranks",
                    name=module,
                    a=format_shape(a.shape),
                    b=format_shape(b.shape),
                )
            )
        if any(side != 1 for side in b.shape[2:]):
            raise UserError(
                Message(
                    "{module}: lora_B is {shape}, but only 1x1 kernels are supported there",
                    module=module,
                    shape=format_shape(b.shape),
                )
            )
    return sorted(halves)


def to_layout(
    state: Mapping[str, Tensor],
    scaling: Mapping[str, float] | float,
    family: Any,
    denoiser_config: Mapping[str, Any],
    layout: str,
) -> dict[str, Tensor]:
    """Rename an adapter from internal naming to a file's. Dtypes are kept, except that scaled tensors become float32.

    Args:
        state: tensors in internal naming.
        scaling: alpha / rank, one for all modules or by module path.
        family: the ModelFamily or its class.
        denoiser_config: the denoiser's diffusers config.
        layout: one of `LAYOUTS`.

    Raises:
        UserError: a pair is incomplete, or the layout has no name for a module.
    """
    if find_kinds(state) != {"lora"}:
        return _convert_others_to_layout(state, scaling, family, denoiser_config, layout)
    name_of, _ = get_rule(family, denoiser_config, layout)
    swapped = _find_swapped(family, denoiser_config, layout)
    down, up = HALVES if layout == "kohya" else HALVES.values()
    pairs: dict[str, Pair] = {}
    for module in list_modules(state):
        a, b, scale = state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"], _get_scale(scaling, module)
        baked = layout != "kohya" and scale != 1
        if module in swapped:
            b = torch.cat(b.chunk(2)[::-1])
        pairs[module] = (a, b.float() * scale, 1.0) if baked else (a, b, scale)
    out: dict[str, Tensor] = {}
    for group, members in dict(name_of(module) for module in pairs).items():
        if len(members) == 1:
            a, b, scale = pairs[members[0]]
        else:
            a, b, scale = fuse([pairs.get(m) for m in members], _count_rows(members, pairs, family, denoiser_config))
        out[f"{group}.{down}"] = a
        out[f"{group}.{up}"] = b
        if layout == "kohya":
            out[f"{group}.alpha"] = torch.tensor(scale * a.shape[0], dtype=torch.float32)
    if layout == "kohya" and family.denoiser_name == "unet":
        _equalize_alphas_(out)
    return out


def _equalize_alphas_(tensors: dict[str, Tensor]) -> None:
    """Give every layer the file's most common alpha, and multiply the rest of its scale into B, in place.

    diffusers (0.39, `get_peft_kwargs`) looks for a UNet's other alphas under names that its modules do not have, and
    then loads those layers with the wrong strength. A ratio that is a power of two, as for ranks 4 and 16, is exact in
    every dtype; with any other ratio, B becomes float32.
    """
    alphas = {name: float(tensor) for name, tensor in tensors.items() if name.endswith(".alpha")}
    if len(set(alphas.values())) < 2:
        return
    common = Counter(alpha for alpha in alphas.values() if alpha).most_common(1)[0][0]
    for name, alpha in alphas.items():
        if alpha != common:
            ratio, up = alpha / common, f"{name.removesuffix('alpha')}lora_up.weight"
            is_exact = math.frexp(ratio)[0] in (0, 0.5)
            tensors[up] = tensors[up] * ratio if is_exact else tensors[up].float() * ratio
            tensors[name] = torch.tensor(common, dtype=torch.float32)


def from_layout(
    tensors: Mapping[str, Tensor], family: Any, denoiser_config: Mapping[str, Any], layout: str | None = None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Convert a file's tensors to internal naming and each module's alpha / rank; the inverse of `to_layout`.

    Files of other programs are read too, with both names of the two matrices and with alpha in every layout. If the B
    of a fused layer is not block diagonal, all members get the same A, which changes nothing. A missing alpha equals
    the rank, as in every client.

    Args:
        tensors: the file's tensors.
        family: the ModelFamily or its class.
        denoiser_config: the denoiser's diffusers config.
        layout: one of `LAYOUTS`; None: detect it from the names.

    Raises:
        UserError: names belong to no layout or to no layer of this base, or pairs are incomplete.
    """
    layout = layout or detect_layout(tensors, family)
    if any(name.endswith(OTHER_PARTS) for name in tensors):
        return _convert_others_from_layout(tensors, family, denoiser_config, layout)
    _, members_of = get_rule(family, denoiser_config, layout)
    prefixes = get_prefixes(family, layout)
    renamed: dict[str, Tensor] = {}
    alphas: dict[str, float] = {}
    foreign = []
    for name, tensor in tensors.items():
        group, kind = _split_name(name)
        if not group.startswith(prefixes) or not kind:
            foreign.append(name)
        elif kind == "alpha":
            alphas[group] = float(tensor)
        else:
            renamed[f"{group}.{HALVES.get(kind, kind)}"] = tensor
    if foreign:
        names = first_few(sorted(foreign))
        parts = ", ".join((family.denoiser_name, *family.trained_text))
        raise UserError(
            Message(
                "{names}: a LoRA of the {parts} has no such names in the {layout} layout",
                names=names,
                parts=parts,
                layout=layout,
            )
        )
    state: dict[str, Tensor] = {}
    scaling: dict[str, float] = {}
    swapped = _find_swapped(family, denoiser_config, layout)
    groups = list_modules(renamed)
    if stray := sorted(alphas.keys() - set(groups)):
        raise UserError(Message("{names}: there is an alpha without weights", names=first_few(stray)))
    for group in groups:
        a, b = renamed[f"{group}.lora_A.weight"], renamed[f"{group}.lora_B.weight"]
        members = members_of(group)
        if members[0] in swapped:
            b = torch.cat(b.chunk(2)[::-1])
        rows = [b.shape[0]] if len(members) == 1 else _count_rows(members, {}, family, denoiser_config)
        if sum(rows) != b.shape[0]:
            raise UserError(
                Message(
                    "{group}: the LoRA has {rows} rows, but this base model has {others}",
                    group=group,
                    rows=b.shape[0],
                    others=sum(rows),
                )
            )
        for member, pair in zip(members, split(a, b, rows), strict=True):
            if pair is not None:
                state[f"{member}.lora_A.weight"], state[f"{member}.lora_B.weight"] = pair
                scaling[member] = alphas[group] / a.shape[0] if group in alphas else 1.0
    return state, scaling


def _convert_others_to_layout(
    state: Mapping[str, Tensor],
    scaling: Mapping[str, float] | float,
    family: Any,
    denoiser_config: Mapping[str, Any],
    layout: str,
) -> dict[str, Tensor]:
    """Do what `to_layout` does for DoRA, LoKr, LoHa and OFT, where every layer keeps its own tensors."""
    name_of, _ = get_rule(family, denoiser_config, layout)
    out: dict[str, Tensor] = {}
    for module, parts in kinds.group_by_layer(state).items():
        kind, scale = kinds.detect_kind(parts, module), _get_scale(scaling, module)
        if kind == "lora":
            raise UserError(
                Message(
                    "{module}: the file mixes LoRA with another kind of adapter, but a file can contain only one",
                    module=module,
                )
            )
        if reason := explain_unsupported(kind, [module], family, denoiser_config, layout):
            raise UserError(
                Message(
                    "the {layout} layout of {title} does not support {kind}: {why}",
                    layout=layout,
                    title=family.title,
                    kind=kinds.TITLES[kind],
                    why=reason,
                )
            )
        name = name_of(module)[0]
        held = dict(parts)
        if layout == "diffusers" and scale != 1:  # multiplied into a factor that every layer of the kind has
            factor = next(part for part in SCALED if part in held)
            held[factor] = held[factor].float() * scale
        if kind == "dora":
            rows = held["lora_magnitude_vector"]
            is_conv = held["lora_A.weight"].ndim > 2
            held["lora_magnitude_vector"] = rows.view(1, -1, 1, 1) if is_conv else rows.flatten()
        out |= {f"{name}.{part}": tensor for part, tensor in held.items()}
        if kind == "oft":
            out[f"{name}.alpha"] = torch.tensor(kinds.LIMIT)
        elif layout != "diffusers":
            out[f"{name}.alpha"] = torch.tensor(scale * (kinds.read_rank(parts) or 1), dtype=torch.float32)
    if (
        layout == "kohya" and family.denoiser_name == "unet" and find_kinds(state) == {"dora"}
    ):  # diffusers reads no other
        _equalize_alphas_(out)
    return out


SCALED = ("lora_B.weight", "lokr_w1", "lokr_w1_a", "hada_w1_a")


def _convert_others_from_layout(
    tensors: Mapping[str, Tensor], family: Any, denoiser_config: Mapping[str, Any], layout: str
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Do what `from_layout` does for DoRA, LoKr, LoHa and OFT.

    Raises:
        UserError: also for DoRA in another layout than diffusers', and for a fused layer.
    """
    _, members_of = get_rule(family, denoiser_config, layout)
    prefix = get_prefix(family, layout)
    alphas = {name.removesuffix(".alpha"): float(t) for name, t in tensors.items() if name.endswith(".alpha")}
    groups = kinds.group_by_layer({name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")})
    if foreign := [group for group in (*groups, *alphas) if not group.startswith(prefix) or group not in groups]:
        raise UserError(
            Message(
                "{names}: these names are not part of the {layout} layout ({prefix}...) of {title}",
                names=first_few(foreign),
                layout=layout,
                prefix=prefix,
                title=family.title,
            )
        )
    state: dict[str, Tensor] = {}
    scaling: dict[str, float] = {}
    for group, parts in groups.items():
        kind = kinds.detect_kind(parts, group)
        module, *others = members_of(group)
        if others:
            raise UserError(
                Message(
                    "{group}: the {kind} of {count} layers combined into one cannot be split",
                    group=group,
                    kind=kinds.TITLES[kind],
                    count=1 + len(others),
                )
            )
        if (
            reason := explain_unsupported(kind, [module], family, denoiser_config, layout)
            if layout != "diffusers"
            else None
        ):
            raise UserError(
                Message(
                    "{group}: the {layout} layout has no {kind}: {why}",
                    group=group,
                    kind=kinds.TITLES[kind],
                    layout=layout,
                    why=reason,
                )
            )
        scaling[module] = alphas[group] / kinds.read_rank(parts) if group in alphas and kinds.has_rank(parts) else 1.0
        for part, tensor in parts.items():
            state[f"{module}.{part}"] = tensor.flatten() if part == "lora_magnitude_vector" else tensor
        if kind == "oft" and group in alphas:
            state[f"{module}.oft_blocks"] = kinds.limit_norm(parts["oft_blocks"], alphas[group])
    return state, scaling


def _split_name(name: str) -> tuple[str, str]:
    """Split a tensor's name into its layer and "alpha" or the name of one of the two matrices; "" if it is neither."""
    for kind in (*HALVES, *HALVES.values(), "alpha"):
        if name.endswith(f".{kind}"):
            return name.removesuffix(f".{kind}"), kind
    return name, ""


def detect_layout(tensors: Iterable[str], family: Any) -> str:
    """Return the layout of a file, from its names.

    Raises:
        UserError: it is none of them; the message names an example.
    """
    names = list(tensors)
    known = [layout for layout in LAYOUTS if has_layout(family, layout)]
    for layout in known:
        if any(name.startswith(get_prefixes(family, layout)) for name in names):
            return layout
    example = names[0] if names else Message("an empty file")
    expected = Joined(" or ", [f"{get_prefix(family, layout)}..." for layout in known])
    raise UserError(
        Message(
            "{path}: this is not a LoRA for {title} (expected {names})",
            path=example,
            title=family.title,
            names=expected,
        )
    )


def _get_scale(scaling: Mapping[str, float] | float, module: str) -> float:
    return float(scaling[module] if isinstance(scaling, Mapping) else scaling)


Pair = tuple[Tensor, Tensor, float]  # A (r, in), B (out, r), alpha / rank


def fuse(pairs: list[Pair | None], rows: list[int]) -> Pair:
    """Combine the LoRAs of a fused layer's members: A's stacked, B's in a block diagonal, the rank is the sum.

    Args:
        pairs: A (r, in), B (rows, r) and scaling of each member; None for a member without an adapter.
        rows: output features of each member.
    """
    present = [pair for pair in pairs if pair is not None]
    scale = present[0][2]
    stacked = torch.cat([a for a, _, _ in present])
    dtype = present[0][1].dtype if all(s == scale for _, _, s in present) else torch.float32
    diagonal = torch.zeros(sum(rows), stacked.shape[0], dtype=dtype)
    row = column = 0
    for pair, height in zip(pairs, rows, strict=True):
        if pair is not None:
            _, b, own = pair
            # one alpha serves the whole layer: for members with another one, the ratio is multiplied into B
            block = b if own == scale else b.float() * (own / scale)
            diagonal[row : row + height, column : column + b.shape[1]] = block
            column += b.shape[1]
        row += height
    return stacked, diagonal, scale


def split(a: Tensor, b: Tensor, rows: list[int]) -> list[tuple[Tensor, Tensor] | None]:
    """Split a fused layer's LoRA: (A, B) of each member, None for members that it does not touch. Inverse of `fuse`."""
    if len(rows) == 1:
        return [(a, b)]
    rank = a.shape[0]
    blocks = b.split(rows)
    used = [block.ne(0).any(0) for block in blocks]  # columns of B that each member needs
    even = rank // len(rows)
    if rank % len(rows) == 0 and all(
        not u[: i * even].any() and not u[(i + 1) * even :].any() for i, u in enumerate(used)
    ):
        bounds = [(i * even, (i + 1) * even) for i in range(len(rows))]  # members of equal rank: the common case
        return [(a[i:j].clone(), block[:, i:j].clone()) for (i, j), block in zip(bounds, blocks, strict=True)]
    touched = [i for i, u in enumerate(used) if u.any()]
    ends = [int(used[i].nonzero().max()) + 1 for i in touched]
    begins = [int(used[i].nonzero().min()) for i in touched]
    out: list[tuple[Tensor, Tensor] | None] = [None] * len(rows)
    if all(end <= begin for end, begin in zip(ends, begins[1:], strict=False)):
        # columns that no member uses belong to the block before them
        edges = [0, *begins[1:], rank]
        for i, begin, end in zip(touched, edges, edges[1:], strict=False):
            out[i] = (a[begin:end].clone(), blocks[i][:, begin:end].clone())
    else:  # trained as one layer: every member needs all of A
        for i in touched:
            out[i] = (a.clone(), blocks[i].clone())
    return out


def explain_unread_by_diffusers(
    family: Any,
    denoiser_config: Mapping[str, Any],
    layout: str,
    kind: str = "lora",
    layers: Collection[str] = (),
) -> str | None:
    """Return why diffusers itself cannot load this layout and kind for this base, or None if it can.

    Args:
        family: the ModelFamily or its class.
        denoiser_config: the denoiser's diffusers config.
        layout: one of `LAYOUTS`.
        kind: of adapter.
        layers: diffusers names of the adapted layers; () for all that the family adapts unless targets are given.
    """
    if kind in ("loha", "oft") or (kind == "lokr" and not (family.lokr_of_diffusers and layout == "diffusers")):
        return Message(
            "diffusers does not read {kind} in the {layout} layout of {title}",
            kind=kinds.TITLES[kind],
            layout=layout,
            title=family.title,
        )
    if layout not in family.layouts_of_diffusers:
        return Message("diffusers does not read the {layout} layout of {title}", layout=layout, title=family.title)
    if layout == "kohya" and layers and family.converter_blocks and not _has_whole_blocks(layers, family):
        return Message(
            "diffusers converts kohya's names of {title} only if each block has exactly these layers: {names}",
            title=family.title,
            names=", ".join(family.converter_blocks),
        )
    if layout == "comfy" and layers and family.converter_mark and not fnmatch.filter(layers, family.converter_mark):
        return Message(
            "diffusers recognizes ComfyUI's names of {title} only if a layer {pattern} is trained",
            title=family.title,
            pattern=family.converter_mark,
        )
    if layout == "diffusers" or not family.converter_width:
        return None
    # Affects miniatures and models with added blocks: diffusers 0.42 has the released sizes hard-coded in its
    # converters.
    sizes = FLUX_DEFAULTS | dict(denoiser_config)
    width = sizes["num_attention_heads"] * sizes["attention_head_dim"]
    if width != family.converter_width:
        return Message(
            "diffusers converts these names at width {width} only, but this base model has {other}",
            width=family.converter_width,
            other=width,
        )
    if family.kohya_naming == "bfl_flux" and (sizes["num_layers"] > 19 or sizes["num_single_layers"] > 38):
        return Message("diffusers converts kohya's FLUX names for 19 + 38 blocks only, but this base model has more")
    return None


def _has_whole_blocks(layers: Collection[str], family: Any) -> bool:
    numbers = {layer.split(".")[1] for layer in layers if layer.startswith("blocks.")}
    return set(layers) == {
        f"blocks.{number}.{name}" for number in range(len(numbers)) for name in family.converter_blocks
    }


FLUX_DEFAULTS = {"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 19, "num_single_layers": 38}
"""diffusers' defaults for entries that a config.json leaves out."""


def _find_swapped(family: Any, denoiser_config: Mapping[str, Any], layout: str) -> set[str]:
    """Return the modules whose B has its halves swapped in this layout."""
    native = layout == "comfy" or (layout == "kohya" and family.kohya_naming == "native")
    return family.find_swapped_halves(denoiser_config) if native else set()


def _count_rows(
    members: Iterable[str], pairs: Mapping[str, Pair], family: Any, denoiser_config: Mapping[str, Any]
) -> list[int]:
    """Return the output features of a fused layer's members; for those without a LoRA, from the denoiser."""
    return [
        pairs[member][1].shape[0] if member in pairs else family.list_layer_shapes(denoiser_config)[member][0]
        for member in members
    ]


def find_misfits(state: Mapping[str, Tensor], family: Any) -> list[str]:
    """Return the layers of an adapter that this base model lacks, or has in another size; text encoders are left out.

    Args:
        state: tensors in internal naming.
        family: of the base model.
    """
    shapes = family.list_layer_shapes(family.read_denoiser_config())
    misfits = []
    for layer, parts in kinds.group_by_layer(state).items():
        if find_text_encoder(layer, family):
            continue
        shape = shapes.get(layer)
        if shape is None or not kinds.fits_shape(parts, shape):
            misfits.append(layer)
    return misfits
