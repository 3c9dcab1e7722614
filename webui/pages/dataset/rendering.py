"""The HTML of the page: head, tags, changes, findings and buckets."""

import difflib
import re
from collections import Counter
from typing import Any

import gradio as gr

from lora_fp8 import families
from lora_fp8.data import captions
from lora_fp8.errors import UserError

from ... import dataset_folder, image_folders, live_panel, run_cards
from ...context import Ui
from ...sanitize import escape

MOST_TAGS, MOST_FILES, MOST_CHANGES = 300, 200, 40
REPAIRED = ("caption_damaged", "caption_half_done", "caption_leftover")
"""Findings that `captions.repair` resolves."""


class Renderer:
    """Renders the open folder in the language of the page.

    Buttons with `data-do` call `Handlers.handle_button`. Those with `data-show` (a tag, a finding or an image) are
    answered by the workbench itself, which filters by it or enlarges it.
    """

    def __init__(self, ui: Ui):
        self.ui, self.say = ui, ui.say

    def render_head(self, dataset: dataset_folder.DatasetFolder) -> str:
        """Render the number of videos and masks, the last edit, and remarks on masks; "" if there is nothing to say."""
        parts = [self.say("dataset.videos", count=len(dataset.videos))] if dataset.videos else []
        parts += [self.say("dataset.masks", count=dataset.masks, mask=dataset.mask)] if dataset.masks else []
        try:
            history = captions.read_history(dataset.folder)
        except UserError as error:
            return self.render_error(error)
        last = [entry for entry in history if entry.done][-1:]
        parts += [self.say("dataset.last", title=self.ui.translate(entry.title)) for entry in last]
        parts += [self.say("dataset.unreadable", count=len(dataset.wrong))] if dataset.wrong else []
        remarks = []
        if dataset.masks and not dataset.given:
            remarks.append(self.say("dataset.masks.guessed", count=dataset.masks, mask=dataset.mask))
            remarks += [self.say("dataset.masks.trained")] if dataset.mask in image_folders.MASKS else []
        if dataset.inside:
            remarks.append(self.say("dataset.masks.inside", folder=dataset.inside))
        notes = f"<p>{escape(' '.join(remarks))}</p>" if remarks else ""
        if any(entry.half_done for entry in history):
            button = run_cards.render_button("repair", self.say("dataset.repair"))
            notes += f'<p class="wrong">{escape(self.say("dataset.half_done"))} {button}</p>'
        return (f'<p class="dim">{" · ".join(map(escape, parts))}</p>' if parts else "") + notes

    def render_tags(self, counted: Counter[str]) -> str:
        """Render tags with the number of their captions, most frequent first."""
        if not counted:
            return f'<p class="empty">{self.say("dataset.no_tags")}</p>'
        rows = []
        for tag, count in counted.most_common(MOST_TAGS):
            buttons = _render_show("tag", self.say("dataset.tag.tag"), tag, tag)
            buttons += "".join(
                run_cards.render_button(do, self.say(f"dataset.tag.{do}"), name=tag) for do in ("rename", "remove")
            )
            rows.append([escape(tag), str(count), f'<div class="tools">{buttons}</div>'])
        more = len(counted) - len(rows)
        rest = f'<p class="dim">{self.say("dataset.more_tags", count=more)}</p>' if more > 0 else ""
        return run_cards.render_table([self.say("dataset.tag"), self.say("dataset.captions"), ""], rows) + rest

    def render_changes(self, edit: captions.Edit) -> str:
        """Render what an edit would change."""
        head = self.say("dataset.would", count=len(edit.changes))
        rows = []
        for change in edit.changes[:MOST_CHANGES]:
            rows.append(f"<dt>{escape(change.file)}</dt><dd>{_render_diff(*change.decode_texts())}</dd>")
        more = len(edit.changes) - len(rows)
        rest = f'<p class="dim">{self.say("dataset.more", count=more)}</p>' if more > 0 else ""
        wrong = "".join(f'<p class="wrong">{escape(self.ui.translate(line))}</p>' for line in edit.problems[:20])
        return f'<p><b>{head}</b></p>{wrong}<dl class="diff">{"".join(rows)}</dl>{rest}'

    def _render_progress(self, examination: dataset_folder.Examination) -> str:
        if examination.problem:
            return f'<p class="wrong">{escape(self.ui.translate(examination.problem))}</p>'
        share = f"{100 * examination.done / examination.total:.0f}%" if examination.total else "0%"
        line = self.say("dataset.examining", done=examination.done, total=examination.total)
        return f'<p class="dim" role="status">{line}</p><div class="bar"><i style="width:{share}"></i></div>'

    def render_findings(self, examination: dataset_folder.Examination) -> str:
        """Render what the examination found, or its progress."""
        if examination.report is None:
            return self._render_progress(examination)
        counts, sizes = examination.report["counts"], examination.report["sizes"]
        head = self.say(
            "dataset.figures", **{name: counts[name] for name in ("readable", "pictures", "different_captions")}
        )
        if sizes:
            head += " " + self.say("dataset.sizes", smallest=sizes["smallest"], largest=sizes["largest"])
        if counts["clips"]:
            head += " " + self.say("dataset.clips", count=counts["clips"], pieces=counts["pieces"])
        made = [f'<p class="dim">{escape(head)}</p>']
        if not examination.report["findings"]:
            made.append(f'<p class="empty">{self.say("dataset.all_well")}</p>')
        for finding in examination.report["findings"]:
            kind, files = finding["kind"], finding["files"]
            rows = "".join(self._render_file(kind, file) for file in files[:MOST_FILES])
            more = len(files) - MOST_FILES
            rows += f'<li class="dim">{self.say("dataset.more", count=more)}</li>' if more > 0 else ""
            level = self.say(f"dataset.level.{finding['level']}")
            shown_only = any(file["file"] for file in files) and kind not in ("kohya_folder",)
            title = self.say(f"dataset.kind.{kind}")
            button = _render_show("finding", self.say("dataset.show_these"), kind, title) if shown_only else ""
            button += run_cards.render_button("repair", self.say("dataset.repair")) if kind in REPAIRED else ""
            made.append(
                f'<details class="finding {finding["level"]}" data-kind="{kind}"><summary>'
                f'<span class="level">{level}</span>'
                f'<b>{title}</b> <span class="dim">{len(files)}</span></summary>'
                f'<p>{self.say(f"dataset.advice.{kind}")}</p><div class="tools">{button}</div><ul>{rows}</ul></details>'
            )
        return "".join(made)

    def _render_file(self, kind: str, finding: dict[str, str]) -> str:
        detail = self.ui.translate(finding["detail"]) if finding["detail"] else ""
        if not finding["file"] or kind == "kohya_folder":
            return f"<li>{escape(' '.join(filter(None, (finding['file'], detail))))}</li>"
        button = _render_show("image", finding["file"], finding["file"], "", "plain")
        return f'<li>{button} <span class="dim">{escape(detail)}</span></li>'

    def render_buckets(self, examination: dataset_folder.Examination, family: str) -> str:
        """Render how training would group the images, or the examination's progress."""
        if examination.report is None:
            return self._render_progress(examination)
        report = examination.report
        title = escape(families.get(family).title)
        head = self.say("dataset.buckets", title=title, resolution=report["resolution"], step=report["bucket_step"])
        most = max((bucket["count"] for bucket in report["buckets"]), default=1)
        rows = []
        for bucket in report["buckets"]:
            width, height, *frames = map(int, bucket["size"].split("x"))
            scale = 36 / max(width, height)
            shape = f'<i class="shape" style="width:{width * scale:.0f}px;height:{height * scale:.0f}px"></i>'
            bar = f'<div class="bar"><i style="width:{100 * bucket["count"] / most:.0f}%"></i></div>'
            cut = f"{bucket['cut']:.0%} / {bucket['most_cut']:.0%}"
            size = f"{width}\u00a0×\u00a0{height}"
            size += "".join(f" · {self.say('dataset.clip.frames', count=number)}" for number in frames)
            rows.append([shape, size, f"{bucket['count']}{bar}", cut, str(bucket["enlarged"])])
        names = ("", "bucket", "pictures", "cut", "enlarged")
        columns = [self.say(f"dataset.column.{name}") if name else "" for name in names]
        return f'<p class="dim">{head}</p>{run_cards.render_table(columns, rows)}'

    def show_note(self, line: str, wrong: bool = False) -> Any:
        """Return an update that shows a message."""
        return gr.update(value=live_panel.render_toast(escape(line), " wrong" if wrong else ""), visible=True)

    def show_error(self, error: Exception) -> Any:
        """Return an update that shows an error as a message."""
        return self.show_note(self.ui.translate(str(error)), wrong=True)

    def render_error(self, error: Exception) -> str:
        """Render an error in place of a panel."""
        return f'<p class="wrong" role="status">{escape(self.ui.translate(str(error)))}</p>'


def _render_show(what: str, text: str, name: str, label: str, kind: str = "") -> str:
    """Render a button that shows images in the workbench; `label` names them there."""
    return (
        f'<button type="button" class="{kind}" data-show="{what}" data-name="{escape(name)}" '
        f'data-label="{escape(label)}">{escape(text)}</button>'
    )


def _render_diff(before: str, after: str) -> str:
    """Render the text after an edit, with removed parts struck out and new parts marked."""
    old, new = (re.findall(r"\w+|\s+|[^\w\s]", text) for text in (before, after))
    if len(old) * len(new) > 250_000:  # very long texts: shown one after the other
        return f"<del>{escape(before[:500])}</del> <ins>{escape(after[:500])}</ins>"
    made = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            made.append(escape("".join(old[a:b])))
            continue
        made.append(f"<del>{escape(''.join(old[a:b]))}</del>" if b > a else "")
        made.append(f"<ins>{escape(''.join(new[c:d]))}</ins>" if d > c else "")
    return "".join(made)
