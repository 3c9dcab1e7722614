"""What all tools share: names of optimizers, schedules, storages and families, and the arithmetic of steps."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PureWindowsPath
from typing import Any, get_args

from lora_fp8 import config, families
from lora_fp8.data.decoding import EXTENSIONS
from lora_fp8.data.images import CAPTIONS, labelled, masked_stem
from lora_fp8.rules import LEAST_FACTOR, MOST_LR

from .base import Draft, Folder, Unfit, flag, listed, number, text, whole

NO_TEXT_ENCODER = "no text encoder of this architecture is trained here; only the denoiser is"
TRAINED_TEXT = ("sd15", "sd2", "sdxl", "sd3", "flux", "flux_kontext")
"""The families of which adapter.text_encoder trains the CLIPs; a test holds it against theirs."""
NOT_HERE = "nothing like it here"
ALWAYS_CACHED = "pictures and captions are always encoded beforehand, into dataset.cache_dir"
OTHER_CACHE = "caches of other tools are not read; ours is made anew in dataset.cache_dir"
ATTENTION = "attention is always torch's scaled_dot_product_attention"
LOGGING = "events.jsonl and log.txt in the run folder hold everything; trackers are not fed"
UPLOAD = "files are not uploaded"
RESUMES = "their states cannot be read; `lora-fp8 resume` goes on with our own runs"
NO_NOISE = "plain Gaussian noise is used here"
NO_MASK = "masks are used as they are drawn here: dataset.folders.N.mask"
MASK_AREA = (
    "theirs divides the loss by the mask's area, so that a small mask counts as much as a large one; ours does not"
)
OUTSIDE = "what is outside of a mask counts nothing there"
NO_WEIGHT = "a folder's weight is above 0 here: take the folder out instead"
NO_REG = (
    "the base's own answers are not trained on here, nor counted in an epoch; pictures with captions of their own can "
    "be a folder with regularization = true"
)
SHOWN_ALIKE = (
    "a folder with regularization = true; there they are shown as often as the others, here each `repeats` times an "
    "epoch, chosen to come to the same where the pictures are here"
)
FULL_STRENGTH = "the LoRA trains at full strength on every folder"
NO_EMA = "no moving average of the weights is kept here"
START = "its rank must be adapter.rank"
NO_SWAP = "here a share of the frozen weights may wait in main memory instead: memory.offload"
NO_CLIPS = "clips are trained of wan, hunyuan_video and ltx_video only: dataset.frames"
SAVED = "the LoRA files of that step, and a checkpoint to go on from"
NO_SPREAD = "frames are never spread over a whole clip here, which would make it move faster; see dataset.frames"
NO_SAMPLER = "previews are drawn with the model's own scheduler"
COMPONENTS = "a diffusers folder with the VAE, text encoders and tokenizers, which a single file lacks"

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
"""Architectures in the field's words -> the names that a family of ours may have; the first that exists is taken."""
DIFFUSION = ("sd15", "sd2", "sd21", "sd20", "sdxl", "kolors")
"""Families that predict noise or v: min-SNR means something to them, timestep shifts do not."""


def thousandths(value: Any) -> float:
    """A timestep of 1000 as a share of all noise."""
    return number(value) / 1000


def accepted(setting: str) -> list[str]:
    """The words that a setting of ours takes now, such as the optimizers that exist."""
    section, _, name = setting.rpartition(".")
    model: Any = config.Job.model_fields[section].annotation
    found: list[str] = []

    def look(annotation: Any) -> None:
        for argument in get_args(annotation):
            found.append(argument) if isinstance(argument, str) else look(argument)

    look(model.model_fields[name].annotation)
    return found


def plain(name: Any) -> str:
    """A name without case, dots, dashes and underscores, to compare."""
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def choice(table: Mapping[str, str], what: str) -> Callable[[Any], str]:
    """Reader for one of some words; anything else is `Unfit`."""

    def read(value: Any) -> str:
        found = table.get(plain(value))
        if found is None:
            raise Unfit(f"{value!r} has no counterpart among {what}")
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
    """model.family from an architecture in the field's words; "" when the file does not say.

    A name that the user gave (`Draft.family`) wins.
    """
    available = families.available()
    if draft.family:
        given = draft.family
        draft.set("model.family", given, "--family")
        draft.mapped(keys, {}, "--family was given")
        if given not in available:
            draft.need("model.family", f"{given!r} is not a family of this version; there are {', '.join(available)}")
        return
    if not kind:
        draft.set("model.family", "TODO")
        draft.need("model.family", f"{why}; there are {', '.join(available)}")
        return
    spelled = {plain(name): name for name in available}
    name = next((spelled[plain(n)] for n in (*FAMILY_NAMES.get(kind, ()), kind) if plain(n) in spelled), "")
    draft.family = name or kind
    draft.mapped(keys, {"model.family": draft.family}, why)
    draft.comments["model.family"] = [why]
    if not name:
        draft.need("model.family", f"this version has no family for {kind}; there are {', '.join(available)}")


def set_control(draft: Draft, key: str, folder: Folder, at: str) -> None:
    """A folder of control pictures under the names of the pictures, for families that are shown any.

    Args:
        at: our folder, such as "dataset.folders.0".
    """
    if not draft.has(key) or not (path := draft.get(key)):
        return
    if draft.family not in families.available() or "controls" not in families.facts(draft.family):
        draft.none(key, f"{draft.family} is shown no control pictures here")
    elif not isinstance(path, str):
        draft.none(key, f"one folder here: put several of one picture into it as name_1, name_2, and name it in {at}")
    else:
        folder.control = path
        draft.mapped(key, {}, f"{at}.control")


def set_mask_folder(draft: Draft, key: str, folder: Folder, at: str) -> None:
    """A folder of masks under the names of the pictures.

    Args:
        at: our folder, such as "dataset.folders.0".
    """
    if path := draft.get(key, text):
        folder.mask = as_mask_folder(path)
        draft.mapped(key, {}, f"{at}.mask")


def as_mask_folder(path: str) -> str:
    """A folder of masks as our setting names it, where "alpha" alone means the pictures' transparency."""
    return "./alpha" if path == "alpha" else path


def set_unmasked(draft: Draft) -> None:
    """objective.unmasked_weight for tools to which what is outside of a mask counts nothing."""
    if any(folder.mask for folder in draft.folders):
        draft.set("objective.unmasked_weight", 0.0, OUTSIDE)


def family_of_name(path: str) -> str:
    """The architecture that a well-known hub id or file name names; "" for any other."""
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
    """model.path as given; single files need model.components beside them."""
    path = draft.get(key, text)
    if not path:
        draft.set("model.path", "TODO")
        draft.need("model.path", "the base model: Hugging Face id, diffusers folder or .safetensors file")
        return
    draft.mapped(key, {"model.path": path}, note)
    suffix = PureWindowsPath(path).suffix.lower()
    if suffix in (".ckpt", ".pt", ".pth", ".bin", ".gguf"):
        draft.need("model.path", f"{suffix} files are not opened here; give the model as .safetensors or a folder")
    if suffix == ".sft":
        draft.need("model.path", "a .sft file is a .safetensors file, and is opened under that name: rename it")
    if (suffix in (".safetensors", ".sft", ".ckpt")) and "model.components" not in draft.settings:
        draft.set("model.components", "")
        draft.need("model.components", COMPONENTS)


def set_dtype(draft: Draft, key: str) -> None:
    """model.dtype from mixed precision."""
    value = draft.get(key)
    kind = plain(value)
    if value is None:
        draft.none(key, "empty", off=True)
    elif kind in ("no", "none", "fp32", "float32", "tf32", "tfloat32"):
        draft.mapped(key, {"model.dtype": "fp32"})
    elif kind in ("bf16", "bfloat16", "fp8"):
        draft.mapped(key, {"model.dtype": "bf16"})
    elif kind in ("fp16", "float16"):
        draft.differs(key, {"model.dtype": "bf16"}, "float16 is not used here: bf16, which needs no loss scaling")
    else:
        draft.none(key, f"{value!r} is no dtype that is known here")


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
    """quantize.storage from another tool's name of it; the scales differ from tool to tool, which is told.

    Args:
        scaled: whether the tool's fp8 has a scale at all; some cast the weights as they are.
    """
    kind = next((kind for kind, words in STORAGES.items() if plain(word) in words), "")
    if kind == "own":
        plain_storage = "bf16" if draft.settings.get("model.dtype", "bf16") == "bf16" else "none"
        note = "the base is not quantized; quantize.storage = 'fp8' would halve its memory"
        draft.mapped(keys, {"quantize.storage": plain_storage}, note)
    elif kind == "fp8":
        draft.differs(
            keys,
            {"quantize.storage": "fp8"},
            f"e4m3 as there; {tool} has scales of its own kind, here each row has one, and modulation is held in int8"
            if scaled
            else f"{tool} casts the weights without a scale, so that small ones become zero; here each row has one. "
            "quantize.scale = 'none' is the exact equivalent",
        )
    elif kind == "fp8 matmul":
        draft.differs(
            keys,
            {"quantize.storage": "fp8", "quantize.compute": "fp8"},
            f"{tool} multiplies in FP8 too, forward and backward; scales are one per row and per token here",
        )
    elif kind == "int8":
        draft.differs(
            keys, {"quantize.storage": "int8"}, f"blocks of 128 share a scale here; {tool} has one per row or tensor"
        )
    elif kind == "nf4":
        draft.mapped(keys, {"quantize.storage": "nf4"})
    elif kind == "fewer":
        draft.differs(
            keys,
            {"quantize.storage": "nf4"},
            f"{word!r} is not known here; nf4 (4 bits) is the smallest storage, and may take more memory or less",
        )
    else:
        draft.none(keys, f"{word!r} is no storage that is known here; quantize.storage = 'fp8' was written")
        draft.set("quantize.storage", "fp8")
        draft.need("quantize.storage", f"choose one for {word!r}")


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer and schedule

ALIKE = {
    "pagedadamw8bit": ("adamw8bit", "its state is not paged to main memory here"),
    "bnbadamw8bit": ("adamw8bit", ""),
    "bnbadamw8bitpaged": ("adamw8bit", "its state is not paged to main memory here"),
    "adamw8bitkahan": ("adamw8bit", "float32 masters (optimizer.rounding) take the place of Kahan summation"),
    "aoadamw8bit": ("adamw8bit", "bitsandbytes' instead of torchao's"),
    "adamw8": ("adamw8bit", "bitsandbytes' instead of a build of its own"),
    "adam8bit": ("adamw8bit", "weight decay is decoupled here"),
    "bnbadam8bit": ("adamw8bit", "weight decay is decoupled here"),
    "aoadamw4bit": ("adamw8bit", "8 bits of state instead of 4"),
    "aoadamwfp8": ("adamw8bit", "8-bit blocks instead of FP8"),
    "bnbadamw": ("adamw", ""),
    "pagedadamw": ("adamw", "its state is not paged to main memory here"),
    "pagedadamw32bit": ("adamw", "its state is not paged to main memory here"),
    "adamwoptimi": ("adamw", "float32 masters (optimizer.rounding) take the place of Kahan summation"),
    "optimiadamw": ("adamw", "float32 masters (optimizer.rounding) take the place of Kahan summation"),
    "adamwbf16": ("adamw", "float32 masters (optimizer.rounding) take the place of stochastic rounding"),
    "adam": ("adamw", "weight decay is decoupled here"),
    "adamwadv": ("adamw", "its additions are not known here"),
    "torchoptimadamw": ("adamw", ""),
    "bitsandbytesoptimadamw8bit": ("adamw8bit", ""),
    "lion": ("lion8bit", "8 bits of state instead of 32"),
    "bnblion": ("lion8bit", "8 bits of state instead of 32"),
    "bnblion8bit": ("lion8bit", ""),
    "bitsandbytesoptimlion8bit": ("lion8bit", ""),
    "pagedlion8bit": ("lion8bit", "its state is not paged to main memory here"),
    "bnblion8bitpaged": ("lion8bit", "its state is not paged to main memory here"),
    "prodigyoptprodigy": ("prodigy", ""),
    "prodigy8bit": ("prodigy", "32 bits of state instead of 8"),
}
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "prodigy": {"weight_decay": 0.0, "safeguard_warmup": False, "use_bias_correction": False},
    "lion8bit": {"weight_decay": 0.0},
}
"""What these take where a file is silent, and we do not."""
FINDS_ITS_RATE = ("prodigy", "dadapt", "automagic", "schedulefree", "lionprodigy")


def set_text_encoders(
    draft: Draft,
    keys: Sequence[str],
    rate_keys: Sequence[str],
    rates: Mapping[str, float],
    why: str = "",
    left_out: Sequence[str] = (),
) -> None:
    """adapter.text_encoder and optimizer.text_encoder_lr.

    Args:
        keys: those that say whether text encoders are trained; rate_keys: those that say at which rate.
        rates: of the CLIPs that theirs trains, by name, with scaling; {} where it trains none.
        why: what to say where the file itself does not ask for it.
        left_out: names of CLIPs that theirs does not train.
    """
    if not rates:
        draft.mapped(keys, {}, "text encoders are not trained")
        draft.none(rate_keys, "text encoders are not trained", off=True)
        return
    if draft.family not in TRAINED_TEXT:
        draft.none([*keys, *rate_keys], NO_TEXT_ENCODER)
        return
    if left_out:
        why = f"theirs leaves {' and '.join(left_out)} as it is; here all of the CLIPs are trained or none"
        draft.differs(keys, {"adapter.text_encoder": True}, why)
    else:
        draft.mapped(keys, {"adapter.text_encoder": True}, why)
    if why and not any(draft.has(key) for key in keys):
        draft.notes.append(why)
    rate = next(iter(rates.values()))
    if draft.settings.get("optimizer.name") == "prodigy":
        if set(rates.values()) == {draft.settings["optimizer.lr"]}:
            draft.mapped(rate_keys, {}, "Prodigy finds one rate for all that is trained")
        else:
            draft.none(rate_keys, "Prodigy finds one rate for all that is trained")
    elif not 0 < rate < 1:  # of optimizers that find their own
        draft.none(rate_keys, f"{rate:g} is no rate for AdamW; half of optimizer.lr is taken")
    elif len(set(rates.values())) > 1:
        told = ", ".join(f"{name} {value:g}" for name, value in rates.items())
        draft.differs(rate_keys, {"optimizer.text_encoder_lr": rate}, f"one rate for all here, the first of {told}")
    else:
        draft.mapped(rate_keys, {"optimizer.text_encoder_lr": rate})


def set_optimizer(
    draft: Draft, name_key: str, rate_keys: Sequence[str], rate: Any, scale: float = 1.0, least: float = 0.0
) -> None:
    """optimizer.name, lr and lr_scale, so that the rate of every step is the other tool's.

    Args:
        rate_keys: the keys that the rate came from.
        rate: the rate; None where the file has none and the tool no default.
        scale: what the tool multiplies it by (with the batch size, for example).
        least: with Prodigy, the tool itself takes 1 for rates below this.
    """
    name = draft.get(name_key, text) or ""
    kind = plain(name)
    own = {plain(word): word for word in accepted("optimizer.name")}
    finds = next((word for word in FINDS_ITS_RATE if word in kind), "")
    if kind == "prodigy" and draft.tool.name == "SimpleTuner":
        draft.differs(name_key, {"optimizer.name": kind}, "its authors' package instead of a build of its own")
    elif kind in own:
        draft.mapped(name_key, {"optimizer.name": own[kind]})
    elif kind in ALIKE:
        ours, note = ALIKE[kind]
        draft.differs(name_key, {"optimizer.name": ours}, note) if note else draft.mapped(
            name_key, {"optimizer.name": ours}
        )
    elif kind:
        draft.none(name_key, f"there is no {name} here; AdamW8bit was written instead")
        draft.set("optimizer.name", "adamw8bit", f"instead of {name}")
    unlike = bool(kind) and kind not in own and kind not in ALIKE
    if unlike and (finds or rate is None or not 0 < rate < 1):
        draft.none(rate_keys, f"{name} finds its rate by itself; AdamW8bit needs one")
        draft.set("optimizer.lr", 1e-4)
        draft.need("optimizer.lr", f"a rate for AdamW8bit; {rate if rate is not None else 'the file'} was {name}'s")
    elif draft.settings.get("optimizer.name") == "prodigy":
        _set_factor(draft, rate_keys, rate, least)
    elif rate is None:
        draft.set("optimizer.lr", 1e-4)
        draft.need("optimizer.lr", "the file has no learning rate")
    else:
        told = "" if scale == 1 else f"{rate:g} x {scale:g} = {rate * scale:g}, as there"
        draft.mapped(rate_keys, {"optimizer.lr": rate}, told)
        if unlike:
            draft.need("optimizer.lr", f"this is {name}'s rate; AdamW8bit may need another")
    # Ours would multiply the rate on an FP8 base by 1.4; nobody else's does.
    draft.set("optimizer.lr_scale", "none" if scale == 1 else float(scale), "the rate is theirs, unscaled")
    if scale != 1:
        draft.comments["optimizer.lr_scale"] = [f"{rate} x {scale:g}: the rate as they scale it"]
    written = draft.settings.get("optimizer.name", "")
    for key, value in OWN_DEFAULTS.get(written, {}).items():
        draft.assume(f"optimizer.{key}", value, key, "the optimizer's own")


def _set_factor(draft: Draft, rate_keys: Sequence[str], rate: Any, least: float) -> None:
    """optimizer.lr of Prodigy: a factor on what it finds."""
    if rate is None:
        draft.set("optimizer.lr", 1.0, "Prodigy's own factor")
    elif rate < least:
        draft.mapped(rate_keys, {"optimizer.lr": 1.0}, f"theirs takes 1 for rates below {least:g} with Prodigy")
    elif not LEAST_FACTOR <= rate <= MOST_LR:
        told = f"with Prodigy it is a factor on the rate that is found, which {rate:g} is not; 1 was written"
        draft.differs(rate_keys, {"optimizer.lr": 1.0}, told)
    else:
        draft.mapped(rate_keys, {"optimizer.lr": rate})


def growth_rate(value: Any) -> float | str:
    """Prodigy's growth_rate, of which infinity is a word here."""
    return "unlimited" if str(value).strip().lower() in ("inf", "infinity", "float('inf')") else number(value)


def set_prodigy(draft: Draft, keys: Mapping[str, str]) -> None:
    """Prodigy's own settings, by our names for them."""
    for name, key in keys.items():
        if draft.settings.get("optimizer.name") != "prodigy":
            draft.none(key, "belongs to Prodigy", off=True)
        elif draft.has(key):
            draft.mapped(key, {f"optimizer.{name}": draft.get(key, OF_PRODIGY[name])})


OF_PRODIGY: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("d0", "d_coef"), number),
    **dict.fromkeys(("safeguard_warmup", "use_bias_correction", "decouple"), flag),
    "growth_rate": growth_rate,
}
"""Its own settings, which have its own names here."""
OPTIMIZER_ARGUMENTS = {
    "weight_decay": ("optimizer.weight_decay", number),
    "eps": ("optimizer.eps", number),
    "beta1": ("optimizer.beta1", number),
    "beta2": ("optimizer.beta2", number),
}


def set_optimizer_arguments(draft: Draft, key: str, arguments: Any) -> None:
    """weight_decay, betas, eps and Prodigy's own out of ["weight_decay=0.1", "betas=0.9,0.99"] or "a=1 b=2"."""
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
        draft.differs(key, settings, f"not known here: {', '.join(left)}")
    elif left:
        draft.none(key, "not known to the optimizers here")
    else:
        draft.mapped(key, settings)


def set_schedule(
    draft: Draft,
    name_key: str,
    *,
    warmup_key: str = "",
    warmup: float | None = None,
    cycles_key: str = "",
    power_key: str = "",
    floor_key: str = "",
    floor: float | None = None,
    warmup_note: str = "",
    constant_warms_up: bool = False,
) -> None:
    """schedule.name, warmup and min_lr.

    Args:
        warmup: steps, or a fraction below 1; None or 0 is none.
        floor: the rate at the end as a fraction of the rate.
        constant_warms_up: whether the tool's "constant" heeds the warm-up (diffusers' does not).
    """
    name = draft.get(name_key, text) or "constant"
    kind = plain(name)
    cycles = draft.get(cycles_key, number) if cycles_key else None
    power = draft.get(power_key, number) if power_key else None
    own = {plain(word): word for word in accepted("schedule.name")}
    tail = [key for key in (cycles_key, power_key) if key]
    spent: list[str] = []
    if kind in ("cosinewithrestarts", "cosinewithhardrestarts"):
        if cycles is None or cycles == 1:
            draft.mapped([name_key, cycles_key], {"schedule.name": "cosine"}, "one cycle of restarts is the cosine")
        else:
            settings = {"schedule.name": "cosine_with_restarts", "schedule.cycles": whole(cycles)}
            draft.mapped([name_key, cycles_key], settings)
        spent = [cycles_key]
    elif kind == "polynomial" and kind not in own:
        if power is None or power == 1:
            draft.mapped([name_key, power_key], {"schedule.name": "linear"}, "a polynomial of power 1 is the line")
        else:
            draft.differs([name_key, power_key], {"schedule.name": "linear"}, f"a line instead of power {power:g}")
        spent = [power_key]
    elif kind in ("constantwithwarmup", "constant") and "constant" in own:
        draft.mapped(name_key, {"schedule.name": "constant"})
    elif kind == "cosinewithminlr" and "cosine" in own:
        draft.mapped(name_key, {"schedule.name": "cosine"})
    elif kind == "sine":
        draft.differs(name_key, {"schedule.name": "cosine"}, "a falling cosine instead of a sine that rises again")
    elif kind in own:
        draft.mapped(name_key, {"schedule.name": own[kind]})
    else:
        draft.none(name_key, f"there is no schedule {name!r} here; constant was written")
        draft.set("schedule.name", "constant")
        draft.need("schedule.name", f"choose one of {', '.join(own.values())} for {name!r}")
    for key in tail:
        if key not in spent:
            draft.none(key, f"means nothing to {name}", off=True)
    if warmup_key:
        ignored = kind == "constant" and not constant_warms_up
        if warmup and ignored:
            draft.none(warmup_key, "'constant' does not warm up there, so it does not here", off=True)
        elif warmup:
            steps = float(warmup) if warmup < 1 else round(warmup)
            draft.mapped(warmup_key, {"schedule.warmup": steps}, warmup_note)
        else:
            draft.mapped(warmup_key, {"schedule.warmup": 0})
    if floor_key:
        if floor and draft.settings.get("schedule.name") in ("cosine", "cosine_with_restarts", "linear"):
            draft.mapped(floor_key, {"schedule.min_lr": float(f"{floor:.12g}")})
        else:
            draft.none(floor_key, f"means nothing to {name}", off=True)


# ---------------------------------------------------------------------------------------------------------------------
# Folders and steps


def look_into(draft: Draft, folder: Folder, *, deep: bool) -> Folder:
    """Count the pictures of a folder if it is here, and those without a caption.

    Args:
        deep: whether the other tool looks into subfolders. Ours does; pictures that only ours would find are told.
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
            f"{folder.path}: {len(every) - len(pictures)} pictures in subfolders, which ours takes and theirs does not"
        )
    folder.images = len(pictures)
    folder.captionless = sum(not any(p.with_suffix(end).is_file() for end in CAPTIONS) for p in pictures)
    return folder


def caption_by_trigger(folder: Folder, words: str) -> str:
    """What becomes of the words that captions pictures without a caption file there; the remark for the report."""
    if folder.images and folder.captionless == folder.images:
        folder.trigger, folder.trigger_is_caption = words, True
        return "no picture has a caption file, so it is the folder's trigger, and with missing_caption the caption"
    return (
        "the caption of pictures without one there; here dataset.missing_caption = 'trigger' with this as trigger, "
        "which is put in front of the captions that lack it as well"
    )


def samples(draft: Draft) -> int | None:
    """Pictures times repeats of all folders; None when one of them is not here."""
    if not draft.folders or any(folder.images is None for folder in draft.folders):
        return None
    shown = [(folder.images or 0) * folder.repeats for folder in draft.folders if not folder.regularization]
    # kohya's trainers show as many for regularization as are trained on, whatever there are.
    return sum(shown) * (2 if any(folder.regularization for folder in draft.folders) else 1)


def balance_regularization(draft: Draft) -> None:
    """Repeats for the folders of regularization pictures, so that they are shown about as often as the others."""
    others = [folder for folder in draft.folders if folder.regularization]
    wanted, there = samples(draft), sum(folder.images or 0 for folder in others)
    if others and wanted and there:
        for folder in others:
            folder.repeats = max(1, round(wanted / 2 / there))
        if there > wanted // 2:
            draft.notes.append(
                f"there are {there} regularization pictures, of which theirs shows the first {wanted // 2} an epoch; "
                "here all are shown, so that they count more: take some out, or lower their folders' weight"
            )


def weigh_regularization(draft: Draft, key: str) -> None:
    """The weight of the folders of regularization pictures."""
    others, weight = [folder for folder in draft.folders if folder.regularization], draft.get(key, number)
    if not others:
        draft.none(key, "there are no regularization pictures", off=True)
    elif weight is not None and weight <= 0:
        draft.none(key, "here they count, as without it: take their folders out instead")
    elif weight is not None:
        for folder in others:
            folder.weight = weight
        draft.mapped(key, {}, "the weight of the folders for regularization")


def weigh(draft: Draft, key: str, folder: Folder, at: str) -> None:
    """The weight of one folder's pictures in the loss.

    Args:
        at: our folder, such as "dataset.folders.0".
    """
    weight = draft.get(key, number)
    if weight is not None and weight <= 0:
        draft.none(key, NO_WEIGHT)
    elif weight is not None:
        folder.weight *= weight
        draft.mapped(key, {}, f"{at}.weight")


def steps_per_epoch(draft: Draft, batch: int, accumulate: int, processes: int = 1) -> int | None:
    """Optimizer steps of one epoch as kohya's trainers count them; None when the pictures are not here.

    Bucketing adds a partly filled batch per bucket when `batch` is above 1, which is not counted.
    """
    count = samples(draft)
    if not count:
        return None
    return math.ceil(math.ceil(count / batch) / processes / accumulate)


def set_steps_from_epochs(draft: Draft, key: str, epochs: int, per_epoch: int | None, batch: int) -> None:
    """train.steps from epochs, by counting; a TODO where the pictures are not here."""
    if per_epoch is None:
        draft.none(key, f"train.steps counts steps; {epochs} epochs are not known without the pictures")
        draft.need(
            "train.steps",
            f"{epochs} epochs = {epochs} x pictures x repeats / (train.batch_size x train.accumulate); "
            "import again where the pictures are, or put the number in",
        )
        draft.set("train.steps", 1500)
        return
    note = f"{epochs} epochs x {per_epoch} steps, from {samples(draft)} samples; steps are counted here, not epochs"
    if batch > 1:
        note += ", and each bucket's last batch may be smaller and add a step"
    draft.differs(key, {"train.steps": epochs * per_epoch}, note)


def set_every(
    draft: Draft,
    setting: str,
    steps_key: str,
    epochs_key: str,
    per_epoch: int | None,
    note: str = "",
    *,
    epochs_count: bool = False,
) -> None:
    """checkpoint.every (and with it export.every) or preview.every from steps, or from epochs by counting.

    Args:
        epochs_count: whether a tool that is given both heeds the epochs alone; otherwise it does both.
    """

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
            draft.none(epochs_key, f"theirs does both; here one interval, that of {steps_key}")
        elif epochs_key:
            draft.none(epochs_key, "off", off=True)
        return
    if steps_key:
        draft.none(steps_key, "off", off=True)
    if epochs > 0 and per_epoch:
        told = f"every {epochs} x {per_epoch} steps; steps are counted here, not epochs"
        draft.differs(epochs_key, every(epochs * per_epoch), f"{told}; {note}" if note else told)
    elif epochs > 0:
        draft.none(epochs_key, f"{setting} counts steps, and an epoch's are not known without the pictures")
        draft.todo.append(f"{setting}: theirs is every {epochs} epochs; the default was left")
    elif epochs_key:
        draft.none(epochs_key, "off", off=True)


ONE_LOSS = "objective.loss knows mse, and huber and smooth_l1 with a sharp or a round corner"


def set_huber(draft: Draft) -> None:
    """objective.loss and its delta from loss_type and huber_c, as kohya's scripts and SimpleTuner have them."""
    kind = plain(draft.get("loss_type") or "l2")
    more = ["huber_c", "huber_scale", "huber_schedule"]
    flow = bool(draft.family) and draft.family not in DIFFUSION
    if kind in ("huber", "smoothl1") and flow and draft.tool.name == "simpletuner":
        draft.none(["loss_type", *more], "theirs trains flow-matching models with the squared error all the same")
    elif kind in ("huber", "smoothl1"):
        schedule = str(draft.get("huber_schedule") or "snr")
        delta = 0.1 if draft.get("huber_c") is None else draft.get("huber_c", number)
        scale = 1.0 if draft.get("huber_scale") is None else draft.get("huber_scale", number)
        ours = {"objective.loss": "pseudo_huber" if kind == "huber" else "pseudo_smooth_l1"}
        if schedule == "constant":
            draft.mapped(["loss_type", *more], ours | {"objective.huber_delta": delta * scale})
        elif schedule == "exponential":
            ours |= {"objective.huber_delta": delta, "objective.huber_schedule": schedule}
            draft.mapped(["loss_type", *more], ours | ({"objective.huber_scale": scale} if scale != 1 else {}))
        elif schedule == "snr" and not flow:
            draft.none("huber_scale", "means nothing with huber_schedule = snr", off=True)
            ours |= {"objective.huber_delta": delta, "objective.huber_schedule": schedule}
            draft.mapped(["loss_type", *more], ours)
        else:
            told = f"huber_schedule = {schedule} is for no flow-matching model, there or here; constant was written"
            draft.differs(["loss_type", *more], ours | {"objective.huber_delta": delta * scale}, told)
    draft.none("loss_type", ONE_LOSS, off=kind in ("l2", "mse"))
    draft.none(more, "belongs to the Huber loss", off=True)


def part_of_name(word: str) -> str:
    """What other tools look for anywhere in a layer's name, as a name of ours; "transformer." or "unet." begins it."""
    inner = re.sub(r"^(transformer|unet)\.", "", word)
    begin = "^" if inner != word else "" if word.startswith(".") else "*"
    found = begin + inner.strip(".") + ("" if word.endswith(".") else "*")
    if not inner.strip(".") or re.search(r"[\s=]", found):
        raise Unfit(f"{word!r} is no part of a name")
    return found


def set_filter(draft: Draft, keys: Sequence[str], only: Sequence[str], without: Sequence[str], rank: int) -> None:
    """adapter.ranks from parts of names that a layer must have, or must not."""
    try:
        entries = [f"{part_of_name(word)} = 0" for word in without]
        entries += [f"{part_of_name(word)} = {rank}" for word in only] + (["* = 0"] if only else [])
    except Unfit as error:
        draft.none(keys, f"adapter.ranks was not written: {error}")
        return
    told = "of the layers that are adapted here; take out what fits none of them, which `check` tells"
    draft.differs(keys, {"adapter.ranks": entries}, told)


def share(
    draft: Draft, keys: Sequence[str], values: Sequence[Any], setting: str, read: Callable[[Any], Any], note: str = ""
) -> None:
    """One setting here for what the other tool sets for each folder.

    Args:
        keys: all keys that say it.
        values: what holds for each folder; None where nothing is said.
    """
    try:
        found = [None if value in (None, "") else read(value) for value in values]
    except Unfit as error:
        draft.none(keys, f"{setting} was not written: {error}")
        return
    given = [value for value in found if value is not None]
    if not given:
        draft.none(keys, "empty", off=True)
        return
    common = Counter(given).most_common(1)[0][0]
    told = [note] if note else []
    if len(set(found)) > 1:
        told.append(f"one value here for all folders, the most frequent: {common!r}")
    (draft.differs if told else draft.mapped)(keys, {setting: common}, "; ".join(told))


def side_of(value: Any) -> tuple[int, str]:
    """The side of the square with the area of a side, "w,h" or [w, h], and what there is to tell of it."""
    parts = value if isinstance(value, list) else re.split(r"[,x]", str(value))
    numbers = [whole(part) for part in parts]
    if not numbers or min(numbers) <= 0 or len(numbers) > 2:
        raise Unfit(f"{value!r} is no resolution")
    side = math.sqrt(numbers[0] * numbers[-1])
    if side == int(side):
        return int(side), ""
    rounded = max(64, round(side / 64) * 64)
    return rounded, f"{value} is an area of {side:.1f} squared; here the side of a square, {rounded}"


def set_resolution(draft: Draft, keys: Sequence[str], values: Sequence[Any], note: str = "") -> None:
    """dataset.resolution, the side of the square with the training area, from sides, "w,h" or [w, h].

    Several resolutions become the largest, which is told.
    """
    found = [side_of(value) for value in values]
    side, rounded = max(found)
    told = [note] if note else []
    if len(set(found)) > 1:
        told.append(f"one resolution here, the largest; theirs were {', '.join(str(one) for one, _ in found)}")
    told += [rounded] if rounded else []
    account = draft.differs if told else draft.mapped
    account(keys, {"dataset.resolution": side}, "; ".join(told))


def set_resolutions(draft: Draft, keys: Sequence[str], values: Sequence[Any], note: str = "") -> None:
    """dataset.resolution, the largest, and that of each folder which has another.

    Args:
        values: as `set_resolution`'s, one for each of `draft.folders`; None where nothing is said.
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
    account(keys, {"dataset.resolution": largest}, told or "the largest, and folders that have another say so")


# ---------------------------------------------------------------------------------------------------------------------
# Timesteps and previews


def set_timesteps(
    draft: Draft, keys: Sequence[str], shape: str, shift: float | str, note: str = "", exact: bool = True
) -> None:
    """objective.timesteps and shift; families that predict noise have neither."""
    if draft.family in DIFFUSION:
        draft.none(keys, f"means nothing to {draft.family}, which draws its timesteps uniformly", off=True)
        return
    account = draft.mapped if exact else draft.differs
    account(keys, {"objective.timesteps": shape, "objective.shift": shift}, note)


def set_min_snr(draft: Draft, key: str, weight: float | None = None) -> None:
    """objective.min_snr_gamma, for families that have it."""
    gamma = draft.get(key, number) if weight is None else weight
    if not gamma:
        draft.none(key, "off", off=True)
    elif draft.family and draft.family not in DIFFUSION:
        draft.none(key, f"flow-matching models such as {draft.family} have no such weight, there or here", off=True)
    else:
        draft.mapped(key, {"objective.min_snr_gamma": float(gamma)})


def set_noise_offset(draft: Draft, key: str) -> None:
    """objective.noise_offset, for families that have it."""
    offset = draft.get(key, number)
    if not offset:
        draft.none(key, "off", off=True)
    elif draft.family in DIFFUSION:
        draft.mapped(key, {"objective.noise_offset": float(offset)})
    else:
        draft.none(key, NO_NOISE)


def set_clips(
    draft: Draft, keys: Sequence[str], lengths: Sequence[int], part_keys: Sequence[str], part: str | None, note: str
) -> None:
    """Lengths of clips, and which part of one is taken, where the architecture draws clips.

    Args:
        lengths: brought down to those that the model's VAE takes, as the other trainers do too.
        part: our word for what `part_keys` say; None where there is none.
    """
    known = families.facts(draft.family) if draft.family in families.available() else {}
    step, _ = known.get("clips", (0, 0))
    if max(lengths, default=1) <= 1 or not step:
        draft.none([*keys, *part_keys], NO_CLIPS, off=max(lengths, default=1) <= 1)
        return
    draft.differs(keys, {"dataset.frames": sorted({max(1, (one - 1) // step * step + 1) for one in lengths})}, note)
    if part is None:
        draft.none(part_keys, "of a clip its head, its middle or chunks are taken here: dataset.clip")
    else:
        draft.mapped(part_keys, {"dataset.clip": part})


def set_previews(draft: Draft, keys: Mapping[str, str], pictures: Sequence[Mapping[str, Any]], note: str = "") -> None:
    """preview.* from a list of pictures: {"prompt", "negative", "width", "height", "steps", "guidance", "seed"}.

    Prompts are each their own; everything else is one value here for all of them.

    Args:
        keys: their key -> which of our preview settings it says, such as "width height"; "" is all of them.
    """
    prompts = [str(picture["prompt"]) for picture in pictures if picture.get("prompt")]
    settings: dict[str, Any] = {"preview.prompts": prompts}
    told = [note] if note else []
    for name, limit in (("negative", text), ("steps", whole), ("guidance", number), ("seed", whole)):
        values = [limit(picture[name]) for picture in pictures if picture.get(name) not in (None, "")]
        if not values:
            continue
        settings[f"preview.{name}"] = values[0]
        # Ours count seeds up from the first one.
        expected = [values[0] + i for i in range(len(values))] if name == "seed" else [values[0]] * len(values)
        if values != expected:
            told.append(f"one {name} for all previews here" + (", counting up" if name == "seed" else ""))
    for name in ("width", "height"):
        values = [whole(picture[name]) for picture in pictures if picture.get(name) not in (None, "")]
        if values:
            settings[f"preview.{name}"] = round(values[0] / 16) * 16
            if len(set(values)) > 1 or values[0] % 16:
                told.append(f"one {name} for all previews here, a multiple of 16")
    if settings.get("preview.seed", 0) < 0:
        del settings["preview.seed"]
        told.append("a negative seed means a random one there; previews here keep theirs")
    account = draft.differs if told else draft.mapped
    for key, names in keys.items():
        own = {name: value for name, value in settings.items() if name.removeprefix("preview.") in names.split()}
        account(key, own if names else settings, "; ".join(told))
    for name, value in settings.items():
        draft.settings.setdefault(name, value)


def set_seed(draft: Draft, key: str) -> None:
    """seed; nothing or -1 is a random one there, and 0 here."""
    seed = draft.get(key, whole)
    if seed is None:
        draft.none(key, "empty", off=True)
    elif seed < 0:
        draft.none(key, "a random seed there; here 0, so that a run can be repeated")
    elif seed > config.MAX_SEED:
        draft.differs(key, {"seed": seed % (config.MAX_SEED + 1)}, f"at most {config.MAX_SEED} here: the remainder")
    else:
        draft.mapped(key, {"seed": seed})


def set_name(draft: Draft, key: str, value: str | None = None, note: str = "") -> None:
    """name, without what cannot be in a folder's name."""
    given = draft.get(key, text) if value is None else value
    if not given:
        draft.none(key, "empty", off=True)
        return
    name = "".join("-" if c in "/\\" or not c.isprintable() else c for c in given).strip()[:120]
    name = name if name not in ("", ".", "..") else "my-lora"
    told = note if name == given else "; ".join(filter(None, (note, "without what cannot name a folder")))
    (draft.mapped if name == given else draft.differs)(key, {"name": name}, told)


def stem(path: str) -> str:
    """The name in a path, which may be of Windows, without its suffix."""
    return PureWindowsPath(path).stem


def on(value: Any) -> bool:
    """True for true and what reads as it; false for nothing."""
    return value not in (None, "") and flag(value)


WHOLE_RANK = 1024
"""What asks for LoKr's whole matrices here: at this rank no side of a matrix is twice as long. Theirs ask with a flag,
or with a rank that no layer has."""


def lokr_factor(value: Any) -> int:
    """adapter.factor from LyCORIS' factor, whose -1 is 0 here."""
    return max(said_number("factor", value), 0)


def said_number(what: str, value: Any) -> int:
    """A whole number from inside another program's settings.

    Raises:
        config.UserError: it is none.
    """
    try:
        return int(str(value))
    except ValueError:
        raise config.UserError(f"{what} = {value!r}: expected a whole number") from None


def lokr_rank(rank: int, whole: Any) -> int:
    """adapter.rank of a LoKr."""
    return WHOLE_RANK if on(whole) or rank > WHOLE_RANK else rank
