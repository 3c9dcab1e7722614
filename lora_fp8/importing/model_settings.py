"""The base model: its architecture, path, dtype and storage."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PureWindowsPath
from typing import Any, NoReturn

from .. import families
from ..errors import Message, Template, UserError
from ..families import _components
from ..families.sources import WEIGHT_ENDINGS
from ..settings import Adapter
from . import common_values, remarks
from .common_values import normalize_name
from .import_draft import Draft
from .readers import read_string, read_whole

FAMILY_NAMES = {
    "sd15": ("sd15",),
    "sd2": ("sd2", "sd21", "sd20"),
    "sdxl": ("sdxl",),
    "sd3": ("sd3", "sd35"),
    "flux": ("flux", "flux1"),
    "flux_kontext": ("flux_kontext", "kontext"),
    "flux2": ("flux2",),
    "flux2_klein": ("flux2_klein", "flux2"),
    "qwen_image": ("qwen_image", "qwen"),
    "qwen_image_edit": ("qwen_image_edit",),
    "qwen_image_edit_plus": ("qwen_image_edit_plus",),
    "z_image": ("z_image", "zimage"),
    "chroma": ("chroma",),
    "lumina2": ("lumina2", "lumina"),
    "krea2": ("krea2",),
    "hidream": ("hidream",),
    "sana": ("sana",),
    "auraflow": ("auraflow",),
    "kolors": ("kolors",),
    "anima": ("anima",),
    "ernie_image": ("ernie_image", "ernie"),
    "wan": ("wan",),
    "wan22_5b": ("wan22_5b",),
    "ltx_video": ("ltx_video",),
    "ltx2": ("ltx2",),
    "hunyuan_video": ("hunyuan_video",),
    "hunyuan_image": ("hunyuan_image",),
}
"""Architectures by the field's names -> the names that our family may have; the first that exists is taken."""
OF_ANOTHER = Template("{name} (another architecture than {family})")
UNLIKE: dict[str, str] = {
    "hunyuan_video_1_5": OF_ANOTHER(name="HunyuanVideo 1.5", family="hunyuan_video"),
    "hunyuan_video_i2v": "HunyuanVideo image-to-video",
    "wan_i2v": "Wan image-to-video",
    "hidream_o1": OF_ANOTHER(name="HiDream-O1", family="hidream (HiDream-I1)"),
    "qwen_image_21": OF_ANOTHER(name="Qwen-Image 2.1", family="qwen_image"),
}
"""Architectures that are not supported although their names resemble supported ones."""


# ---------------------------------------------------------------------------------------------------------------------
# Model


def set_family(draft: Draft, keys: str | Iterable[str], kind: str, why: str) -> None:
    """Set model.family from an architecture, named as the field does; "" if the file does not say.

    A family that the user gave (`Draft.family`) takes precedence.
    """
    available = families.list_families()
    if draft.family:
        given = draft.family
        draft.set("model.family", given, "--family")
        draft.report_mapped(keys, {}, Message("--family sets the architecture"))
        if given not in available:
            draft.add_todo(
                "model.family",
                Message(
                    "this version does not support the architecture {family}. Possible values: {names}",
                    family=repr(given),
                    names=", ".join(available),
                ),
            )
        return
    if not kind:
        draft.set("model.family", "TODO")
        draft.add_todo(
            "model.family", Message("{line}. Possible values: {names}", line=why, names=", ".join(available))
        )
        return
    spelled = {normalize_name(name): name for name in available}
    name = next(
        (spelled[normalize_name(n)] for n in (*FAMILY_NAMES.get(kind, ()), kind) if normalize_name(n) in spelled), ""
    )
    draft.family = name or kind
    draft.report_mapped(keys, {"model.family": draft.family}, why)
    draft.comments["model.family"] = [why]
    if not name:
        what = UNLIKE.get(kind, kind)
        draft.add_todo(
            "model.family",
            Message(
                "this version does not support {kind}. Possible values: {names}", kind=what, names=", ".join(available)
            ),
        )


def set_whole_model(draft: Draft, why: str = "", keys: str | Iterable[str] = ()) -> None:
    """Write a LoRA where the tool trains the whole model, with a TODO for its rank.

    Args:
        draft: the import.
        why: what shows it, and that a LoRA is written; "" if `keys` show it.
        keys: the tool's keys that say so.
    """
    draft.report_unmatched(keys, Message("this trainer trains only LoRAs; a LoRA was written"))
    if why:
        draft.notes.append(why)
    if not draft.has("network_dim"):
        draft.settings.setdefault("adapter.rank", Adapter().rank)
    draft.add_todo("adapter.rank", Message("the other trainer trains the whole model; choose the rank of the LoRA"))


def refuse(draft: Draft, what: str) -> NoReturn:
    """Refuse a file whose job is not LoRA training.

    Raises:
        UserError: always.
    """
    raise UserError(
        Message(
            "{path}: {line}, but this trainer only trains LoRAs on images with captions. Give the settings of a "
            "LoRA training",
            path=draft.source.path,
            line=what,
        )
    )


def refine_kind(kind: str, why: str, paths: Iterable[Any], controls: bool = False) -> tuple[str, str]:
    """Tell apart the variants of an architecture that other tools give one name.

    Args:
        kind: an architecture, named as the field does.
        why: what shows it.
        paths: paths of the base model.
        controls: the dataset has control images.

    Returns:
        The architecture, and what shows it.
    """
    by_name = Template("{line}, and the name of {file}")
    for path in map(str, filter(None, paths)):
        named = find_family_by_name(path)
        if named in RELATIVES.get(kind, ()):
            return named, by_name(line=why, file=PureWindowsPath(path).name)
        if kind in CLIPS_FROM_PICTURES and re.search(r"i2v|image[-_. ]?to[-_. ]?video", path.lower()):
            return f"{kind}_i2v", by_name(line=why, file=PureWindowsPath(path).name)
    if controls and kind in EDITING:
        return EDITING[kind], Message("{line}, and the dataset has control images", line=why)
    return kind, why


RELATIVES = {
    "flux": ("flux_kontext",),
    "flux2": ("flux2_klein",),
    "qwen_image": ("qwen_image_edit", "qwen_image_edit_plus"),
    "wan": ("wan22_5b",),
}
"""Architectures whose variants other tools give the same name."""
EDITING = {"flux": "flux_kontext", "qwen_image": "qwen_image_edit"}
"""Architectures with a variant of the same name that edits images."""
CLIPS_FROM_PICTURES = ("wan", "hunyuan_video")
"""Architectures with an image-to-video variant."""


def find_family_by_name(path: str) -> str:
    """Return the architecture that a well-known hub id or file name stands for; "" for any other."""
    name = PureWindowsPath(path).name.lower()
    for pattern, kind in (
        (r"flux[._-]?2.*klein|klein", "flux2_klein"),
        (r"flux[._-]?2", "flux2"),
        (r"kontext", "flux_kontext"),
        (r"flux", "flux"),
        (r"qwen.*image.*edit.*(plus|25(09|11))", "qwen_image_edit_plus"),
        (r"qwen.*image.*edit", "qwen_image_edit"),
        (r"qwen.*image", "qwen_image"),
        (r"wan.*(ti2v|2[._-]?2.*5b)", "wan22_5b"),
        (r"z[._-]?image", "z_image"),
        (r"chroma", "chroma"),
        (r"krea[._-]?2", "krea2"),
        (r"stable-diffusion-3|sd3", "sd3"),
        (r"sd_?xl|stable-diffusion-xl|pony|illustrious|noobai|animagine", "sdxl"),
        (r"stable-diffusion-2|v2-1_", "sd2"),
        (r"stable-diffusion-v1|v1-5|sd[._-]?v?1[._-]?5|sd15", "sd15"),
    ):
        if re.search(pattern, name):
            return kind
    return ""


def set_model_path(draft: Draft, key: str, note: str = "") -> None:
    """Set model.path as given, and add a TODO if it is of a format that is not opened."""
    path = draft.get(key, read_string)
    if not path:
        draft.set("model.path", "TODO")
        draft.add_todo(
            "model.path",
            Message("the file names no base model. Give a Hugging Face id, a diffusers folder or a .safetensors file"),
        )
        return
    draft.report_mapped(key, {"model.path": path}, note)
    suffix = PureWindowsPath(path).suffix.lower()
    if suffix in (".ckpt", ".pt", ".pth", ".bin", ".gguf"):
        draft.add_todo(
            "model.path",
            Message(
                "this trainer does not open {suffix} files; give the model as a .safetensors file or a folder",
                suffix=suffix,
            ),
        )


PART_KINDS = {
    "vae": r"^Autoencoder",
    "clip": r"^CLIPTextModel$",
    "clip_l": r"^CLIPTextModel",
    "clip_g": r"^CLIPTextModelWithProjection$",
    "t5": r"^U?MT5|^T5",
    "llm": r"^(?!CLIP|T5|UMT5|Autoencoder|Anima)",
    "any": r"^(?!Autoencoder|Anima)",
}
"""Kind of part, as other trainers' keys name them -> the classes that can be it. Of several, the first is meant, but
"clip_g" is the last, and "any" is used where a family has one text encoder."""


def find_part(family: str, kind: str) -> str:
    """Return the name in `model.files` of a family's part of this kind; "" if it has none, or "any" is ambiguous."""
    if family not in families.list_families():
        return ""
    cls = families.get(family)
    parts = [
        part
        for part in _components.list_weight_parts(cls)
        if re.search(PART_KINDS[kind], _components.get_part_class(cls, part))
    ]
    if not parts or (kind == "any" and len(parts) > 1):
        return ""
    return parts[-1 if kind == "clip_g" else 0]


def set_part_files(draft: Draft, kinds: Mapping[str, str]) -> None:
    """Set model.files from keys that name single files of parts.

    Args:
        draft: the import.
        kinds: key -> kind of the part, in `PART_KINDS`; several kinds, separated by "|", are tried in order.
    """
    for key, kind in kinds.items():
        path = draft.get(key, read_string)
        if not path:
            draft.report_unmatched(key, remarks.EMPTY, off=True)
            continue
        if not draft.family:
            draft.wait(key)
            continue
        part = next(filter(None, (find_part(draft.family, name) for name in kind.split("|"))), "")
        suffix = PureWindowsPath(path).suffix.lower()
        if not part:
            draft.report_unmatched(key, Message("this model has no component of this kind"))
        elif suffix not in WEIGHT_ENDINGS:
            draft.report_unmatched(key, remarks.ONLY_SAFETENSORS)
            draft.add_todo(
                "model.files",
                Message("{part}: give {file} as a .safetensors file", part=part, file=repr(PureWindowsPath(path).name)),
            )
        else:
            files = draft.settings.get("model.files") or {}
            draft.report_mapped(key, {"model.files": {**files, part: path}})


def set_training_adapter(draft: Draft, key: str) -> None:
    """Set model.training_adapter, with a TODO if it names a file of the hub."""
    path = draft.get(key, read_string)
    if not path:
        draft.report_unmatched(key, remarks.EMPTY, off=True)
        return
    draft.report_mapped(key, {"model.training_adapter": path}, remarks.LOCAL_FILE)
    if re.fullmatch(r"[\w.-]+/[\w.-]+(/[\w.-]+)?", path) and draft.find(path) is None:
        draft.add_todo("model.training_adapter", remarks.LOCAL_FILE)


def set_dtype(draft: Draft, key: str) -> None:
    """Set model.dtype from the mixed precision."""
    value = draft.get(key)
    kind = normalize_name(value)
    if value is None:
        draft.report_unmatched(key, remarks.EMPTY, off=True)
    elif kind in ("no", "none", "fp32", "float32", "tf32", "tfloat32"):
        draft.report_mapped(key, {"model.dtype": "fp32"})
    elif kind in ("bf16", "bfloat16", "fp8"):
        draft.report_mapped(key, {"model.dtype": "bf16"})
    elif kind in ("fp16", "float16"):
        draft.report_different(
            key,
            {"model.dtype": "bf16"},
            Message("this trainer does not use float16; bf16 was written, which needs no loss scaling"),
        )
    else:
        draft.report_unmatched(key, Message("{value} is not a known dtype", value=repr(value)))


def set_caption_tokens(draft: Draft) -> None:
    """Set model.caption_tokens from kohya's max_token_length."""
    key = "max_token_length"
    if draft.get(key) is None:
        draft.report_unmatched(key, remarks.EMPTY, off=True)
    elif not draft.family:
        draft.wait(key)
    elif not _has_trait(draft, "long_captions"):
        # sd-scripts ignores it for FLUX, SD3 and Lumina, and the pages write it for every model.
        ignored = str(draft.get(key)) == "75" or not predicts_noise(draft.family)
        draft.report_unmatched(key, remarks.PROMPT_LENGTH, off=ignored)
    else:
        # sd-scripts cuts as many whole chunks as fit; lora-scripts' page writes 255.
        given = draft.get(key, read_whole)
        tokens = 75 * min(max(given // 75, 1), 3)
        if 75 <= given < 300:
            draft.report_mapped(key, {"model.caption_tokens": tokens}, "" if given == tokens else WHOLE_CHUNKS)
        else:
            draft.report_different(
                key, {"model.caption_tokens": tokens}, Message("this trainer accepts 75, 150 or 225")
            )


def set_prompt_weights(draft: Draft) -> None:
    """Set model.prompt_weights from kohya's weighted_captions."""
    key = "weighted_captions"
    if not draft.family and common_values.is_on(draft.get(key)):
        draft.wait(key)
    elif draft.has(key) and common_values.is_on(draft.given[key]) and _has_trait(draft, "long_captions"):
        draft.report_mapped(key, {"model.prompt_weights": True}, PREVIEWS_WEIGHTED)
    else:
        draft.report_unmatched(
            key,
            Message("brackets in captions are read as text with this model"),
            off=not common_values.is_on(draft.get(key)),
        )


def set_clip_skip(draft: Draft, key: str, from_zero: bool = False) -> None:
    """Set model.clip_skip.

    Args:
        draft: the import.
        key: the tool's key.
        from_zero: the tool counts the layers that are left out.
    """
    if draft.get(key) is None:
        draft.report_unmatched(key, remarks.EMPTY, off=True)
    elif not draft.family:
        draft.wait(key)
    elif not _has_trait(draft, "clip_skip"):
        usual = str(draft.get(key)) == ("0" if from_zero else "1")
        # sd-scripts ignores clip_skip but for SD 1.5 and 2; OneTrainer counts from the layer that the model uses.
        ignored = (draft.family == "sdxl" or not predicts_noise(draft.family)) and not from_zero
        draft.report_unmatched(
            key, ALWAYS_PENULTIMATE if draft.family == "sdxl" else remarks.CLIP_SKIP, off=usual or ignored
        )
    elif 1 <= (skip := draft.get(key, read_whole) + from_zero) <= 12:
        draft.report_mapped(key, {"model.clip_skip": skip}, LAYERS_LEFT_OUT if from_zero else "")
    else:
        draft.report_unmatched(key, Message("CLIP has no such layer; its last layer is used"))


WHOLE_CHUNKS = Message("this is the number of tokens in whole chunks of 75, as in sd-scripts")
PREVIEWS_WEIGHTED = Message("it applies to preview prompts too, as in sd-scripts")
LAYERS_LEFT_OUT = Message("the last layer is 0 in OneTrainer and 1 in this trainer")
ALWAYS_PENULTIMATE = Message("SDXL always uses the second-last layer of its text encoders")


def _has_trait(draft: Draft, trait: str) -> bool:
    return draft.family in families.list_families() and bool(families.get_traits(draft.family)[trait])


STORAGES = {
    "own": ("nochange", "bfloat16", "bf16", "float16", "fp16", "float32", "fp32", "none", "tfloat32"),
    "fp8": ("float8", "fp8", "qfloat8", "float8e4m3fn", "float8wo", "fp8quanto", "fp8woquanto", "fp8uzquanto")
    + ("fp8wotorchao", "float8e5m2", "ostrisfloat8"),
    "fp8 matmul": ("fp8torchao", "fp8native", "floatw8a8", "w8a8fp8"),
    "int8": ("int8", "qint8", "uint8", "int8quanto", "int8torchao", "int8sdnq", "intw8a8", "w8a8int8", "convrot8"),
    "nf4": ("nf4", "nfloat4", "nf4bnb", "fp4bnb"),
    "fewer": ("int4quanto", "int2quanto", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7", "qint4", "int4", "gguf")
    + ("nvfp4", "convrot2", "convrot3", "convrot4", "convrot5", "convrot6", "convrot7", "uint4sdnq", "float6"),
}


def set_storage(draft: Draft, keys: Sequence[str], word: Any, tool: str, *, scaled: bool = True) -> None:
    """Set quantize.storage from another tool's name for it; each tool scales differently, which is reported.

    Args:
        draft: the import.
        keys: the tool's keys.
        word: the tool's name of the storage.
        tool: the tool's name, for the remark.
        scaled: the tool's FP8 has a scale; some tools cast the weights without one.
    """
    kind = next((kind for kind, words in STORAGES.items() if normalize_name(word) in words), "")
    if kind == "own":
        plain_storage = "bf16" if draft.settings.get("model.dtype", "bf16") == "bf16" else "none"
        note = Message("the base model is not quantized; quantize.storage = 'fp8' would halve its memory")
        draft.report_mapped(keys, {"quantize.storage": plain_storage}, note)
    elif kind == "fp8":
        draft.report_different(
            keys,
            {"quantize.storage": "fp8"},
            Message(
                "both use e4m3, but {tool} scales weights in its own way; this trainer has one scale per row, "
                "and stores modulation layers in int8",
                tool=tool,
            )
            if scaled
            else remarks.CAST_WITHOUT_SCALE(tool=tool),
        )
    elif kind == "fp8 matmul":
        draft.report_different(
            keys,
            {"quantize.storage": "fp8", "quantize.compute": "fp8"},
            Message(
                "{tool} also multiplies in FP8, forward and backward; this trainer has one scale per row and per token",
                tool=tool,
            ),
        )
    elif kind == "int8":
        draft.report_different(
            keys,
            {"quantize.storage": "int8"},
            Message("in this trainer 128 weights share a scale; {tool} has one scale per row or tensor", tool=tool),
        )
    elif kind == "nf4":
        draft.report_mapped(keys, {"quantize.storage": "nf4"})
    elif kind == "fewer":
        draft.report_different(
            keys,
            {"quantize.storage": "nf4"},
            Message(
                "this trainer has no {word}; nf4 (4 bits) is its smallest storage, and may take more memory or less",
                word=repr(word),
            ),
        )
    else:
        draft.report_unmatched(
            keys,
            Message("this trainer has no storage {word}; quantize.storage = 'fp8' was written", word=repr(word)),
        )
        draft.set("quantize.storage", "fp8")
        draft.add_todo("quantize.storage", remarks.CHOOSE_ANOTHER(name=repr(word)))


def count_trained_text(family: str) -> int:
    """Return how many text encoders of this family can be trained: its CLIPs."""
    return len(families.get(family).trained_text) if family in families.list_families() else 0


def can_train_text(family: str) -> bool:
    """Return True if text encoders of this family can be trained."""
    return count_trained_text(family) > 0


def embeds_guidance(family: str) -> bool:
    """Return True for a family whose denoiser takes the guidance scale as an input."""
    return family in families.list_families() and families.get(family).embeds_guidance


def predicts_noise(family: str) -> bool:
    """Return True for a family that predicts noise or v: it has min-SNR weighting, but no timestep shift."""
    return family in families.list_families() and families.get(family).objective == "Diffusion"
