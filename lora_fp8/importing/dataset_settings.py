"""Folders, masks, clips, resolutions, and the counting of steps."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .. import families
from ..common.numbers import format_digits
from ..data.caption_text import CAPTIONS
from ..data.decoding import EXTENSIONS
from ..data.image_files import find_label_files, find_masked_stem
from ..errors import Message, Plural, Template
from . import remarks
from .common_values import find_bounds
from .import_draft import Draft, Folder
from .readers import Unfit, read_number, read_string, read_whole

EPOCHS = Template(
    "{epochs} epochs x {steps} steps ({samples} samples per epoch); this trainer counts steps, not epochs"
)
EPOCHS_LEFT = re.compile(r"^steps = .*# TODO[:：] ?(\d+) \D+ = \1 ", re.MULTILINE)
"""A line in which `set_steps_from_epochs` left a TODO, in any language. The comment outlives the TODO."""
OUTSIDE = Message("the other trainer ignores the area outside a mask")
NO_WEIGHT = Message("the weight of a folder must be above 0; remove the folder instead")
NO_CLIPS = Message("only base models that generate video are trained on clips; see dataset.frames")
EVERY_EPOCHS = Plural(
    "{key}: the file says every epoch, which cannot be converted without the images; the default is used",
    "{key}: the file says every {count} epochs, which cannot be converted without the images; the default is used",
)


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
    knows = draft.family in families.list_families() and any(families.get(draft.family).controls)
    if draft.family and not knows:
        draft.report_unmatched(key, Message("this trainer trains {family} without control images", family=draft.family))
        draft.add_todo(
            "dataset.folders",
            Message(
                "the file has control images ({path}), but this trainer trains {family} without them",
                path=path,
                family=draft.family,
            ),
        )
    elif not isinstance(path, str):
        draft.report_unmatched(
            key,
            Message(
                "this trainer reads control images from one folder: put several of one image into it as name_1, "
                "name_2, and set {at}.control",
                at=at,
            ),
        )
    else:
        folder.control = path
        draft.report_mapped(key, {}, remarks.SETS(setting=f"{at}.control"))


def set_mask_folder(draft: Draft, key: str, folder: Folder, at: str) -> None:
    """Set a folder of masks, named as the images are.

    Args:
        draft: the import.
        key: the tool's key with the path.
        folder: the folder of images.
        at: our name of the folder, such as "dataset.folders.0".
    """
    if path := draft.get(key, read_string):
        folder.mask = as_mask_folder(path)
        draft.report_mapped(key, {}, remarks.SETS(setting=f"{at}.mask"))


def as_mask_folder(path: str) -> str:
    """Return the path of a mask folder for our setting, in which "alpha" alone means the images' transparency."""
    return "./alpha" if path == "alpha" else path


def set_unmasked(draft: Draft) -> None:
    """Set objective.unmasked_weight for tools that ignore the area outside a mask."""
    if any(folder.mask for folder in draft.folders):
        draft.set("objective.unmasked_weight", 0.0, OUTSIDE)


# ---------------------------------------------------------------------------------------------------------------------
# Folders and steps


def count_images(draft: Draft, folder: Folder, *, deep: bool) -> Folder:
    """Count a folder's images, and those without a caption, if the folder is on this machine.

    Args:
        draft: the import.
        folder: receives the counts.
        deep: the other tool searches subfolders, as ours does; images that only ours would find are reported.
    """
    place = draft.find(folder.path)
    if place is None or not place.is_dir():
        return folder
    every = sorted(p for p in place.rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())
    labels = {parent / name for parent in {p.parent for p in every} for name in find_label_files(os.listdir(parent))}
    every = [p for p in every if p not in labels and not find_masked_stem(folder.mask, p.name)]
    pictures = every if deep else [p for p in every if p.parent == place]
    if len(pictures) < len(every):
        draft.notes.append(
            Plural(
                "{path}: this trainer also uses the {count} image in subfolders, which the other trainer does not",
                "{path}: this trainer also uses the {count} images in subfolders, which the other trainer does not",
            )(
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
            "no image has a caption file, so this is the folder's trigger and, with missing_caption = 'trigger', "
            "the caption"
        )
    return Message(
        "the other trainer uses this as the caption of images that have none. To do the same, set it as the "
        "folder's trigger with dataset.missing_caption = 'trigger', which also adds it to captions that lack it"
    )


def count_samples(draft: Draft) -> int | None:
    """Return the samples of the other tool's epoch: images times repeats, over all folders; None if one is missing."""
    if not draft.folders or any(folder.images is None for folder in draft.folders):
        return None
    counts = [(folder.images or 0) * folder.repeats for folder in draft.folders if not folder.regularization]
    # kohya's trainers train on as many regularization images as on others, whatever their number.
    total = round(sum(counts))
    return total * (2 if any(folder.regularization for folder in draft.folders) else 1)


def balance_regularization(draft: Draft) -> None:
    """Set repeats so that an epoch has as many regularization images as others, as in the other tool."""
    others = [folder for folder in draft.folders if folder.regularization]
    total, there = count_samples(draft), sum(folder.images or 0 for folder in others)
    if not (others and total and there):
        return
    wanted = total // 2
    for folder in others:
        folder.repeats = wanted / there
    if there > wanted:
        draft.notes.append(
            Message(
                "there are {count} regularization images. The other trainer uses only the first {shown} per "
                "epoch; this trainer uses {shown} per epoch in turn",
                count=there,
                shown=wanted,
            )
        )


def weigh_regularization(draft: Draft, key: str) -> None:
    """Set the weight of the regularization folders."""
    others, weight = [folder for folder in draft.folders if folder.regularization], draft.get(key, read_number)
    if not others:
        draft.report_unmatched(key, Message("there are no regularization images"), off=True)
    elif weight is not None and weight <= 0:
        draft.report_unmatched(
            key,
            Message("the weight must be above 0, so regularization images count fully; remove their folders instead"),
        )
    elif weight is not None:
        for folder in others:
            folder.weight = weight
        draft.report_mapped(key, {}, Message("this is the weight of the regularization folders"))


def weigh(draft: Draft, key: str, folder: Folder, at: str) -> None:
    """Set the weight of one folder's images in the loss.

    Args:
        draft: the import.
        key: the tool's key.
        folder: the folder of images.
        at: our name of the folder, such as "dataset.folders.0".
    """
    weight = draft.get(key, read_number)
    if weight is not None and weight <= 0:
        draft.report_unmatched(key, NO_WEIGHT)
    elif weight is not None:
        folder.weight *= weight
        draft.report_mapped(key, {}, remarks.SETS(setting=f"{at}.weight"))


def count_steps_per_epoch(draft: Draft, batch: int, accumulate: int, processes: int = 1) -> int | None:
    """Return the optimizer steps per epoch as kohya's trainers count them; None if the images are missing.

    With `batch` above 1, bucketing adds a partly filled batch per bucket, which is not counted.
    """
    count = count_samples(draft)
    if not count:
        return None
    return math.ceil(math.ceil(count / batch) / processes / accumulate)


def set_steps_from_epochs(draft: Draft, key: str, epochs: int, per_epoch: int | None, batch: int) -> None:
    """Set train.steps from epochs, by counting the images; add a TODO if they are missing."""
    if per_epoch is None:
        draft.report_unmatched(
            key, Message("{epochs} epochs cannot be converted to steps without the images", epochs=epochs)
        )
        draft.add_todo(
            "train.steps",
            Message(
                "{epochs} epochs = {epochs} x images x repeats / (train.batch_size x train.accumulate) steps. "
                "Import again on the machine that has the images, add them on the page, or fill in the number",
                epochs=epochs,
            ),
        )
        draft.set("train.steps", "TODO")  # a number might be far off, and trained unseen
        return
    note = EPOCHS(epochs=epochs, steps=per_epoch, samples=count_samples(draft))
    if batch > 1:
        note = Message("{line}. The last batch of each bucket may be smaller and add a step", line=note)
    draft.report_different(key, {"train.steps": epochs * per_epoch}, note)


def find_epochs(text: str) -> int | None:
    """Return the epochs that an import could not convert to steps without the images; None if there are none."""
    left = EPOCHS_LEFT.search(text)
    return int(left[1]) if left else None


def convert_epochs(epochs: int, samples: float, batch: int, accumulate: int) -> tuple[int, Message]:
    """Return train.steps for epochs of so many samples, as kohya's trainers count them, and the reason."""
    per_epoch = math.ceil(math.ceil(samples / batch) / accumulate)
    return epochs * per_epoch, EPOCHS(epochs=epochs, steps=per_epoch, samples=format_digits(samples))


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

    def make_intervals(steps: int) -> dict[str, int]:
        return {setting: steps} | ({"export.every": steps} if setting == "checkpoint.every" else {})

    steps = read_whole(draft.get(steps_key) or 0) if steps_key else 0
    epochs = read_whole(draft.get(epochs_key) or 0) if epochs_key else 0
    if steps > 0 and epochs > 0 and epochs_count:
        draft.report_unmatched(steps_key, remarks.COUNTS(key=epochs_key), off=True)
        steps = 0
    if steps > 0:
        account = draft.report_different if note else draft.report_mapped
        account(steps_key, make_intervals(steps), note)
        if epochs > 0:
            draft.report_unmatched(
                epochs_key,
                Message("the other trainer uses both intervals; this trainer has one, that of {key}", key=steps_key),
            )
        elif epochs_key:
            draft.report_unmatched(epochs_key, remarks.OFF, off=True)
        return
    if steps_key:
        draft.report_unmatched(steps_key, remarks.OFF, off=True)
    if epochs > 0 and per_epoch:
        counted = remarks.EVERY_EPOCHS(epochs=epochs, steps=per_epoch)
        draft.report_different(epochs_key, make_intervals(epochs * per_epoch), remarks.join([counted, note]))
    elif epochs > 0:
        draft.report_unmatched(
            epochs_key,
            Message("{setting} counts steps, and the steps per epoch are unknown without the images", setting=setting),
        )
        draft.todo.append(EVERY_EPOCHS(key=setting, count=epochs))
    elif epochs_key:
        draft.report_unmatched(epochs_key, remarks.OFF, off=True)


def set_shared(
    draft: Draft, keys: Sequence[str], values: Sequence[Any], setting: str, read: Callable[[Any], Any], note: str = ""
) -> None:
    """Set one of our settings from one that the other tool has per folder.

    Args:
        draft: the import.
        keys: all of the tool's keys for it.
        values: the value for each folder; None if it has none.
        setting: our setting.
        read: converts the tool's value to ours.
        note: the difference in meaning, if there is one.
    """
    try:
        parsed = [None if value in (None, "") else read(value) for value in values]
    except Unfit as error:
        draft.report_unmatched(keys, Message("{setting} was not written: {line}", setting=setting, line=error))
        return
    given = [value for value in parsed if value is not None]
    if not given:
        draft.report_unmatched(keys, remarks.EMPTY, off=True)
        return
    common = Counter(given).most_common(1)[0][0]
    notes = [note] if note else []
    if len(set(parsed)) > 1:
        notes.append(Message("this trainer has one value for all folders; the most frequent one was written"))
    (draft.report_different if notes else draft.report_mapped)(keys, {setting: common}, remarks.join(notes))


def compute_side(value: Any) -> tuple[int, str]:
    """Return the side of the square with the area of a side, "w,h" or [w, h], and the remark if it was rounded."""
    parts = value if isinstance(value, list) else re.split(r"[,x]", str(value))
    numbers = [read_whole(part) for part in parts]
    if not numbers or min(numbers) <= 0 or len(numbers) > 2:
        raise Unfit(Message("{value} is not a resolution", value=repr(value)))
    side = math.sqrt(numbers[0] * numbers[-1])
    if side == int(side):
        return int(side), ""
    rounded = max(64, round(side / 64) * 64)
    return rounded, Message(
        "{size} has the area of a square with side {side}; dataset.resolution is this side, rounded to {ours}",
        size=value,
        side=f"{side:.1f}",
        ours=rounded,
    )


def set_resolution(draft: Draft, keys: Sequence[str], values: Sequence[Any], note: str = "") -> None:
    """Set dataset.resolution, the side of the square with the training area, from sides, "w,h" or [w, h].

    Of several resolutions the largest is taken, which is reported.
    """
    sides = [compute_side(value) for value in values]
    if not sides:
        draft.report_unmatched(keys, remarks.EMPTY, off=True)
        return
    side, rounded = max(sides)
    notes = [note] if note else []
    if len(set(sides)) > 1:
        notes.append(
            Message(
                "the file has several resolutions ({sizes}); the largest was written",
                sizes=", ".join((str(given) for given, _ in sides)),
            )
        )
    notes += [rounded] if rounded else []
    account = draft.report_different if notes else draft.report_mapped
    account(keys, {"dataset.resolution": side}, remarks.join(notes))


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
    sides = [compute_side(value) if value else None for value in values]
    largest = max(side for side in sides if side)[0]
    for folder, side in zip(draft.folders, sides, strict=True):
        folder.resolution = side[0] if side and side[0] != largest else 0
    rounded = [side[1] for side in sides if side and side[1]]
    differences = remarks.join([note, *rounded])
    account = draft.report_different if differences else draft.report_mapped
    account(keys, {"dataset.resolution": largest}, differences or remarks.LARGEST)


def keep_aspects(draft: Draft, key: str) -> None:
    """Set dataset.max_aspect to its limit, for tools whose buckets have any shape; `key` is their key for buckets."""
    if draft.settings.get("dataset.buckets") is not False:
        note = remarks.ANY_ASPECT(tool=draft.tool.name)
        draft.assume("dataset.max_aspect", float(find_bounds("dataset.max_aspect")[1]), key, note)


def set_bucket_step(draft: Draft, keys: Sequence[str], values: Sequence[Any]) -> None:
    """Set dataset.bucket_step, which is at least 8 pixels.

    Args:
        draft: the import.
        keys, values: as for `set_shared`.
    """
    given = [read_whole(value) for value in values if value not in (None, "")]
    least, _ = find_bounds("dataset.bucket_step")
    note = ""
    if given and min(given) < least:
        note = Message(
            "the file has {number}; the minimum of this trainer is {least} pixels", number=min(given), least=least
        )
    set_shared(draft, keys, values, "dataset.bucket_step", lambda value: max(least, read_whole(value)), note)


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
    step, _ = families.get(draft.family).clips if draft.family in families.list_families() else (0, 0)
    step = step if draft.family else 1  # of an unknown family, the lengths are kept as they are
    if max(lengths, default=1) <= 1 or not step:
        draft.report_unmatched([*keys, *part_keys], NO_CLIPS, off=max(lengths, default=1) <= 1)
        return
    draft.report_different(
        keys, {"dataset.frames": sorted({max(1, (length - 1) // step * step + 1) for length in lengths})}, note
    )
    if part is None:
        draft.report_unmatched(
            part_keys, Message("this trainer takes the head, the middle or chunks of a clip: dataset.clip")
        )
    else:
        draft.report_mapped(part_keys, {"dataset.clip": part})
