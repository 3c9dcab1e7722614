"""The HTML of the page: head, grid, large view, tags, changes, findings, buckets and captioning jobs."""

import difflib
import json
import math
import re
from pathlib import Path
from typing import Any

import gradio as gr

from lora_fp8.data import buckets, captions, clips
from lora_fp8.errors import UserError

from ... import dataset_folder, image_folders, live_panel, run_cards, run_monitor
from ...sanitize import escape
from .open_folder import PER_PAGE, OpenFolder

MOST_TAGS, MOST_FILES, MOST_CHANGES = 300, 200, 40
REPAIRED = ("caption_damaged", "caption_half_done", "caption_leftover")
"""Findings that `captions.repair` resolves."""


class Renderer:
    """Renders the open folder in the language of the page."""

    def __init__(self, opened: OpenFolder):
        self.ui, self.say, self.opened = opened.ui, opened.say, opened

    def render_all(self, at: dict[str, Any], family: str, resolution: float) -> list[Any]:
        """Return values for at, head, grid, view and tags."""
        dataset = self.opened.get_dataset(at)
        view, grid = (show(at, dataset, family, resolution) for show in (self.render_view, self.render_grid))
        return [at, self.render_head(dataset), grid, view, self._render_tags(at, dataset)]

    def fill_editor(self, name: str, loaded: str, text: str) -> list[Any]:
        """Return values for the editor: this text for the caption of an image, and which caption was loaded."""
        return [gr.update(value=text, interactive=bool(name)), json.dumps([name, loaded])]

    def render_head(self, dataset: dataset_folder.DatasetFolder) -> str:
        """Render the name of the folder, its counts, its last edits and remarks on masks."""
        without = sum(not text.strip() for text in dataset.texts.values())
        videos = len(dataset.videos)
        parts = [self.say("dataset.count", count=len(dataset.files) - videos)]
        parts += [self.say("dataset.videos", count=videos)] if videos else []
        parts += [self.say("dataset.without", count=without)] if without else []
        parts += [self.say("dataset.masks", count=dataset.masks, mask=dataset.mask)] if dataset.masks else []
        try:
            history = captions.history(dataset.folder)
        except UserError as error:
            return self.render_error(error)
        last = [entry for entry in history if entry.done][-1:]
        parts += [self.say("dataset.last", title=self.ui.translate(entry.title), count=entry.files) for entry in last]
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
        return f'<p class="dim"><b>{escape(dataset.folder.name)}</b> · {" · ".join(map(escape, parts))}</p>{notes}'

    def render_grid(
        self, at: dict[str, Any], dataset: dataset_folder.DatasetFolder, family: str, resolution: float
    ) -> str:
        """Render a page of the images that match the filters."""
        names = self.opened.filter_names(at, dataset)
        pages = max(1, math.ceil(len(names) / PER_PAGE))
        page = min(at["page"], pages - 1)
        chosen = set(at["chosen"])
        known = self.opened.list_clips(at, dataset, family, resolution)
        cells = "".join(
            self._render_cell(dataset, name, name == at["picked"], name in chosen, known.get(name, {}))
            for name in names[page * PER_PAGE : (page + 1) * PER_PAGE]
        )
        bar = f"<span>{self.say('dataset.shown', count=len(names), of=len(dataset.files))}</span>"
        if chosen:
            bar += f"<span>{self.say('dataset.chosen', count=len(chosen))}</span>"
        bar += run_cards.render_button("choose_all", self.say("dataset.choose_all"))
        bar += run_cards.render_button("choose_none", self.say("dataset.choose_none")) if chosen else ""
        if at["query"] or at.get("finding") or at["showing"] != "all":
            bar += run_cards.render_button("clear", self.say("dataset.clear"))
        turn = ""
        if pages > 1:
            back = run_cards.render_button("page", self.say("dataset.back"), to=str(page - 1)) if page else ""
            on = run_cards.render_button("page", self.say("dataset.on"), to=str(page + 1)) if page + 1 < pages else ""
            here = self.say("dataset.page", page=page + 1, pages=pages)
            turn = f'<div class="tools">{back}<span>{here}</span>{on}</div>'
        empty = "" if names else f'<p class="empty">{self.say("dataset.nothing")}</p>'
        return f'<div class="tools">{bar}</div><div class="thumbs">{cells}</div>{empty}{turn}'

    def _describe_clip(self, clip: dict[str, Any]) -> list[str]:
        """Describe a clip: seconds, frames per second, and how many pieces of how many frames are trained."""
        figures = [self.say("dataset.clip.seconds", seconds=run_cards.digits(clip["seconds"]))]
        figures.append(self.say("dataset.clip.rate", rate=run_cards.digits(clip["fps"])))
        if clip["pieces"]:
            figures.append(self.say("dataset.clip.pieces", count=clip["pieces"], length=clip["length"]))
        return figures

    def _render_cell(
        self, dataset: dataset_folder.DatasetFolder, name: str, picked: bool, chosen: bool, clip: dict[str, Any]
    ) -> str:
        text = dataset.texts[name]
        source = escape(self.ui.picture(dataset.folder / name, 192))
        label, tick = escape(name), escape(self.say("dataset.choose_one", file=name))
        line = escape(text[:90]) if text.strip() else f'<em class="wrong">{self.say("dataset.no_caption")}</em>'
        if name in dataset.wrong:  # a caption that cannot be read
            line = f'<em class="wrong">{escape(self.ui.translate(dataset.wrong[name]))}</em>'
        image, about = f'<img src="{source}" alt="{label}" loading="lazy" decoding="async">', ""
        if dataset_folder.is_video(name) and not clips.can_read_videos():
            image = f'<span class="wrong">{escape(self.ui.translate(clips.NEEDED))}</span>'
        elif "error" in clip:
            image = f'<span class="wrong">{escape(self.ui.translate(clip["error"]))}</span>'
        elif clip:
            image += f'<i class="length">▶ {escape(self._describe_clip(clip)[0])}</i>'
            figures = [f"{clip['width']} × {clip['height']}", *self._describe_clip(clip)[1:]]
            about = f'<p class="dim">{escape(" · ".join(figures))}</p>'
        elif dataset_folder.is_video(name):
            image += '<i class="length">▶</i>'
        return (
            f'<div class="thumb{" picked" if picked else ""}{" chosen" if chosen else ""}">'
            f'<button type="button" data-do="pick" data-name="{label}" title="{label}">'
            f"{image}</button>"
            f'<button type="button" class="tick" data-do="choose" data-name="{label}" '
            f'aria-pressed="{str(chosen).lower()}" aria-label="{tick}"></button>{about}<p>{line}</p></div>'
        )

    def render_view(
        self, at: dict[str, Any], dataset: dataset_folder.DatasetFolder, family: str, resolution: float
    ) -> str:
        """Render the picked image, large, with the crop that training takes of it."""
        name = at["picked"]
        if name not in dataset.files:
            return f'<p class="empty">{self.say("dataset.pick")}</p>'
        side = self.opened.choose_resolution(family, resolution)
        examination = self.opened.examine(at, dataset, family, resolution)
        size = next(
            (picture for picture in (examination.report or {}).get("pictures", ()) if picture["file"] == name), None
        )
        crop, figures = "", [escape(name)]
        if size is not None:
            try:
                place = buckets.place((size["width"], size["height"]), side, 64)
            except UserError as error:
                figures.append(escape(self.ui.translate(str(error))))
            else:
                (width, height), (left, top), (w, h) = place.resized_wh, place.crop_xy, place.bucket_wh
                style = f"left:{left / width:.3%};top:{top / height:.3%};width:{w / width:.3%};height:{h / height:.3%}"
                crop = f'<i class="crop" data-bucket="{w}x{h}" style="{style}"></i>'
                figures.append(f"{size['width']} × {size['height']}")
                figures.append(self.say("dataset.crop", bucket=f"{w} × {h}", cut=f"{1 - w * h / (width * height):.0%}"))
                figures.append(escape(self.opened.families[family]))
            if "seconds" in size:
                figures += map(escape, self._describe_clip(size))
        odd = [dataset.wrong[name]] if name in dataset.wrong else []
        source = escape(self.ui.picture(dataset.folder / name, 1280))
        picture = f'<div class="large"><img src="{source}" alt="{escape(name)}">{crop}</div>'
        if dataset_folder.is_video(name) and not clips.can_read_videos():
            picture, odd = "", [*odd, clips.NEEDED]
        elif dataset_folder.is_video(name) and (why := examination.list_files("unreadable").get(name)):
            picture, odd = "", [*odd, why]
        wrong = "".join(f'<p class="wrong">{escape(self.ui.translate(line))}</p>' for line in odd)
        return f'{picture}<p class="dim">{" · ".join(figures)}</p>{wrong}'

    def _render_tags(self, at: dict[str, Any], dataset: dataset_folder.DatasetFolder) -> str:
        counted = dataset.count_tags(
            self.opened.filter_names(at, dataset) if at["query"] or at.get("finding") else None
        )
        if not counted:
            return f'<p class="empty">{self.say("dataset.no_tags")}</p>'
        rows = []
        for tag, count in counted.most_common(MOST_TAGS):
            buttons = "".join(
                run_cards.render_button(do, self.say(f"dataset.tag.{do}"), name=tag)
                for do in ("tag", "rename", "remove")
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
            rows.append(f"<dt>{escape(change.file)}</dt><dd>{_render_diff(*change.texts())}</dd>")
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
            head += " " + self.say("dataset.clips", clips=counts["clips"], pieces=counts["pieces"])
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
            button = run_cards.render_button("finding", self.say("dataset.show_these"), name=kind) if shown_only else ""
            button += run_cards.render_button("repair", self.say("dataset.repair")) if kind in REPAIRED else ""
            made.append(
                f'<details class="finding {finding["level"]}" data-kind="{kind}"><summary>'
                f'<span class="level">{level}</span>'
                f'<b>{self.say(f"dataset.kind.{kind}")}</b> <span class="dim">{len(files)}</span></summary>'
                f'<p>{self.say(f"dataset.advice.{kind}")}</p><div class="tools">{button}</div><ul>{rows}</ul></details>'
            )
        return "".join(made)

    def _render_file(self, kind: str, finding: dict[str, str]) -> str:
        detail = self.ui.translate(finding["detail"]) if finding["detail"] else ""
        if not finding["file"] or kind == "kohya_folder":
            return f"<li>{escape(' '.join(filter(None, (finding['file'], detail))))}</li>"
        button = run_cards.render_button("look", finding["file"], "plain", name=finding["file"])
        return f'<li>{button} <span class="dim">{escape(detail)}</span></li>'

    def render_buckets(self, examination: dataset_folder.Examination, family: str) -> str:
        """Render how training would group the images, or the examination's progress."""
        if examination.report is None:
            return self._render_progress(examination)
        report = examination.report
        title = escape(self.opened.families[family])
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

    def render_jobs(self, folder: Path) -> str:
        """Render the captioning jobs of this folder, newest first."""
        watching = run_monitor.get_monitor(self.ui.place)
        views = [view for view in watching.views() if view.command[:2] == ("caption", str(folder))]
        made = []
        for view in sorted(views, key=lambda view: -int(view.id))[:3]:
            lines = watching.queue.log_tail(view.id)
            done, total = dataset_folder.parse_progress(lines)
            bar = f'<div class="bar"><i style="width:{100 * done / total:.0f}%"></i></div>' if total else ""
            count = f"{done} / {total}" if total else ""
            failed = lines and view.state == "failed"
            last = f'<pre tabindex="0">{escape(lines[-1])}</pre>' if failed else ""
            name = escape(run_cards.translate_title(self.ui, view))
            made.append(
                f'<section class="card" data-job="{escape(view.id)}"><div class="row"><h2>{name}</h2>'
                f'{run_cards.render_state(self.ui, view)}<span class="dim">{count}</span></div>'
                f'<p class="said">{escape(run_cards.translate_sentence(self.ui, view.sentence))}</p>'
                f"{last}{bar}{run_cards.render_buttons(self.ui, view)}</section>"
            )
        return f'<div class="cards">{"".join(made)}</div>'

    def show_note(self, line: str, wrong: bool = False) -> Any:
        """Return an update that shows a message."""
        return gr.update(value=live_panel.render_toast(escape(line), " wrong" if wrong else ""), visible=True)

    def show_error(self, error: Exception) -> Any:
        """Return an update that shows an error as a message."""
        return self.show_note(self.ui.translate(str(error)), wrong=True)

    def render_error(self, error: Exception) -> str:
        """Render an error in place of a panel."""
        return f'<p class="wrong" role="status">{escape(self.ui.translate(str(error)))}</p>'


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
