"""The summary beside the form: problems, images, epochs, time, memory and disk space."""

from pathlib import Path
from typing import Any

from lora_fp8.errors import UserError

from ... import estimate_panel, form, image_folders, run_cards, sanitize
from ...context import Ui
from ...draft import Draft
from .draft_reader import DraftReader
from .problems import Problems
from .questions import make_id


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
        first = f"{self.problems.title(key)}: {line}" if key and self.ui.language == "en" else line
        text = self.ui.say(
            "new.state.one" if len(findings) == 1 else "new.state.open", count=len(findings), first=first
        )
        return f"<p class='state open' title='{sanitize.escape(text)}'>{sanitize.escape(text)}</p>"

    def render(self, findings: list[tuple[str, str]] | None = None) -> str:
        """Render the summary; `findings`: what `Problems.find` returned for the draft, if it is known."""
        say, escape = self.ui.say, sanitize.escape
        text = self.draft.text()
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
            amounts = {"folder": folder.name, "count": contents.pictures, "without": contents.without_caption}
            line = (
                say("new.clips.count", videos=contents.videos, **amounts)
                if contents.videos
                else say("new.pictures.count", **amounts)
            )
            parts.append(f"<p>{escape(line)}</p>")
            if contents.masks:
                line = say("new.pictures.masks", folder=folder.name, mask=contents.mask, count=contents.masks)
                parts.append(f"<p class='wrong'>{escape(line)}</p>")
        details = self._count_steps(values, counts, bool(findings), parts, facts)
        if not findings:
            known = self.estimates.get(text)
            details += [self._estimate_time(values, facts), *self._render_memory(known, facts)]
            if isinstance(known, dict):
                problems, warnings = estimate_panel.check_disk_space(known)
                parts += [f"<p class='wrong'>{escape(self.ui.translate(line))}</p>" for line in problems]
                details += [self.ui.translate(line) for line in [*known["notes"], *warnings]]
        if facts:
            rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
            parts.append(f"<table class='facts estimate'>{rows}</table>")
        if details:
            paragraphs = "".join(f"<p>{escape(line)}</p>" for line in details)
            parts.append(f"<details><summary>{escape(say('new.summary.how'))}</summary>{paragraphs}</details>")
        return "".join(parts)

    def _render_problem(self, key: str, line: str) -> str:
        """Render a problem as a button that leads to its setting; a problem of no setting as text."""
        text = sanitize.escape(self.problems.label(key, line) if key else line)
        id = make_id("", key)
        return f"<button type='button' class='to-setting' data-setting='{id}'>{text}</button>" if key else text

    def _count_steps(
        self,
        values: dict[str, Any],
        counts: list[tuple[Path, image_folders.Count, float, str]],
        has_problems: bool,
        parts: list[str],
        facts: list[tuple[str, str]],
    ) -> list[str]:
        """Add steps and epochs to the facts, and what was found in the folders to the parts; return the arithmetic."""
        say, escape = self.ui.say, sanitize.escape
        skipping = values["dataset.missing_caption"] == "skip"
        examined = [] if has_problems else [self.reader.examine(values, folder, mask) for folder, *_, mask in counts]
        samples: float = 0
        files = 0
        for (folder, contents, times, _), examination in zip(counts, examined or [None] * len(counts), strict=True):
            if examination is None:
                number = contents.files - (contents.without_caption if skipping else 0)
            elif examination.report is not None:
                number = estimate_panel.count_examples(examination.report, skipping)
                if made := examination.report["counts"]["clips"]:
                    line = say("new.clips.cut", folder=folder.name, clips=made, examples=number)
                    parts.append(f"<p>{escape(line)}</p>")
            else:
                number = 0
                if examination.problem:
                    parts.append(f"<p class='wrong'>{escape(self.ui.translate(examination.problem))}</p>")
            samples, files = samples + times * number, files + number
        held = values["validation.pictures"]
        if isinstance(held, int) and 0 < held < files:
            samples -= round(samples * held / files)  # the seed decides which ones
        waiting = [examination for examination in examined if examination is not None and examination.running]
        reckoned = estimate_panel.count_epochs(samples, values)
        if waiting:
            line = say("dataset.examining", done=waiting[0].done, total=waiting[0].total)
            parts.append(f"<p>{escape(line)}</p>")
            return []
        if reckoned is None:
            parts += [] if samples else [f"<p>{escape(say('new.summary.none'))}</p>"]
            return []
        if values["train.batch_size"] > samples:
            line = say("new.summary.batch", batch=values["train.batch_size"], samples=run_cards.digits(samples))
            parts.append(f"<p class='wrong'>{escape(line)}</p>")
        steps = say("new.fact.steps_of", steps=values["train.steps"], epochs=run_cards.digits(reckoned.epochs))
        facts.append((say("new.fact.steps"), steps))
        line = say(
            "new.summary.epochs",
            samples=run_cards.digits(reckoned.samples),
            per_step=reckoned.per_step,
            steps=run_cards.digits(reckoned.steps),
            total=values["train.steps"],
            epochs=run_cards.digits(reckoned.epochs),
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
        minutes = seconds * values["train.steps"] / 60
        name, count = ("new.time.minutes", minutes) if minutes < 90 else ("new.time.hours", minutes / 60)
        length = say(name, count=run_cards.digits(max(count, 1)))
        facts.append((say("new.fact.time"), say("new.fact.about", amount=length)))
        return say(
            "new.summary.time",
            time=length,
            seconds=run_cards.digits(seconds),
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

        def size(num: int | None) -> str:
            if num is None:
                return say("new.summary.unknown")
            return f"{num / 2**30:.2f} GiB" if num >= 2**28 else f"{num / 2**20:.1f} MiB"

        file_bytes = max(known["file_bytes"].values(), default=None)
        facts += [
            (say("new.fact.ram" if known["process_bytes"] else "new.fact.vram"), size(known["peak_bytes"])),
            (say("new.fact.cache"), size(known["cache_bytes"])),
            (say("new.fact.file"), size(file_bytes)),
        ]
        lines = [
            say(
                "new.summary.memory",
                peak=size(known["peak_bytes"]),
                base=size(known["base_bytes"]),
                adapter=size(known["adapter_bytes"]),
                optimizer=size(known["optimizer_bytes"]),
                step=size(known["step_bytes"]),
            ),
            say("new.summary.memory_cpu", process=size(known["process_bytes"]))
            if known["process_bytes"]
            else say("new.summary.memory_gpu"),
        ]
        files = ", ".join(f"{layout} {size(num)}" for layout, num in known["file_bytes"].items())
        return [*lines, say("new.summary.files", file=files, cache=size(known["cache_bytes"]))]
