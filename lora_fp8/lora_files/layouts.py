"""The key layouts of LoRA files: converts the internal naming to the names that other programs read, and back.

Internally, an adapter is a dict of `<diffusers module path>.lora_A.weight` (r, in[, kh, kw]) and `....lora_B.weight`
(out, r[, 1, 1]), and a scaling (alpha / rank) for all modules or for each. Files have one of three layouts:

* `diffusers`: `unet.` or `transformer.` + module path + `.lora_A/.lora_B.weight`.
* `comfy`: `diffusion_model.` + the layer's name in the original code + `.lora_A/.lora_B.weight`. ComfyUI reads it for
  every architecture, and diffusers for most of the newer ones.
* `kohya`: `lora_unet_<name>.lora_down/.lora_up.weight` and `.alpha`, read by A1111, Forge, ComfyUI, InvokeAI, Draw
  Things and diffusers. The weights are written as trained, with their alpha, so nothing is rounded (except in a UNet's
  file with several alphas: `_equalize_alphas_`).

A text encoder's layer is `text_encoder.text_model.` + its path, internally and in the diffusers layout, whether or not
the installed transformers has `text_model` in its paths: older versions and ComfyUI expect it, diffusers takes both. In
kohya's layout it starts with lora_te_, lora_te1_ or lora_te2_ (`TextEncoder.kohya`), in comfy's with
`text_encoders.clip_l.transformer.`.

In the first two layouts the scaling is multiplied into B (in float32) and no alpha is written: this is the only form
that diffusers, ComfyUI and the hosts read with the same strength.

kohya's name of a module depends on the architecture; a family names its rule in `kohya_naming`:

    diffusers_underscored   SD 1.5: the diffusers path with _ instead of .
    sgm_unet                SDXL: block names of the original UNet (input_blocks_4_1_...), inner names as in diffusers
    native                  the names of the original code (`native_layers`) with _ instead of .
    bfl_flux                the same, for layers inside the blocks only

If the original code has several layers fused into one (q, k and v), their LoRAs become the LoRA of the fused layer
without loss: the A's are stacked, the B's form a block diagonal, the rank is the sum of the ranks, and alpha grows with
the rank. Members that were not trained are rows of zeros.

DoRA, LoKr and LoHa have their own tensors (`kinds`) under the same layer names. Not every layout supports them:
`uncarried` tells which does not, and why. alpha is written wherever LyCORIS writes it; diffusers accepts none.

This module has pure functions of tensors and names; `export` handles files. The arguments and results of `to_layout`
and `from_layout` must not change: other tools build on them. Sources: kohya-ss/sd-scripts' names; ComfyUI's rule for
them.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..adapters import kinds
from ..common.text import first_few, sides
from ..errors import Message, UserError
from . import naming

LAYOUTS = ("diffusers", "comfy", "kohya")
HALVES = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight"}
"""kohya's names of the two matrices -> the names in the other layouts."""


PAIR = tuple(f".{name}" for name in HALVES.values())


def kinds_in(state: Mapping[str, Tensor]) -> set[str]:
    """Return the kinds of adapter in internal naming. Unknown tensors count as LoRA, whose reader refuses them by name.

    Raises:
        UserError: a layer's tensors are incomplete.
    """
    if not any(name.endswith(OTHER_PARTS) for name in state):
        return {"lora"}
    return {kinds.kind_of(parts, layer) for layer, parts in kinds.grouped(state).items()}


OTHER_PARTS = tuple(f".{part}" for part in kinds.ALL_PARTS if part not in kinds.PARTS["lora"])


def uncarried(
    kind: str, modules: Iterable[str], family: Any, denoiser_config: Mapping[str, Any], layout: str
) -> str | None:
    """Return why a layout does not support a kind of adapter on these layers, or None if it does."""
    if kind == "lora":
        return None
    if kind == "dora":
        if layout == "diffusers":
            return None
        return Message(
            "programs that read it give DoRA's lengths another meaning (A1111: of the weight's columns, ComfyUI: "
            "over the length without the update)"
        )
    title = kinds.TITLES[kind]
    if layout == "diffusers":
        read = family.split_names_in_comfy or (kind == "lokr" and family.lokr_of_diffusers)
        return (
            None
            if read
            else Message("nothing reads {kind} of {title} under these names", kind=title, title=family.title)
        )
    name_of, _ = _rule(family, denoiser_config, layout)
    swapped = _swapped(family, denoiser_config, layout)
    for module in modules:
        name, members = name_of(module)
        if len(members) > 1:
            return Message(
                "it holds {count} layers as one ({name}), whose {kinds}s are no {kinds} of the whole",
                count=len(members),
                name=name,
                kinds=title,
            )
        if module in swapped:
            return Message(
                "it has the rows of {name} in another order, of which there is no {kind}", name=module, kind=title
            )
    return None


def in_our_words(name: str) -> str:
    """Return a tensor's name with kohya's names of the two matrices replaced by ours."""
    for theirs, ours in HALVES.items():
        if name.endswith(f".{theirs}"):
            return name.removesuffix(theirs) + ours
    return name


def modules(state: Mapping[str, Tensor]) -> list[str]:
    """Return the sorted module paths of an adapter in internal naming.

    Raises:
        UserError: an A without its B or the reverse, a pair of different ranks, an unknown name, or an incomplete layer
            of another kind.
    """
    if any(not name.endswith(PAIR) for name in state) and kinds_in(state) - {"lora"}:
        layers = kinds.grouped(state)
        for layer, parts in layers.items():
            kinds.kind_of(parts, layer)
        return list(layers)
    halves: dict[str, set[str]] = {}
    for name in state:
        module, dot, half = name.rpartition(".lora_")
        if not dot or half not in ("A.weight", "B.weight"):
            raise UserError(
                Message("{name}: not a LoRA tensor (expected <module>.lora_A.weight or .lora_B.weight)", name=name)
            )
        halves.setdefault(module, set()).add(half)
    for module, found in halves.items():
        if len(found) != 2:
            raise UserError(
                Message(
                    "{name}: has {half} but not the other half of the pair", name=module, half=f"lora_{found.pop()[0]}"
                )
            )
        a, b = state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"]
        if a.ndim < 2 or b.ndim < 2 or a.shape[0] != b.shape[1]:
            raise UserError(
                Message(
                    "{name}: lora_A of {a} and lora_B of {b} are not of one rank",
                    name=module,
                    a=sides(a.shape),
                    b=sides(b.shape),
                )
            )
        if any(side != 1 for side in b.shape[2:]):
            raise UserError(
                Message(
                    "{module}: lora_B is {shape}; only kernels of one pixel are known there",
                    module=module,
                    shape=sides(b.shape),
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
    if kinds_in(state) != {"lora"}:
        return _others_to_layout(state, scaling, family, denoiser_config, layout)
    name_of, _ = _rule(family, denoiser_config, layout)
    swapped = _swapped(family, denoiser_config, layout)
    down, up = HALVES if layout == "kohya" else HALVES.values()
    pairs: dict[str, Pair] = {}
    for module in modules(state):
        a, b, scale = state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"], _scale_of(scaling, module)
        baked = layout != "kohya" and scale != 1
        if module in swapped:
            b = torch.cat(b.chunk(2)[::-1])
        pairs[module] = (a, b.float() * scale, 1.0) if baked else (a, b, scale)
    out: dict[str, Tensor] = {}
    for group, members in dict(name_of(module) for module in pairs).items():
        if len(members) == 1:
            a, b, scale = pairs[members[0]]
        else:
            a, b, scale = fuse([pairs.get(m) for m in members], _rows(members, pairs, family, denoiser_config))
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
        return _others_from_layout(tensors, family, denoiser_config, layout)
    _, members_of = _rule(family, denoiser_config, layout)
    prefixes = _prefixes(family, layout)
    renamed: dict[str, Tensor] = {}
    alphas: dict[str, float] = {}
    foreign = []
    for name, tensor in tensors.items():
        group, kind = _parted(name)
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
                "{names}: not names that a LoRA of the {parts} has in the {layout} layout",
                names=names,
                parts=parts,
                layout=layout,
            )
        )
    state: dict[str, Tensor] = {}
    scaling: dict[str, float] = {}
    swapped = _swapped(family, denoiser_config, layout)
    groups = modules(renamed)
    if stray := sorted(alphas.keys() - set(groups)):
        raise UserError(Message("{names}: alpha without weights", names=first_few(stray)))
    for group in groups:
        a, b = renamed[f"{group}.lora_A.weight"], renamed[f"{group}.lora_B.weight"]
        members = members_of(group)
        if members[0] in swapped:
            b = torch.cat(b.chunk(2)[::-1])
        rows = [b.shape[0]] if len(members) == 1 else _rows(members, {}, family, denoiser_config)
        if sum(rows) != b.shape[0]:
            raise UserError(
                Message(
                    "{group}: the LoRA has {rows} rows; this base has {others}",
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


def _others_to_layout(
    state: Mapping[str, Tensor],
    scaling: Mapping[str, float] | float,
    family: Any,
    denoiser_config: Mapping[str, Any],
    layout: str,
) -> dict[str, Tensor]:
    """Do what `to_layout` does for DoRA, LoKr and LoHa, where every layer keeps its own tensors."""
    name_of, _ = _rule(family, denoiser_config, layout)
    out: dict[str, Tensor] = {}
    for module, parts in kinds.grouped(state).items():
        kind, scale = kinds.kind_of(parts, module), _scale_of(scaling, module)
        if kind == "lora":
            raise UserError(
                Message("{module}: LoRA beside another kind of adapter; files hold one kind", module=module)
            )
        if reason := uncarried(kind, [module], family, denoiser_config, layout):
            raise UserError(
                Message(
                    "the {layout} layout of {title} carries no {kind}: {why}",
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
        if layout != "diffusers":
            out[f"{name}.alpha"] = torch.tensor(scale * (kinds.rank_of(parts) or 1), dtype=torch.float32)
    if layout == "kohya" and family.denoiser_name == "unet" and kinds_in(state) == {"dora"}:  # diffusers reads no other
        _equalize_alphas_(out)
    return out


SCALED = ("lora_B.weight", "lokr_w1", "lokr_w1_a", "hada_w1_a")


def _others_from_layout(
    tensors: Mapping[str, Tensor], family: Any, denoiser_config: Mapping[str, Any], layout: str
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Do what `from_layout` does for DoRA, LoKr and LoHa.

    Raises:
        UserError: also for DoRA in another layout than diffusers', and for a fused layer.
    """
    _, members_of = _rule(family, denoiser_config, layout)
    prefix = _prefix(family, layout)
    alphas = {name.removesuffix(".alpha"): float(t) for name, t in tensors.items() if name.endswith(".alpha")}
    groups = kinds.grouped({name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")})
    if foreign := [group for group in (*groups, *alphas) if not group.startswith(prefix) or group not in groups]:
        raise UserError(
            Message(
                "{names}: not part of the {layout} layout ({prefix}...) of {title}",
                names=first_few(foreign),
                layout=layout,
                prefix=prefix,
                title=family.title,
            )
        )
    state: dict[str, Tensor] = {}
    scaling: dict[str, float] = {}
    for group, parts in groups.items():
        kind = kinds.kind_of(parts, group)
        module, *others = members_of(group)
        if others:
            raise UserError(
                Message(
                    "{group}: {kind} of {count} layers as one cannot be taken apart",
                    group=group,
                    kind=kinds.TITLES[kind],
                    count=1 + len(others),
                )
            )
        if reason := uncarried(kind, [module], family, denoiser_config, layout) if layout != "diffusers" else None:
            raise UserError(
                Message(
                    "{group}: {kind} is not known in the {layout} layout: {why}",
                    group=group,
                    kind=kinds.TITLES[kind],
                    layout=layout,
                    why=reason,
                )
            )
        scaling[module] = alphas[group] / kinds.rank_of(parts) if group in alphas and kinds.has_rank(parts) else 1.0
        for part, tensor in parts.items():
            state[f"{module}.{part}"] = tensor.flatten() if part == "lora_magnitude_vector" else tensor
    return state, scaling


def _parted(name: str) -> tuple[str, str]:
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
    known = [layout for layout in LAYOUTS if _has_layout(family, layout)]
    for layout in known:
        if any(name.startswith(_prefixes(family, layout)) for name in names):
            return layout
    found = names[0] if names else "an empty file"
    expected = " or ".join(f"{_prefix(family, layout)}..." for layout in known)
    raise UserError(
        Message("{path}: not a LoRA for {title} (expected {names})", path=found, title=family.title, names=expected)
    )


def _has_layout(family: Any, layout: str) -> bool:
    return {"diffusers": True, "comfy": bool(family.native_layers), "kohya": family.kohya_naming in NAMINGS}[layout]


def _prefix(family: Any, layout: str) -> str:
    return {"diffusers": f"{family.denoiser_name}.", "comfy": "diffusion_model.", "kohya": "lora_unet_"}[layout]


def _prefixes(family: Any, layout: str) -> tuple[str, ...]:
    """Return the prefixes of a layout's names: of the denoiser's layers, and of the text encoders'."""
    return _prefix(family, layout), *(text_prefix(family, layout, name) for name in family.trained_text)


# -- text encoders


def text_layer(encoder: str, path: str) -> str:
    """Return an adapter's module path for the text encoder's own `path` of a layer."""
    return f"{encoder}.text_model.{path.removeprefix('text_model.')}"


def text_encoder_of(module: str, family: Any) -> str:
    """Return the text encoder that a module path belongs to; "" for a layer of the denoiser."""
    return next((name for name in family.trained_text if module.startswith(f"{name}.")), "")


def has_text(names: Iterable[str], family: Any) -> bool:
    """Return True if a file with these names holds LoRAs of the family's text encoders."""
    prefixes = tuple(
        text_prefix(family, layout, name)
        for layout in LAYOUTS
        if _has_layout(family, layout)
        for name in family.trained_text
    )
    return any(name.startswith(prefixes) for name in names)


def text_prefix(family: Any, layout: str, encoder: str) -> str:
    """Return the prefix of a text encoder's layers in a layout."""
    about = family.trained_text[encoder]
    comfy = f"text_encoders.{about.comfy}.transformer."
    return {"diffusers": f"{encoder}.", "comfy": comfy, "kohya": about.kohya}[layout]


def _text_to_name(module: str, family: Any, layout: str) -> str:
    encoder = text_encoder_of(module, family)
    path = module.removeprefix(f"{encoder}.")
    return text_prefix(family, layout, encoder) + (path.replace(".", "_") if layout == "kohya" else path)


def _text_module(name: str, family: Any, layout: str) -> str:
    """Return the module path for a text encoder layer's name; "" if the name belongs to no text encoder.

    Raises:
        UserError: the name belongs to another part of the text encoder.
    """
    for encoder in family.trained_text:
        prefix = text_prefix(family, layout, encoder)
        if name.startswith(prefix):
            path = name.removeprefix(prefix)
            if layout == "kohya":  # underscores before these words are part of a name, all others were dots
                path = re.sub(r"_(?!proj|attn|model)", ".", path)
            module = text_layer(encoder, path)
            if not re.fullmatch(r"[^.]+\.text_model\.encoder\.layers\.\d+\.(self_attn|mlp)\.\w+", module):
                raise UserError(
                    Message(
                        "{name}: no layer of CLIP's {encoder} that LoRAs are trained in has that name",
                        name=name,
                        encoder=encoder,
                    )
                )
            return module
    return ""


def _scale_of(scaling: Mapping[str, float] | float, module: str) -> float:
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


def unread_by_diffusers(family: Any, denoiser_config: Mapping[str, Any], layout: str, kind: str = "lora") -> str | None:
    """Return why diffusers itself cannot load this layout and kind for this base, or None if it can."""
    if kind == "loha" or (kind == "lokr" and not (family.lokr_of_diffusers and layout == "diffusers")):
        return Message(
            "diffusers does not read {kind} in the {layout} layout of {title}",
            kind=kinds.TITLES[kind],
            layout=layout,
            title=family.title,
        )
    if layout not in family.layouts_of_diffusers:
        return Message("diffusers does not read the {layout} layout of {title}", layout=layout, title=family.title)
    if layout == "diffusers" or not family.converter_width:
        return None
    # Affects miniatures and models with added blocks: diffusers 0.42 has the released sizes hard-coded in its
    # converters.
    sizes = FLUX_DEFAULTS | dict(denoiser_config)
    width = sizes["num_attention_heads"] * sizes["attention_head_dim"]
    if width != family.converter_width:
        return Message(
            "diffusers converts these names at width {width} only, this base has {other}",
            width=family.converter_width,
            other=width,
        )
    if family.kohya_naming == "bfl_flux" and (sizes["num_layers"] > 19 or sizes["num_single_layers"] > 38):
        return Message("diffusers converts kohya's FLUX names for 19 + 38 blocks, this base has more")
    return None


FLUX_DEFAULTS = {"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 19, "num_single_layers": 38}
"""diffusers' defaults for entries that a config.json leaves out."""


# -- names. Each rule is two functions: module path -> name in the layout and all modules that it stands for; and that
# name -> module paths. Both without the prefix and without what follows the layer.

# Segments of diffusers' UNet paths that contain underscores; all other underscores of a kohya name were dots.
COMPOUNDS = (
    *("down_blocks", "up_blocks", "mid_block", "transformer_blocks", "to_q", "to_k", "to_v", "to_out", "proj_in"),
    *("proj_out", "time_emb_proj", "conv_shortcut", "conv_in", "conv_out", "time_embedding", "add_embedding"),
    *("linear_1", "linear_2"),
)


def _dotted(kohya: str) -> str:
    parts = re.split(f"({'|'.join(COMPOUNDS)})", kohya)
    return "".join(part if part in COMPOUNDS else part.replace("_", ".") for part in parts)


Named = tuple[str, tuple[str, ...]]  # a name in a layout, and the modules that it stands for


def _underscored_to_kohya(module: str, family: Any, denoiser_config: Mapping[str, Any]) -> Named:
    return module.replace(".", "_"), (module,)


def _underscored_members(kohya: str, family: Any, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
    return (_dotted(kohya),)


# Layers inside a ResNet block, and layers outside all blocks, that have other names in the original UNet.
SGM_RESNET = {
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
SGM_OUTSIDE = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}


# diffusers' defaults for entries that a config.json leaves out.
UNET_DEFAULTS: dict[str, Any] = {
    "layers_per_block": 2,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
}


def sgm_blocks(denoiser_config: Mapping[str, Any]) -> dict[str, str]:
    """Return {path of a block's part in diffusers: path in the original UNet}, for this depth and layers per block.

    The original numbers all parts of the way down (and up) in one list: the input convolution, then for each resolution
    `layers_per_block` layers (ResNet block .0, attention .1) and the downsampler (up: one more layer, and the upsampler
    last).
    """
    denoiser_config = UNET_DEFAULTS | dict(denoiser_config)
    layers = denoiser_config["layers_per_block"]
    if not isinstance(layers, int):
        raise UserError(
            Message(
                "layers_per_block = {layers}: kohya's names are known where all blocks have as many layers",
                layers=layers,
            )
        )
    names = dict(SGM_OUTSIDE)
    for i, _ in enumerate(denoiser_config["down_block_types"]):
        for j in range(layers):
            names[f"down_blocks.{i}.resnets.{j}"] = f"input_blocks.{(layers + 1) * i + j + 1}.0"
            names[f"down_blocks.{i}.attentions.{j}"] = f"input_blocks.{(layers + 1) * i + j + 1}.1"
        names[f"down_blocks.{i}.downsamplers.0.conv"] = f"input_blocks.{(layers + 1) * (i + 1)}.0.op"
    names["mid_block.resnets.0"] = "middle_block.0"
    names["mid_block.attentions.0"] = "middle_block.1"
    names["mid_block.resnets.1"] = "middle_block.2"
    for i, kind in enumerate(denoiser_config["up_block_types"]):
        for j in range(layers + 1):
            names[f"up_blocks.{i}.resnets.{j}"] = f"output_blocks.{(layers + 1) * i + j}.0"
            names[f"up_blocks.{i}.attentions.{j}"] = f"output_blocks.{(layers + 1) * i + j}.1"
        place = 2 if "CrossAttn" in kind else 1  # the upsampler follows the attention, where there is one
        names[f"up_blocks.{i}.upsamplers.0.conv"] = f"output_blocks.{(layers + 1) * i + layers}.{place}.conv"
    return names


def _sgm_to_kohya(module: str, family: Any, denoiser_config: Mapping[str, Any]) -> Named:
    for path, name in sgm_blocks(denoiser_config).items():
        if module == path or module.startswith(path + "."):
            inner = module[len(path) + 1 :]
            inner = SGM_RESNET.get(inner, inner)
            return (f"{name}.{inner}" if inner else name).replace(".", "_"), (module,)
    raise UserError(
        Message("{name}: kohya's layout has no name for this layer; {instead}", name=module, instead=LEAVE_OUT)
    )


def _sgm_members(kohya: str, family: Any, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
    resnet = {name.replace(".", "_"): path for path, name in SGM_RESNET.items()}
    for path, name in sgm_blocks(denoiser_config).items():
        name = name.replace(".", "_")
        # an upsampler without an attention before it is named like an attention: only its whole name tells
        if kohya == name:
            return (path,)
        inner = kohya.removeprefix(name + "_")
        if inner != kohya and path not in SGM_OUTSIDE and (("resnets" in path) == (inner in resnet)):
            if "attentions" in path and inner == "conv":
                continue
            return (f"{path}.{resnet.get(inner) or _dotted(inner)}",)
    raise UserError(Message("{name}: no layer of this base has that name", name=f"lora_unet_{kohya}"))


def _to_native(module: str, family: Any, denoiser_config: Mapping[str, Any]) -> Named:
    found = naming.to_native(family.native_layers, module)
    if found is None:
        raise UserError(
            Message(
                "{name}: this layer has no name in {title}'s original code; {instead}",
                name=module,
                title=family.title,
                instead=LEAVE_OUT,
            )
        )
    return found


def _native_members(native: str, family: Any, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
    found = naming.from_native(family.native_layers, native)
    if found is None:
        raise UserError(
            Message("{name}: no layer of {title} has that name", name=f"diffusion_model.{native}", title=family.title)
        )
    return found


def _native_to_kohya(module: str, family: Any, denoiser_config: Mapping[str, Any]) -> Named:
    native, members = _to_native(module, family, denoiser_config)
    return native.replace(".", "_"), members


def _native_kohya_members(kohya: str, family: Any, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
    # Only the base's own layers tell which of the underscores were dots.
    known = _underscored(family.native_layers, tuple(family.layer_shapes(denoiser_config)))
    if kohya not in known:
        raise UserError(Message("{name}: no layer of this base has that name", name=f"lora_unet_{kohya}"))
    return known[kohya]


@cache
def _underscored(rows: tuple[naming.Row, ...], layers: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    found = (naming.to_native(rows, layer) for layer in layers)
    return {one[0].replace(".", "_"): one[1] for one in found if one}


def _bfl_to_kohya(module: str, family: Any, denoiser_config: Mapping[str, Any]) -> Named:
    native, members = _to_native(module, family, denoiser_config)
    if not native.startswith(("double_blocks.", "single_blocks.")):
        # diffusers drops or swaps layers outside the blocks in kohya files, so the file would not do what was trained
        raise UserError(
            Message(
                "{name}: kohya's FLUX layout holds layers inside the blocks only; {instead}",
                name=module,
                instead=LEAVE_OUT,
            )
        )
    return native.replace(".", "_"), members


LEAVE_OUT = "leave it out of adapter.targets, or the layout out of export.formats"
NAMINGS = {
    "diffusers_underscored": (_underscored_to_kohya, _underscored_members),
    "sgm_unet": (_sgm_to_kohya, _sgm_members),
    "native": (_native_to_kohya, _native_kohya_members),
    "bfl_flux": (_bfl_to_kohya, _native_kohya_members),
}


def _rule(
    family: Any, denoiser_config: Mapping[str, Any], layout: str
) -> tuple[Callable[[str], Named], Callable[[str], tuple[str, ...]]]:
    """Return the two functions of a layout's rule, which take and return names with their prefixes.

    Raises:
        UserError: there is no such layout, or the family does not have it.
    """
    if layout not in LAYOUTS:
        raise UserError(
            Message("{layout}: unknown layout; there are {names}", layout=repr(layout), names=", ".join(LAYOUTS))
        )
    if layout != "diffusers" and not _has_layout(family, layout):
        raise UserError(
            Message(
                "{title} has no {layout} layout; set export.formats = ['diffusers']", title=family.title, layout=layout
            )
        )
    to_name, members = _denoiser_rule(family, layout)
    prefix = _prefix(family, layout)

    def name_of(module: str) -> Named:
        if text_encoder_of(module, family):
            return _text_to_name(module, family, layout), (module,)
        name, modules_ = to_name(module, family, denoiser_config)
        return prefix + name, modules_

    def members_of(name: str) -> tuple[str, ...]:
        text = _text_module(name, family, layout)
        return (text,) if text else members(name.removeprefix(prefix), family, denoiser_config)

    return name_of, members_of


def _denoiser_rule(family: Any, layout: str) -> tuple[Callable[..., Named], Callable[..., tuple[str, ...]]]:
    if layout == "diffusers":
        return lambda module, *_: (module, (module,)), lambda name, *_: (name,)
    return NAMINGS[family.kohya_naming] if layout == "kohya" else (_to_native, _native_members)


def _swapped(family: Any, denoiser_config: Mapping[str, Any], layout: str) -> set[str]:
    """Return the modules whose B has its halves swapped in this layout."""
    native = layout == "comfy" or (layout == "kohya" and family.kohya_naming == "native")
    return family.halves_swapped(denoiser_config) if native else set()


def _rows(
    members: Iterable[str], pairs: Mapping[str, Pair], family: Any, denoiser_config: Mapping[str, Any]
) -> list[int]:
    """Return the output features of a fused layer's members; for those without a LoRA, from the denoiser."""
    return [
        pairs[member][1].shape[0] if member in pairs else family.layer_shapes(denoiser_config)[member][0]
        for member in members
    ]
