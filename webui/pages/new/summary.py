"""The summary beside the form: problems, images, epochs, time, memory and disk space."""

from pathlib import Path
from typing import Any

from lora_fp8.common.numbers import format_bytes, format_digits
from lora_fp8.errors import UserError

from ... import dataset_folder, estimate_panel, form, image_folders, run_cards, sanitize, setting_values
from ...context import Ui
from ...draft import Draft
from .draft_reader import DraftReader
from .problems import Problems
from .questions import make_id

Counts = list[tuple[Path, image_folders.Count, float, str]]
"""Each image folder with its contents, its repeats and its mask."""


class Summary:
    """Renders the summary of a draft."""

    def __init__(self, ui: Ui, draft: Draft, reader: DraftReader, problems: Problems):
        self.ui, self.draft, self.reader, self.problems = ui, draft, reader, problems
        self.estimates = estimate_panel.Estimates(ui.place.home)

    def render_state(self, findings: list[tuple[str, str]]) -> str:
        """Render the state of the draft in a line: ready, or how much is to do and what comes first."""
        if not findings:
            return f"<p class='state ready'>{sanitize.escape(self.ui.say('new.summary.ready'))}</p>"
        key, line = findings[0]
        first = f"{setting_values.get_title(self.ui, key)}: {line}" if key and self.ui.language == "en" else line
        text = self.ui.say("new.state.open", count=len(findings), first=first)
        return f"<p class='state open' title='{sanitize.escape(text)}'>{sanitize.escape(text)}</p>"

    def render(self, findings: list[tuple[str, str]] | None = None) -> str:
        """Render the summary; `findings`: what `Problems.find` returned for the draft, if it is known."""
        say, escape = self.ui.say, sanitize.escape
        text = self.draft.load_text()
        findings = self.problems.find(text) if findings is None else findings
        parts = []
        if findings:
            items = "".join(f"<li>{self._render_problem(key, line)}</li>" for key, line in findings)
            parts.append(f"<p><strong>{escape(say('new.summary.open'))}</strong></p><ul class='problems'>{items}</ul>")
        try:
            values = form.read_values(text, self.draft.home)
        except UserError:
            return "".join(parts)
        facts: list[tuple[str, str]] = []
        counts = self.reader.count_folders(values)
        for folder, contents, *_ in counts:
            if not contents.files:
                continue  # a problem says so
            amounts = {"folder": folder.name, "count": contents.pictures, "without": contents.without_caption}
            line = (
                say("new.clips.count", videos=contents.videos, **amounts)
                if contents.videos
                else say("new.pictures.count", **amounts)
            )
            parts.append(_render_paragraph(line))
            if contents.masks:
                line = say("new.pictures.masks", folder=folder.name, mask=contents.mask, count=contents.masks)
                parts.append(_render_paragraph(line, "wrong"))
        samples = self._count_samples(values, counts, bool(findings), parts)
        known = None if findings else self.estimates.get(text)
        epochs = None if samples is None else estimate_panel.count_epochs(samples, values, known)
        details = [] if samples is None else self._describe_epochs(samples, epochs, values, parts, facts)
        if not findings:
            details += [self._estimate_time(values, facts), *self._render_memory(known, facts)]
            if isinstance(known, dict):
                problems, warnings = estimate_panel.check_disk_space(known)
                parts += [_render_paragraph(self.ui.translate(line), "wrong") for line in problems]
                details += [self.ui.translate(line) for line in [*known["notes"], *warnings]]
        if facts:
            rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
            parts.append(f"<table class='facts estimate'>{rows}</table>")
        if details:
            paragraphs = "".join(map(_render_paragraph, details))
            parts.append(f"<details><summary>{escape(say('new.summary.how'))}</summary>{paragraphs}</details>")
        return "".join(parts)

    def _render_problem(self, key: str, line: str) -> str:
        """Render a problem as a button that leads to its setting; a problem of no setting as text."""
        text = sanitize.escape(setting_values.label_problem(self.ui, key, line) if key else line)
        id = make_id("", key)
        return f"<button type='button' class='to-setting' data-setting='{id}'>{text}</button>" if key else text

    def _count_samples(
        self, values: dict[str, Any], counts: Counts, has_problems: bool, parts: list[str]
    ) -> float | None:
        """Count the samples of an epoch, without the images that are held out. None while a folder is examined.

        Folders with clips are examined for the number of clips, unless the draft has problems. The parts get a
        paragraph about each.
        """
        say = self.ui.say
        skipping = values["dataset.missing_caption"] == "skip"
        samples: float = 0
        files = 0
        running: list[dataset_folder.Examination] = []
        for folder, contents, repeats, mask in counts:
            examination = None if has_problems else self.reader.examine(values, folder, mask)
            running += [examination] if examination is not None and examination.running else []
            if examination is None:
                number = contents.files - (contents.without_caption if skipping else 0)
            elif examination.report is None:
                number = 0
                if examination.problem:
                    parts.append(_render_paragraph(self.ui.translate(examination.problem), "wrong"))
            else:
                number = estimate_panel.count_examples(examination.report, skipping)
                if clips := examination.report["counts"]["clips"]:
                    line = say("new.clips.cut", folder=folder.name, clips=clips, examples=number)
                    parts.append(_render_paragraph(line))
            samples, files = samples + repeats * number, files + number
        if running:
            parts.append(_render_paragraph(say("dataset.examining", done=running[0].done, total=running[0].total)))
            return None
        held_out = values["validation.pictures"]
        if isinstance(held_out, int) and 0 < held_out < files:
            samples -= round(samples * held_out / files)  # the seed decides which ones
        return samples

    def _describe_epochs(
        self,
        samples: float,
        epochs: estimate_panel.Epochs | None,
        values: dict[str, Any],
        parts: list[str],
        facts: list[tuple[str, str]],
    ) -> list[str]:
        """Add steps and epochs to the facts, and what is wrong with them to the parts; return the arithmetic."""
        say = self.ui.say
        if epochs is None:
            parts += [] if samples else [_render_paragraph(say("new.summary.none"))]
            return []
        if values["train.batch_size"] > samples:
            line = say("new.summary.batch", batch=values["train.batch_size"], samples=format_digits(samples))
            parts.append(_render_paragraph(line, "wrong"))
        steps = say("new.fact.steps_of", steps=values["train.steps"], count=format_digits(epochs.epochs))
        facts.append((say("new.fact.steps"), steps))
        line = say(
            "new.summary.epochs.buckets" if epochs.has_buckets else "new.summary.epochs",
            samples=format_digits(epochs.samples),
            per_step=epochs.per_step,
            steps=format_digits(epochs.steps),
            total=values["train.steps"],
            epochs=format_digits(epochs.epochs),
        )
        return [line]

    def _estimate_time(self, values: dict[str, Any], facts: list[tuple[str, str]]) -> str:
        """Add the time to the facts; return where it comes from."""
        say = self.ui.say
        folders = [self.ui.place.home / "runs", *self.ui.place.roots]
        known = estimate_panel.find_pace(dict.fromkeys(folders), str(values["model.family"]))
        if known is None:
            facts.append((say("new.fact.time"), say("new.summary.unknown")))
            return say("new.summary.no_time")
        seconds, run = known
        length = run_cards.format_duration(self.ui, seconds * values["train.steps"])
        facts.append((say("new.fact.time"), say("new.fact.about", amount=length)))
        return say(
            "new.summary.time",
            time=length,
            seconds=format_digits(seconds),
            run=run,
        )

    def _render_memory(self, known: dict[str, Any] | str | None, facts: list[tuple[str, str]]) -> list[str]:
        """Add memory, cache and file sizes to the facts; return how the memory is made up."""
        say = self.ui.say
        if known is None:
            facts.append((say("new.fact.memory"), say("new.summary.estimating")))
            return []
        if isinstance(known, str):
            return [say("new.summary.no_estimate", why=self.ui.translate(known))] if known else []

        def format_known_size(num: int | None) -> str:
            if num is None:
                return say("new.summary.unknown")
            return format_bytes(num)

        file_bytes = max(known["file_bytes"].values(), default=None)
        facts += [
            (
                say("new.fact.ram" if known["process_bytes"] else "new.fact.vram"),
                format_known_size(known["peak_bytes"]),
            ),
            (say("new.fact.cache"), format_known_size(known["cache_bytes"])),
            (say("new.fact.file"), format_known_size(file_bytes)),
        ]
        lines = [
            say(
                "new.summary.memory",
                peak=format_known_size(known["peak_bytes"]),
                base=format_known_size(known["base_bytes"]),
                adapter=format_known_size(known["adapter_bytes"]),
                optimizer=format_known_size(known["optimizer_bytes"]),
                step=format_known_size(known["step_bytes"]),
            ),
            say("new.summary.memory_cpu", process=format_known_size(known["process_bytes"]))
            if known["process_bytes"]
            else say("new.summary.memory_gpu"),
        ]
        files = ", ".join(f"{layout} {format_known_size(num)}" for layout, num in known["file_bytes"].items())
        return [*lines, say("new.summary.files", file=files, cache=format_known_size(known["cache_bytes"]))]


def _render_paragraph(text: str, css_class: str = "") -> str:
    attribute = f" class='{css_class}'" if css_class else ""
    return f"<p{attribute}>{sanitize.escape(text)}</p>"
