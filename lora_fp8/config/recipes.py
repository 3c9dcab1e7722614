"""Recipes: what a goal, a model family and a GPU ask of the settings, each value with a sentence of why.

A recipe is two presets that are made instead of read from a file: a goal (`character`) and a card (`vram_16gb`). Both
know the family. A goal says what is learned and how; a card says what memory allows. They set different keys, so their
order does not matter, and the config wins over both.

* `GOAL_RULES` holds the rules of the goals. A rule may need a kind of family (`relations.KINDS`).
* The rules of the cards choose the fastest settings whose estimated peak fits. The estimates are in memory.json, which
  scripts/measure_memory.py writes with the program's own estimate of each family's released model.
* What depends on the images (length, validation, shuffling) is in dataset_recipe.py, as a config has to state it. The
  number of frames is one of these; the cards read it, since clips take more memory than images. They also read whether
  the adapters have dropout, which a goal may set.
"""

import bisect
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from .. import families
from ..common.numbers import format_digits
from ..data.clips import MOST_FRAMES
from ..errors import Message
from ..families.sources import known_bases
from .relations import find_kinds

GOALS = ("character", "style", "concept", "object", "edit")
CARDS = (8, 12, 16, 24, 48, 80)
"""GB of GPU memory."""
SLACK = 2**30
"""Bytes that cards report less than their name says."""
IMAGES_PER_STEP = 2
"""On every card, so that the same steps train the same: together, or one after the other."""
SAME_SIZE = 0.05
"""Models of a family whose weights differ by less than this share take the same memory."""
SHARE, RESERVE = 0.95, 1536
"""Of a card's memory this share can be allocated; of that, so many MiB are the CUDA context and torch's reserve."""


@dataclass(frozen=True)
class Value:
    """A setting of a recipe.

    Attributes:
        key: the setting, such as "adapter.rank".
        value: its value.
        why: the reason, one sentence.
        drawn: True if it has an effect only with previews.
    """

    key: str
    value: Any
    why: str
    drawn: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the value as plain JSON types."""
        return {"key": self.key, "value": self.value, "why": self.why}


@dataclass(frozen=True)
class Rule:
    """A value of a goal, for families of a kind of `relations.KINDS`; "" is every family."""

    key: str
    value: Any
    why: Message
    kind: str = ""


def _make_rules(key: str, value: Any, why: dict[str, Message]) -> tuple[Rule, ...]:
    return tuple(Rule(key, value, sentence, kind) for kind, sentence in why.items())


COMMON = (
    Rule("optimizer.lr", "auto", Message("1e-4, the usual learning rate for a LoRA of the denoiser.")),
    *_make_rules(
        "optimizer.lr_scale",
        "auto",
        {
            "diffusion": Message(
                "On an FP8 base, the learning rate is multiplied by 1.4, as users of kohya's fp8_base do. Measured "
                "on a UNet: the concept appears in 2 to 6 more of 100 prompts, and the held-out loss is 2.5 % "
                "higher. 'none' keeps the plain learning rate."
            ),
            "flow": Message(
                "On an FP8 base, the learning rate is multiplied by 1.4, as users of kohya's fp8_base do. Measured "
                "on FLUX's layout: the concept appears in 2 to 6 more of 100 prompts, and the held-out loss is 0.7 "
                "% lower. 'none' keeps the plain learning rate."
            ),
        },
    ),
    Rule("schedule.warmup", 0.05, Message("Adam's averages are not reliable in the first steps.")),
    Rule(
        "objective.min_snr_gamma",
        5.0,
        Message(
            "Balances the noise levels (Min-SNR); otherwise the easy ones dominate. Measured on a small UNet: the "
            "concept appears in 47 instead of 31 of 100 prompts, and the held-out loss is the same within 1 %."
        ),
        "diffusion",
    ),
    Rule(
        "dataset.shuffle_tags",
        True,
        Message("Captions of tags are shuffled, so that the LoRA does not learn the order of the tags."),
        "tags",
    ),
    Rule("dataset.keep_tokens", 1, Message("The first tag, the trigger word, stays in front."), "tags"),
)
ALPHA_IS_RANK = Message("alpha = rank: the learning rate is not scaled down.")
COSINE = Message("Lowers the learning rate gradually, so that the last images cause less noise in the weights.")
DROPOUT_OF_CAPTIONS = Message("Some samples are trained without a caption, so that guidance (CFG) keeps working.")
CHOICE = Message("The best step often comes before the end, so several checkpoints are kept to choose from.")
ALL_SIX = Message("Keeps all checkpoints of a 1,500-step training.")
GOAL_RULES: dict[str, tuple[Rule, ...]] = {
    "character": (
        Rule("adapter.rank", 16, Message("Enough for one subject, and the file stays small.")),
        Rule("adapter.alpha", 16.0, ALPHA_IS_RANK),
        Rule("dataset.flip", False, Message("Faces, hair partings, scars and lettering are not symmetric.")),
        Rule("dataset.caption_dropout", 0.05, DROPOUT_OF_CAPTIONS),
        Rule("train.steps", 1200, Message("For 30 images, each trained 80 times.")),
        Rule("schedule.name", "cosine", COSINE),
        Rule("checkpoint.every", 200, CHOICE),
        Rule("checkpoint.keep", 6, Message("Keeps all checkpoints of a 1,200-step training.")),
    ),
    "style": (
        Rule("adapter.rank", 32, Message("Brushwork, colours and composition need more capacity than one subject.")),
        Rule(
            "adapter.alpha",
            16.0,
            Message(
                "Half the rank: weaker updates, so that the LoRA learns what all images share, not the single images."
            ),
        ),
        Rule(
            "dataset.flip",
            True,
            Message("A style looks the same mirrored, and mirroring doubles the number of images."),
        ),
        Rule(
            "dataset.caption_dropout",
            0.1,
            Message(
                "Captions are dropped more often than for a character, so that the style appears without being named."
            ),
        ),
        Rule("train.steps", 2000, Message("For 100 images, each trained 40 times.")),
        Rule("schedule.name", "cosine", COSINE),
        Rule("checkpoint.every", 250, CHOICE),
        Rule("checkpoint.keep", 4, Message("The newest ones are enough, as a style changes slowly.")),
    ),
    "concept": (
        Rule(
            "adapter.rank",
            16,
            Message("Enough for one idea, and too small to memorize the people and things that show it."),
        ),
        Rule(
            "adapter.alpha",
            8.0,
            Message("Half the rank: weaker updates, so that chance similarities between the images are learned less."),
        ),
        Rule("adapter.dropout", 0.1, Message("Keeps the subjects of the images from becoming part of the concept.")),
        Rule("dataset.flip", True, Message("Doubles the number of images. Set it to false if left and right matter.")),
        Rule("dataset.caption_dropout", 0.05, DROPOUT_OF_CAPTIONS),
        Rule("train.steps", 1500, Message("For 60 images, each trained 50 times.")),
        Rule(
            "schedule.name",
            "constant",
            Message("The learning rate does not fall, so you can stop as soon as the previews look right."),
        ),
        Rule("checkpoint.every", 250, CHOICE),
        Rule("checkpoint.keep", 6, ALL_SIX),
    ),
    "object": (
        Rule("adapter.rank", 16, Message("Enough for one object, and the file stays small.")),
        Rule("adapter.alpha", 16.0, ALPHA_IS_RANK),
        Rule(
            "dataset.flip",
            True,
            Message("Shows the object from the other side. Set it to false for lettering, logos and steering wheels."),
        ),
        Rule("dataset.caption_dropout", 0.05, DROPOUT_OF_CAPTIONS),
        Rule("train.steps", 1000, Message("For 25 images, each trained 80 times.")),
        Rule("schedule.name", "cosine", COSINE),
        Rule("checkpoint.every", 200, CHOICE),
        Rule("checkpoint.keep", 5, Message("Keeps all checkpoints of a 1,000-step training.")),
    ),
    "edit": (
        Rule("adapter.rank", 32, Message("An edit applies to any image, which needs more capacity than one subject.")),
        Rule("adapter.alpha", 32.0, ALPHA_IS_RANK),
        Rule("dataset.flip", False, Message("Instructions such as 'to the left' depend on left and right.")),
        Rule("dataset.caption_dropout", 0.05, DROPOUT_OF_CAPTIONS),
        Rule("train.steps", 1500, Message("For 50 pairs of images, each trained 60 times.")),
        Rule("schedule.name", "cosine", COSINE),
        Rule("checkpoint.every", 250, CHOICE),
        Rule("checkpoint.keep", 6, ALL_SIX),
    ),
}
"""What each goal sets beside `COMMON`."""


@dataclass(frozen=True)
class Fit:
    """What a card allows for a family.

    Attributes:
        values: the memory settings; the most economical ones if nothing fits.
        peak: the estimated peak of the whole job in MiB; None if only trying tells.
        usable: MiB of the card that a job can use.
        problem: why the family does not fit this card, and which card would do; "" if it fits.
        note: what the estimate does not know, or ""
    """

    values: list[Value]
    peak: int | None
    usable: int
    problem: str = ""
    note: str = ""


@dataclass(frozen=True)
class Recipe:
    """The settings of a goal on a family and a card, each with its reason."""

    goal: str
    family: str
    card: int
    values: list[Value]
    fit: Fit

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as plain JSON types."""
        about = {"goal": self.goal, "family": self.family, "card_gb": self.card, "presets": self.presets}
        about |= {"base": families.get(self.family).example_base, "fits": not self.fit.problem}
        about |= {"peak_mib": self.fit.peak, "usable_mib": self.fit.usable}
        about |= {"problem": self.fit.problem, "note": self.fit.note}
        return about | {"settings": [value.to_json() for value in self.values]}

    @property
    def presets(self) -> list[str]:
        """Return the names for `preset` in a config."""
        return [self.goal, format_card_name(self.card)]


def find_goals(family: str) -> tuple[str, ...]:
    """Return the goals that a family can be trained for: editing needs control images, and some families only edit."""
    least, most = families.get(family).controls
    if least:
        return ("edit",)
    return GOALS if most else tuple(goal for goal in GOALS if goal != "edit")


def format_card_name(gb: int) -> str:
    """Return the name of a card's preset."""
    return f"vram_{gb}gb"


def choose_card(memory: int) -> int:
    """Return the largest card that is not larger than a GPU with so many bytes; the smallest for a smaller GPU."""
    return max((gb for gb in CARDS if gb * 2**30 <= memory + SLACK), default=CARDS[0])


def parse_card(name: str) -> int:
    """Return the GB of a card's preset; 0 for any other name."""
    match = re.fullmatch(r"vram_(\d+)gb", name)
    return int(match[1]) if match and int(match[1]) in CARDS else 0


def list_names() -> list[str]:
    """Return the names of the presets that recipes are made of."""
    return [*GOALS, *map(format_card_name, CARDS)]


def make_recipe(goal: str, family: str, card: int, *, draws: bool = True, frames: int = 1, base: str = "") -> Recipe:
    """Make a recipe.

    Args:
        goal: one of `find_goals(family)`.
        family: a known family.
        card: GB of GPU memory, one of `CARDS`.
        draws: True if the job draws previews.
        frames: length of the longest clip; 1 for images.
        base: `model.path`; released models of another size than usual have estimates of their own.
    """
    fit = fit_card(family, card, frames, has_dropout(goal), base)
    values = [*list_goal_values(goal, family), *(value for value in fit.values if draws or not value.drawn)]
    return Recipe(goal, family, card, values, fit)


def find_preset_values(
    name: str, family: str, *, draws: bool, frames: int = 1, dropout: bool = False, base: str = ""
) -> list[Value] | None:
    """Return the values of a goal or a card for a family ("" or unknown: what holds for all); None for other names.

    Args:
        name: of a preset.
        family: its name.
        draws: True if the job draws previews.
        frames: length of the longest clip; 1 for images.
        dropout: True if the adapters have dropout.
        base: `model.path`; "" for the family's usual base.
    """
    if name in GOALS:
        return list_goal_values(name, family)
    if gb := parse_card(name):
        return [value for value in fit_card(family, gb, frames, dropout, base).values if draws or not value.drawn]
    return None


def has_dropout(goal: str) -> bool:
    """Return True if a goal sets dropout of the adapters."""
    return any(rule.key == "adapter.dropout" and is_dropout(rule.value) for rule in GOAL_RULES[goal])


def is_dropout(value: Any) -> bool:
    """Return True if an `adapter.dropout`, which may not have been validated yet, is not 0."""
    return isinstance(value, int | float) and value > 0


def find_longest_clip(frames: Any) -> int:
    """Return the longest length of `dataset.frames`, which may not have been validated yet; 1 without any."""
    lengths = frames if isinstance(frames, list) else []
    return min(max((num for num in lengths if type(num) is int and num > 0), default=1), MOST_FRAMES)


def list_goal_values(goal: str, family: str) -> list[Value]:
    """Return what a goal sets for a family."""
    kinds = ("", *find_kinds(family))  # an unknown family has none
    rules = (*GOAL_RULES[goal], *COMMON)
    return [Value(rule.key, rule.value, rule.why) for rule in rules if rule.kind in kinds]


# ---------------------------------------------------------------------------------------------------------------------
# Cards


PLAIN_DROPOUT, CHECKPOINTED_DROPOUT = 1.5, 1.25
"""Memory of a step with dropout of the adapters, at most, relative to one without: without and with gradient
checkpointing. Estimated: 1.42 to 1.48 and 1.10 to 1.23 for SDXL, Sana and LTX-Video, 1.20 for clips of Wan 14B."""


@dataclass(frozen=True)
class Sizes:
    """The estimates of a family's released model, in MiB; written by scripts/measure_memory.py.

    Attributes:
        base: the released model.
        sides: training resolutions, the family's own first.
        weights: share of offload -> (the base on the GPU, its part in RAM), in FP8.
        trained: adapters and optimizer.
        steps: "SIDE xBATCH" or "SIDE xBATCH checkpointed" -> a training step; empty if only trying tells.
        vae: the VAE.
        encode, decode, decode_tiled: side -> the VAE's work on one image.
        text: storage -> the largest text encoder.
        clips: number of frames -> {"steps", "encode"} of clips with that many; empty for families of images.
    """

    base: str
    sides: list[int]
    weights: dict[str, list[int]]
    trained: int
    steps: dict[str, int]
    vae: int
    encode: dict[str, int]
    decode: dict[str, int]
    decode_tiled: dict[str, int]
    text: dict[str, int]
    clips: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)

    def with_clips(self, frames: int) -> "Sizes":
        """Return the estimates for clips of this length.

        Memory grows in proportion to the frames, so what lies between two estimates, or behind the last, lies on the
        line through them.
        """
        estimates = {1: {"steps": self.steps, "encode": self.encode}}
        estimates |= {int(number): estimate for number, estimate in self.clips.items()}
        lengths = sorted(estimates)
        if frames <= 1 or len(lengths) == 1:
            return self
        position = min(max(1, bisect.bisect_left(lengths, frames)), len(lengths) - 1)
        below, above = lengths[position - 1], lengths[position]
        share = (frames - below) / (above - below)
        steps, encode = (
            _interpolate_sizes(estimates[below][part], estimates[above][part], share) for part in ("steps", "encode")
        )
        return replace(self, steps=steps, encode=encode)

    def with_dropout(self) -> "Sizes":
        """Return the estimates for adapters with dropout, which keep their inputs a second time."""
        factors = {key: CHECKPOINTED_DROPOUT if key.endswith("checkpointed") else PLAIN_DROPOUT for key in self.steps}
        return replace(self, steps={key: math.ceil(size * factors[key]) for key, size in self.steps.items()})


def _interpolate_sizes(below: dict[str, int], above: dict[str, int], share: float) -> dict[str, int]:
    """Return the sizes at a share of the way between two estimates; beyond the second for a share above 1."""
    return {key: math.ceil(below[key] + (above[key] - below[key]) * share) for key in above if key in below}


@dataclass(frozen=True)
class Choice:
    """One combination of memory settings."""

    side: int
    batch: int
    checkpointing: bool
    share: str
    step: int = field(compare=False, default=0)


@cache
def read_sizes() -> dict[str, Sizes]:
    """Read memory.json: by family the estimates of its usual base, and by id those of bases of another size."""
    data = json.loads(Path(__file__).with_name("memory.json").read_text(encoding="utf-8"))
    return {name: Sizes(**sizes) for name, sizes in data.items()}


def find_sizes(family: str, base: str = "") -> Sizes | None:
    """Return the estimates for a base: of its own size if that is known, else of its family's usual base, if any.

    Args:
        family: the architecture.
        base: `model.path`.
    """
    return find_own_sizes(family, base) or read_sizes().get(family)


def find_own_sizes(family: str, base: str) -> Sizes | None:
    """Return the estimates for a released base of this size; None if there are none, or its size is not known."""
    known = known_bases.get(base.removeprefix("modelscope:"))
    if known is None or known.family != family:
        return None
    for name, sizes in read_sizes().items():
        if name == family or ((other := known_bases.get(name)) is not None and other.family == family):
            estimated = known_bases.get(sizes.base) or _find_by_name(family, sizes.base)
            if estimated is not None and _has_same_size(known, estimated):
                return sizes
    return None


def _find_by_name(family: str, name: str) -> known_bases.KnownBase | None:
    """Return the known base of a family whose id ends like `name`, which may be a path."""
    last = name.rpartition("/")[2].lower()
    return next((base for base in known_bases.list_of_family(family) if base.id.lower().endswith(last)), None)


def _has_same_size(base: known_bases.KnownBase, other: known_bases.KnownBase) -> bool:
    """Return True if two denoisers have about as many parameters; one may be stored in full precision."""
    denoiser = families.get(base.family).denoiser_name
    sizes = [model.gigabytes[denoiser] for model in (base, other)]
    ratio = max(sizes) / min(sizes)
    return min(abs(ratio - 1), abs(ratio - 2)) < SAME_SIZE


def compute_usable_mib(gb: int) -> int:
    """Return the MiB of a card that a job can use."""
    return int(gb * 1024 * SHARE) - RESERVE


def find_least_cards(family: str, base: str = "") -> tuple[int, int]:
    """Find the smallest cards that train a family at its own resolution, without and with offloading to RAM.

    Args:
        family: its name.
        base: the id of a released base; "" for the family's usual one.

    Returns:
        GB of both, of `CARDS`; 0 where none is large enough, and for a family or a size that was not estimated.
    """
    sizes = find_own_sizes(family, base) if base else read_sizes().get(family)
    if sizes is None:
        return 0, 0
    least = []
    for shares in (("0",), tuple(sizes.weights)):
        choices = [
            choice for choice in _list_choices(sizes) if choice.side == sizes.sides[0] and choice.share in shares
        ]
        needed = min((_compute_peak(sizes, choice, _choose_smallest_text(sizes)) for choice in choices), default=0)
        least.append(next((gb for gb in CARDS if 0 < needed <= compute_usable_mib(gb)), 0))
    return least[0], least[1]


def _choose_smallest_text(sizes: Sizes) -> str:
    return min(sizes.text, key=lambda storage: sizes.text[storage])


def fit_card(family: str, gb: int, frames: int = 1, dropout: bool = False, base: str = "") -> Fit:
    """Choose the memory settings of a family on a card: the fastest that fit, without changing what is learned.

    Gradient checkpointing costs 1.4 times the time, offloading costs more, and a lower resolution costs detail, so
    they come in this order. An unknown family gets what saves most without offloading.

    Args:
        family: its name.
        gb: one of `CARDS`.
        frames: length of the longest clip; 1 for images.
        dropout: True if the adapters have dropout.
        base: `model.path`, which may be a released model of another size; "" for the family's usual base.
    """
    own = find_own_sizes(family, base)
    return _fit_card(family, gb, frames, dropout, own.base if own else "")


@cache
def _fit_card(family: str, gb: int, frames: int, dropout: bool, base: str) -> Fit:
    usable = compute_usable_mib(gb)
    known = find_sizes(family, base)
    if known is None:
        return Fit(_list_fallback_values(), None, usable)
    sizes = known.with_clips(frames)
    sizes = sizes.with_dropout() if dropout else sizes
    choices = list(_list_choices(sizes))
    text = next((storage for storage, size in sizes.text.items() if size <= usable), None)
    fitting = (choice for choice in choices if _compute_peak(sizes, choice, text or "nf4") <= usable)
    choice = next(fitting, None) if text else None
    problem = "" if choice else _explain_misfit(sizes, family, gb, (frames, dropout, base), text)
    choice = choice or choices[-1]
    peak = _compute_peak(sizes, choice, text or "nf4")
    held = sizes.weights[choice.share][0] + sizes.trained + sizes.vae
    tiled = held + sizes.decode.get(str(choice.side), 0) > usable
    values = [*_list_weight_values(sizes, choice, usable), *_list_text_values(sizes, text or "nf4", usable)]
    values += [*_list_step_values(sizes, choice, frames), *_list_side_values(sizes, choice, tiled, usable)]
    note = "" if sizes.steps else Message("The memory of a training step is known only after a test step.")
    decode = 0 if tiled else sizes.decode.get(str(choice.side), 0)  # in tiles it is part of the peak already
    return Fit(values, max(peak, held + decode), usable, problem, note)


def _list_fallback_values() -> list[Value]:
    less = Message("Saves memory. The architecture is unknown, so nothing was estimated.")
    return [
        Value("quantize.storage", "fp8", less),
        Value("optimizer.name", "adamw8bit", less),
        Value("memory.gradient_checkpointing", True, less),
        Value("train.batch_size", 1, less),
        Value("train.accumulate", IMAGES_PER_STEP, less),
    ]


def _list_choices(sizes: Sizes) -> Iterator[Choice]:
    """Yield all combinations that were estimated, the fastest first."""
    native, *smaller = sizes.sides
    for side, batch, checkpointing, share in (
        (native, 2, False, "0"),
        (native, 1, False, "0"),
        (native, 2, True, "0"),
        *((native, 1, True, share) for share in sizes.weights),
        *((side, 1, True, share) for side in smaller for share in sizes.weights),
    ):
        key = f"{side} x{batch}{' checkpointed' * checkpointing}"
        if key in sizes.steps:
            yield Choice(side, batch, checkpointing, share, sizes.steps[key])
        elif not sizes.steps and batch == 1 and checkpointing:
            yield Choice(side, batch, checkpointing, share, UNKNOWN_STEP)


UNKNOWN_STEP = 6 * 1024
"""MiB that are kept free for a training step that cannot be estimated."""


def _compute_peak(sizes: Sizes, choice: Choice, text: str) -> int:
    """Return the highest peak of encoding, training and a preview in tiles, in MiB."""
    held = sizes.weights[choice.share][0] + sizes.trained
    encode = max(sizes.vae + sizes.encode.get(str(choice.side), 0), sizes.text[text])
    preview = held + sizes.vae + sizes.decode_tiled.get(str(choice.side), 0)
    return max(held + choice.step, encode, preview)


def _explain_misfit(sizes: Sizes, family: str, gb: int, more: tuple[int, bool, str], text: str | None) -> Message:
    """Return why a family does not fit a card; `more` are the last arguments of `fit_card`."""
    title, frames = families.get(family).title, more[0]
    if sizes.base != read_sizes()[family].base and (other := known_bases.get(sizes.base)):
        title = other.title
    larger = next((other for other in CARDS if other > gb and not fit_card(family, other, *more).problem), None)
    if text is None:
        why = Message("its largest text encoder takes {size} GiB even in nf4", size=format_gib(sizes.text["nf4"]))
    else:
        least = format_gib(min(_compute_peak(sizes, choice, text) for choice in _list_choices(sizes)))
        why = Message("even with everything offloaded it takes {size} GiB", size=least)
        if sizes.clips and frames > 1:
            why = Message(
                "even with everything offloaded, clips of {frames} frames take {size} GiB", frames=frames, size=least
            )
    usable = format_gib(compute_usable_mib(gb))
    if larger is None:
        return Message(
            "{title} does not fit a GPU of {gb} GB, of which a job can use {usable} GiB: {why}.",
            title=title,
            gb=gb,
            usable=usable,
            why=why,
        )
    return Message(
        "{title} does not fit a GPU of {gb} GB, of which a job can use {usable} GiB: {why}. A GPU of {larger} GB is "
        "enough.",
        title=title,
        gb=gb,
        usable=usable,
        why=why,
        larger=larger,
    )


def format_gib(mib: int) -> str:
    """Return MiB as GiB, for people."""
    return format_digits(mib / 1024)


def _list_weight_values(sizes: Sizes, choice: Choice, usable: int) -> Iterator[Value]:
    whole = sizes.weights["0"][0]
    yield Value(
        "quantize.storage",
        "fp8",
        Message(
            "One byte per weight instead of two: the base takes {size} GiB. Measured: the held-out loss rises by "
            "0.3 to 0.6 %, less than the difference between two seeds.",
            size=format_gib(whole),
        ),
    )
    if choice.share != "0":
        held, waiting = sizes.weights[choice.share]
        yield Value(
            "memory.offload",
            float(choice.share),
            Message(
                "{waiting} GiB of the base are offloaded to RAM, so that {held} GiB are left on the GPU; a job can "
                "use {usable} GiB of its memory. The result is bit-identical, but training is slower.",
                waiting=format_gib(waiting),
                held=format_gib(held),
                usable=format_gib(usable),
            ),
        )
    yield Value(
        "optimizer.name",
        "adamw8bit",
        Message("Two bytes of optimizer state per trained weight instead of eight."),
    )


def _list_text_values(sizes: Sizes, storage: str, usable: int) -> Iterator[Value]:
    plain, size = format_gib(sizes.text["none"]), format_gib(sizes.text[storage])
    if storage == "none":
        why = Message(
            "The largest text encoder takes {size} GiB and fits: captions are encoded before the base is loaded.",
            size=size,
        )
    else:
        why = Message(
            "The largest text encoder takes {plain} GiB in bf16, more than the {usable} GiB that a job can use; in "
            "{storage} it takes {size} GiB.",
            plain=plain,
            usable=format_gib(usable),
            storage=storage,
            size=size,
        )
    yield Value("model.text_storage", storage, why)


def _list_step_values(sizes: Sizes, choice: Choice, frames: int) -> Iterator[Value]:
    size, of_clips = format_gib(choice.step), bool(sizes.clips) and frames > 1
    plain = sizes.steps.get(f"{choice.side} x1")
    if not choice.checkpointing:
        why = Message(
            "Without gradient checkpointing a step takes {size} GiB, which fits; with it, steps would take 1.4 "
            "times as long (measured on a CPU).",
            size=size,
        )
    elif not sizes.steps:
        why = Message(
            "Saves memory. The memory of a step is known only after a test step; {size} GiB are kept free.", size=size
        )
    elif plain is None:
        why = Message("Recomputes activations, so a step takes {size} GiB.", size=size)
    elif of_clips:
        why = Message(
            "Recomputes activations, so a step takes {size} GiB; without this, a single clip of {frames} frames "
            "takes {plain} GiB.",
            size=size,
            frames=frames,
            plain=format_gib(plain),
        )
    else:
        why = Message(
            "Recomputes activations, so a step takes {size} GiB; without this, a single image takes {plain} GiB.",
            size=size,
            plain=format_gib(plain),
        )
    yield Value("memory.gradient_checkpointing", choice.checkpointing, why)
    at_once = Message("Two images at once are faster than one after the other, and fit.")
    in_turn = Message("One image at a time, because two at once do not fit.")
    a_step = Message("Two images per step on every GPU, so the number of steps means the same everywhere.")
    if of_clips:
        at_once = Message("Two clips at once are faster than one after the other, and fit.")
        in_turn = Message("One clip at a time, because two at once do not fit.")
        a_step = Message("Two clips per step on every GPU, so the number of steps means the same everywhere.")
    yield Value("train.batch_size", choice.batch, at_once if choice.batch == IMAGES_PER_STEP else in_turn)
    yield Value("train.accumulate", IMAGES_PER_STEP // choice.batch, a_step)


def _list_side_values(sizes: Sizes, choice: Choice, tiled: bool, usable: int) -> Iterator[Value]:
    native = sizes.sides[0]
    if choice.side == native:
        why = Message("The resolution that the base was trained at: {side} pixels.", side=native)
        yield Value("dataset.resolution", "auto", why)
    else:
        why = Message("{native} pixels do not fit this GPU, so some detail is lost.", native=native)
        yield Value("dataset.resolution", choice.side, why)
    if tiled:
        why = Message(
            "Decoding a whole preview of {side} pixels during the training takes {size} GiB, in tiles {less}. A job "
            "can use {usable} GiB.",
            side=choice.side,
            size=format_gib(sizes.decode[str(choice.side)]),
            less=format_gib(sizes.decode_tiled[str(choice.side)]),
            usable=format_gib(usable),
        )
        yield Value("preview.tiled", True, why, drawn=True)
