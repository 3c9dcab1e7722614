"""The key layouts of LoRA files: from the one internal naming to the names that other programs read, and back.

Inside, an adapter is a dict of `<diffusers module path>.lora_A.weight` (r, in[, kh, kw]) and `....lora_B.weight`
(out, r[, 1, 1]), and a scaling (alpha / rank), for all modules or module by module. Outside there are three layouts:

* `diffusers`: `unet.` or `transformer.` + module path + `.lora_A/.lora_B.weight`.
* `comfy`: `diffusion_model.` + the layer's name in the original code + `.lora_A/.lora_B.weight`. ComfyUI resolves it
  for every architecture, and diffusers for most of the newer ones.
* `kohya`: `lora_unet_<name>.lora_down/.lora_up.weight` and `.alpha`, read by A1111, Forge, ComfyUI, InvokeAI, Draw
  Things and diffusers. The weights are written as they were trained and alpha is the true alpha, so nothing is rounded.

A text encoder's layer is `text_encoder.text_model.` + its path, inside and in the diffusers layout, whether the release
of transformers at hand has `text_model` in its paths or not: older ones and ComfyUI look for it, diffusers takes both.
In kohya's layout it begins with lora_te_, lora_te1_ or lora_te2_ (`TextEncoder.kohya`), in comfy's with
`text_encoders.clip_l.transformer.`.

In the first two the scaling is multiplied into B (in float32) and no alpha is written: it is the only form that
diffusers, ComfyUI and the hosts read with the same strength.

How kohya's tools call a module depends on the architecture; a family says which rule holds in `kohya_naming`:

    diffusers_underscored   SD 1.5: the diffusers path with _ for .
    sgm_unet                SDXL: block names of the original UNet (input_blocks_4_1_...), inner names as in diffusers
    native                  the names of the original code (`native_layers`) with _ for .
    bfl_flux                the same, of layers inside the blocks only

Where the original code holds several layers as one (q, k and v), several LoRAs become the LoRA of the fused layer
without loss: the A's are stacked, the B's stand in a block diagonal, the rank is the sum of the ranks, and alpha grows
with the rank. Members that were not trained are rows of zeros.

DoRA, LoKr and LoHa have their own tensors (`kinds`) under the same names of layers, and not every layout carries them:
`uncarried` says which does not, and why. alpha is written wherever LyCORIS writes it; diffusers takes none.

Pure functions of tensors and names; files are the matter of `export`. What `to_layout` and `from_layout` take and give
stays as it is: other tools build on them. Sources: kohya-ss/sd-scripts' names; ComfyUI's rule for them.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import kinds, naming
from .config import UserError
from .wording import sides

LAYOUTS = ("diffusers", "comfy", "kohya")
HALVES = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight"}
"""The two matrices in kohya's words, and in those of the others."""


PAIR = tuple(f".{name}" for name in HALVES.values())


def kinds_in(state: Mapping[str, Tensor]) -> set[str]:
    """The kinds of adapter in the internal naming; an unknown tensor counts as LoRA's, whose readers refuse it by name.

    Raises:
        UserError: a layer whose tensors are not whole.
    """
    if not any(name.endswith(OTHER_PARTS) for name in state):
        return {"lora"}
    return {kinds.kind_of(parts, layer) for layer, parts in kinds.grouped(state).items()}


OTHER_PARTS = tuple(f".{part}" for part in kinds.ALL_PARTS if part not in kinds.PARTS["lora"])


def uncarried(
    kind: str, modules: Iterable[str], family: Any, denoiser_config: Mapping[str, Any], layout: str
) -> str | None:
    """Why a layout cannot carry a kind of adapter of these layers, or None where it can."""
    if kind == "lora":
        return None
    if kind == "dora":
        if layout == "diffusers":
            return None
        return (
            "programs that read it give DoRA's lengths another meaning (A1111: of the weight's columns, ComfyUI: over "
            "the length without the update)"
        )
    title = kinds.TITLES[kind]
    if layout == "diffusers":
        read = family.split_names_in_comfy or (kind == "lokr" and family.lokr_of_diffusers)
        return None if read else f"nothing reads {title} of {family.title} under these names"
    name_of, _ = _rule(family, denoiser_config, layout)
    swapped = _swapped(family, denoiser_config, layout)
    for module in modules:
        name, members = name_of(module)
        if len(members) > 1:
            return f"it holds {len(members)} layers as one ({name}), whose {title}s are no {title} of the whole"
        if module in swapped:
            return f"it has the rows of {module} in another order, of which there is no {title}"
    return None


def in_our_words(name: str) -> str:
    """A tensor's name with kohya's words for the two matrices replaced."""
    for theirs, ours in HALVES.items():
        if name.endswith(f".{theirs}"):
            return name.removesuffix(theirs) + ours
    return name


def first_few(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def modules(state: Mapping[str, Tensor]) -> list[str]:
    """The module paths of an adapter in the internal naming, sorted.

    Raises:
        UserError: an A without its B (or the other way round), a pair of different ranks, a name of another kind, or
            another kind's layer that is not whole.
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
            raise UserError(f"{name}: not a LoRA tensor (expected <module>.lora_A.weight or .lora_B.weight)")
        halves.setdefault(module, set()).add(half)
    for module, found in halves.items():
        if len(found) != 2:
            raise UserError(f"{module}: has lora_{found.pop()[0]} but not the other half of the pair")
        a, b = state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"]
        if a.ndim < 2 or b.ndim < 2 or a.shape[0] != b.shape[1]:
            raise UserError(f"{module}: lora_A of {sides(a.shape)} and lora_B of {sides(b.shape)} are not of one rank")
    return sorted(halves)


def to_layout(
    state: Mapping[str, Tensor],
    scaling: Mapping[str, float] | float,
    family: Any,
    denoiser_config: Mapping[str, Any],
    layout: str,
) -> dict[str, Tensor]:
    """Rename an adapter from the internal naming to a file's. Dtypes are kept; what must be multiplied becomes float32.

    Raises:
        UserError: an incomplete pair, or a module that the layout has no name for.
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
    return out


def from_layout(
    tensors: Mapping[str, Tensor], family: Any, denoiser_config: Mapping[str, Any], layout: str | None = None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The inverse of `to_layout`: a file's tensors in the internal naming, and each module's alpha / rank.

    Files of other programs are read as well: both words for the two matrices, and alpha, in every layout; a fused layer
    whose B is not block diagonal is given to all of its members with the same A, which changes nothing. Where alpha is
    missing it equals the rank, as every client has it.

    Args:
        layout: one of `LAYOUTS`; found from the names where it is None.

    Raises:
        UserError: names of no layout, of no layer of this base, or incomplete pairs.
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
        raise UserError(f"{names}: not names that a LoRA of the {parts} has in the {layout} layout")
    state: dict[str, Tensor] = {}
    scaling: dict[str, float] = {}
    swapped = _swapped(family, denoiser_config, layout)
    groups = modules(renamed)
    if stray := sorted(alphas.keys() - set(groups)):
        raise UserError(f"{first_few(stray)}: alpha without weights")
    for group in groups:
        a, b = renamed[f"{group}.lora_A.weight"], renamed[f"{group}.lora_B.weight"]
        members = members_of(group)
        if members[0] in swapped:
            b = torch.cat(b.chunk(2)[::-1])
        rows = [b.shape[0]] if len(members) == 1 else _rows(members, {}, family, denoiser_config)
        if sum(rows) != b.shape[0]:
            raise UserError(f"{group}: the LoRA has {b.shape[0]} rows; this base has {sum(rows)}")
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
    """`to_layout` of DoRA, LoKr and LoHa: one layer there for each here."""
    name_of, _ = _rule(family, denoiser_config, layout)
    out: dict[str, Tensor] = {}
    for module, parts in kinds.grouped(state).items():
        kind, scale = kinds.kind_of(parts, module), _scale_of(scaling, module)
        if kind == "lora":
            raise UserError(f"{module}: LoRA beside another kind of adapter; files hold one kind")
        if reason := uncarried(kind, [module], family, denoiser_config, layout):
            raise UserError(f"the {layout} layout of {family.title} carries no {kinds.TITLES[kind]}: {reason}")
        name = name_of(module)[0]
        held = dict(parts)
        if layout == "diffusers" and scale != 1:  # into a factor that every layer has
            factor = next(part for part in SCALED if part in held)
            held[factor] = held[factor].float() * scale
        if kind == "dora":
            rows = held["lora_magnitude_vector"]
            is_conv = held["lora_A.weight"].ndim > 2
            held["lora_magnitude_vector"] = rows.view(1, -1, 1, 1) if is_conv else rows.flatten()
        out |= {f"{name}.{part}": tensor for part, tensor in held.items()}
        if layout != "diffusers":
            out[f"{name}.alpha"] = torch.tensor(scale * (kinds.rank_of(parts) or 1), dtype=torch.float32)
    return out


SCALED = ("lora_B.weight", "lokr_w1", "lokr_w1_a", "hada_w1_a")


def _others_from_layout(
    tensors: Mapping[str, Tensor], family: Any, denoiser_config: Mapping[str, Any], layout: str
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """`from_layout` of DoRA, LoKr and LoHa.

    Raises:
        UserError: also for DoRA in another layout than diffusers', and for a layer that stands for several here.
    """
    _, members_of = _rule(family, denoiser_config, layout)
    prefix = _prefix(family, layout)
    alphas = {name.removesuffix(".alpha"): float(t) for name, t in tensors.items() if name.endswith(".alpha")}
    groups = kinds.grouped({name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")})
    if foreign := [group for group in (*groups, *alphas) if not group.startswith(prefix) or group not in groups]:
        raise UserError(f"{first_few(foreign)}: not part of the {layout} layout ({prefix}...) of {family.title}")
    state: dict[str, Tensor] = {}
    scaling: dict[str, float] = {}
    for group, parts in groups.items():
        kind = kinds.kind_of(parts, group)
        module, *others = members_of(group)
        if others:
            raise UserError(f"{group}: {kinds.TITLES[kind]} of {1 + len(others)} layers as one cannot be taken apart")
        if reason := uncarried(kind, [module], family, denoiser_config, layout) if layout != "diffusers" else None:
            raise UserError(f"{group}: {kinds.TITLES[kind]} is not known in the {layout} layout: {reason}")
        scaling[module] = alphas[group] / kinds.rank_of(parts) if group in alphas and kinds.has_rank(parts) else 1.0
        for part, tensor in parts.items():
            state[f"{module}.{part}"] = tensor.flatten() if part == "lora_magnitude_vector" else tensor
    return state, scaling


def _parted(name: str) -> tuple[str, str]:
    """What a tensor's name says of its layer, and which of the two matrices (or alpha) it is; "" for neither."""
    for kind in (*HALVES, *HALVES.values(), "alpha"):
        if name.endswith(f".{kind}"):
            return name.removesuffix(f".{kind}"), kind
    return name, ""


def detect_layout(tensors: Iterable[str], family: Any) -> str:
    """Which layout a file has, from its names.

    Raises:
        UserError: none; the message names what was found.
    """
    names = list(tensors)
    known = [layout for layout in LAYOUTS if _has_layout(family, layout)]
    for layout in known:
        if any(name.startswith(_prefixes(family, layout)) for name in names):
            return layout
    found = names[0] if names else "an empty file"
    expected = " or ".join(f"{_prefix(family, layout)}..." for layout in known)
    raise UserError(f"{found}: not a LoRA for {family.title} (expected {expected})")


def _has_layout(family: Any, layout: str) -> bool:
    return {"diffusers": True, "comfy": bool(family.native_layers), "kohya": family.kohya_naming in NAMINGS}[layout]


def _prefix(family: Any, layout: str) -> str:
    return {"diffusers": f"{family.denoiser_name}.", "comfy": "diffusion_model.", "kohya": "lora_unet_"}[layout]


def _prefixes(family: Any, layout: str) -> tuple[str, ...]:
    """What the names of a layout begin with: of the denoiser's layers, and of the text encoders'."""
    return _prefix(family, layout), *(text_prefix(family, layout, name) for name in family.trained_text)


# -- text encoders


def text_layer(encoder: str, path: str) -> str:
    """The module path, as an adapter's, of a layer that the text encoder itself calls `path`."""
    return f"{encoder}.text_model.{path.removeprefix('text_model.')}"


def text_encoder_of(module: str, family: Any) -> str:
    """The text encoder that a module path is of; "" for a layer of the denoiser."""
    return next((name for name in family.trained_text if module.startswith(f"{name}.")), "")


def has_text(names: Iterable[str], family: Any) -> bool:
    """Whether a file with these names holds LoRAs of the family's text encoders."""
    prefixes = tuple(
        text_prefix(family, layout, name)
        for layout in LAYOUTS
        if _has_layout(family, layout)
        for name in family.trained_text
    )
    return any(name.startswith(prefixes) for name in names)


def text_prefix(family: Any, layout: str, encoder: str) -> str:
    """What the names of a text encoder's layers begin with in a layout."""
    about = family.trained_text[encoder]
    comfy = f"text_encoders.{about.comfy}.transformer."
    return {"diffusers": f"{encoder}.", "comfy": comfy, "kohya": about.kohya}[layout]


def _text_to_name(module: str, family: Any, layout: str) -> str:
    encoder = text_encoder_of(module, family)
    path = module.removeprefix(f"{encoder}.")
    return text_prefix(family, layout, encoder) + (path.replace(".", "_") if layout == "kohya" else path)


def _text_module(name: str, family: Any, layout: str) -> str:
    """The inverse; "" where it is the name of no text encoder's layer.

    Raises:
        UserError: a name of another part of the text encoder.
    """
    for encoder in family.trained_text:
        prefix = text_prefix(family, layout, encoder)
        if name.startswith(prefix):
            path = name.removeprefix(prefix)
            if layout == "kohya":  # an underscore that was none stands before these words
                path = re.sub(r"_(?!proj|attn|model)", ".", path)
            module = text_layer(encoder, path)
            if not re.fullmatch(r"[^.]+\.text_model\.encoder\.layers\.\d+\.(self_attn|mlp)\.\w+", module):
                raise UserError(f"{name}: no layer of CLIP's {encoder} that LoRAs are trained in has that name")
            return module
    return ""


def _scale_of(scaling: Mapping[str, float] | float, module: str) -> float:
    return float(scaling[module] if isinstance(scaling, Mapping) else scaling)


Pair = tuple[Tensor, Tensor, float]  # A (r, in), B (out, r), alpha / rank


def fuse(pairs: list[Pair | None], rows: list[int]) -> Pair:
    """The LoRA of a fused layer from those of its members: A's stacked, B's in a block diagonal, the rank is the sum.

    Args:
        pairs: A (r, in), B (rows, r) and scaling of each member; None where a member has no adapter.
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
            # one alpha serves the whole layer: where members differ, the ratio goes into their B
            block = b if own == scale else b.float() * (own / scale)
            diagonal[row : row + height, column : column + b.shape[1]] = block
            column += b.shape[1]
        row += height
    return stacked, diagonal, scale


def split(a: Tensor, b: Tensor, rows: list[int]) -> list[tuple[Tensor, Tensor] | None]:
    """The inverse of `fuse`: (A, B) of each member of a fused layer; None for a member that the LoRA does not touch."""
    if len(rows) == 1:
        return [(a, b)]
    rank = a.shape[0]
    blocks = b.split(rows)
    used = [block.ne(0).any(0) for block in blocks]  # which columns of B each member needs
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
        # columns that nobody uses belong to the block before them
        edges = [0, *begins[1:], rank]
        for i, begin, end in zip(touched, edges, edges[1:], strict=False):
            out[i] = (a[begin:end].clone(), blocks[i][:, begin:end].clone())
    else:  # trained as one layer: every member needs all of A
        for i in touched:
            out[i] = (a.clone(), blocks[i].clone())
    return out


def unread_by_diffusers(family: Any, denoiser_config: Mapping[str, Any], layout: str, kind: str = "lora") -> str | None:
    """Why diffusers itself cannot load this layout and kind for this base, or None where it can."""
    if kind == "loha" or (kind == "lokr" and not (family.lokr_of_diffusers and layout == "diffusers")):
        return f"diffusers does not read {kinds.TITLES[kind]} in the {layout} layout of {family.title}"
    if layout not in family.layouts_of_diffusers:
        return f"diffusers does not read the {layout} layout of {family.title}"
    if layout == "diffusers" or not family.converter_width:
        return None
    # Miniatures and models with blocks added: diffusers 0.42 has the sizes of the released model in its converters.
    sizes = FLUX_DEFAULTS | dict(denoiser_config)
    width = sizes["num_attention_heads"] * sizes["attention_head_dim"]
    if width != family.converter_width:
        return f"diffusers converts these names at width {family.converter_width} only, this base has {width}"
    if family.kohya_naming == "bfl_flux" and (sizes["num_layers"] > 19 or sizes["num_single_layers"] > 38):
        return "diffusers converts kohya's FLUX names for 19 + 38 blocks, this base has more"
    return None


FLUX_DEFAULTS = {"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 19, "num_single_layers": 38}
"""What diffusers takes where a config.json leaves it out."""


# -- names: each rule is two functions. There: module path -> name in the layout, and all modules which that stands for.
# Back: that name -> module paths. Without the prefix and what comes behind the layer.

# Words of diffusers' UNet paths that hold an underscore themselves: all other underscores of a kohya name were dots.
COMPOUNDS = (
    *("down_blocks", "up_blocks", "mid_block", "transformer_blocks", "to_q", "to_k", "to_v", "to_out", "proj_in"),
    *("proj_out", "time_emb_proj", "conv_shortcut", "conv_in", "conv_out", "time_embedding", "add_embedding"),
    *("linear_1", "linear_2"),
)


def _dotted(kohya: str) -> str:
    parts = re.split(f"({'|'.join(COMPOUNDS)})", kohya)
    return "".join(part if part in COMPOUNDS else part.replace("_", ".") for part in parts)


Named = tuple[str, tuple[str, ...]]  # a name in a layout, and the modules which it stands for


def _underscored_to_kohya(module: str, family: Any, denoiser_config: Mapping[str, Any]) -> Named:
    return module.replace(".", "_"), (module,)


def _underscored_members(kohya: str, family: Any, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
    return (_dotted(kohya),)


# Layers inside a ResNet block, and layers outside of all blocks, that the original UNet calls otherwise.
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


# What diffusers takes where a config.json leaves it out.
UNET_DEFAULTS: dict[str, Any] = {
    "layers_per_block": 2,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
}


def sgm_blocks(denoiser_config: Mapping[str, Any]) -> dict[str, str]:
    """{path of a block's part in diffusers: in the original UNet}, from the UNet's depth and layers per block.

    The original counts all parts of the way down (and up) in one list: the input convolution, then for each resolution
    `layers_per_block` layers (ResNet block .0, attention .1) and the downsampler (up: one layer more, the upsampler
    last).
    """
    denoiser_config = UNET_DEFAULTS | dict(denoiser_config)
    layers = denoiser_config["layers_per_block"]
    if not isinstance(layers, int):
        raise UserError(f"layers_per_block = {layers}: kohya's names are known where all blocks have as many layers")
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
    raise UserError(f"{module}: kohya's layout has no name for this layer; {LEAVE_OUT}")


def _sgm_members(kohya: str, family: Any, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
    resnet = {name.replace(".", "_"): path for path, name in SGM_RESNET.items()}
    for path, name in sgm_blocks(denoiser_config).items():
        name = name.replace(".", "_")
        # an upsampler without attention before it is called like an attention: only its whole name tells
        if kohya == name:
            return (path,)
        inner = kohya.removeprefix(name + "_")
        if inner != kohya and path not in SGM_OUTSIDE and (("resnets" in path) == (inner in resnet)):
            if "attentions" in path and inner == "conv":
                continue
            return (f"{path}.{resnet.get(inner) or _dotted(inner)}",)
    raise UserError(f"lora_unet_{kohya}: no layer of this base has that name")


def _to_native(module: str, family: Any, denoiser_config: Mapping[str, Any]) -> Named:
    found = naming.to_native(family.native_layers, module)
    if found is None:
        raise UserError(f"{module}: this layer has no name in {family.title}'s original code; {LEAVE_OUT}")
    return found


def _native_members(native: str, family: Any, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
    found = naming.from_native(family.native_layers, native)
    if found is None:
        raise UserError(f"diffusion_model.{native}: no layer of {family.title} has that name")
    return found


def _native_to_kohya(module: str, family: Any, denoiser_config: Mapping[str, Any]) -> Named:
    native, members = _to_native(module, family, denoiser_config)
    return native.replace(".", "_"), members


def _native_kohya_members(kohya: str, family: Any, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
    # Which of the underscores were dots is told by the base's own layers only.
    known = _underscored(family.native_layers, tuple(family.layer_shapes(denoiser_config)))
    if kohya not in known:
        raise UserError(f"lora_unet_{kohya}: no layer of this base has that name")
    return known[kohya]


@cache
def _underscored(rows: tuple[naming.Row, ...], layers: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    found = (naming.to_native(rows, layer) for layer in layers)
    return {one[0].replace(".", "_"): one[1] for one in found if one}


def _bfl_to_kohya(module: str, family: Any, denoiser_config: Mapping[str, Any]) -> Named:
    native, members = _to_native(module, family, denoiser_config)
    if not native.startswith(("double_blocks.", "single_blocks.")):
        # diffusers drops or swaps what kohya files hold outside of the blocks: the file would not do what was trained
        raise UserError(f"{module}: kohya's FLUX layout holds layers inside the blocks only; {LEAVE_OUT}")
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
    """The two functions of a layout's rule, with the prefixes in their names.

    Raises:
        UserError: there is no such layout, or the family has none of the kind.
    """
    if layout not in LAYOUTS:
        raise UserError(f"{layout!r}: unknown layout; there are {', '.join(LAYOUTS)}")
    if layout != "diffusers" and not _has_layout(family, layout):
        raise UserError(f"{family.title} has no {layout} layout; set export.formats = ['diffusers']")
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
    """Modules whose B has its halves the other way round in this layout."""
    native = layout == "comfy" or (layout == "kohya" and family.kohya_naming == "native")
    return family.halves_swapped(denoiser_config) if native else set()


def _rows(
    members: Iterable[str], pairs: Mapping[str, Pair], family: Any, denoiser_config: Mapping[str, Any]
) -> list[int]:
    """Output features of a fused layer's members; of those without a LoRA the denoiser tells."""
    return [
        pairs[member][1].shape[0] if member in pairs else family.layer_shapes(denoiser_config)[member][0]
        for member in members
    ]
