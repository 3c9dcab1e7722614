"""The summary beside the form: problems, images, epochs, time, memory and disk space."""

from typing import Any

from lora_fp8.errors import UserError

from ... import estimate_panel, form, run_cards, sanitize
from ...context import Ui
from ...draft import Draft
from .draft_reader import DraftReader
from .problems import Problems


class Summary:
    """Renders the summary of a draft."""

    def __init__(self, ui: Ui, draft: Draft, reader: DraftReader, problems: Problems):
        self.ui, self.draft, self.reader, self.problems = ui, draft, reader, problems
        self.estimates = estimate_panel.Estimates(ui.place.home)

    def render(self, findings: list[tuple[str, str]] | None = None) -> str:
        """Render the summary; `findings`: what `Problems.find` returned for the draft, if it is known."""
        say, escape = self.ui.say, sanitize.escape
        text = self.draft.text()
        findings = self.problems.find(text) if findings is None else findings
        parts = []
        if findings:
            lines = [self.problems.label(key, line) if key else line for key, line in findings]
            items = "".join(f"<li>{escape(line)}</li>" for line in lines)
            parts.append(f"<p><strong>{escape(say('new.summary.open'))}</strong></p><ul class='problems'>{items}</ul>")
        else:
            parts.append(f"<p><strong class='ready'>{escape(say('new.summary.ready'))}</strong></p>")
        try:
            values = form.read_values(text, self.draft.home)
        except UserError:
            return parts[0]
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
        skipping = values["dataset.missing_caption"] == "skip"
        examined = [] if findings else [self.reader.examine(values, folder, mask) for folder, *_, mask in counts]
        samples = files = 0
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
        elif reckoned is None:
            parts += [] if samples else [f"<p>{escape(say('new.summary.none'))}</p>"]
        else:
            line = say(
                "new.summary.epochs",
                samples=reckoned.samples,
                per_step=reckoned.per_step,
                steps=run_cards.digits(reckoned.steps),
                total=values["train.steps"],
                epochs=run_cards.digits(reckoned.epochs),
            )
            parts.append(f"<p>{escape(line)}</p>")
        if not findings:
            known = self.estimates.get(text)
            parts += [f"<p>{escape(line)}</p>" for line in (self._estimate_time(values), *self._render_memory(known))]
            if isinstance(known, dict):
                problems, warnings = estimate_panel.check_disk_space(known)
                parts += [f"<p class='wrong'>{escape(self.ui.translate(line))}</p>" for line in problems]
                parts += [f"<p>{escape(self.ui.translate(line))}</p>" for line in [*known["notes"], *warnings]]
        return "".join(parts)

    def _estimate_time(self, values: dict[str, Any]) -> str:
        say = self.ui.say
        folders = [self.ui.place.home / "runs", *self.ui.place.roots]
        known = estimate_panel.find_pace(dict.fromkeys(folders), str(values["model.family"]))
        if known is None:
            return say("new.summary.no_time")
        seconds, run = known
        minutes = seconds * values["train.steps"] / 60
        name, count = ("new.time.minutes", minutes) if minutes < 90 else ("new.time.hours", minutes / 60)
        return say(
            "new.summary.time",
            time=say(name, count=run_cards.digits(max(count, 1))),
            seconds=run_cards.digits(seconds),
            run=run,
        )

    def _render_memory(self, known: dict[str, Any] | str | None) -> list[str]:
        """Format the estimate: memory, cache and file sizes."""
        say = self.ui.say
        if known is None:
            return [say("new.summary.estimating")]
        if isinstance(known, str):
            return [say("new.summary.no_estimate", why=self.ui.translate(known))] if known else []

        def size(num: int | None) -> str:
            if num is None:
                return say("new.summary.unknown")
            return f"{num / 2**30:.2f} GiB" if num >= 2**28 else f"{num / 2**20:.1f} MiB"

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
