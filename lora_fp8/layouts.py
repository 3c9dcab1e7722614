"""The key layouts of LoRA files: from the one internal naming to the names that other programs read, and back.

Inside, an adapter is a dict of `<diffusers module path>.lora_A.weight` (r, in[, kh, kw]) and `....lora_B.weight`
(out, r[, 1, 1]), and a scaling (alpha / rank), for all modules or module by module. Outside there are two layouts:

* `diffusers`: `unet.` or `transformer.` + module path + `.lora_A/.lora_B.weight`. The scaling is multiplied into B (in
  float32) and no alpha is written: it is the only form that diffusers, ComfyUI and the hosts read with the same
  strength.
* `kohya`: `lora_unet_<name>.lora_down/.lora_up.weight` and `.alpha`, read by A1111, Forge, ComfyUI, InvokeAI, Draw
  Things and diffusers. The weights are written as they were trained and alpha is the true alpha, so nothing is rounded.

How kohya's tools call a module depends on the architecture; a family says which rule holds in `kohya_naming`:

    diffusers_underscored   SD 1.5: the diffusers path with _ for .
    sgm_unet                SDXL: block names of the original UNet (input_blocks_4_1_...), inner names as in diffusers
    bfl_flux                FLUX: names of the original transformer, where q, k, v (and the MLP's input) are one layer

Several LoRAs become the LoRA of their fused layer without loss: the A's are stacked, the B's stand in a block diagonal,
the rank is the sum of the ranks, and alpha grows with the rank. Members that were not trained are rows of zeros.

Pure functions of tensors and names; files are the matter of `export`. Source: kohya-ss/sd-scripts' names.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .config import UserError

LAYOUTS = ("diffusers", "kohya")


def first_few(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def modules(state: Mapping[str, Tensor]) -> list[str]:
    """The module paths of an adapter in the internal naming, sorted.

    Raises:
        UserError: an A without its B (or the other way round), a pair of different ranks, or a name of another kind.
    """
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
            raise UserError(f"{module}: lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} are not of one rank")
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
    out: dict[str, Tensor] = {}
    names = modules(state)
    pairs = {m: (state[f"{m}.lora_A.weight"], state[f"{m}.lora_B.weight"], _scale_of(scaling, m)) for m in names}
    if layout == "diffusers":
        for module, (a, b, scale) in pairs.items():
            out[f"{family.denoiser_name}.{module}.lora_A.weight"] = a
            out[f"{family.denoiser_name}.{module}.lora_B.weight"] = b if scale == 1 else b.float() * scale
        return out
    if layout != "kohya":
        raise UserError(f"{layout!r}: unknown layout; there are {', '.join(LAYOUTS)}")
    to_kohya, members_of = _naming(family)
    groups = {to_kohya(module, denoiser_config): None for module in names}
    for group in groups:
        members = members_of(group, denoiser_config)
        if len(members) == 1:
            a, b, scale = pairs[members[0]]
        else:
            a, b, scale = fuse([pairs.get(m) for m in members], [_flux_rows(m, denoiser_config) for m in members])
        out[f"lora_unet_{group}.lora_down.weight"] = a
        out[f"lora_unet_{group}.lora_up.weight"] = b
        out[f"lora_unet_{group}.alpha"] = torch.tensor(scale * a.shape[0], dtype=torch.float32)
    return out


def from_layout(
    tensors: Mapping[str, Tensor], family: Any, denoiser_config: Mapping[str, Any], layout: str | None = None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The inverse of `to_layout`: a file's tensors in the internal naming, and each module's alpha / rank.

    Files of other programs are read as well: a fused layer whose B is not block diagonal is given to all of its members
    with the same A, which changes nothing. Where alpha is missing it equals the rank, as every client has it.

    Args:
        layout: "diffusers" or "kohya"; found from the names where it is None.

    Raises:
        UserError: names of neither layout, or incomplete pairs.
    """
    layout = layout or detect_layout(tensors, family)
    state: dict[str, Tensor] = {}
    scaling: dict[str, float] = {}
    if layout == "diffusers":
        prefix = family.denoiser_name + "."
        foreign = sorted(name for name in tensors if not name.startswith(prefix))
        if foreign:
            raise UserError(f"{first_few(foreign)}: not names of a {family.denoiser_name} LoRA in the diffusers layout")
        state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        return state, dict.fromkeys(modules(state), 1.0)
    _, members_of = _naming(family)
    halves = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight"}
    renamed = {}
    for name, tensor in tensors.items():
        group, _, kind = name.partition(".")
        if not group.startswith("lora_unet_") or kind not in (*halves, "alpha"):
            raise UserError(f"{name}: not a name of the kohya layout that a LoRA of the denoiser has")
        if kind != "alpha":
            renamed[f"{group}.{halves[kind]}"] = tensor
    for group in modules(renamed):
        a, b = renamed[f"{group}.lora_A.weight"], renamed[f"{group}.lora_B.weight"]
        alpha = tensors.get(f"{group}.alpha")
        scale = 1.0 if alpha is None else float(alpha) / a.shape[0]
        members = members_of(group.removeprefix("lora_unet_"), denoiser_config)
        rows = [b.shape[0]] if len(members) == 1 else [_flux_rows(m, denoiser_config) for m in members]
        if sum(rows) != b.shape[0]:
            raise UserError(f"{group}: lora_up has {b.shape[0]} rows; this base has {sum(rows)}")
        for member, pair in zip(members, split(a, b, rows), strict=True):
            if pair is not None:
                state[f"{member}.lora_A.weight"], state[f"{member}.lora_B.weight"] = pair
                scaling[member] = scale
    alphas = [name.removesuffix(".alpha") for name in tensors if name.endswith(".alpha")]
    stray = sorted(group for group in alphas if f"{group}.lora_down.weight" not in tensors)
    if stray:
        raise UserError(f"{first_few(stray)}: alpha without weights")
    return state, scaling


def detect_layout(tensors: Iterable[str], family: Any) -> str:
    """Which layout a file has, from its names.

    Raises:
        UserError: neither; the message names what was found.
    """
    names = list(tensors)
    if any(name.startswith("lora_unet_") for name in names):
        return "kohya"
    if any(name.startswith(family.denoiser_name + ".") for name in names):
        return "diffusers"
    found = names[0] if names else "an empty file"
    raise UserError(f"{found}: not a LoRA for {family.title} (expected lora_unet_... or {family.denoiser_name}....)")


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


def unread_by_diffusers(family: Any, denoiser_config: Mapping[str, Any], layout: str) -> str | None:
    """Why diffusers itself cannot load this layout for this base, or None where it can.

    Only the bundled miniatures are meant: diffusers 0.42 has the sizes of FLUX.1 written into its converter of kohya
    names.
    """
    if layout == "kohya" and family.kohya_naming == "bfl_flux":
        width = _flux_width(denoiser_config)
        if width != 3072:
            return f"diffusers converts kohya's FLUX names at width 3072 only, this base has {width}"
        sizes = FLUX_DEFAULTS | dict(denoiser_config)
        if sizes["num_layers"] > 19 or sizes["num_single_layers"] > 38:
            return "diffusers converts kohya's FLUX names for 19 + 38 blocks, this base has more"
    return None


# -- kohya's names: for each rule, (module path -> kohya name) and (kohya name -> module paths), without lora_unet_

# Words of diffusers' UNet paths that hold an underscore themselves: all other underscores of a kohya name were dots.
COMPOUNDS = (
    *("down_blocks", "up_blocks", "mid_block", "transformer_blocks", "to_q", "to_k", "to_v", "to_out", "proj_in"),
    *("proj_out", "time_emb_proj", "conv_shortcut", "conv_in", "conv_out", "time_embedding", "add_embedding"),
    *("linear_1", "linear_2"),
)


def _dotted(kohya: str) -> str:
    parts = re.split(f"({'|'.join(COMPOUNDS)})", kohya)
    return "".join(part if part in COMPOUNDS else part.replace("_", ".") for part in parts)


def _underscored_to_kohya(module: str, denoiser_config: Mapping[str, Any]) -> str:
    return module.replace(".", "_")


def _underscored_members(kohya: str, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
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
FLUX_DEFAULTS = {"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 19, "num_single_layers": 38}


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


def _sgm_to_kohya(module: str, denoiser_config: Mapping[str, Any]) -> str:
    for path, name in sgm_blocks(denoiser_config).items():
        if module == path or module.startswith(path + "."):
            inner = module[len(path) + 1 :]
            inner = SGM_RESNET.get(inner, inner)
            return (f"{name}.{inner}" if inner else name).replace(".", "_")
    raise UserError(
        f"{module}: kohya's layout has no name for this layer; "
        "leave it out of adapter.targets, or kohya out of export.formats"
    )


def _sgm_members(kohya: str, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
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


# Layers of one block, by their names in the original FLUX; the order of the members is their order in the fused layer.
FLUX_DOUBLE = {
    "img_mod_lin": ("norm1.linear",),
    "img_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn_proj": ("attn.to_out.0",),
    "img_mlp_0": ("ff.net.0.proj",),
    "img_mlp_2": ("ff.net.2",),
    "txt_mod_lin": ("norm1_context.linear",),
    "txt_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn_proj": ("attn.to_add_out",),
    "txt_mlp_0": ("ff_context.net.0.proj",),
    "txt_mlp_2": ("ff_context.net.2",),
}
FLUX_SINGLE = {
    "modulation_lin": ("norm.linear",),
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
}
FLUX_BLOCKS = (
    ("double_blocks", "transformer_blocks", FLUX_DOUBLE),
    ("single_blocks", "single_transformer_blocks", FLUX_SINGLE),
)


def _flux_to_kohya(module: str, denoiser_config: Mapping[str, Any]) -> str:
    for theirs, ours, layers in FLUX_BLOCKS:
        match = re.fullmatch(rf"{ours}\.(\d+)\.(.+)", module)
        for name, members in layers.items():
            if match and match[2] in members:
                return f"{theirs}_{match[1]}_{name}"
    # diffusers drops or swaps what kohya files hold outside of the blocks: the file would not do what was trained
    raise UserError(
        f"{module}: kohya's FLUX layout holds layers inside the blocks only; "
        "leave it out of adapter.targets, or kohya out of export.formats"
    )


def _flux_members(kohya: str, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
    for theirs, ours, layers in FLUX_BLOCKS:
        match = re.fullmatch(rf"{theirs}_(\d+)_(\w+)", kohya)
        if match and match[2] in layers:
            return tuple(f"{ours}.{match[1]}.{member}" for member in layers[match[2]])
    raise UserError(f"lora_unet_{kohya}: no layer of this base has that name")


def _flux_width(denoiser_config: Mapping[str, Any]) -> int:
    sizes = FLUX_DEFAULTS | dict(denoiser_config)
    return sizes["num_attention_heads"] * sizes["attention_head_dim"]


def _flux_rows(module: str, denoiser_config: Mapping[str, Any]) -> int:
    return _flux_width(denoiser_config) * (4 if module.endswith(".proj_mlp") else 1)  # FLUX's MLP is four times as wide


NAMINGS = {
    "diffusers_underscored": (_underscored_to_kohya, _underscored_members),
    "sgm_unet": (_sgm_to_kohya, _sgm_members),
    "bfl_flux": (_flux_to_kohya, _flux_members),
}


def _naming(family: Any) -> tuple[Callable[..., str], Callable[..., tuple[str, ...]]]:
    if family.kohya_naming not in NAMINGS:
        raise UserError(f"{family.title} has no kohya layout; set export.formats = ['diffusers']")
    return NAMINGS[family.kohya_naming]
