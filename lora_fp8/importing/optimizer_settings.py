"""Optimizers, schedules and the training of text encoders."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.relations import LEAST_FACTOR
from ..errors import Message
from ..settings import FALLING, MOST_LR, is_class
from . import remarks
from .common_values import clamp, list_accepted, normalize_name
from .import_draft import Draft
from .model_settings import can_train_text
from .readers import Unfit, read_flag, read_list, read_number, read_string, read_whole

NO_TEXT_ENCODER = Message("this trainer does not train text encoders of this architecture, only the denoiser")


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer and schedule

ALIKE = {
    "pagedadamw8bit": ("adamw8bit", remarks.NOT_PAGED),
    "bnbadamw8bit": ("adamw8bit", ""),
    "bnbadamw8bitpaged": ("adamw8bit", remarks.NOT_PAGED),
    "adamw8bitkahan": (
        "adamw8bit",
        remarks.MASTERS(what_else=remarks.KAHAN),
    ),
    "aoadamw8bit": ("adamw8bit", Message("this trainer uses bitsandbytes instead of torchao")),
    "adamw8": ("adamw8bit", Message("this trainer uses bitsandbytes instead of the other trainer's own build")),
    "adam8bit": ("adamw8bit", remarks.DECOUPLED),
    "bnbadam8bit": ("adamw8bit", remarks.DECOUPLED),
    "aoadamw4bit": ("adamw8bit", Message("the optimizer state has 8 bits instead of 4")),
    "aoadamwfp8": ("adamw8bit", remarks.BLOCKS_NOT_FP8),
    "bnbadamw": ("adamw", ""),
    "pagedadamw": ("adamw", remarks.NOT_PAGED),
    "pagedadamw32bit": ("adamw", remarks.NOT_PAGED),
    "adamwoptimi": (
        "adamw",
        remarks.MASTERS(what_else=remarks.KAHAN),
    ),
    "optimiadamw": (
        "adamw",
        remarks.MASTERS(what_else=remarks.KAHAN),
    ),
    "adamwbf16": (
        "adamw",
        remarks.MASTERS(what_else=Message("stochastic rounding")),
    ),
    "adam": ("adamw", remarks.DECOUPLED),
    "adamwadv": ("adamw", Message("this trainer does not have the additions to AdamW")),
    "torchoptimadamw": ("adamw", ""),
    "bitsandbytesoptimadamw8bit": ("adamw8bit", ""),
    "lion": ("lion8bit", remarks.EIGHT_BITS),
    "optimilion": ("lion8bit", remarks.EIGHT_BITS),
    "lionoptimi": ("lion8bit", remarks.EIGHT_BITS),
    "bnblionpaged": ("lion8bit", remarks.EIGHT_BITS),
    "torchadamw": ("adamw", ""),
    "stableadamw": ("adamw", remarks.NOT_STABILIZED),
    "optimistableadamw": ("adamw", remarks.NOT_STABILIZED),
    "optimiadam": ("adamw", remarks.DECOUPLED),
    "bnbadam": ("adamw", remarks.DECOUPLED),
    "bnbadamwpaged": ("adamw", remarks.NOT_PAGED),
    "aoadamfp8": ("adamw8bit", remarks.BLOCKS_NOT_FP8),
    "bnblion": ("lion8bit", remarks.EIGHT_BITS),
    "bnblion8bit": ("lion8bit", ""),
    "bitsandbytesoptimlion8bit": ("lion8bit", ""),
    "pagedlion8bit": ("lion8bit", remarks.NOT_PAGED),
    "bnblion8bitpaged": ("lion8bit", remarks.NOT_PAGED),
    "prodigyoptprodigy": ("prodigy", ""),
    "schedulefreeadamw": ("adamw_schedulefree", ""),
    "schedulefreeadamwschedulefree": ("adamw_schedulefree", ""),
    "schedulefreewrapper": ("adamw_schedulefree", remarks.AVERAGED),
    "transformersadafactor": ("adafactor", ""),
    "camepytorchcame": ("came", ""),
    "came8bit": ("came", remarks.FULL_BITS),
    "muon": ("muon", remarks.STEP_OF_ADAMW),
    "torchoptimmuon": ("muon", remarks.STEP_OF_ADAMW),
    "ademamix": ("ademamix8bit", remarks.EIGHT_BITS),
    "bnbademamix": ("ademamix8bit", remarks.EIGHT_BITS),
    "bnbademamix8bit": ("ademamix8bit", ""),
    "bnbademamix8bitpaged": ("ademamix8bit", remarks.NOT_PAGED),
    "pagedademamix8bit": ("ademamix8bit", remarks.NOT_PAGED),
    "bitsandbytesoptimademamix8bit": ("ademamix8bit", ""),
    "prodigy8bit": ("prodigy", remarks.FULL_BITS),
}
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "prodigy": {"weight_decay": 0.0, "safeguard_warmup": False, "use_bias_correction": False},
    **dict.fromkeys(("lion8bit", "adafactor", "came", "adamw_schedulefree"), {"weight_decay": 0.0}),
}
"""The other tools' defaults for these optimizers, where ours differ."""
OF_KOHYA = ("sd-scripts", "musubi-tuner", "kohya_ss", "lora-scripts")
CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
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
        draft.report_mapped(keys, {}, remarks.TEXT_NOT_TRAINED)
        draft.report_unmatched(rate_keys, remarks.TEXT_NOT_TRAINED, off=True)
        return
    if not draft.family:
        draft.wait([*keys, *rate_keys])
        draft.waiting.append("adapter.text_encoder")
        if why and not any(draft.has(key) for key in keys):
            draft.notes.append(why)
        return
    if not can_train_text(draft.family):
        draft.report_unmatched([*keys, *rate_keys], NO_TEXT_ENCODER)
        return
    if left_out:
        why = Message(
            "the other trainer does not train {names}; this trainer trains all CLIP text encoders or none",
            names=" and ".join(left_out),
        )
        draft.report_different(keys, {"adapter.text_encoder": True}, why)
    else:
        draft.report_mapped(keys, {"adapter.text_encoder": True}, why)
    if why and not any(draft.has(key) for key in keys):
        draft.notes.append(why)
    rate = next(iter(rates.values()))
    if draft.settings.get("optimizer.name") == "prodigy":
        if set(rates.values()) == {draft.settings["optimizer.lr"]}:
            draft.report_mapped(rate_keys, {}, remarks.ONE_RATE)
        else:
            draft.report_unmatched(rate_keys, remarks.ONE_RATE)
    elif not 0 < rate < 1:  # learning rates for optimizers that find their own
        draft.report_unmatched(
            rate_keys,
            Message("AdamW cannot use {rate} as a learning rate; half of optimizer.lr is used", rate=f"{rate:g}"),
        )
    elif len(set(rates.values())) > 1:
        listed_rates = ", ".join(f"{name} {value:g}" for name, value in rates.items())
        draft.report_different(
            rate_keys,
            {"optimizer.text_encoder_lr": rate},
            Message(
                "this trainer has one learning rate for all text encoders; the first of {told} was written",
                told=listed_rates,
            ),
        )
    else:
        draft.report_mapped(rate_keys, {"optimizer.text_encoder_lr": rate})


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
    finds_rate = any(word in normalize_name(unlike) for word in FINDS_ITS_RATE)
    if unlike and (finds_rate or rate is None or not 0 < rate < 1):
        draft.report_unmatched(
            rate_keys, Message("{name} finds its learning rate by itself, but AdamW8bit needs one", name=unlike)
        )
        draft.set("optimizer.lr", 1e-4)
        what = Message("the file has no learning rate for AdamW8bit; choose one")
        if rate is not None:
            what = Message("choose a learning rate for AdamW8bit; {rate} is for {name}", rate=rate, name=unlike)
        draft.add_todo("optimizer.lr", what)
    elif draft.settings.get("optimizer.name") == "prodigy":
        _set_factor(draft, rate_keys, rate, least)
    elif rate is None:
        draft.set("optimizer.lr", 1e-4)
        draft.add_todo("optimizer.lr", Message("the file has no learning rate; choose one"))
    else:
        note = (
            ""
            if scale == 1
            else Message(
                "the learning rate is {rate} x {factor} = {result}, as in the other trainer",
                rate=f"{rate:g}",
                factor=f"{scale:g}",
                result=f"{rate * scale:g}",
            )
        )
        draft.report_mapped(rate_keys, {"optimizer.lr": rate}, note)
        if unlike:
            draft.add_todo(
                "optimizer.lr", Message("this learning rate is for {name}; AdamW8bit may need another", name=unlike)
            )
    # By default, lr_scale would multiply the learning rate on an FP8 base by 1.4; no other tool does.
    draft.set(
        "optimizer.lr_scale",
        "none" if scale == 1 else float(scale),
        Message("the learning rate is not scaled, as in the other trainer"),
    )
    if scale != 1:
        note = Message("the other trainer scales the learning rate: {rate} x {factor}", rate=rate, factor=f"{scale:g}")
        draft.comments["optimizer.lr_scale"] = [note]
    written = draft.settings.get("optimizer.name", "")
    for key, value in OWN_DEFAULTS.get(written, {}).items():
        draft.assume(f"optimizer.{key}", value, key, Message("this is the optimizer's own default"))


def _set_optimizer_name(draft: Draft, key: str) -> str:
    """Set optimizer.name from the tool's key; return the tool's name of an optimizer without a counterpart, else ""."""
    name = draft.get(key, read_string) or ""
    kind = normalize_name(name)
    own = {normalize_name(word): word for word in list_accepted("optimizer.name")}
    if kind == "prodigy" and draft.tool.name == "simpletuner":
        draft.report_different(
            key,
            {"optimizer.name": kind},
            Message("this trainer uses the package of Prodigy's authors instead of SimpleTuner's own build"),
        )
    elif kind == "adafactor" and draft.tool.name in OF_KOHYA and not _has_fixed_rate(draft):
        why = Message(
            "the other trainer sets the learning rate by itself (relative_step, scale_parameter); this trainer "
            "uses optimizer.lr"
        )
        draft.report_different(key, {"optimizer.name": "adafactor"}, why)
        draft.add_todo("optimizer.lr", Message("check the learning rate, which the other trainer sets by itself"))
    elif kind in own and kind not in ALIKE:
        draft.report_mapped(key, {"optimizer.name": own[kind]})
    elif kind in ALIKE:
        ours, note = ALIKE[kind]
        (draft.report_different if note else draft.report_mapped)(key, {"optimizer.name": ours}, note)
    elif draft.tool.name in OF_KOHYA and CLASS_PATH.fullmatch(name):
        draft.report_mapped(
            key, {"optimizer.name": name}, Message("this trainer uses the class itself; its package must be installed")
        )
    elif kind:
        draft.report_unmatched(key, Message("this trainer has no {name}; AdamW8bit was written", name=name))
        draft.set("optimizer.name", "adamw8bit", Message("AdamW8bit replaces {name}", name=name))
        return name
    return ""


def _has_fixed_rate(draft: Draft) -> bool:
    """Return True if kohya's arguments keep Adafactor from setting the learning rate."""
    given = "".join(str(draft.given.get(key, "")) for key in ("optimizer_args", "optimizer_args_custom"))
    return all(re.search(rf"{name}\s*=\s*False", given, re.IGNORECASE) for name in ("relative_step", "scale_parameter"))


def _set_factor(draft: Draft, rate_keys: Sequence[str], rate: Any, least: float) -> None:
    """Set optimizer.lr for Prodigy: a factor on the learning rate that it finds."""
    if rate is None:
        draft.set("optimizer.lr", 1.0, Message("this is Prodigy's default factor"))
    elif rate < least:
        draft.report_mapped(
            rate_keys,
            {"optimizer.lr": 1.0},
            Message("with Prodigy, the other trainer uses 1 for learning rates below {least}", least=f"{least:g}"),
        )
    elif not LEAST_FACTOR <= rate <= MOST_LR:
        note = Message(
            "Prodigy multiplies the learning rate that it finds by this factor, and {rate} is out of range; 1 "
            "was written",
            rate=f"{rate:g}",
        )
        draft.report_different(rate_keys, {"optimizer.lr": 1.0}, note)
    else:
        draft.report_mapped(rate_keys, {"optimizer.lr": rate})


def read_growth_rate(value: Any) -> float | str:
    """Read Prodigy's growth_rate; our word for infinity is "unlimited"."""
    return "unlimited" if str(value).strip().lower() in ("inf", "infinity", "float('inf')") else read_number(value)


def set_prodigy(draft: Draft, keys: Mapping[str, str]) -> None:
    """Set Prodigy's own settings; `keys` maps our names to the tool's keys."""
    for name, key in keys.items():
        if draft.settings.get("optimizer.name") != "prodigy":
            draft.report_unmatched(key, remarks.BELONGS_TO(key="Prodigy"), off=True)
        elif draft.has(key):
            draft.report_mapped(key, {f"optimizer.{name}": draft.get(key, OF_PRODIGY[name])})


OF_PRODIGY: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("d0", "d_coef"), read_number),
    **dict.fromkeys(("safeguard_warmup", "use_bias_correction", "decouple"), read_flag),
    "growth_rate": read_growth_rate,
}
"""Prodigy's own settings, which have the same names in ours."""
FIXED_RATE = ("relative_step", "scale_parameter", "warmup_init")
"""Arguments of Adafactor that are always off in ours."""
OPTIMIZER_ARGUMENTS = {
    "weight_decay": ("optimizer.weight_decay", read_number),
    "eps": ("optimizer.eps", read_number),
    "beta1": ("optimizer.beta1", read_number),
    "beta2": ("optimizer.beta2", read_number),
}


def set_optimizer_arguments(draft: Draft, key: str, arguments: Any) -> None:
    """Set weight_decay, betas, eps and Prodigy's settings from ["weight_decay=0.1", "betas=0.9,0.99"] or "a=1 b=2"."""
    if isinstance(arguments, str):
        arguments = re.split(r"[ ;]+|,(?=\s*[A-Za-z_])", arguments.strip())
    if is_class(draft.settings.get("optimizer.name", "")):
        _set_class_arguments(draft, key, read_list(arguments))
        return
    prodigy = draft.settings.get("optimizer.name") == "prodigy"
    of_prodigy = {name: (f"optimizer.{name}", read) for name, read in OF_PRODIGY.items()}
    known = OPTIMIZER_ARGUMENTS | (of_prodigy if prodigy else {})
    settings: dict[str, Any] = {}
    left: list[str] = []
    for argument in read_list(arguments):
        name, _, value = (part.strip().strip("\"'") for part in str(argument).partition("="))
        try:
            if name == "betas":
                first, second = (read_number(part) for part in value.strip("()[] ").split(","))
                settings |= {"optimizer.beta1": first, "optimizer.beta2": second}
            elif name in FIXED_RATE and not read_flag(value):
                continue  # always off in ours
            elif name in known:
                setting, read = known[name]
                settings[setting] = read(value)
            elif name:
                left.append(str(argument))
        except (Unfit, ValueError):
            left.append(str(argument))
    if left and settings:
        draft.report_different(
            key, settings, Message("this trainer does not have these arguments: {names}", names=", ".join(left))
        )
    elif left:
        draft.report_unmatched(key, remarks.NOT_AN_ARGUMENT)
    else:
        draft.report_mapped(key, settings)


def _set_class_arguments(draft: Draft, key: str, arguments: Sequence[Any]) -> None:
    """Set optimizer.arguments from ["betas=0.9,0.99"], whose values are Python's."""
    values: dict[str, Any] = {}
    left: list[str] = []
    for argument in arguments:
        name, _, value = (part.strip() for part in str(argument).partition("="))
        try:
            read = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            left.append(str(argument))
            continue
        if isinstance(read, tuple | list) and all(isinstance(part, bool | int | float | str) for part in read):
            values[name] = list(read)
        elif isinstance(read, bool | int | float | str):
            values[name] = read
        else:
            left.append(str(argument))
    if left:
        draft.report_different(
            key,
            {"optimizer.arguments": values},
            Message("these arguments could not be read: {names}", names=", ".join(left)),
        )
    else:
        draft.report_mapped(key, {"optimizer.arguments": values})


@dataclass(frozen=True)
class ScheduleKeys:
    """The tool's keys of a schedule; "" if there is none."""

    name: str
    warmup: str = ""
    cycles: str = ""
    power: str = ""
    decay: str = ""
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
    """Set schedule.name, what belongs to that schedule, warmup and min_lr.

    Args:
        draft: the import.
        keys: the tool's keys.
        warmup: steps, or a fraction below 1; None or 0 for none.
        floor: final learning rate, as a fraction of the learning rate.
        warmup_note: remark on the warm-up.
        constant_warms_up: the tool's "constant" schedule warms up (diffusers' does not).
    """
    if draft.settings.get("optimizer.name") == "adamw_schedulefree" and draft.tool.name in OF_KOHYA:
        named = [keys.name, keys.warmup, keys.cycles, keys.power, keys.decay, keys.floor]
        draft.report_unmatched(
            named, Message("the other trainer uses no schedule with schedule-free optimizers"), off=True
        )
        draft.set("schedule.name", "constant")
        return
    name = draft.get(keys.name, read_string) or "constant"
    spent = _set_curve(draft, keys, name)
    for key in (keys.cycles, keys.power, keys.decay):
        if key and key not in spent:
            draft.report_unmatched(key, remarks.UNUSED_BY(name=name), off=True)
    if keys.warmup:
        ignored = normalize_name(name) == "constant" and not constant_warms_up
        if warmup and ignored:
            draft.report_unmatched(
                keys.warmup,
                Message("the other trainer does not warm up with 'constant', so no warm-up was written"),
                off=True,
            )
        elif warmup:
            steps = float(warmup) if warmup < 1 else round(warmup)
            draft.report_mapped(keys.warmup, {"schedule.warmup": steps}, warmup_note)
        else:
            draft.report_mapped(keys.warmup, {"schedule.warmup": 0})
    if keys.floor:
        if floor and draft.settings.get("schedule.name") in FALLING:
            draft.report_mapped(keys.floor, {"schedule.min_lr": float(f"{floor:.12g}")})
        else:
            draft.report_unmatched(keys.floor, remarks.UNUSED_BY(name=name), off=True)


def _set_curve(draft: Draft, keys: ScheduleKeys, name: str) -> tuple[str, ...]:
    """Set schedule.name, and what belongs to that schedule; return the other keys that were used."""
    kind = normalize_name(name)
    cycles = draft.get(keys.cycles, read_number) if keys.cycles else None
    power = draft.get(keys.power, read_number) if keys.power else None
    own = {normalize_name(word): word for word in list_accepted("schedule.name")}
    if kind in ("cosinewithrestarts", "cosinewithhardrestarts"):
        if cycles is None or cycles == 1:
            draft.report_mapped(
                [keys.name, keys.cycles],
                {"schedule.name": "cosine"},
                Message("one cycle of cosine_with_restarts equals cosine"),
            )
        else:
            settings = {"schedule.name": "cosine_with_restarts", "schedule.cycles": read_whole(cycles)}
            draft.report_mapped([keys.name, keys.cycles], settings)
        return (keys.cycles,)
    if kind == "polynomial" and (power is None or power == 1):
        draft.report_mapped(
            [keys.name, keys.power], {"schedule.name": "linear"}, Message("polynomial with power 1 equals linear")
        )
        return (keys.power,)
    if kind == "polynomial":
        draft.report_mapped([keys.name, keys.power], {"schedule.name": "polynomial", "schedule.power": power})
        return (keys.power,)
    if kind in ("warmupstabledecay", "wsd"):
        return _set_stable(draft, keys, cycles)
    if kind == "rex":  # of OneTrainer and musubi-tuner; the paper has 0.5
        draft.report_mapped(keys.name, {"schedule.name": "rex", "schedule.rex_d": 0.9})
        return ()
    ours = {"constantwithwarmup": "constant", "cosinewithminlr": "cosine"}.get(kind, kind)
    if kind == "sine":
        draft.report_different(
            keys.name,
            {"schedule.name": "cosine"},
            Message("SimpleTuner's sine rises again; a falling cosine was written"),
        )
    elif ours in own:
        draft.report_mapped(keys.name, {"schedule.name": own[ours]})
    else:
        draft.report_unmatched(
            keys.name, Message("this trainer has no schedule {name}; constant was written", name=repr(name))
        )
        draft.set("schedule.name", "constant")
        draft.add_todo(
            "schedule.name",
            Message(
                "this trainer has no schedule {name}; choose one of {names}",
                names=", ".join(own.values()),
                name=repr(name),
            ),
        )
    return ()


def _set_stable(draft: Draft, keys: ScheduleKeys, cycles: float | None) -> tuple[str, ...]:
    """Set schedule.name = "wsd" and its decay, which has transformers' default shape; return the used keys."""
    decay = draft.get(keys.decay, read_number) if keys.decay else None
    if not decay:
        draft.report_mapped(
            [keys.name, keys.decay],
            {"schedule.name": "constant"},
            Message("the schedule is constant, because it has no decay"),
        )
        return (keys.decay,)
    settings = {"schedule.name": "wsd", "schedule.decay": float(decay) if decay < 1 else round(decay)}
    if cycles in (None, 1):
        draft.report_mapped([keys.name, keys.decay, keys.cycles], settings)
    else:
        note = Message("the decay falls once instead of in {count} cosine cycles", count=f"{cycles:g}")
        draft.report_different([keys.name, keys.decay, keys.cycles], settings, note)
    return (keys.decay, keys.cycles)


def set_ema(draft: Draft, switch: str, decay_key: str, *, chosen: bool, usual: float, interval_key: str = "") -> None:
    """Set optimizer.ema_decay.

    Args:
        draft: the import.
        switch: the tool's key that turns the average on.
        decay_key: its key of the decay.
        chosen: the average is on.
        usual: its own decay if the file names none.
        interval_key: its key of the steps between two updates; "" if it has none.
    """
    keys = [switch, decay_key, *filter(None, [interval_key])]
    if not chosen:
        draft.report_unmatched(keys, remarks.OFF, off=True)
        return
    decay = draft.get(decay_key, read_number)
    interval = draft.get(interval_key, read_whole) or 1 if interval_key else 1
    ours = clamp("optimizer.ema_decay", usual if decay is None else decay)
    # The same memory in steps: one update by decay each `interval` steps.
    ours = round(ours ** (1 / interval), 6)
    (draft.report_different if interval > 1 else draft.report_mapped)(
        keys, {"optimizer.ema_decay": ours}, remarks.EMA_EACH_STEP if interval > 1 else ""
    )
