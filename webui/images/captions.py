"""Save single captions, durably and only over what was loaded, and undo edits of a folder."""

from pathlib import Path
from typing import Any

from lora_fp8.data import captions
from lora_fp8.errors import Message, UserError

from .. import dataset_folder
from ..context import Ui
from . import tasks

unwritten: dict[Path, dict[str, tuple[str, str]]] = {}
"""Captions that could not be written, for example on a full disk: folder -> image -> (text as loaded, text as typed).
They are kept while the page's process runs, and appear in the box of whoever opens the folder.
"""


def save(ui: Ui, dataset: dataset_folder.DatasetFolder, name: str, loaded: str, text: str) -> dict[str, Any]:
    """Write a caption.

    Args:
        dataset: the folder.
        name: the image.
        loaded: the caption as the window has read it. If the file has another one now, nothing is written.
        text: the caption to write.

    Returns:
        "outcome" (saved, unchanged or changed: by somebody else), "caption" (the file's) and "message".

    Raises:
        UserError: there is no such image, or the caption cannot be written.
    """
    if name not in dataset.files:
        raise UserError(ui.say("images.gone", file=name))
    if (now := dataset.reread_caption(name)) != loaded:
        if is_same_text(now, text):  # saved before, in an answer that was lost
            return {"outcome": "unchanged", "caption": now, "message": ui.say("dataset.unchanged", file=name)}
        return {"outcome": "changed", "caption": now, "message": ui.say("images.changed", file=name)}
    edit = captions.assign(dataset.folder, {dataset.files[name]: text}, Message("caption of {name}", name=name))
    if edit.problems:
        raise UserError(edit.problems[0])
    if edit.changes:
        try:
            captions.apply(dataset.folder, edit)
        except UserError:
            unwritten.setdefault(dataset.folder, {})[name] = (loaded, text)
            raise
    unwritten.get(dataset.folder, {}).pop(name, None)
    outcome = "saved" if edit.changes else "unchanged"
    return {
        "outcome": outcome,
        "caption": dataset.reread_caption(name),
        "message": ui.say(f"dataset.{outcome}", file=name),
    }


def is_same_text(typed: str, loaded: str) -> bool:
    """Return True if two texts differ at most in line ends and outer spaces. Browsers use line ends of their own."""
    return typed.strip().splitlines() == loaded.strip().splitlines()


def start_undo(ui: Ui, folder: Path, what: str) -> tasks.Task:
    """Start to undo or redo ("undo", "redo") the last edit of a folder. Raises UserError as `tasks.start`."""
    step = captions.redo if what == "redo" else captions.undo

    def work(task: tasks.Task, progress: tasks.Progress) -> None:
        entry = step(folder, progress=progress)
        title = ui.translate(entry.title)
        task.lines.append(ui.say("dataset.redone" if entry.done else "dataset.undone", title=title))

    return tasks.start(folder, work, ui.language)


def describe_history(ui: Ui, folder: Path) -> dict[str, str]:
    """Describe the edits that can be undone and redone: {"undo": title or "", "redo": title or ""}."""
    try:
        history = captions.read_history(folder)
    except UserError as error:
        return {"undo": "", "redo": "", "problem": ui.translate(str(error))}
    done, undone = ([entry for entry in history if entry.done is state] for state in (True, False))
    return {
        "undo": ui.translate(done[-1].title) if done else "",
        "redo": ui.translate(undone[0].title) if undone else "",
    }
