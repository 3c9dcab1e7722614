"""kohya's datasets: dataset TOML, folders named 10_name, masks, regularization, buckets and captions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PureWindowsPath
from typing import Any

from ..errors import Joined, Message, Plural, Template
from . import common_values, dataset_settings, model_settings, remarks
from .import_draft import Draft, Folder
from .readers import Unfit, keep_value, read_flag, read_number, read_positive, read_string, read_whole
from .source_files import flatten_tables


def flatten_sections(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (shown, key, value) for a TOML whose section names have no meaning."""
    for name, value in data.items():
        if isinstance(value, dict):
            yield from flatten_sections(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", name, value


def flatten_dataset(data: Mapping[str, Any], file: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (shown, key, value) for a dataset TOML."""
    for key, value in flatten_tables(data):
        yield f"{file}: {key}" if file else key, key, value


def read_datasets(draft: Draft, rows: list[tuple[str, str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """Yield the rows of the dataset TOML that dataset_config names, if it was found."""
    for _, key, value in rows:
        if key == "dataset_config" and value:
            data = draft.refer(key, str(value))
            if isinstance(data, dict):
                yield from flatten_dataset(data, PureWindowsPath(str(value)).name)


def find_all_keys(draft: Draft, name: str) -> list[str]:
    """Return all keys with this name: the argument, and those of the dataset file."""
    inside = ("general.", "datasets.")
    return [key for key in draft.given if key == name or (key.startswith(inside) and key.endswith(f".{name}"))]


def list_subsets(draft: Draft) -> list[str]:
    """Return the dataset file's folders, as prefixes of their keys: datasets.0.subsets.1."""
    prefixes = {m[0] for key in draft.given if (m := re.match(r"datasets\.\d+\.subsets\.\d+\.", key))}
    return sorted(prefixes, key=lambda key: [int(part) for part in re.findall(r"\d+", key)])


def find_effective_key(draft: Draft, subset: str, name: str) -> str:
    """Return the key that applies to a folder: its own, its dataset's, that of [general], or the argument."""
    outer = ".".join(subset.split(".")[:2]) + "." if subset else ""
    keys = (f"{subset}{name}", f"{outer}{name}", f"general.{name}")
    return next((key for key in keys if draft.has(key)), name)


def read_effective(draft: Draft, subset: str, name: str, read: Callable[[Any], Any] = keep_value) -> Any:
    """Return the value that applies to a folder, or the tool's default; None if there is neither."""
    return draft.get(find_effective_key(draft, subset, name), read)


def collect_values(draft: Draft, name: str, places: list[str]) -> tuple[list[str], list[Any]]:
    """Return the keys that apply to the folders, and each folder's value. Overridden keys are reported."""
    keys = list(dict.fromkeys(find_effective_key(draft, place, name) for place in places or [""]))
    draft.report_unmatched(
        [key for key in find_all_keys(draft, name) if key not in keys],
        Message("each folder sets its own value"),
        off=True,
    )
    return keys, [read_effective(draft, place, name) for place in places or [""]]


def has_only_images(draft: Draft) -> bool:
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
    draft.add_todo("dataset.folders", remarks.FOLDERS_OF(file=file))
    draft.add_todo(
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
    dataset_settings.set_shared(draft, *collect_values(draft, "batch_size", places), "train.batch_size", read_whole)


def set_folders(draft: Draft) -> None:
    """Set dataset.folders from the dataset file, or from the subfolders of train_data_dir."""
    subset_keys = list_subsets(draft)
    for subset in subset_keys:
        _add_folder(draft, subset)
    used = [key for key in find_all_keys(draft, "is_reg") if common_values.is_on(draft.given[key])]
    draft.report_different(used, {}, remarks.SHOWN_ALIKE)
    draft.report_unmatched(find_all_keys(draft, "is_reg"), remarks.OFF, off=True)
    for name in ("num_repeats", "class_tokens", "dataset_repeats", "caption_prefix", "caption_suffix"):
        draft.report_mapped(find_all_keys(draft, name), {}, remarks.IN_EACH_FOLDER)
    draft.report_mapped("dataset_config", {}, remarks.READ_TOO if subset_keys else remarks.FILE_NOT_FOUND)
    _set_root_folders(draft, bool(subset_keys))
    dataset_settings.balance_regularization(draft)
    dataset_settings.weigh_regularization(draft, "prior_loss_weight")
    if not subset_keys:
        for number, folder in enumerate(draft.folders):
            folder.mask = _find_mask(draft, "", number)
            _set_texts_around(draft, "", folder)
    dataset_settings.set_unmasked(draft)
    if any(folder.mask for folder in draft.folders):
        draft.report_mapped("masked_loss", {}, Message("this applies to the folders with masks"))
    draft.report_unmatched(
        [*find_all_keys(draft, "alpha_mask"), "masked_loss"],
        Message("this setting is off, or the file names no masks"),
        off=True,
    )


def _add_folder(draft: Draft, subset: str) -> None:
    """Add a folder of the dataset file to the draft, and report the folder's own keys."""
    path = draft.get(f"{subset}image_dir", read_string)
    if not path:
        draft.report_unmatched(f"{subset}metadata_file", remarks.CAPTION_FILES)
        return
    folder = Folder(path, read_positive(read_effective(draft, subset, "num_repeats") or 1))
    dataset_settings.count_images(draft, folder, deep=False)
    draft.report_mapped(f"{subset}image_dir", {}, remarks.SETS(setting=f"dataset.folders.{len(draft.folders)}.path"))
    draft.report_mapped(
        f"{subset}num_repeats",
        {},
        remarks.SETS(setting=f"dataset.folders.{len(draft.folders)}.repeats = {folder.repeats}"),
    )
    tokens = read_effective(draft, subset, "class_tokens")
    if common_values.is_on(read_effective(draft, subset, "is_reg")):
        _regularize(draft, folder, str(tokens or ""))
    elif tokens:
        draft.report_different(f"{subset}class_tokens", {}, dataset_settings.caption_by_trigger(folder, str(tokens)))
    _set_texts_around(draft, subset, folder)
    folder.mask = _find_mask(draft, subset, len(draft.folders))
    draft.folders.append(folder)


def _set_texts_around(draft: Draft, subset: str, folder: Folder) -> None:
    """Set the texts before and after a folder's captions, which kohya joins with spaces, too."""
    folder.prefix = str(read_effective(draft, subset, "caption_prefix") or "").strip()
    folder.suffix = str(read_effective(draft, subset, "caption_suffix") or "").strip()


def _set_root_folders(draft: Draft, has_subsets: bool) -> None:
    """Set folders from train_data_dir and reg_data_dir, which count only without a dataset file's folders."""
    root = draft.get("train_data_dir", read_string)
    if root and has_subsets:
        draft.report_unmatched("train_data_dir", remarks.COUNTS(key="dataset_config"), off=True)
    elif root:
        _set_folders_by_name(draft, root)
    elif draft.get("dataset_config") and not has_subsets:
        set_absent_dataset(draft)
    others = draft.get("reg_data_dir", read_string)
    if others and has_subsets:
        draft.report_unmatched("reg_data_dir", remarks.COUNTS(key="dataset_config"), off=True)
    elif others:
        _set_folders_by_name(draft, others, "reg_data_dir")


def _find_mask(draft: Draft, subset: str, number: int) -> str:
    """Return the folder of a folder's masks, "alpha" if the images' transparency is the mask, or "" without masks."""
    masks, alpha = (find_effective_key(draft, subset, name) for name in ("conditioning_data_dir", "alpha_mask"))
    if common_values.is_on(draft.get("masked_loss")) and (path := draft.get(masks, read_string)):
        draft.report_mapped(masks, {}, remarks.SETS(setting=f"dataset.folders.{number}.mask"))
        return dataset_settings.as_mask_folder(path)
    if common_values.is_on(draft.get(alpha)):
        draft.report_mapped(alpha, {}, Message("each of these folders has mask = 'alpha'"))
        return "alpha"
    return ""


def _regularize(draft: Draft, folder: Folder, words_of_it: str) -> None:
    """Make a folder a regularization folder, which holds images without the subject."""
    folder.regularization = True
    if folder.captionless:
        needed = Plural("{folder}: {count} image needs a caption file", "{folder}: {count} images need a caption file")
        what = needed(folder=folder.path, count=folder.captionless)
        if words_of_it:
            what = Message("{line}; kohya uses {caption} as their caption", line=what, caption=repr(words_of_it))
        draft.add_todo("dataset.folders", what)


def _set_folders_by_name(draft: Draft, root: str, key: str = "train_data_dir") -> None:
    """Set folders from kohya's 10_name subfolders: ten repeats, and "name class" as caption of images without one."""
    place = draft.find(root)
    separator = "\\" if "\\" in root and "/" not in root else "/"
    others = key == "reg_data_dir"
    if place is None or not place.is_dir():
        draft.folders.append(Folder(root, regularization=others))
        note = Message("kohya reads repeats from the names of subfolders (10_name), but the folder was not found")
        draft.report_different(key, {}, note)
        draft.add_todo(
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
        dataset_settings.count_images(draft, folder, deep=False)
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
        draft.report_different(
            key, {}, Message("no subfolder has a name such as 10_name, so kohya would find no images")
        )
        draft.add_todo("dataset.folders", Message("check the folder, and set its repeats"))
        return
    if others:
        draft.report_different(key, {}, remarks.SHOWN_ALIKE)
        return
    note = Message("each folder has its own repeats: {lines}", lines=Joined("; ", written))
    if not any(folder.captionless for folder in draft.folders):
        draft.report_mapped(key, {}, note)
        return
    draft.report_different(
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
    return 0.05 if read_flag(value) else 0.0  # kohya's gamma is from 0.95 to 1.05


def set_pictures(draft: Draft) -> None:
    """Set sizes, buckets and captions, with one value for all folders."""
    places = list_subsets(draft)
    keys, values = collect_values(draft, "resolution", [place for place in places if draft.has(f"{place}image_dir")])
    if any(values):
        dataset_settings.set_resolutions(draft, keys, values)
    shared = [
        ("enable_bucket", "dataset.buckets", read_flag),
        ("flip_aug", "dataset.flip", read_flag),
        ("shuffle_caption", "dataset.shuffle_tags", read_flag),
        ("caption_dropout_rate", "dataset.caption_dropout", read_number),
        ("caption_tag_dropout_rate", "dataset.tag_dropout", read_number),
        ("caption_separator", "dataset.tag_separator", read_string),
        ("keep_tokens", "dataset.keep_tokens", read_whole),
        ("keep_tokens_separator", "dataset.keep_separator", read_string),
    ]
    for name, setting, read in shared:
        tags = draft.settings.get("dataset.shuffle_tags") or draft.settings.get("dataset.tag_dropout")
        if name in ("keep_tokens", "keep_tokens_separator") and not tags:
            draft.report_unmatched(find_all_keys(draft, name), remarks.UNUSED_WITHOUT(key="shuffle_caption"), off=True)
            continue
        dataset_settings.set_shared(draft, *collect_values(draft, name, places), setting, read)
    for name, setting, read, note in (
        ("random_crop", "dataset.random_crop", read_flag, remarks.CACHED_VARIANTS),
        ("color_aug", "dataset.color_jitter", _read_colours, COLOURS),
    ):
        keys, values = collect_values(draft, name, places)
        if any(map(read_flag, filter(None, values))):
            dataset_settings.set_shared(draft, keys, values, setting, read, note)
        draft.report_unmatched(keys, remarks.OFF, off=True)
    dataset_settings.set_bucket_step(draft, *collect_values(draft, "bucket_reso_steps", places))
    dataset_settings.set_shared(
        draft, *collect_values(draft, "enable_wildcard", places), "dataset.wildcards", read_flag
    )
    if draft.settings.get("dataset.wildcards"):  # it also draws a line of a caption with several
        draft.set("dataset.caption_lines", "one", "enable_wildcard")
    set_upscale(draft, places, OWN_SHAPE)
    _set_aspect(draft)
    for name in ("caption_extension", "caption_extention"):
        keys = find_all_keys(draft, name)
        if all(_is_caption_suffix(draft.given[key]) for key in keys):
            draft.report_mapped(keys, {}, remarks.CAPTIONS_READ)
        else:
            draft.report_unmatched(keys, remarks.RENAME_CAPTIONS)
            draft.todo.append(remarks.CAPTION_SUFFIX(suffix=draft.given[keys[0]]))


def _is_caption_suffix(value: Any) -> bool:
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
        draft.report_unmatched(keys, remarks.UNUSED_WITHOUT(key="enable_bucket"), off=True)
        return
    try:
        kept = any(map(common_values.is_on, values))
    except Unfit:  # `set_shared` reports it
        kept = False
    dataset_settings.set_shared(
        draft, keys, values, "dataset.upscale", lambda value: not read_flag(value), note if kept else ""
    )


def _set_aspect(draft: Draft) -> None:
    """Set dataset.max_aspect from the widest of kohya's buckets, whose sides lie between two limits."""
    small, large = find_all_keys(draft, "min_bucket_reso"), find_all_keys(draft, "max_bucket_reso")
    side = draft.settings.get("dataset.resolution")
    if draft.settings.get("dataset.upscale") is False:
        draft.report_unmatched([*small, *large], remarks.UNUSED_BESIDE(key="bucket_no_upscale"), off=True)
        draft.set("dataset.max_aspect", float(common_values.find_bounds("dataset.max_aspect")[1]), "bucket_no_upscale")
        return
    if not draft.settings.get("dataset.buckets") or not side:
        draft.report_unmatched([*small, *large], remarks.UNUSED_WITHOUT(key="buckets"), off=True)
        return
    first = (list_subsets(draft) or [""])[0]
    narrow = read_effective(draft, first, "min_bucket_reso", read_positive) or 256
    wide = read_effective(draft, first, "max_bucket_reso", read_positive) or 1024
    step = draft.settings.get("dataset.bucket_step", 64)
    tall = min(wide, side * side // narrow // step * step)
    least, most = common_values.find_bounds("dataset.max_aspect")
    draft.report_different(
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
