"""The names of layers in the layouts of LoRA files.

A rule is two functions: module path -> name in the layout and all modules that it stands for; and that name -> module
paths. kohya's name of a module depends on the architecture; a family names its rule in `kohya_naming`:

    diffusers_underscored   SD 1.5: the diffusers path with _ instead of .
    sgm_unet                SDXL: block names of the original UNet (input_blocks_4_1_...), inner names as in diffusers
    native                  the names of the original code (`native_layers`) with _ instead of .
    bfl_flux                the same, for layers inside the blocks only

A text encoder's layer is `text_encoder.text_model.` + its path, internally and in the diffusers layout, whether or not
the installed transformers has `text_model` in its paths: older versions and ComfyUI expect it, diffusers takes both. In
kohya's layout it starts with lora_te_, lora_te1_ or lora_te2_ (`TextEncoder.kohya`), in comfy's with
`text_encoders.clip_l.transformer.`."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from ..errors import Message, UserError
from . import naming

LAYOUTS = ("diffusers", "comfy", "kohya")


def has_layout(family: Any, layout: str) -> bool:
    """Return True if files of this family have the layout."""
    return {"diffusers": True, "comfy": bool(family.native_layers), "kohya": family.kohya_naming in NAMINGS}[layout]


def get_prefix(family: Any, layout: str) -> str:
    """Return the prefix of the denoiser's layers in a layout."""
    return {"diffusers": f"{family.denoiser_name}.", "comfy": "diffusion_model.", "kohya": "lora_unet_"}[layout]


def get_prefixes(family: Any, layout: str) -> tuple[str, ...]:
    """Return the prefixes of a layout's names: of the denoiser's layers, and of the text encoders'."""
    return get_prefix(family, layout), *(get_text_prefix(family, layout, name) for name in family.trained_text)


def make_text_layer_name(encoder: str, path: str) -> str:
    """Return an adapter's module path for the text encoder's own `path` of a layer."""
    return f"{encoder}.text_model.{path.removeprefix('text_model.')}"


def find_text_encoder(module: str, family: Any) -> str:
    """Return the text encoder that a module path belongs to; "" for a layer of the denoiser."""
    return next((name for name in family.trained_text if module.startswith(f"{name}.")), "")


def has_text(names: Iterable[str], family: Any) -> bool:
    """Return True if a file with these names holds LoRAs of the family's text encoders."""
    prefixes = tuple(
        get_text_prefix(family, layout, name)
        for layout in LAYOUTS
        if has_layout(family, layout)
        for name in family.trained_text
    )
    return any(name.startswith(prefixes) for name in names)


def get_text_prefix(family: Any, layout: str, encoder: str) -> str:
    """Return the prefix of a text encoder's layers in a layout."""
    about = family.trained_text[encoder]
    comfy = f"text_encoders.{about.comfy}.transformer."
    return {"diffusers": f"{encoder}.", "comfy": comfy, "kohya": about.kohya}[layout]


def _text_to_name(module: str, family: Any, layout: str) -> str:
    encoder = find_text_encoder(module, family)
    path = module.removeprefix(f"{encoder}.")
    return get_text_prefix(family, layout, encoder) + (path.replace(".", "_") if layout == "kohya" else path)


def find_text_module(name: str, family: Any, layout: str) -> str:
    """Return the module path for a text encoder layer's name; "" if the name belongs to no text encoder.

    Raises:
        UserError: the name belongs to another part of the text encoder.
    """
    for encoder in family.trained_text:
        prefix = get_text_prefix(family, layout, encoder)
        if name.startswith(prefix):
            path = name.removeprefix(prefix)
            if layout == "kohya":  # underscores before these words are part of a name, all others were dots
                path = re.sub(r"_(?!proj|attn|model)", ".", path)
            module = make_text_layer_name(encoder, path)
            if not re.fullmatch(r"[^.]+\.text_model\.encoder\.layers\.\d+\.(self_attn|mlp)\.\w+", module):
                raise UserError(
                    Message(
                        "{name}: CLIP's {encoder} has no layer of this name that LoRAs can train",
                        name=name,
                        encoder=encoder,
                    )
                )
            return module
    return ""


# Segments of diffusers' UNet paths that contain underscores; all other underscores of a kohya name were dots.
COMPOUNDS = (
    *("down_blocks", "up_blocks", "mid_block", "transformer_blocks", "to_q", "to_k", "to_v", "to_out", "proj_in"),
    *("proj_out", "time_emb_proj", "conv_shortcut", "conv_in", "conv_out", "time_embedding", "add_embedding"),
    *("linear_1", "linear_2"),
)


def _convert_to_dotted(kohya: str) -> str:
    parts = re.split(f"({'|'.join(COMPOUNDS)})", kohya)
    return "".join(part if part in COMPOUNDS else part.replace("_", ".") for part in parts)


Named = tuple[str, tuple[str, ...]]  # a name in a layout, and the modules that it stands for


def _underscored_to_kohya(module: str, family: Any, denoiser_config: Mapping[str, Any]) -> Named:
    return module.replace(".", "_"), (module,)


def _find_underscored_members(kohya: str, family: Any, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
    return (_convert_to_dotted(kohya),)


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


def map_sgm_blocks(denoiser_config: Mapping[str, Any]) -> dict[str, str]:
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
                "layers_per_block = {layers}: kohya's names exist only if all blocks have the same number of layers",
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
    for path, name in map_sgm_blocks(denoiser_config).items():
        if module == path or module.startswith(path + "."):
            inner = module[len(path) + 1 :]
            inner = SGM_RESNET.get(inner, inner)
            return (f"{name}.{inner}" if inner else name).replace(".", "_"), (module,)
    raise UserError(
        Message("{name}: kohya's layout has no name for this layer; {instead}", name=module, instead=LEAVE_OUT)
    )


def _find_sgm_members(kohya: str, family: Any, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
    resnet = {name.replace(".", "_"): path for path, name in SGM_RESNET.items()}
    for path, name in map_sgm_blocks(denoiser_config).items():
        name = name.replace(".", "_")
        # an upsampler without an attention before it is named like an attention: only its whole name tells
        if kohya == name:
            return (path,)
        inner = kohya.removeprefix(name + "_")
        if inner != kohya and path not in SGM_OUTSIDE and (("resnets" in path) == (inner in resnet)):
            if "attentions" in path and inner == "conv":
                continue
            return (f"{path}.{resnet.get(inner) or _convert_to_dotted(inner)}",)
    raise _make_unknown_error(kohya)


def _make_unknown_error(kohya: str) -> UserError:
    return UserError(Message("{name}: this base model has no layer of this name", name=f"lora_unet_{kohya}"))


def _to_native(module: str, family: Any, denoiser_config: Mapping[str, Any]) -> Named:
    named = naming.to_native(family.native_layers, module)
    if named is None:
        raise UserError(
            Message(
                "{name}: {title}'s original code has no name for this layer; {instead}",
                name=module,
                title=family.title,
                instead=LEAVE_OUT,
            )
        )
    return named


def _find_native_members(native: str, family: Any, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
    members = naming.from_native(family.native_layers, native)
    if members is None:
        raise UserError(
            Message("{name}: {title} has no layer of this name", name=f"diffusion_model.{native}", title=family.title)
        )
    return members


def _native_to_kohya(module: str, family: Any, denoiser_config: Mapping[str, Any]) -> Named:
    native, members = _to_native(module, family, denoiser_config)
    return native.replace(".", "_"), members


def _find_native_kohya_members(kohya: str, family: Any, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
    # Only the base's own layers tell which of the underscores were dots.
    known = _map_underscored(family.native_layers, tuple(family.list_layer_shapes(denoiser_config)))
    if kohya not in known:
        raise _make_unknown_error(kohya)
    return known[kohya]


@cache
def _map_underscored(rows: tuple[naming.Row, ...], layers: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    translated = (naming.to_native(rows, layer) for layer in layers)
    return {named[0].replace(".", "_"): named[1] for named in translated if named}


def _bfl_to_kohya(module: str, family: Any, denoiser_config: Mapping[str, Any]) -> Named:
    native, members = _to_native(module, family, denoiser_config)
    if not native.startswith(("double_blocks.", "single_blocks.")):
        # diffusers drops or swaps layers outside the blocks in kohya files, so the file would not do what was trained
        raise UserError(
            Message(
                "{name}: kohya's FLUX layout supports only layers inside the blocks; {instead}",
                name=module,
                instead=LEAVE_OUT,
            )
        )
    return native.replace(".", "_"), members


LEAVE_OUT = Message("remove it from adapter.targets, or the layout from export.formats")
NAMINGS = {
    "diffusers_underscored": (_underscored_to_kohya, _find_underscored_members),
    "sgm_unet": (_sgm_to_kohya, _find_sgm_members),
    "native": (_native_to_kohya, _find_native_kohya_members),
    "bfl_flux": (_bfl_to_kohya, _find_native_kohya_members),
}


def get_rule(
    family: Any, denoiser_config: Mapping[str, Any], layout: str
) -> tuple[Callable[[str], Named], Callable[[str], tuple[str, ...]]]:
    """Return the two functions of a layout's rule, which take and return names with their prefixes.

    Raises:
        UserError: there is no such layout, or the family does not have it.
    """
    if layout not in LAYOUTS:
        raise UserError(
            Message(
                "{layout}: there is no such layout; accepted: {names}", layout=repr(layout), names=", ".join(LAYOUTS)
            )
        )
    if layout != "diffusers" and not has_layout(family, layout):
        raise UserError(Message("{title} has no {layout} layout; use 'diffusers'", title=family.title, layout=layout))
    to_name, members = get_denoiser_rule(family, layout)
    prefix = get_prefix(family, layout)

    def find_name(module: str) -> Named:
        if find_text_encoder(module, family):
            return _text_to_name(module, family, layout), (module,)
        name, modules_ = to_name(module, family, denoiser_config)
        return prefix + name, modules_

    def find_members(name: str) -> tuple[str, ...]:
        text = find_text_module(name, family, layout)
        return (text,) if text else members(name.removeprefix(prefix), family, denoiser_config)

    return find_name, find_members


def get_denoiser_rule(family: Any, layout: str) -> tuple[Callable[..., Named], Callable[..., tuple[str, ...]]]:
    """Return the two functions of the rule for the denoiser's layers, without prefixes."""
    if layout == "diffusers":
        return lambda module, *_: (module, (module,)), lambda name, *_: (name,)
    return NAMINGS[family.kohya_naming] if layout == "kohya" else (_to_native, _find_native_members)
