"""Models that caption images: those that are offered, those that lie in the user's folders, and their jobs."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub

from lora_fp8 import jobs
from lora_fp8.common.json_files import read_json
from lora_fp8.common.numbers import format_bytes
from lora_fp8.jobs import JobView
from lora_fp8.tools import wd_tagger

from .. import dataset_folder, run_cards, run_monitor
from ..context import Ui

DEEP = 2
"""How many levels below an allowed folder captioning models are looked for."""
MOST_FOLDERS = 2000
"""Folders that are looked at for captioning models; a folder of images may have many more."""
WRITERS = {"blip": ("text",), "florence2": ("text",), "llava": ("text", "tags"), "qwen2_5_vl": ("text", "tags")}
"""Architectures of vision-language models that the captioner is tested with, and the kinds of captions they write."""
THRESHOLDS = {"threshold": wd_tagger.GENERAL_THRESHOLD, "character_threshold": wd_tagger.CHARACTER_THRESHOLD}
OF_WRITERS = ("prompt",)
OF_CLASSIFIERS = ("threshold", "keep_underscores", "exclude")
OF_WD_TAGGERS = (*OF_CLASSIFIERS, "character_threshold", "rating")
"""Options of the captioner that each kind of model has a use for."""


@dataclass(frozen=True)
class Model:
    """A captioning model.

    Attributes:
        model: Hugging Face id, or a folder.
        title: its name.
        gigabytes: size of its download; 0 for a folder.
        kinds: kinds of captions that it writes: "text" and "tags".
        options: which options it has a use for.
        purpose: key of the text that says what it is good for; "" for a folder.
        here: no download is needed.
    """

    model: str
    title: str
    gigabytes: float
    kinds: tuple[str, ...]
    purpose: str = ""
    options: tuple[str, ...] = OF_WRITERS
    here: bool = False

    @property
    def is_wd_tagger(self) -> bool:
        """Return True if onnxruntime runs it."""
        return self.options == OF_WD_TAGGERS


def _offer_wd_tagger(name: str, title: str, gigabytes: float, purpose: str) -> Model:
    return Model(f"SmilingWolf/wd-{name}-tagger-v3", title, gigabytes, ("tags",), purpose, OF_WD_TAGGERS)


OFFERED = (
    # Sizes: parameters of the released weights at the two bytes of bf16 or fp16 each.
    Model("florence-community/Florence-2-base-ft", "Florence-2 base", 0.5, ("text",), "florence_base"),
    Model("florence-community/Florence-2-large-ft", "Florence-2 large", 1.6, ("text",), "florence_large"),
    Model("Qwen/Qwen2.5-VL-3B-Instruct", "Qwen2.5-VL 3B", 7.5, ("text", "tags"), "qwen_3b"),
    Model("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL 7B", 16.6, ("text", "tags"), "qwen_7b"),
    Model("fancyfeast/llama-joycaption-beta-one-hf-llava", "JoyCaption Beta One", 17.0, ("text", "tags"), "joycaption"),
    # Sizes of model.onnx as published.
    _offer_wd_tagger("swinv2", "WD SwinV2 v3", 0.47, "wd_swinv2"),
    _offer_wd_tagger("eva02-large", "WD EVA02-Large v3", 1.26, "wd_eva02_large"),
    _offer_wd_tagger("vit-large", "WD ViT-Large v3", 1.26, "wd_vit_large"),
    _offer_wd_tagger("convnext", "WD ConvNeXt v3", 0.4, "wd_convnext"),
    _offer_wd_tagger("vit", "WD ViT v3", 0.38, "wd_vit"),
)


def list_models(ui: Ui) -> list[dict[str, Any]]:
    """List the models of the user's folders, then those that are offered for download."""
    roots = dict.fromkeys([*ui.place.models, *ui.place.roots])
    own = {model.model: model for root in roots for model in _find_models(root)}
    listed = [*own.values(), *OFFERED]
    obstacle = wd_tagger.find_obstacle()
    return [
        {
            "model": model.model,
            "title": model.title,
            "size": ui.say("images.auto.size", size=f"{model.gigabytes:g}") if model.gigabytes else "",
            "kinds": list(model.kinds),
            "options": list(model.options),
            "obstacle": ui.translate(obstacle) if obstacle and model.is_wd_tagger else "",
            "purpose": ui.say(f"images.captioner.{model.purpose}") if model.purpose else ui.say("images.captioner.own"),
            "here": model.here or _is_downloaded(model),
        }
        for model in listed
    ]


def _is_downloaded(model: Model) -> bool:
    if model.is_wd_tagger:
        names = (wd_tagger.MODEL, wd_tagger.TAGS)
        return all(isinstance(huggingface_hub.try_to_load_from_cache(model.model, name), str) for name in names)
    config = huggingface_hub.try_to_load_from_cache(model.model, "config.json")
    return isinstance(config, str) and any(Path(config).parent.glob("*.safetensors"))


def _find_models(root: Path) -> Iterator[Model]:
    """Yield the captioning models in a folder, as far as their config.json or the files of a tagger tell."""
    waiting, seen = [(root, 0)], 0
    while waiting and seen < MOST_FOLDERS:
        folder, depth = waiting.pop(0)
        seen += 1
        if model := _find_model(folder):
            yield model
            continue
        if depth < DEEP:
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                inner = [entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
                waiting += [(Path(entry.path), depth + 1) for entry in sorted(inner, key=lambda entry: entry.name)]


def _find_model(folder: Path) -> Model | None:
    """Return the captioning model in this folder; None if there is none."""
    if _is_wd_tagger(folder):
        return Model(str(folder), folder.name, 0.0, ("tags",), options=OF_WD_TAGGERS, here=True)
    try:
        content = read_json(folder / "config.json")
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    if content.get("problem_type") == "multi_label_classification":
        return Model(str(folder), folder.name, 0.0, ("tags",), options=OF_CLASSIFIERS, here=True)
    kinds = WRITERS.get(str(content.get("model_type")))
    return Model(str(folder), folder.name, 0.0, kinds, here=True) if kinds else None


def _is_wd_tagger(folder: Path) -> bool:
    return (folder / wd_tagger.MODEL).is_file() and (folder / wd_tagger.TAGS).is_file()


def start(ui: Ui, dataset: dataset_folder.DatasetFolder, wanted: dataset_folder.Captioning) -> int:
    """Queue captioning of a folder and return the job's number.

    Raises:
        UserError: as for `submit_captioning`, or this machine cannot run the offered tagger.
    """
    if any(model.model == wanted.model and model.is_wd_tagger for model in OFFERED):
        wd_tagger.require_runtime(wanted.model)
    number = dataset_folder.submit_captioning(ui.place, dataset.folder, wanted)
    run_monitor.get_monitor(ui.place).views.invalidate()
    return number


def find_job(ui: Ui, folder: Path) -> JobView | None:
    """Find the newest captioning job of a folder."""
    return run_monitor.find_newest_command(ui.place, "caption", str(folder))


def describe_job(ui: Ui, folder: Path) -> dict[str, Any] | None:
    """Describe the newest captioning job of a folder: state, reason, progress and, if it failed, its last message."""
    view = find_job(ui, folder)
    if view is None:
        return None
    lines = run_monitor.get_monitor(ui.place).queue.read_log_tail(view.id)
    done, total = dataset_folder.parse_progress(lines)
    note = ui.say("images.auto.progress", done=done, total=total) if total else ""
    if (download := dataset_folder.parse_download(lines)) is not None:
        done, total = download["bytes"], download["total"]
        note = ui.say("images.auto.downloaded", done=format_bytes(done), total=format_bytes(total))
    failed = view.state in ("failed", "lost")
    return {
        "id": str(view.id),
        "state": view.state,
        "label": ui.say(f"state.{view.state}"),
        "sentence": run_cards.translate_sentence(ui, view.sentence),
        "done": done,
        "total": total,
        "note": note,
        "ended": view.state in jobs.ENDED,
        "failed": failed,
        "detail": ui.translate(lines[-1]) if failed and lines else "",
    }


def stop_job(ui: Ui, folder: Path) -> str:
    """Stop the captioning job of a folder; captions that were written stay. Returns a message. Raises UserError."""
    view = find_job(ui, folder)
    if view is None or view.state in jobs.ENDED:
        return ui.say("images.auto.none")
    return run_monitor.run_action(ui, "cancel" if view.state == "queued" else "stop", str(view.id))
