"""What all tools share: names of optimizers, schedules, storages and families, and the counting of steps."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PureWindowsPath
from typing import Any, NoReturn, get_args

from .. import families
from ..config.relations import LEAST_FACTOR
from ..data.caption_text import CAPTIONS
from ..data.decoding import EXTENSIONS
from ..data.image_files import labelled, masked_stem
from ..errors import Message, UserError
from ..settings import MAX_SEED, MOST_LR, Job, Quantize
from .base import Draft, Folder, Unfit, flag, listed, number, text, whole

NO_TEXT_ENCODER = Message("no text encoder of this architecture is trained here; only the denoiser is")
TRAINED_TEXT = ("sd15", "sd2", "sdxl", "sd3", "flux", "flux_kontext")
"""Families whose CLIP text encoders adapter.text_encoder trains; a test compares the list with the families."""
NOT_HERE = Message("nothing like it here")
ALWAYS_CACHED = Message("pictures and captions are always encoded beforehand, into dataset.cache_dir")
OTHER_CACHE = Message("caches of other tools are not read; ours is made anew in dataset.cache_dir")
ATTENTION = Message("attention is always torch's scaled_dot_product_attention")
LOGGING = "events.jsonl and log.txt in the run folder hold everything; trackers are not fed"
UPLOAD = Message("files are not uploaded")
RESUMES = Message("their states cannot be read; `lora-fp8 resume` goes on with our own runs")
NO_NOISE = Message("plain Gaussian noise is used here")
NO_MASK = Message("masks are used as they are drawn here: dataset.folders.N.mask")
MASK_AREA = Message(
    "theirs divides the loss by the mask's area, so that a small mask counts as much as a large one; ours does not"
)
OUTSIDE = "what is outside of a mask counts nothing there"
NO_WEIGHT = Message("a folder's weight is above 0 here: take the folder out instead")
NO_REG = Message(
    "the base's own answers are not trained on here, nor counted in an epoch; pictures with captions of their "
    "own can be a folder with regularization = true"
)
SHOWN_ALIKE = Message(
    "a folder with regularization = true; there they are shown as often as the others, here each `repeats` times "
    "an epoch, chosen to come to the same where the pictures are here"
)
FULL_STRENGTH = Message("the LoRA trains at full strength on every folder")
NO_EMA = Message("no moving average of the weights is kept here")
START = Message("its rank must be adapter.rank")
NO_SWAP = Message("here a share of the frozen weights may wait in main memory instead: memory.offload")
NO_CONV = Message(
    "convolutions are adapted where adapter.targets names them, such as conv1, with a rank in adapter.ranks"
)
NO_CLIPS = Message("clips are trained of wan, hunyuan_video and ltx_video only: dataset.frames")
SAVED = Message("the LoRA files of that step, and a checkpoint to go on from")
NO_SPREAD = Message(
    "frames are never spread over a whole clip here, which would make it move faster; see dataset.frames"
)
NO_SAMPLER = Message("previews are drawn with the model's own scheduler")
COMPONENTS = Message("a diffusers folder with the VAE, text encoders and tokenizers, which a single file lacks")

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
    "ltx_video": ("ltx_video",),
    "ltx2": ("ltx2",),
    "hunyuan_video": ("hunyuan_video",),
    "hunyuan_image": ("hunyuan_image",),
}
"""Architectures by the field's names -> the names that our family may have; the first that exists is taken."""
UNLIKE = {
    "hunyuan_video_1_5": "HunyuanVideo 1.5, which is not the architecture of hunyuan_video",
    "hunyuan_video_i2v": "HunyuanVideo image-to-video",
    "wan_i2v": "Wan image-to-video",
    "hidream_o1": "HiDream-O1, which is not the architecture of hidream (HiDream-I1)",
    "qwen_image_21": "Qwen-Image 2.1, which is not the architecture of qwen_image",
}
"""Architectures that are not supported although their names resemble supported ones."""
DIFFUSION = ("sd15", "sd2", "sd21", "sd20", "sdxl", "kolors")
"""Families that predict noise or v, which have min-SNR weighting but no timestep shift."""


def thousandths(value: Any) -> float:
    """Convert a timestep out of 1000 to a noise level from 0 to 1."""
    return number(value) / 1000


def accepted(setting: str) -> list[str]:
    """Return the words that one of our settings accepts, such as the names of optimizers."""
    section, _, name = setting.rpartition(".")
    model: Any = Job.model_fields[section].annotation
    found: list[str] = []

    def look(annotation: Any) -> None:
        for argument in get_args(annotation):
            found.append(argument) if isinstance(argument, str) else look(argument)

    look(model.model_fields[name].annotation)
    return found


def plain(name: Any) -> str:
    """Return a name in lower case, with letters and digits only, for comparisons."""
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def choice(table: Mapping[str, str], what: str) -> Callable[[Any], str]:
    """Return a reader that looks a word up in a table; any other word is `Unfit`."""

    def read(value: Any) -> str:
        found = table.get(plain(value))
        if found is None:
            raise Unfit(Message("{value} has no counterpart among {names}", value=repr(value), names=what))
        return found

    return read


FILE_DTYPE = choice(
    {
        **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
        **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
        **dict.fromkeys(("fp32", "float32", "float", "no", "none"), "fp32"),
    },
    "bf16, fp16 and fp32",
)


# ---------------------------------------------------------------------------------------------------------------------
# Model


def set_family(draft: Draft, keys: str | Iterable[str], kind: str, why: str) -> None:
    """Set model.family from an architecture, named as the field does; "" if the file does not say.

    A family that the user gave (`Draft.family`) takes precedence.
    """
    available = families.available()
    if draft.family:
        given = draft.family
        draft.set("model.family", given, "--family")
        draft.mapped(keys, {}, Message("--family was given"))
        if given not in available:
            draft.need(
                "model.family",
                Message(
                    "{family} is not a family of this version; there are {names}",
                    family=repr(given),
                    names=", ".join(available),
                ),
            )
        return
    if not kind:
        draft.set("model.family", "TODO")
        draft.need("model.family", Message("{line}; there are {names}", line=why, names=", ".join(available)))
        return
    spelled = {plain(name): name for name in available}
    name = next((spelled[plain(n)] for n in (*FAMILY_NAMES.get(kind, ()), kind) if plain(n) in spelled), "")
    draft.family = name or kind
    draft.mapped(keys, {"model.family": draft.family}, why)
    draft.comments["model.family"] = [why]
    if not name:
        what = UNLIKE.get(kind, kind)
        draft.need(
            "model.family",
            Message("this version has no family for {kind}; there are {names}", kind=what, names=", ".join(available)),
        )


def set_whole_model(draft: Draft, why: str = "", keys: str | Iterable[str] = ()) -> None:
    """Write a LoRA where the tool trains the whole model, with a TODO for its rank.

    Args:
        draft: the import.
        why: what shows it, if no key does.
        keys: the tool's keys that say so.
    """
    draft.none(keys, Message("only LoRAs are trained here; a LoRA was written"))
    if why:
        draft.notes.append(Message("{why}; here a LoRA is trained", why=why))
    if not draft.has("network_dim"):
        draft.settings.setdefault("adapter.rank", 16)
    draft.need("adapter.rank", Message("theirs trained the whole model: choose the size of a LoRA"))


def refuse(draft: Draft, what: str) -> NoReturn:
    """Refuse a file whose job is not LoRA training.

    Raises:
        UserError: always.
    """
    raise UserError(
        Message(
            "{path}: {line}, which has no counterpart here: this trains LoRAs on images with captions. Give the "
            "settings of a LoRA training",
            path=draft.source.path,
            line=what,
        )
    )


def refined(kind: str, why: str, paths: Iterable[Any], controls: bool = False) -> tuple[str, str]:
    """Tell apart the variants of an architecture that other tools give one name.

    Args:
        kind: an architecture, named as the field does.
        why: what shows it.
        paths: paths of the base model.
        controls: the dataset has control images.

    Returns:
        The architecture, and what shows it.
    """
    for path in map(str, filter(None, paths)):
        named = family_of_name(path)
        if named in RELATIVES.get(kind, ()):
            return named, f"{why}, and the name of {PureWindowsPath(path).name}"
        if kind in CLIPS_FROM_PICTURES and re.search(r"i2v|image[-_. ]?to[-_. ]?video", path.lower()):
            return f"{kind}_i2v", f"{why}, and the name of {PureWindowsPath(path).name}"
    if controls and kind in RELATIVES and kind != "flux2":
        return RELATIVES[kind][0], f"{why}, and the dataset has control images"
    return kind, why


RELATIVES = {
    "flux": ("flux_kontext",),
    "flux2": ("flux2_klein",),
    "qwen_image": ("qwen_image_edit", "qwen_image_edit_plus"),
}
"""Architectures whose variants other tools give the same name; the first variant is the one that edits images."""
CLIPS_FROM_PICTURES = ("wan", "hunyuan_video")
"""Architectures with an image-to-video variant."""


def set_control(draft: Draft, key: str, folder: Folder, at: str) -> None:
    """Set a folder of control images, named as the images are, for families that take any.

    Args:
        draft: the import.
        key: the tool's key with the path.
        folder: the folder of images.
        at: our name of the folder, such as "dataset.folders.0".
    """
    if not draft.has(key) or not (path := draft.get(key)):
        return
    if draft.family not in families.available() or not any(families.get(draft.family).controls):
        draft.none(key, Message("{family} is shown no control pictures here", family=draft.family))
        draft.need(
            "dataset.folders",
            Message(
                "theirs shows control images ({path}), which {family} is not shown here", path=path, family=draft.family
            ),
        )
    elif not isinstance(path, str):
        draft.none(
            key,
            Message(
                "one folder here: put several of one picture into it as name_1, name_2, and name it in {at}", at=at
            ),
        )
    else:
        folder.control = path
        draft.mapped(key, {}, f"{at}.control")


def set_mask_folder(draft: Draft, key: str, folder: Folder, at: str) -> None:
    """Set a folder of masks, named as the images are.

    Args:
        draft: the import.
        key: the tool's key with the path.
        folder: the folder of images.
        at: our name of the folder, such as "dataset.folders.0".
    """
    if path := draft.get(key, text):
        folder.mask = as_mask_folder(path)
        draft.mapped(key, {}, f"{at}.mask")


def as_mask_folder(path: str) -> str:
    """Return the path of a mask folder for our setting, in which "alpha" alone means the images' transparency."""
    return "./alpha" if path == "alpha" else path


def set_unmasked(draft: Draft) -> None:
    """Set objective.unmasked_weight for tools that ignore what is outside a mask."""
    if any(folder.mask for folder in draft.folders):
        draft.set("objective.unmasked_weight", 0.0, OUTSIDE)


def family_of_name(path: str) -> str:
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
    """Set model.path as given, and add a TODO for model.components, which single files need."""
    path = draft.get(key, text)
    if not path:
        draft.set("model.path", "TODO")
        draft.need("model.path", Message("the base model: Hugging Face id, diffusers folder or .safetensors file"))
        return
    draft.mapped(key, {"model.path": path}, note)
    suffix = PureWindowsPath(path).suffix.lower()
    if suffix in (".ckpt", ".pt", ".pth", ".bin", ".gguf"):
        draft.need(
            "model.path",
            Message("{suffix} files are not opened here; give the model as .safetensors or a folder", suffix=suffix),
        )
    if suffix == ".sft":
        draft.need(
            "model.path", Message("a .sft file is a .safetensors file, and is opened under that name: rename it")
        )
    if (suffix in (".safetensors", ".sft", ".ckpt")) and "model.components" not in draft.settings:
        draft.set("model.components", "")
        draft.need("model.components", COMPONENTS)


def set_dtype(draft: Draft, key: str) -> None:
    """Set model.dtype from the mixed precision."""
    value = draft.get(key)
    kind = plain(value)
    if value is None:
        draft.none(key, "empty", off=True)
    elif kind in ("no", "none", "fp32", "float32", "tf32", "tfloat32"):
        draft.mapped(key, {"model.dtype": "fp32"})
    elif kind in ("bf16", "bfloat16", "fp8"):
        draft.mapped(key, {"model.dtype": "bf16"})
    elif kind in ("fp16", "float16"):
        draft.differs(
            key, {"model.dtype": "bf16"}, Message("float16 is not used here: bf16, which needs no loss scaling")
        )
    else:
        draft.none(key, Message("{value} is no dtype that is known here", value=repr(value)))


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
    kind = next((kind for kind, words in STORAGES.items() if plain(word) in words), "")
    if kind == "own":
        plain_storage = "bf16" if draft.settings.get("model.dtype", "bf16") == "bf16" else "none"
        note = Message("the base is not quantized; quantize.storage = 'fp8' would halve its memory")
        draft.mapped(keys, {"quantize.storage": plain_storage}, note)
    elif kind == "fp8":
        draft.differs(
            keys,
            {"quantize.storage": "fp8"},
            Message(
                "e4m3 as there; {tool} has scales of its own kind, here each row has one, and modulation is held "
                "in int8",
                tool=tool,
            )
            if scaled
            else Message(
                "{tool} casts the weights without a scale, so that small ones become zero; here each row has "
                "one. quantize.scale = 'none' is the exact equivalent",
                tool=tool,
            ),
        )
    elif kind == "fp8 matmul":
        draft.differs(
            keys,
            {"quantize.storage": "fp8", "quantize.compute": "fp8"},
            Message(
                "{tool} multiplies in FP8 too, forward and backward; scales are one per row and per token here",
                tool=tool,
            ),
        )
    elif kind == "int8":
        draft.differs(
            keys,
            {"quantize.storage": "int8"},
            Message("blocks of 128 share a scale here; {tool} has one per row or tensor", tool=tool),
        )
    elif kind == "nf4":
        draft.mapped(keys, {"quantize.storage": "nf4"})
    elif kind == "fewer":
        draft.differs(
            keys,
            {"quantize.storage": "nf4"},
            Message(
                "{word} is not known here; nf4 (4 bits) is the smallest storage, and may take more memory or less",
                word=repr(word),
            ),
        )
    else:
        draft.none(
            keys,
            Message("{word} is no storage that is known here; quantize.storage = 'fp8' was written", word=repr(word)),
        )
        draft.set("quantize.storage", "fp8")
        draft.need("quantize.storage", Message("choose one for {name}", name=repr(word)))


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer and schedule

ALIKE = {
    "pagedadamw8bit": ("adamw8bit", "its state is not paged to main memory here"),
    "bnbadamw8bit": ("adamw8bit", ""),
    "bnbadamw8bitpaged": ("adamw8bit", "its state is not paged to main memory here"),
    "adamw8bitkahan": (
        "adamw8bit",
        Message("float32 masters (optimizer.rounding) take the place of {what_else}", what_else="Kahan summation"),
    ),
    "aoadamw8bit": ("adamw8bit", "bitsandbytes' instead of torchao's"),
    "adamw8": ("adamw8bit", "bitsandbytes' instead of a build of its own"),
    "adam8bit": ("adamw8bit", Message("weight decay is decoupled here")),
    "bnbadam8bit": ("adamw8bit", Message("weight decay is decoupled here")),
    "aoadamw4bit": ("adamw8bit", "8 bits of state instead of 4"),
    "aoadamwfp8": ("adamw8bit", "8-bit blocks instead of FP8"),
    "bnbadamw": ("adamw", ""),
    "pagedadamw": ("adamw", "its state is not paged to main memory here"),
    "pagedadamw32bit": ("adamw", "its state is not paged to main memory here"),
    "adamwoptimi": (
        "adamw",
        Message("float32 masters (optimizer.rounding) take the place of {what_else}", what_else="Kahan summation"),
    ),
    "optimiadamw": (
        "adamw",
        Message("float32 masters (optimizer.rounding) take the place of {what_else}", what_else="Kahan summation"),
    ),
    "adamwbf16": (
        "adamw",
        Message("float32 masters (optimizer.rounding) take the place of {what_else}", what_else="stochastic rounding"),
    ),
    "adam": ("adamw", Message("weight decay is decoupled here")),
    "adamwadv": ("adamw", "its additions are not known here"),
    "torchoptimadamw": ("adamw", ""),
    "bitsandbytesoptimadamw8bit": ("adamw8bit", ""),
    "lion": ("lion8bit", Message("8 bits of state instead of 32")),
    "optimilion": ("lion8bit", Message("8 bits of state instead of 32")),
    "lionoptimi": ("lion8bit", Message("8 bits of state instead of 32")),
    "bnblionpaged": ("lion8bit", Message("8 bits of state instead of 32")),
    "torchadamw": ("adamw", ""),
    "stableadamw": ("adamw", Message("updates are not stabilized beyond Adam's")),
    "optimistableadamw": ("adamw", Message("updates are not stabilized beyond Adam's")),
    "optimiadam": ("adamw", Message("weight decay is decoupled here")),
    "bnbadam": ("adamw", Message("weight decay is decoupled here")),
    "bnbadamwpaged": ("adamw", "its state is not paged to main memory here"),
    "aoadamfp8": ("adamw8bit", "8-bit blocks instead of FP8"),
    "bnblion": ("lion8bit", Message("8 bits of state instead of 32")),
    "bnblion8bit": ("lion8bit", ""),
    "bitsandbytesoptimlion8bit": ("lion8bit", ""),
    "pagedlion8bit": ("lion8bit", "its state is not paged to main memory here"),
    "bnblion8bitpaged": ("lion8bit", "its state is not paged to main memory here"),
    "prodigyoptprodigy": ("prodigy", ""),
    "prodigy8bit": ("prodigy", Message("32 bits of state instead of 8")),
}
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "prodigy": {"weight_decay": 0.0, "safeguard_warmup": False, "use_bias_correction": False},
    "lion8bit": {"weight_decay": 0.0},
}
"""The other tools' defaults for these optimizers, where ours differ."""
FINDS_ITS_RATE = ("prodigy", "dadapt", "automagic", "schedulefree", "lionprodigy")


def set_text_encoders(
    draft: Draft,
    keys: Sequence[str],
    rate_keys: Sequence[str],
    rates: Mapping[str, float],
    why: str = "",
    left_out: Sequence[str] = (),
) -> None:
    """Set adapter.text_encoder and optimizer.text_encoder_lr.

    Args:
        draft: the import.
        keys: the tool's keys that say whether text encoders are trained.
        rate_keys: the tool's keys with the learning rates.
        rates: learning rate, with scaling, of each CLIP that the tool trains, by name; {} if it trains none.
        why: the remark if the file itself does not ask for it.
        left_out: names of CLIPs that the tool does not train.
    """
    if not rates:
        draft.mapped(keys, {}, Message("text encoders are not trained"))
        draft.none(rate_keys, Message("text encoders are not trained"), off=True)
        return
    if draft.family not in TRAINED_TEXT:
        draft.none([*keys, *rate_keys], NO_TEXT_ENCODER)
        return
    if left_out:
        why = Message(
            "theirs leaves {names} as it is; here all of the CLIPs are trained or none", names=" and ".join(left_out)
        )
        draft.differs(keys, {"adapter.text_encoder": True}, why)
    else:
        draft.mapped(keys, {"adapter.text_encoder": True}, why)
    if why and not any(draft.has(key) for key in keys):
        draft.notes.append(why)
    rate = next(iter(rates.values()))
    if draft.settings.get("optimizer.name") == "prodigy":
        if set(rates.values()) == {draft.settings["optimizer.lr"]}:
            draft.mapped(rate_keys, {}, Message("Prodigy finds one rate for all that is trained"))
        else:
            draft.none(rate_keys, Message("Prodigy finds one rate for all that is trained"))
    elif not 0 < rate < 1:  # learning rates for optimizers that find their own
        draft.none(rate_keys, Message("{rate} is no rate for AdamW; half of optimizer.lr is taken", rate=f"{rate:g}"))
    elif len(set(rates.values())) > 1:
        told = ", ".join(f"{name} {value:g}" for name, value in rates.items())
        draft.differs(
            rate_keys,
            {"optimizer.text_encoder_lr": rate},
            Message("one rate for all here, the first of {told}", told=told),
        )
    else:
        draft.mapped(rate_keys, {"optimizer.text_encoder_lr": rate})


def set_optimizer(
    draft: Draft, name_key: str, rate_keys: Sequence[str], rate: Any, scale: float = 1.0, least: float = 0.0
) -> None:
    """Set optimizer.name, lr and lr_scale so that the learning rate of every step equals the other tool's.

    Args:
        draft: the import.
        name_key: the tool's key with the optimizer.
        rate_keys: the tool's keys with the learning rate.
        rate: the learning rate; None if neither the file nor the tool sets it.
        scale: factor that the tool applies to it (for the batch size, for example).
        least: with Prodigy, the tool itself takes 1 for learning rates below this.
    """
    unlike = _set_optimizer_name(draft, name_key)
    finds_rate = any(word in plain(unlike) for word in FINDS_ITS_RATE)
    if unlike and (finds_rate or rate is None or not 0 < rate < 1):
        draft.none(rate_keys, Message("{name} finds its rate by itself; AdamW8bit needs one", name=unlike))
        draft.set("optimizer.lr", 1e-4)
        draft.need(
            "optimizer.lr",
            Message(
                "a rate for AdamW8bit; {rate} was {name}'s", rate=rate if rate is not None else "the file", name=unlike
            ),
        )
    elif draft.settings.get("optimizer.name") == "prodigy":
        _set_factor(draft, rate_keys, rate, least)
    elif rate is None:
        draft.set("optimizer.lr", 1e-4)
        draft.need("optimizer.lr", Message("the file has no learning rate"))
    else:
        told = (
            ""
            if scale == 1
            else Message(
                "{rate} x {factor} = {result}, as there",
                rate=f"{rate:g}",
                factor=f"{scale:g}",
                result=f"{rate * scale:g}",
            )
        )
        draft.mapped(rate_keys, {"optimizer.lr": rate}, told)
        if unlike:
            draft.need("optimizer.lr", Message("this is {name}'s rate; AdamW8bit may need another", name=unlike))
    # By default, lr_scale would multiply the learning rate on an FP8 base by 1.4; no other tool does.
    draft.set("optimizer.lr_scale", "none" if scale == 1 else float(scale), "the rate is theirs, unscaled")
    if scale != 1:
        draft.comments["optimizer.lr_scale"] = [f"{rate} x {scale:g}: the rate as they scale it"]
    written = draft.settings.get("optimizer.name", "")
    for key, value in OWN_DEFAULTS.get(written, {}).items():
        draft.assume(f"optimizer.{key}", value, key, Message("the optimizer's own"))


def _set_optimizer_name(draft: Draft, key: str) -> str:
    """Set optimizer.name from the tool's key; return the tool's name of an optimizer without a counterpart, else ""."""
    name = draft.get(key, text) or ""
    kind = plain(name)
    own = {plain(word): word for word in accepted("optimizer.name")}
    if kind == "prodigy" and draft.tool.name == "simpletuner":
        draft.differs(key, {"optimizer.name": kind}, Message("its authors' package instead of a build of its own"))
    elif kind in own:
        draft.mapped(key, {"optimizer.name": own[kind]})
    elif kind in ALIKE:
        ours, note = ALIKE[kind]
        (draft.differs if note else draft.mapped)(key, {"optimizer.name": ours}, note)
    elif kind:
        draft.none(key, Message("there is no {name} here; AdamW8bit was written instead", name=name))
        draft.set("optimizer.name", "adamw8bit", f"instead of {name}")
        return name
    return ""


def _set_factor(draft: Draft, rate_keys: Sequence[str], rate: Any, least: float) -> None:
    """Set optimizer.lr for Prodigy: a factor on the learning rate that it finds."""
    if rate is None:
        draft.set("optimizer.lr", 1.0, Message("Prodigy's own factor"))
    elif rate < least:
        draft.mapped(
            rate_keys,
            {"optimizer.lr": 1.0},
            Message("theirs takes 1 for rates below {least} with Prodigy", least=f"{least:g}"),
        )
    elif not LEAST_FACTOR <= rate <= MOST_LR:
        told = Message(
            "with Prodigy it is a factor on the rate that is found, which {rate} is not; 1 was written",
            rate=f"{rate:g}",
        )
        draft.differs(rate_keys, {"optimizer.lr": 1.0}, told)
    else:
        draft.mapped(rate_keys, {"optimizer.lr": rate})


def growth_rate(value: Any) -> float | str:
    """Read Prodigy's growth_rate; our word for infinity is "unlimited"."""
    return "unlimited" if str(value).strip().lower() in ("inf", "infinity", "float('inf')") else number(value)


def set_prodigy(draft: Draft, keys: Mapping[str, str]) -> None:
    """Set Prodigy's own settings; `keys` maps our names to the tool's keys."""
    for name, key in keys.items():
        if draft.settings.get("optimizer.name") != "prodigy":
            draft.none(key, Message("belongs to Prodigy"), off=True)
        elif draft.has(key):
            draft.mapped(key, {f"optimizer.{name}": draft.get(key, OF_PRODIGY[name])})


OF_PRODIGY: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("d0", "d_coef"), number),
    **dict.fromkeys(("safeguard_warmup", "use_bias_correction", "decouple"), flag),
    "growth_rate": growth_rate,
}
"""Prodigy's own settings, which have the same names here."""
OPTIMIZER_ARGUMENTS = {
    "weight_decay": ("optimizer.weight_decay", number),
    "eps": ("optimizer.eps", number),
    "beta1": ("optimizer.beta1", number),
    "beta2": ("optimizer.beta2", number),
}


def set_optimizer_arguments(draft: Draft, key: str, arguments: Any) -> None:
    """Set weight_decay, betas, eps and Prodigy's settings from ["weight_decay=0.1", "betas=0.9,0.99"] or "a=1 b=2"."""
    if isinstance(arguments, str):
        arguments = re.split(r"[ ;]+|,(?=\s*[A-Za-z_])", arguments.strip())
    prodigy = draft.settings.get("optimizer.name") == "prodigy"
    of_prodigy = {name: (f"optimizer.{name}", read) for name, read in OF_PRODIGY.items()}
    known = OPTIMIZER_ARGUMENTS | (of_prodigy if prodigy else {})
    settings: dict[str, Any] = {}
    left: list[str] = []
    for argument in listed(arguments):
        name, _, value = (part.strip().strip("\"'") for part in str(argument).partition("="))
        try:
            if name == "betas":
                first, second = (number(part) for part in value.strip("()[] ").split(","))
                settings |= {"optimizer.beta1": first, "optimizer.beta2": second}
            elif name in known:
                setting, read = known[name]
                settings[setting] = read(value)
            elif name:
                left.append(str(argument))
        except (Unfit, ValueError):
            left.append(str(argument))
    if left and settings:
        draft.differs(key, settings, Message("not known here: {names}", names=", ".join(left)))
    elif left:
        draft.none(key, Message("not known to the optimizers here"))
    else:
        draft.mapped(key, settings)


@dataclass(frozen=True)
class ScheduleKeys:
    """The tool's keys of a schedule; "" if there is none."""

    name: str
    warmup: str = ""
    cycles: str = ""
    power: str = ""
    floor: str = ""


def set_schedule(
    draft: Draft,
    keys: ScheduleKeys,
    *,
    warmup: float | None = None,
    floor: float | None = None,
    warmup_note: str = "",
    constant_warms_up: bool = False,
) -> None:
    """Set schedule.name, warmup and min_lr.

    Args:
        draft: the import.
        keys: the tool's keys.
        warmup: steps, or a fraction below 1; None or 0 for none.
        floor: final learning rate, as a fraction of the learning rate.
        warmup_note: remark on the warm-up.
        constant_warms_up: the tool's "constant" schedule warms up (diffusers' does not).
    """
    name = draft.get(keys.name, text) or "constant"
    spent = _set_curve(draft, keys, name)
    for key in (keys.cycles, keys.power):
        if key and key != spent:
            draft.none(key, f"means nothing to {name}", off=True)
    if keys.warmup:
        ignored = plain(name) == "constant" and not constant_warms_up
        if warmup and ignored:
            draft.none(keys.warmup, "'constant' does not warm up there, so it does not here", off=True)
        elif warmup:
            steps = float(warmup) if warmup < 1 else round(warmup)
            draft.mapped(keys.warmup, {"schedule.warmup": steps}, warmup_note)
        else:
            draft.mapped(keys.warmup, {"schedule.warmup": 0})
    if keys.floor:
        if floor and draft.settings.get("schedule.name") in ("cosine", "cosine_with_restarts", "linear"):
            draft.mapped(keys.floor, {"schedule.min_lr": float(f"{floor:.12g}")})
        else:
            draft.none(keys.floor, f"means nothing to {name}", off=True)


def _set_curve(draft: Draft, keys: ScheduleKeys, name: str) -> str:
    """Set schedule.name, and schedule.cycles with it; return the key of the cycles or the power if it counted."""
    kind = plain(name)
    cycles = draft.get(keys.cycles, number) if keys.cycles else None
    power = draft.get(keys.power, number) if keys.power else None
    own = {plain(word): word for word in accepted("schedule.name")}
    if kind in ("cosinewithrestarts", "cosinewithhardrestarts"):
        if cycles is None or cycles == 1:
            draft.mapped(
                [keys.name, keys.cycles], {"schedule.name": "cosine"}, Message("one cycle of restarts is the cosine")
            )
        else:
            settings = {"schedule.name": "cosine_with_restarts", "schedule.cycles": whole(cycles)}
            draft.mapped([keys.name, keys.cycles], settings)
        return keys.cycles
    if kind == "polynomial" and kind not in own:
        if power is None or power == 1:
            draft.mapped(
                [keys.name, keys.power], {"schedule.name": "linear"}, Message("a polynomial of power 1 is the line")
            )
        else:
            draft.differs(
                [keys.name, keys.power],
                {"schedule.name": "linear"},
                Message("a line instead of power {power}", power=f"{power:g}"),
            )
        return keys.power
    ours = {"constantwithwarmup": "constant", "cosinewithminlr": "cosine"}.get(kind, kind)
    if kind == "sine":
        draft.differs(
            keys.name, {"schedule.name": "cosine"}, Message("a falling cosine instead of a sine that rises again")
        )
    elif ours in own:
        draft.mapped(keys.name, {"schedule.name": own[ours]})
    else:
        draft.none(keys.name, Message("there is no schedule {name} here; constant was written", name=repr(name)))
        draft.set("schedule.name", "constant")
        draft.need(
            "schedule.name", Message("choose one of {names} for {name}", names=", ".join(own.values()), name=repr(name))
        )
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Folders and steps


def look_into(draft: Draft, folder: Folder, *, deep: bool) -> Folder:
    """Count a folder's images, and those without a caption, if the folder exists here.

    Args:
        draft: the import.
        folder: receives the counts.
        deep: the other tool searches subfolders. Ours does; images that only ours would find are reported.
    """
    place = draft.find(folder.path)
    if place is None or not place.is_dir():
        return folder
    every = sorted(p for p in place.rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())
    labels = {parent / name for parent in {p.parent for p in every} for name in labelled(os.listdir(parent))}
    every = [p for p in every if p not in labels and not masked_stem(folder.mask, p.name)]
    pictures = every if deep else [p for p in every if p.parent == place]
    if len(pictures) < len(every):
        draft.notes.append(
            Message(
                "{path}: {count} pictures in subfolders, which ours takes and theirs does not",
                path=folder.path,
                count=len(every) - len(pictures),
            )
        )
    folder.images = len(pictures)
    folder.captionless = sum(not any(p.with_suffix(end).is_file() for end in CAPTIONS) for p in pictures)
    return folder


def caption_by_trigger(folder: Folder, words: str) -> str:
    """Set the trigger to the words that caption images without a caption file; return the remark for the report."""
    if folder.images and folder.captionless == folder.images:
        folder.trigger, folder.trigger_is_caption = words, True
        return Message(
            "no picture has a caption file, so it is the folder's trigger, and with missing_caption the caption"
        )
    return Message(
        "the caption of pictures without one there; here dataset.missing_caption = 'trigger' with this as "
        "trigger, which is put in front of the captions that lack it as well"
    )


def samples(draft: Draft) -> int | None:
    """Return images times repeats, summed over all folders; None if a folder does not exist here."""
    if not draft.folders or any(folder.images is None for folder in draft.folders):
        return None
    shown = [(folder.images or 0) * folder.repeats for folder in draft.folders if not folder.regularization]
    # kohya's trainers train on as many regularization images as on others, whatever their number.
    return sum(shown) * (2 if any(folder.regularization for folder in draft.folders) else 1)


def balance_regularization(draft: Draft) -> None:
    """Set the repeats of regularization folders so that they are trained on about as often as the others."""
    others = [folder for folder in draft.folders if folder.regularization]
    wanted, there = samples(draft), sum(folder.images or 0 for folder in others)
    if others and wanted and there:
        for folder in others:
            folder.repeats = max(1, round(wanted / 2 / there))
        if there > wanted // 2:
            draft.notes.append(
                Message(
                    "there are {count} regularization pictures, of which theirs shows the first {shown} an "
                    "epoch; here all are shown, so that they count more: take some out, or lower their folders' "
                    "weight",
                    count=there,
                    shown=wanted // 2,
                )
            )


def weigh_regularization(draft: Draft, key: str) -> None:
    """Set the weight of the regularization folders."""
    others, weight = [folder for folder in draft.folders if folder.regularization], draft.get(key, number)
    if not others:
        draft.none(key, "there are no regularization pictures", off=True)
    elif weight is not None and weight <= 0:
        draft.none(key, Message("here they count, as without it: take their folders out instead"))
    elif weight is not None:
        for folder in others:
            folder.weight = weight
        draft.mapped(key, {}, Message("the weight of the folders for regularization"))


def weigh(draft: Draft, key: str, folder: Folder, at: str) -> None:
    """Set the weight of one folder's images in the loss.

    Args:
        draft: the import.
        key: the tool's key.
        folder: the folder of images.
        at: our name of the folder, such as "dataset.folders.0".
    """
    weight = draft.get(key, number)
    if weight is not None and weight <= 0:
        draft.none(key, NO_WEIGHT)
    elif weight is not None:
        folder.weight *= weight
        draft.mapped(key, {}, f"{at}.weight")


def steps_per_epoch(draft: Draft, batch: int, accumulate: int, processes: int = 1) -> int | None:
    """Return the optimizer steps per epoch as kohya's trainers count them; None if the images are not here.

    With `batch` above 1, bucketing adds a partly filled batch per bucket, which is not counted.
    """
    count = samples(draft)
    if not count:
        return None
    return math.ceil(math.ceil(count / batch) / processes / accumulate)


def set_steps_from_epochs(draft: Draft, key: str, epochs: int, per_epoch: int | None, batch: int) -> None:
    """Set train.steps from epochs, by counting the images; add a TODO if they are not here."""
    if per_epoch is None:
        draft.none(
            key, Message("train.steps counts steps; {epochs} epochs are not known without the pictures", epochs=epochs)
        )
        draft.need(
            "train.steps",
            Message(
                "{epochs} epochs = {epochs} x pictures x repeats / (train.batch_size x train.accumulate); import "
                "again where the pictures are, or put the number in",
                epochs=epochs,
            ),
        )
        draft.set("train.steps", 1500)
        return
    note: str = Message(
        "{epochs} epochs x {steps} steps, from {samples} samples; steps are counted here, not epochs",
        epochs=epochs,
        steps=per_epoch,
        samples=samples(draft),
    )
    if batch > 1:
        note += ", and each bucket's last batch may be smaller and add a step"
    draft.differs(key, {"train.steps": epochs * per_epoch}, note)


def set_every(
    draft: Draft,
    setting: str,
    keys: tuple[str, str],
    per_epoch: int | None,
    note: str = "",
    *,
    epochs_count: bool = False,
) -> None:
    """Set checkpoint.every (and with it export.every) or preview.every from steps, or by counting from epochs.

    Args:
        draft: the import.
        setting: our setting.
        keys: the tool's keys with the steps and with the epochs; "" if there is none.
        per_epoch: steps per epoch; None if unknown.
        note: the difference in meaning, if there is one.
        epochs_count: if both are given, the tool ignores the steps; other tools do both.
    """
    steps_key, epochs_key = keys

    def every(steps: int) -> dict[str, int]:
        return {setting: steps} | ({"export.every": steps} if setting == "checkpoint.every" else {})

    steps = whole(draft.get(steps_key) or 0) if steps_key else 0
    epochs = whole(draft.get(epochs_key) or 0) if epochs_key else 0
    if steps > 0 and epochs > 0 and epochs_count:
        draft.none(steps_key, f"{epochs_key} counts", off=True)
        steps = 0
    if steps > 0:
        account = draft.differs if note else draft.mapped
        account(steps_key, every(steps), note)
        if epochs > 0:
            draft.none(epochs_key, Message("theirs does both; here one interval, that of {key}", key=steps_key))
        elif epochs_key:
            draft.none(epochs_key, "off", off=True)
        return
    if steps_key:
        draft.none(steps_key, "off", off=True)
    if epochs > 0 and per_epoch:
        told = Message(
            "every {epochs} x {steps} steps; steps are counted here, not epochs", epochs=epochs, steps=per_epoch
        )
        draft.differs(epochs_key, every(epochs * per_epoch), f"{told}; {note}" if note else told)
    elif epochs > 0:
        draft.none(
            epochs_key,
            Message("{setting} counts steps, and an epoch's are not known without the pictures", setting=setting),
        )
        draft.todo.append(
            Message("{key}: theirs is every {epochs} epochs; the default was left", key=setting, epochs=epochs)
        )
    elif epochs_key:
        draft.none(epochs_key, "off", off=True)


ONE_LOSS = Message("objective.loss knows mse, and huber and smooth_l1 with a sharp or a round corner")


def set_huber(draft: Draft) -> None:
    """Set objective.loss and its delta from loss_type and huber_c, as kohya's scripts and SimpleTuner define them."""
    kind = plain(draft.get("loss_type") or "l2")
    more = ["huber_c", "huber_scale", "huber_schedule"]
    flow = bool(draft.family) and draft.family not in DIFFUSION
    if kind in ("huber", "smoothl1") and flow and draft.tool.name == "simpletuner":
        draft.none(
            ["loss_type", *more], Message("theirs trains flow-matching models with the squared error all the same")
        )
    elif kind in ("huber", "smoothl1"):
        schedule = str(draft.get("huber_schedule") or "snr")
        delta = 0.1 if draft.get("huber_c") is None else draft.get("huber_c", number)
        scale = 1.0 if draft.get("huber_scale") is None else draft.get("huber_scale", number)
        ours: dict[str, Any] = {"objective.loss": "pseudo_huber" if kind == "huber" else "pseudo_smooth_l1"}
        if schedule == "constant":
            draft.mapped(["loss_type", *more], ours | {"objective.huber_delta": delta * scale})
        elif schedule == "exponential":
            ours |= {"objective.huber_delta": delta, "objective.huber_schedule": schedule}
            draft.mapped(["loss_type", *more], ours | ({"objective.huber_scale": scale} if scale != 1 else {}))
        elif schedule == "snr" and not flow:
            draft.none("huber_scale", Message("means nothing with {key}", key="huber_schedule = snr"), off=True)
            ours |= {"objective.huber_delta": delta, "objective.huber_schedule": schedule}
            draft.mapped(["loss_type", *more], ours)
        else:
            told = Message(
                "huber_schedule = {schedule} is for no flow-matching model, there or here; constant was written",
                schedule=schedule,
            )
            draft.differs(["loss_type", *more], ours | {"objective.huber_delta": delta * scale}, told)
    draft.none("loss_type", ONE_LOSS, off=kind in ("l2", "mse"))
    draft.none(more, Message("belongs to the Huber loss"), off=True)


def part_of_name(word: str) -> str:
    """Convert a part of a layer's name to our pattern; "transformer." or "unet." stands for the start of the name."""
    inner = re.sub(r"^(transformer|unet)\.", "", word)
    begin = "^" if inner != word else "" if word.startswith(".") else "*"
    found = begin + inner.strip(".") + ("" if word.endswith(".") else "*")
    if not inner.strip(".") or re.search(r"[\s=]", found):
        raise Unfit(Message("{word} is no part of a name", word=repr(word)))
    return found


def set_filter(draft: Draft, keys: Sequence[str], only: Sequence[str], without: Sequence[str], rank: int) -> None:
    """Set adapter.ranks from parts of names that a layer must contain (`only`), or must not (`without`)."""
    try:
        entries = dict.fromkeys(map(part_of_name, without), 0)
        entries |= {name: rank for name in map(part_of_name, only) if name not in entries}
        entries |= {"*": 0} if only and "*" not in entries else {}
    except Unfit as error:
        draft.none(keys, Message("adapter.ranks was not written: {why}", why=error))
        return
    told = Message("of the layers that are adapted here; take out what fits none of them, which `check` tells")
    draft.differs(keys, {"adapter.ranks": entries}, told)


def share(
    draft: Draft, keys: Sequence[str], values: Sequence[Any], setting: str, read: Callable[[Any], Any], note: str = ""
) -> None:
    """Set one setting of ours from what the other tool sets per folder.

    Args:
        draft: the import.
        keys: all of the tool's keys for it.
        values: the value for each folder; None if it has none.
        setting: our setting.
        read: converts the tool's value to ours.
        note: the difference in meaning, if there is one.
    """
    try:
        found = [None if value in (None, "") else read(value) for value in values]
    except Unfit as error:
        draft.none(keys, Message("{setting} was not written: {line}", setting=setting, line=error))
        return
    given = [value for value in found if value is not None]
    if not given:
        draft.none(keys, "empty", off=True)
        return
    common = Counter(given).most_common(1)[0][0]
    told = [note] if note else []
    if len(set(found)) > 1:
        told.append(Message("one value here for all folders, the most frequent: {value}", value=repr(common)))
    (draft.differs if told else draft.mapped)(keys, {setting: common}, "; ".join(told))


def side_of(value: Any) -> tuple[int, str]:
    """Return the side of the square with the area of a side, "w,h" or [w, h], and the remark if it was rounded."""
    parts = value if isinstance(value, list) else re.split(r"[,x]", str(value))
    numbers = [whole(part) for part in parts]
    if not numbers or min(numbers) <= 0 or len(numbers) > 2:
        raise Unfit(Message("{value} is no resolution", value=repr(value)))
    side = math.sqrt(numbers[0] * numbers[-1])
    if side == int(side):
        return int(side), ""
    rounded = max(64, round(side / 64) * 64)
    return rounded, Message(
        "{size} is an area of {side} squared; here the side of a square, {ours}",
        size=value,
        side=f"{side:.1f}",
        ours=rounded,
    )


def set_resolution(draft: Draft, keys: Sequence[str], values: Sequence[Any], note: str = "") -> None:
    """Set dataset.resolution, the side of the square with the training area, from sides, "w,h" or [w, h].

    Of several resolutions the largest is taken, which is reported.
    """
    found = [side_of(value) for value in values]
    if not found:
        draft.none(keys, "empty", off=True)
        return
    side, rounded = max(found)
    told = [note] if note else []
    if len(set(found)) > 1:
        told.append(
            Message(
                "one resolution here, the largest; theirs were {sizes}", sizes=", ".join((str(one) for one, _ in found))
            )
        )
    told += [rounded] if rounded else []
    account = draft.differs if told else draft.mapped
    account(keys, {"dataset.resolution": side}, "; ".join(told))


def set_resolutions(draft: Draft, keys: Sequence[str], values: Sequence[Any], note: str = "") -> None:
    """Set dataset.resolution to the largest resolution, and that of each folder that has another one.

    Args:
        draft: the import.
        keys: the tool's keys.
        values: as for `set_resolution`, one per folder in `draft.folders`; None if a folder has none.
        note: the difference in meaning, if there is one.
    """
    if len(values) != len(draft.folders) or len(set(map(str, values))) == 1:
        set_resolution(draft, keys, [value for value in values if value], note)
        return
    found = [side_of(value) if value else None for value in values]
    largest = max(one for one in found if one)[0]
    for folder, one in zip(draft.folders, found, strict=True):
        folder.resolution = one[0] if one and one[0] != largest else 0
    rounded = [one[1] for one in found if one and one[1]]
    told = "; ".join(dict.fromkeys([*([note] if note else []), *rounded]))
    account = draft.differs if told else draft.mapped
    account(keys, {"dataset.resolution": largest}, told or Message("the largest, and folders that have another say so"))


# ---------------------------------------------------------------------------------------------------------------------
# Timesteps and previews


def set_timesteps(
    draft: Draft, keys: Sequence[str], shape: str, shift: float | str, note: str = "", exact: bool = True
) -> None:
    """Set objective.timesteps and shift, which families that predict noise do not have."""
    if draft.family in DIFFUSION:
        draft.none(keys, f"means nothing to {draft.family}, which draws its timesteps uniformly", off=True)
        return
    account = draft.mapped if exact else draft.differs
    shift = "scheduler" if shift == "auto" else shift  # the sampler's; our "auto" may differ
    account(keys, {"objective.timesteps": shape, "objective.shift": shift}, note)


def set_min_snr(draft: Draft, key: str, weight: float | None = None) -> None:
    """Set objective.min_snr_gamma, for families that have it."""
    gamma = draft.get(key, number) if weight is None else weight
    if not gamma:
        draft.none(key, "off", off=True)
    elif draft.family and draft.family not in DIFFUSION:
        draft.none(key, f"flow-matching models such as {draft.family} have no such weight, there or here", off=True)
    else:
        draft.mapped(key, {"objective.min_snr_gamma": float(gamma)})


def set_prediction(draft: Draft, key: str, predicts: str) -> None:
    """Set objective.prediction, for families of which some models predict noise and some v.

    Args:
        draft: the import.
        key: the tool's key.
        predicts: "epsilon" or "v"; "" if the key is off.
    """
    if not predicts:
        draft.none(key, "off", off=True)
    elif draft.family and draft.family not in DIFFUSION:
        draft.none(key, f"flow-matching models such as {draft.family} predict neither noise nor v", off=True)
    else:
        draft.mapped(key, {"objective.prediction": predicts})


BLOCKS = {"hidream": (16, 32), "lumina2": (26, 0)}
"""Numbers of double-stream and single-stream blocks, for families that do not state those of the released model."""


def set_offload(draft: Draft, keys: str | Sequence[str], share: float, told: str) -> None:
    """Set memory.offload; called after precision and compilation are set, as it depends on them.

    Args:
        draft: the import.
        keys: the tool's keys.
        share: fraction of the frozen weights that the tool keeps in RAM.
        told: the difference in meaning.
    """
    if share <= 0:
        draft.none(keys, "off", off=True)
        return
    share = min(1.0, round(share, 2))
    storage = draft.settings.get("quantize.storage", Quantize.model_fields["storage"].default)
    if storage in ("bf16", "none"):
        draft.none(keys, Message("memory.offload needs a quantized base: quantize.storage = 'fp8' halves it"))
        what = Message(
            "theirs keeps about {share} of the base in main memory; with quantize.storage = 'fp8' set this share",
            share=f"{share:g}",
        )
        draft.need("memory.offload", what)
        return
    if draft.settings.get("memory.compile", "off") != "off":
        draft.set("memory.compile", "off", "excluded by memory.offload")
        told += "; memory.compile was left off, which excludes it"
    draft.differs(keys, {"memory.offload": share}, told)


def set_swap(draft: Draft, key: str) -> None:
    """Set memory.offload from a number of blocks; kohya swaps two single-stream blocks per double-stream block."""
    number_of = draft.get(key, whole) or 0
    stated: Mapping[str, Any] = {}
    if draft.family in families.available():
        stated = families.get(draft.family).reference_config
    double = stated.get("num_layers", stated.get("n_layers", 0))
    double, single = BLOCKS.get(draft.family, (double, stated.get("num_single_layers", 0)))
    if draft.family == "wan" and re.search(r"1[._]3b", str(draft.settings.get("model.path")).lower()):
        double = 30
    if number_of > 0 and not double:
        draft.none(key, Message("how many blocks this architecture has is not known here; memory.offload is a share"))
        draft.need(
            "memory.offload", Message("theirs keeps {number} blocks in main memory; choose a share", number=number_of)
        )
        return
    swapped = number_of if not single else number_of // 2 + 2 * (number_of - number_of // 2)
    told = Message(
        "about {swapped} of {blocks} blocks; here a share of all frozen weights",
        swapped=min(swapped, double + single),
        blocks=double + single,
    )
    set_offload(draft, key, swapped / (double + single) if number_of > 0 else 0.0, told)


def set_noise_offset(draft: Draft, key: str, heeded: bool = True) -> None:
    """Set objective.noise_offset, for families that have it.

    Args:
        draft: the import.
        key: the tool's key.
        heeded: the other tool shifts the noise of flow-matching models too.
    """
    offset = draft.get(key, number)
    if not offset:
        draft.none(key, "off", off=True)
    elif draft.family in DIFFUSION:
        draft.mapped(key, {"objective.noise_offset": float(offset)})
    elif draft.family and not heeded:
        draft.none(key, f"flow-matching models such as {draft.family} have no noise offset, there or here", off=True)
    else:
        draft.none(key, NO_NOISE)


def set_bucket_step(draft: Draft, keys: Sequence[str], values: Sequence[Any]) -> None:
    """Set dataset.bucket_step, which is at least 8 pixels.

    Args:
        draft: the import.
        keys, values: as for `share`.
    """
    given = [whole(value) for value in values if value not in (None, "")]
    note = Message("{number} there; 8 pixels is the least here", number=min(given)) if given and min(given) < 8 else ""
    share(draft, keys, values, "dataset.bucket_step", lambda value: max(8, whole(value)), note)


def set_clips(
    draft: Draft, keys: Sequence[str], lengths: Sequence[int], part_keys: Sequence[str], part: str | None, note: str
) -> None:
    """Set the lengths of clips, and which part of a clip is taken, if the architecture draws clips.

    Args:
        draft: the import.
        keys: the tool's keys with the lengths.
        lengths: in frames; rounded down to what the model's VAE takes, as the other trainers do too.
        part_keys: the tool's keys with the part.
        part: our word for the part; None if there is none.
        note: the difference in meaning.
    """
    step, _ = families.get(draft.family).clips if draft.family in families.available() else (0, 0)
    if max(lengths, default=1) <= 1 or not step:
        draft.none([*keys, *part_keys], NO_CLIPS, off=max(lengths, default=1) <= 1)
        return
    draft.differs(keys, {"dataset.frames": sorted({max(1, (one - 1) // step * step + 1) for one in lengths})}, note)
    if part is None:
        draft.none(part_keys, Message("of a clip its head, its middle or chunks are taken here: dataset.clip"))
    else:
        draft.mapped(part_keys, {"dataset.clip": part})


def set_previews(draft: Draft, keys: Mapping[str, str], pictures: Sequence[Mapping[str, Any]], note: str = "") -> None:
    """Set preview.* from a list of {"prompt", "negative", "width", "height", "steps", "guidance", "seed"}.

    Each preview has its own prompt; everything else has one value for all of them here.

    Args:
        draft: the import.
        keys: the tool's key -> the preview settings of ours that it holds, such as "width height"; "" for all of them.
        pictures: one table per preview.
        note: the difference in meaning, if there is one.
    """
    prompts = [str(picture["prompt"]) for picture in pictures if picture.get("prompt")]
    settings: dict[str, Any] = {"preview.prompts": prompts}
    told = [note] if note else []
    settings |= _preview_controls(draft, pictures, told) | _preview_frames(draft, pictures, told)
    settings |= _preview_values(pictures, told) | _preview_sides(pictures, told)
    if settings.get("preview.seed", 0) < 0:
        del settings["preview.seed"]
        told.append(Message("a negative seed means a random one there; previews here keep theirs"))
    account = draft.differs if told else draft.mapped
    for key, names in keys.items():
        own = {name: value for name, value in settings.items() if name.removeprefix("preview.") in names.split()}
        account(key, own if names else settings, "; ".join(told))
    for name, value in settings.items():
        draft.settings.setdefault(name, value)


def _given_values(pictures: Sequence[Mapping[str, Any]], name: str, read: Callable[[Any], Any]) -> list[Any]:
    """Return the values of one name in the previews that have it."""
    return [read(picture[name]) for picture in pictures if picture.get(name) not in (None, "")]


def _preview_values(pictures: Sequence[Mapping[str, Any]], told: list[str]) -> dict[str, Any]:
    """Return preview.negative, steps, guidance and seed, each from the first preview that has it."""
    settings: dict[str, Any] = {}
    for name, read in (("negative", text), ("steps", whole), ("guidance", number), ("seed", whole)):
        values = _given_values(pictures, name, read)
        if not values:
            continue
        settings[f"preview.{name}"] = values[0]
        # Our previews count seeds up from the first one.
        expected = [values[0] + i for i in range(len(values))] if name == "seed" else [values[0]] * len(values)
        if values != expected:
            told.append(f"one {name} for all previews here" + (", counting up" if name == "seed" else ""))
    return settings


def _preview_sides(pictures: Sequence[Mapping[str, Any]], told: list[str]) -> dict[str, Any]:
    """Return preview.width and height, each from the first preview that has it, as a multiple of 16."""
    settings: dict[str, Any] = {}
    for name in ("width", "height"):
        values = _given_values(pictures, name, whole)
        if values:
            settings[f"preview.{name}"] = round(values[0] / 16) * 16
            if len(set(values)) > 1 or values[0] % 16:
                told.append(Message("one {name} for all previews here, a multiple of 16", name=name))
    return settings


def _preview_controls(draft: Draft, pictures: Sequence[Mapping[str, Any]], told: list[str]) -> dict[str, Any]:
    """Return preview.controls, one image per prompt, if the family takes control images."""
    given = [picture.get("controls") or [] for picture in pictures if picture.get("prompt")]
    if not any(given):
        return {}
    if draft.family not in families.available() or not any(families.get(draft.family).controls):
        told.append(Message("previews are shown no control images here"))
        return {}
    if not all(given):
        told.append(Message("one control image for each prompt here, and some of theirs have none"))
        draft.need("preview.controls", Message("a control image for each prompt, or none at all"))
        return {}
    written = [_one_control(draft, [text(image) for image in images]) for images in given]
    if several := [" + ".join(map(text, images)) for images, path in zip(given, written, strict=True) if not path]:
        told.append(Message("several control images of one prompt are a folder here, and none was written"))
        images = ", ".join(several[:3]) + (" ..." if len(several) > 3 else "")
        draft.need(
            "preview.controls",
            Message(
                "prompts with several control images ({images}): put those of each into a folder that holds just "
                "them, and name the folders here",
                images=images,
            ),
        )
        return {}
    return {"preview.controls": written}


def _one_control(draft: Draft, images: list[str]) -> str:
    """Return the only image, or the folder that contains exactly these images in order of their names, or ""."""
    if len(images) == 1:
        return images[0]
    parents = {os.path.dirname(image) for image in images}
    place = draft.find(parent) if len(parents) == 1 and (parent := parents.pop()) else None
    try:
        held = sorted(one.name for one in place.iterdir()) if place is not None else []
    except OSError:  # no folder, or unreadable: the user has to name its images
        return ""
    held = [name for name in held if os.path.splitext(name)[1].lower() in EXTENSIONS and not name.startswith(".")]
    return os.path.dirname(images[0]) if held == [os.path.basename(image) for image in images] else ""


def _preview_frames(draft: Draft, pictures: Sequence[Mapping[str, Any]], told: list[str]) -> dict[str, Any]:
    """Return preview.frames, rounded down to a length that the model draws."""
    step, _ = families.get(draft.family).clips if draft.family in families.available() else (0, 0)
    lengths = [whole(picture["frames"]) for picture in pictures if picture.get("frames") not in (None, "")]
    if not step or max(lengths, default=1) <= 1:
        return {}
    if len(set(lengths)) > 1:
        told.append(Message("one length for all previews here"))
    return {"preview.frames": (lengths[0] - 1) // step * step + 1}


def set_seed(draft: Draft, key: str) -> None:
    """Set seed; for other tools, no seed or -1 is a random one, here 0 is used."""
    seed = draft.get(key, whole)
    if seed is None:
        draft.none(key, "empty", off=True)
    elif seed < 0:
        draft.none(key, Message("a random seed there; here 0, so that a run can be repeated"))
    elif seed > MAX_SEED:
        draft.differs(key, {"seed": seed % (MAX_SEED + 1)}, f"at most {MAX_SEED} here: the remainder")
    else:
        draft.mapped(key, {"seed": seed})


def set_name(draft: Draft, key: str, value: str | None = None, note: str = "") -> None:
    """Set name, without characters that a folder's name cannot have."""
    given = draft.get(key, text) if value is None else value
    if not given:
        draft.none(key, "empty", off=True)
        return
    name = "".join("-" if c in "/\\" or not c.isprintable() else c for c in given).strip()[:120]
    name = name if name not in ("", ".", "..") else "my-lora"
    told = note if name == given else "; ".join(filter(None, (note, Message("without what cannot name a folder"))))
    (draft.mapped if name == given else draft.differs)(key, {"name": name}, told)


def stem(path: str) -> str:
    """Return the file name in a path, which may be a Windows path, without its suffix."""
    return PureWindowsPath(path).stem


def on(value: Any) -> bool:
    """Return True if a flag is set to true; an empty value is False."""
    return value not in (None, "") and flag(value)


WHOLE_RANK = 1024
"""Rank that selects LoKr's whole matrices here, as no side of a matrix is twice as long as this.

Other tools use a flag, or a rank larger than any layer's.
"""


def lokr_factor(value: Any) -> int:
    """Return adapter.factor from LyCORIS' factor, whose -1 is 0 here."""
    return max(said_number("factor", value), 0)


def said_number(what: str, value: Any) -> int:
    """Read a whole number from inside another program's settings.

    Raises:
        UserError: it is not a whole number.
    """
    try:
        return int(str(value))
    except ValueError:
        raise UserError(Message("{key} = {given}: expected a whole number", key=what, given=repr(value))) from None


def lokr_rank(rank: int, whole: Any) -> int:
    """Return adapter.rank for a LoKr."""
    return WHOLE_RANK if on(whole) or rank > WHOLE_RANK else rank
