"""kohya's datasets: dataset TOML, folders named 10_name, masks, regularization, buckets and captions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PureWindowsPath
from typing import Any

from ..errors import Joined, Message, Template
from . import common_values, dataset_settings, model_settings, remarks
from .import_draft import Draft, Folder
from .readers import Unfit, flag, number, positive, same, text, whole
from .source_files import flattened


def sections(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (shown, key, value) for a TOML whose section names have no meaning."""
    for name, value in data.items():
        if isinstance(value, dict):
            yield from sections(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", name, value


def dataset(data: Mapping[str, Any], file: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (shown, key, value) for a dataset TOML."""
    for key, value in flattened(data):
        yield f"{file}: {key}" if file else key, key, value


def datasets_of(draft: Draft, rows: list[tuple[str, str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """Yield the rows of the dataset TOML that dataset_config names, if it was found."""
    for _, key, value in rows:
        if key == "dataset_config" and value:
            data = draft.refer(key, str(value))
            if isinstance(data, dict):
                yield from dataset(data, PureWindowsPath(str(value)).name)


def everywhere(draft: Draft, name: str) -> list[str]:
    """Return all keys with this name: the argument, and those of the dataset file."""
    inside = ("general.", "datasets.")
    return [key for key in draft.given if key == name or (key.startswith(inside) and key.endswith(f".{name}"))]


def subsets(draft: Draft) -> list[str]:
    """Return the dataset file's folders, as prefixes of their keys: datasets.0.subsets.1."""
    prefixes = {m[0] for key in draft.given if (m := re.match(r"datasets\.\d+\.subsets\.\d+\.", key))}
    return sorted(prefixes, key=lambda key: [int(part) for part in re.findall(r"\d+", key)])


def counting(draft: Draft, subset: str, name: str) -> str:
    """Return the key that applies to a folder: its own, its dataset's, that of [general], or the argument."""
    outer = ".".join(subset.split(".")[:2]) + "." if subset else ""
    keys = (f"{subset}{name}", f"{outer}{name}", f"general.{name}")
    return next((key for key in keys if draft.has(key)), name)


def effective(draft: Draft, subset: str, name: str, read: Callable[[Any], Any] = same) -> Any:
    """Return the value that applies to a folder, or the tool's default; None if there is neither."""
    return draft.get(counting(draft, subset, name), read)


def collect_values(draft: Draft, name: str, places: list[str]) -> tuple[list[str], list[Any]]:
    """Return the keys that apply to the folders, and each folder's value. Overridden keys are reported."""
    keys = list(dict.fromkeys(counting(draft, place, name) for place in places or [""]))
    draft.none(
        [key for key in everywhere(draft, name) if key not in keys], Message("each folder sets its own value"), off=True
    )
    return keys, [effective(draft, place, name) for place in places or [""]]


def only_pictures(draft: Draft) -> bool:
    """Return True for a dataset file alone, which says nothing about the model and the training."""
    return isinstance(draft.source.data, dict) and isinstance(draft.source.data.get("datasets"), list)


SAID_BY_DATASET: tuple[str, ...] = ("batch_size", "train_batch_size", "resolution", "enable_bucket", "min_bucket_reso")
SAID_BY_DATASET += ("max_bucket_reso", "keep_tokens")


def set_absent_dataset(draft: Draft) -> None:
    """Add TODOs for the settings of a missing dataset file, instead of taking the tool's defaults."""
    file = draft.get("dataset_config")
    for key in SAID_BY_DATASET:
        draft.defaults.pop(key, None)
    draft.folders = [Folder("TODO")]
    draft.need("dataset.folders", remarks.FOLDERS_OF(file=file))
    draft.need(
        "dataset.resolution",
        Message(
            "{file} sets the resolution, the buckets and the batch size, but was not found; fill them in", file=file
        ),
    )


def set_only_pictures(draft: Draft, places: list[str]) -> None:
    """Convert a dataset file alone, except for its folders and sizes."""
    kept = ("keep_tokens", "enable_bucket", "resolution")
    draft.defaults = {name: value for name, value in draft.defaults.items() if name in kept}
    model_settings.set_family(
        draft,
        (),
        "",
        Message("the file describes only the images; import the settings of the training with this file beside them"),
    )
    model_settings.set_model_path(draft, "pretrained_model_name_or_path")
    dataset_settings.share(draft, *collect_values(draft, "batch_size", places), "train.batch_size", whole)


def set_folders(draft: Draft) -> None:
    """Set dataset.folders from the dataset file, or from the subfolders of train_data_dir."""
    subset_keys = subsets(draft)
    for subset in subset_keys:
        _add_folder(draft, subset)
    used = [key for key in everywhere(draft, "is_reg") if common_values.on(draft.given[key])]
    draft.differs(used, {}, remarks.SHOWN_ALIKE)
    draft.none(everywhere(draft, "is_reg"), remarks.OFF, off=True)
    for name in ("num_repeats", "class_tokens", "dataset_repeats", "caption_prefix", "caption_suffix"):
        draft.mapped(everywhere(draft, name), {}, remarks.IN_EACH_FOLDER)
    draft.mapped("dataset_config", {}, remarks.READ_TOO if subset_keys else remarks.FILE_NOT_FOUND)
    _set_root_folders(draft, bool(subset_keys))
    dataset_settings.balance_regularization(draft)
    dataset_settings.weigh_regularization(draft, "prior_loss_weight")
    if not subset_keys:
        for number, folder in enumerate(draft.folders):
            folder.mask = _mask_of(draft, "", number)
            _set_texts_around(draft, "", folder)
    dataset_settings.set_unmasked(draft)
    if any(folder.mask for folder in draft.folders):
        draft.mapped("masked_loss", {}, Message("this applies to the folders with masks"))
    draft.none(
        [*everywhere(draft, "alpha_mask"), "masked_loss"],
        Message("this setting is off, or the file names no masks"),
        off=True,
    )


def _add_folder(draft: Draft, subset: str) -> None:
    """Add a folder of the dataset file to the draft, and report the folder's own keys."""
    path = draft.get(f"{subset}image_dir", text)
    if not path:
        draft.none(f"{subset}metadata_file", remarks.CAPTION_FILES)
        return
    folder = Folder(path, positive(effective(draft, subset, "num_repeats") or 1))
    dataset_settings.look_into(draft, folder, deep=False)
    draft.mapped(f"{subset}image_dir", {}, remarks.SETS(setting=f"dataset.folders.{len(draft.folders)}.path"))
    draft.mapped(
        f"{subset}num_repeats",
        {},
        remarks.SETS(setting=f"dataset.folders.{len(draft.folders)}.repeats = {folder.repeats}"),
    )
    tokens = effective(draft, subset, "class_tokens")
    if common_values.on(effective(draft, subset, "is_reg")):
        _regularize(draft, folder, str(tokens or ""))
    elif tokens:
        draft.differs(f"{subset}class_tokens", {}, dataset_settings.caption_by_trigger(folder, str(tokens)))
    _set_texts_around(draft, subset, folder)
    folder.mask = _mask_of(draft, subset, len(draft.folders))
    draft.folders.append(folder)


def _set_texts_around(draft: Draft, subset: str, folder: Folder) -> None:
    """Set the texts before and after a folder's captions, which kohya joins with spaces, too."""
    folder.prefix = str(effective(draft, subset, "caption_prefix") or "").strip()
    folder.suffix = str(effective(draft, subset, "caption_suffix") or "").strip()


def _set_root_folders(draft: Draft, has_subsets: bool) -> None:
    """Set folders from train_data_dir and reg_data_dir, which count only without a dataset file's folders."""
    root = draft.get("train_data_dir", text)
    if root and has_subsets:
        draft.none("train_data_dir", remarks.COUNTS(key="dataset_config"), off=True)
    elif root:
        _folders_by_name(draft, root)
    elif draft.get("dataset_config") and not has_subsets:
        set_absent_dataset(draft)
    others = draft.get("reg_data_dir", text)
    if others and has_subsets:
        draft.none("reg_data_dir", remarks.COUNTS(key="dataset_config"), off=True)
    elif others:
        _folders_by_name(draft, others, "reg_data_dir")


def _mask_of(draft: Draft, subset: str, number: int) -> str:
    """Return the folder of a folder's masks, "alpha" if the images' transparency is the mask, or "" without masks."""
    masks, alpha = (counting(draft, subset, name) for name in ("conditioning_data_dir", "alpha_mask"))
    if common_values.on(draft.get("masked_loss")) and (path := draft.get(masks, text)):
        draft.mapped(masks, {}, remarks.SETS(setting=f"dataset.folders.{number}.mask"))
        return dataset_settings.as_mask_folder(path)
    if common_values.on(draft.get(alpha)):
        draft.mapped(alpha, {}, Message("each of these folders has mask = 'alpha'"))
        return "alpha"
    return ""


def _regularize(draft: Draft, folder: Folder, words_of_it: str) -> None:
    """Make a folder a regularization folder, which holds images without the subject."""
    folder.regularization = True
    if folder.captionless:
        what = Message("{folder}: {count} images need a caption file", folder=folder.path, count=folder.captionless)
        if words_of_it:
            what = Message("{line}; kohya uses {caption} as their caption", line=what, caption=repr(words_of_it))
        draft.need("dataset.folders", what)


def _folders_by_name(draft: Draft, root: str, key: str = "train_data_dir") -> None:
    """Set folders from kohya's 10_name subfolders: ten repeats, and "name class" as caption of images without one."""
    place = draft.find(root)
    separator = "\\" if "\\" in root and "/" not in root else "/"
    others = key == "reg_data_dir"
    if place is None or not place.is_dir():
        draft.folders.append(Folder(root, regularization=others))
        note = Message("kohya reads repeats from the names of subfolders (10_name), but the folder was not found")
        draft.differs(key, {}, note)
        draft.need(
            "dataset.folders", Message("add one [[dataset.folders]] for each subfolder: 10_name becomes repeats = 10")
        )
        return
    written = []
    for inner in sorted(p for p in place.iterdir() if p.is_dir()):
        match = re.match(r"(\d+)_(.*)$", inner.name)
        if not match:
            draft.notes.append(
                Message(
                    "{path}: kohya skips this folder, because its name does not begin with a number; it was left out",
                    path=f"{root}{separator}{inner.name}",
                )
            )
            continue
        folder = Folder(f"{root.rstrip('/' + chr(92))}{separator}{inner.name}", max(1, int(match[1])))
        dataset_settings.look_into(draft, folder, deep=False)
        if others:
            _regularize(draft, folder, match[2])
        else:
            dataset_settings.caption_by_trigger(folder, match[2])
        template = Template("{name}: repeats = {repeats}")
        if folder.trigger:
            template = Template("{name}: repeats = {repeats}, trigger {trigger}")
        trigger = {"trigger": repr(match[2])} if folder.trigger else {}
        written.append(template(name=inner.name, repeats=folder.repeats, **trigger))
        draft.folders.append(folder)
    if not written:
        draft.folders.append(Folder(root, regularization=others))
        draft.differs(key, {}, Message("no subfolder has a name such as 10_name, so kohya would find no images"))
        draft.need("dataset.folders", Message("check the folder, and set its repeats"))
        return
    if others:
        draft.differs(key, {}, remarks.SHOWN_ALIKE)
        return
    note = Message("each folder has its own repeats: {lines}", lines=Joined("; ", written))
    if not any(folder.captionless for folder in draft.folders):
        draft.mapped(key, {}, note)
        return
    draft.differs(
        key,
        {},
        Message(
            "{line}. kohya uses the words after the number as the caption of images that have none; this trainer "
            "needs a caption or a trigger for them (see `lora-fp8 check`)",
            line=note,
        ),
    )


COLOURS = Message(
    "this trainer changes brightness, contrast and saturation; sd-scripts changes hue or gamma of a third of the images"
)


def _read_colours(value: Any) -> float:
    return 0.05 if flag(value) else 0.0  # kohya's gamma is from 0.95 to 1.05


def set_pictures(draft: Draft) -> None:
    """Set sizes, buckets and captions, with one value for all folders."""
    places = subsets(draft)
    keys, values = collect_values(draft, "resolution", [place for place in places if draft.has(f"{place}image_dir")])
    if any(values):
        dataset_settings.set_resolutions(draft, keys, values)
    shared = [
        ("enable_bucket", "dataset.buckets", flag),
        ("flip_aug", "dataset.flip", flag),
        ("shuffle_caption", "dataset.shuffle_tags", flag),
        ("caption_dropout_rate", "dataset.caption_dropout", number),
        ("caption_tag_dropout_rate", "dataset.tag_dropout", number),
        ("caption_separator", "dataset.tag_separator", text),
        ("keep_tokens", "dataset.keep_tokens", whole),
        ("keep_tokens_separator", "dataset.keep_separator", text),
    ]
    for name, setting, read in shared:
        tags = draft.settings.get("dataset.shuffle_tags") or draft.settings.get("dataset.tag_dropout")
        if name in ("keep_tokens", "keep_tokens_separator") and not tags:
            draft.none(everywhere(draft, name), remarks.UNUSED_WITHOUT(key="shuffle_caption"), off=True)
            continue
        dataset_settings.share(draft, *collect_values(draft, name, places), setting, read)
    for name, setting, read, note in (
        ("random_crop", "dataset.random_crop", flag, remarks.CACHED_VARIANTS),
        ("color_aug", "dataset.color_jitter", _read_colours, COLOURS),
    ):
        keys, values = collect_values(draft, name, places)
        if any(map(flag, filter(None, values))):
            dataset_settings.share(draft, keys, values, setting, read, note)
        draft.none(keys, remarks.OFF, off=True)
    dataset_settings.set_bucket_step(draft, *collect_values(draft, "bucket_reso_steps", places))
    dataset_settings.share(draft, *collect_values(draft, "enable_wildcard", places), "dataset.wildcards", flag)
    if draft.settings.get("dataset.wildcards"):  # it also draws a line of a caption with several
        draft.set("dataset.caption_lines", "one", "enable_wildcard")
    set_upscale(draft, places, OWN_SHAPE)
    _set_aspect(draft)
    for name in ("caption_extension", "caption_extention"):
        keys = everywhere(draft, name)
        if all(_reads_captions(draft.given[key]) for key in keys):
            draft.mapped(keys, {}, remarks.CAPTIONS_READ)
        else:
            draft.none(keys, remarks.RENAME_CAPTIONS)
            draft.todo.append(remarks.CAPTION_SUFFIX(suffix=draft.given[keys[0]]))


def _reads_captions(value: Any) -> bool:
    return str(value).strip().lower().lstrip(".") in ("txt", "caption")


OWN_SHAPE = Message(
    "sd-scripts keeps the aspect ratio of every image and crops small images to their bucket; this trainer "
    "limits it with dataset.max_aspect and scales images to their bucket"
)


def set_upscale(draft: Draft, places: list[str], note: str) -> None:
    """Set dataset.upscale; without buckets, these tools ignore bucket_no_upscale.

    Args:
        draft: its buckets are set.
        places: prefixes of the folders' keys.
        note: what differs if small images are not enlarged.
    """
    keys, values = collect_values(draft, "bucket_no_upscale", places)
    if draft.settings.get("dataset.buckets") is False:
        draft.none(keys, remarks.UNUSED_WITHOUT(key="enable_bucket"), off=True)
        return
    try:
        kept = any(map(common_values.on, values))
    except Unfit:  # `share` reports it
        kept = False
    dataset_settings.share(draft, keys, values, "dataset.upscale", lambda value: not flag(value), note if kept else "")


def _set_aspect(draft: Draft) -> None:
    """Set dataset.max_aspect from the widest of kohya's buckets, whose sides lie between two limits."""
    small, large = everywhere(draft, "min_bucket_reso"), everywhere(draft, "max_bucket_reso")
    side = draft.settings.get("dataset.resolution")
    if draft.settings.get("dataset.upscale") is False:
        draft.none([*small, *large], remarks.UNUSED_BESIDE(key="bucket_no_upscale"), off=True)
        draft.set("dataset.max_aspect", float(common_values.bounds("dataset.max_aspect")[1]), "bucket_no_upscale")
        return
    if not draft.settings.get("dataset.buckets") or not side:
        draft.none([*small, *large], remarks.UNUSED_WITHOUT(key="buckets"), off=True)
        return
    first = (subsets(draft) or [""])[0]
    narrow = effective(draft, first, "min_bucket_reso", positive) or 256
    wide = effective(draft, first, "max_bucket_reso", positive) or 1024
    step = draft.settings.get("dataset.bucket_step", 64)
    tall = min(wide, side * side // narrow // step * step)
    least, most = common_values.bounds("dataset.max_aspect")
    draft.differs(
        [*small, *large] or ["min_bucket_reso", "max_bucket_reso"],
        {"dataset.max_aspect": float(min(most, max(least, tall / narrow)))},
        Message(
            "kohya's widest bucket is {wide} x {high}; buckets of this trainer keep the whole area, with an "
            "aspect ratio of at most {limit}",
            limit=f"{most:g}",
            wide=tall,
            high=narrow,
        ),
    )
