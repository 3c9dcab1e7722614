"""The sections of a report, in the order in which a reader asks for them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ...common.chart import Line, Mark, render_chart
from ...common.messages import translate
from ...common.numbers import format_bytes, format_count, is_finite_number
from ...common.shell import quote_path
from ...errors import Joined, Message, Plural
from ...run.run_log import smooth, thin
from . import pictures, words
from .contents import Contents, ResultFile
from .page import Page, format_number, format_time

SMOOTHING = 0.9
"""Share of the smoothed loss that one step keeps; as on the page of a run."""
MOST_WARNINGS = 20
STATES = {
    "running": Message("in progress"),
    "done": Message("done"),
    "stopped": Message("stopped"),
    "error": Message("failed"),
    "interrupted": Message("interrupted"),
    "unknown": Message("unknown"),
}
IN_THE_HEAD = (
    *("name", "output_dir", "preset", "model.family", "model.path", "dataset.folders", "dataset.cache_dir"),
    *("preview.prompts", "preview.negative"),
)
"""Settings that a report shows at another place, or that say nothing about the LoRA."""
CHECKS = {
    "file": Message("File"),
    "metadata": Message("Metadata"),
    "hash": Message("Hash"),
    "pairs": Message("Matrix pairs"),
    "finite": Message("Finite values"),
    "trained": Message("Trained layers"),
    "load": Message("Loading in diffusers"),
    "delta": Message("Weight difference"),
    "prediction": Message("Prediction"),
    "effect": Message("Effect of the LoRA"),
    "preview": Message("Previews"),
    "text": Message("Text encoders"),
    "text effect": Message("Effect of the text encoders"),
    "plain prediction": Message("Prediction, unquantized base"),
    "plain preview": Message("Previews, unquantized base"),
    "merged, unscaled e4m3": Message("Merged into an FP8 base without scales"),
    "merged, row-scaled e4m3": Message("Merged into an FP8 base with a scale per row"),
}
"""Name of a check of verify.json -> its title."""
VERIFIED, UNVERIFIED, FAILED = Message("verified"), Message("not verified"), Message("failed")
PASSED, MEASURED = Message("passed"), Message("measured")
OMITTED = Plural(
    "{count} image is not included: a report contains at most {size} of images.",
    "{count} images are not included: a report contains at most {size} of images.",
)
UNREADABLE = Plural("{count} image cannot be read.", "{count} images cannot be read.")
TITLE = Message("Training report")
COSTS = ("plain prediction", "plain preview", "merged, unscaled e4m3", "merged, row-scaled e4m3")
"""Checks that measure what quantization costs; they are not judged."""


@dataclass(frozen=True)
class Report:
    """A run, the page that it is written on, and its images."""

    contents: Contents
    page: Page
    previews: list[pictures.Preview]
    num_prompts: int
    """prompts that have previews, of which `previews` may leave some out"""
    steps: list[int]
    strengths: list[pictures.Strengths]
    album: pictures.Album


def render_head(report: Report) -> str:
    """Render name, state, what was trained on what, the verdict on the held-out loss, and what went wrong."""
    contents, page = report.contents, report.page
    facts, settings = contents.log.facts, contents.settings
    state = contents.state
    kind = {"done": "good", "running": "now", "stopped": "warn"}.get(state, "bad")
    steps = str(facts.step)
    if facts.steps and facts.step != facts.steps:
        steps = Message("{step} of {steps}", step=facts.step, steps=facts.steps)
    images = facts.data.get("images")
    adapter = str(settings.get("adapter.type", "lora"))
    about = [
        (Message("Base model"), contents.base_name),
        (Message("Architecture"), contents.base_title),
        (Message("Images"), format_number(images)),
        (Message("Steps"), steps if facts.step else ""),
        (Message("Time"), page.format_duration(contents.seconds) if contents.began else ""),
        (
            Message("Adapter"),
            Message("{kind}, rank {rank}", kind=adapter, rank=settings["adapter.rank"])
            if is_finite_number(settings.get("adapter.rank")) and adapter != "oft"
            else adapter,
        ),
        (Message("Trigger word"), settings.get("dataset.trigger", "")),
        (Message("Hardware"), _name_hardware(contents)),
        (Message("Started"), format_time(contents.began)),
    ]
    return (
        f'<header><p class="kicker">{page.say(TITLE)}</p>'
        f'<div class="title"><h1>{page.say(contents.name)}</h1>'
        f'<span class="state {kind}">{page.say(STATES.get(state, state))}</span></div>'
        f"{page.render_facts(about)}{_render_verdict(report)}{_render_ending(report)}</header>"
    )


def _name_hardware(contents: Contents) -> str:
    machine = contents.find_newest("environment")
    device = str(contents.log.facts.start.get("device", ""))
    return str(machine.get("gpu") or ("CPU" if device == "cpu" else device))


def _render_verdict(report: Report) -> str:
    """Render the sentence about the held-out loss, as everywhere, and why training ended before its steps."""
    facts = report.contents.log.facts
    lines = [event["text"] for event in (facts.verdict, facts.patience) if isinstance(event.get("text"), str)]
    # Risen, or never below that of the base: nothing that a reader should take for a success.
    doubtful = facts.verdict.get("risen_since") is not None or facts.verdict.get("best") == 0
    return report.page.render_paragraph(Joined(" ", lines), "verdict warn" if doubtful else "verdict") if lines else ""


def _render_ending(report: Report) -> str:
    """Render what went wrong in the words of the run's own events, and how to go on; "" of a finished run."""
    contents, page = report.contents, report.page
    state, facts = contents.state, contents.log.facts
    if state == "done":
        return ""
    resume = f"lora-fp8 resume {quote_path(contents.run.path)}"
    lines: list[object] = []
    if state == "running":
        lines.append(
            Message("The training is in progress; this report shows it as of {time}.", time=_format_newest(contents))
        )
    elif text := facts.end.get("text"):
        lines.append(text)
    elif state == "interrupted":
        lines.append(
            Message(
                "The training ended without a message after {time}. The log of the run may say why.",
                time=_format_newest(contents),
            )
        )
    if state != "running" and contents.saved_step is not None and resume not in str(facts.end.get("text")):
        lines.append(
            Message(
                "`{command}` continues from the checkpoint of step {step}.", command=resume, step=contents.saved_step
            )
        )
    kind = {"running": "now", "stopped": "warn"}.get(state, "bad")
    return f'<div class="ending {kind}" role="note">{"".join(map(page.render_paragraph, lines))}</div>' if lines else ""


def _format_newest(contents: Contents) -> str:
    return format_time(contents.newest)


def render_files(report: Report) -> str:
    """Render the LoRA files with step, size, verification and hash."""
    contents, page = report.contents, report.page
    if not contents.files:
        none = Message("No LoRA file was written.")
        return page.render_section(
            Message("Result files"), page.render_paragraph(none, "dim") if contents.state != "running" else "", "files"
        )
    rows = [
        (
            f"<code>{page.say(file.name)}</code>",
            page.say(file.step),
            f'<span class="nowrap">{page.say(format_bytes(file.num_bytes))}</span>',
            _render_outcome(report, file),
            f'<code class="hash">{page.say(file.sha256)}</code>',
        )
        for file in contents.files
    ]
    head = (Message("File"), Message("Step"), Message("Size"), Message("Verified"), "SHA-256")
    return page.render_section(Message("Result files"), page.render_table(head, rows, stacked=True), "files")


def _render_outcome(report: Report, file: ResultFile) -> str:
    ok = file.report.get("ok")
    if ok is None:
        return f'<span class="dim nowrap">{report.page.say(UNVERIFIED)}</span>'
    return _render_mark(report.page, ok is True, VERIFIED)


def _render_mark(page: Page, ok: bool, passed: Message) -> str:
    kind, sign, text = ("good", "✓", passed) if ok else ("bad", "✗", FAILED)
    return f'<b class="{kind} nowrap">{sign} {page.say(text)}</b>'


def render_curves(report: Report) -> str:
    """Render training loss, held-out loss with the best step marked, and learning rate."""
    contents, page = report.contents, report.page
    points = contents.log.measures["loss"].list_points()
    if not points:
        missing = Message("There are no curves: no step was trained.")
        return page.render_section(Message("Curves"), page.render_paragraph(missing, "dim"), "curves")

    def say(text: str) -> str:
        return translate(page.language, text)

    step, best = say(Message("step")), contents.best
    mark = Mark(best[0], say(Message("best: step {step}", step=best[0]))) if best else None
    smoothed = smooth(points, SMOOTHING)
    lines = [
        Line(say(Message("each step")), thin(points), 0, faint=True),
        Line(say(Message("smoothed")), thin(smoothed), 0),
    ]
    charts = [render_chart(say(Message("Training loss")), lines, empty="", x_label=step, mark=mark)]
    if contents.log.validation:
        charts.append(_render_held_out(report, say, mark))
    names = {"likeness": Message("image similarity"), "prompt_fit": Message("prompt match")}
    scores = [(name, groups.list_points()) for name, groups in contents.log.scores.items() if groups.list_points()]
    if scores:
        lines = [Line(say(names[name]), drawn, number) for number, (name, drawn) in enumerate(scores)]
        charts.append(render_chart(say(Message("Scores of the previews")), lines, empty="", x_label=step))
    rates = thin(contents.log.measures["lr"].list_points())
    charts.append(render_chart(say(Message("Learning rate")), [Line("", rates, 2)], empty="", x_label=step))
    tenth = max(1, len(points) // 10)
    first, last = (fmean(value for _, value in part) for part in (points[:tenth], points[-tenth:]))
    ends = Message(
        "Mean training loss: {first} over the first tenth of the steps, {last} over the last tenth.",
        first=f"{first:.4g}",
        last=f"{last:.4g}",
    )
    body = f'<div class="charts">{"".join(charts)}</div>{page.render_paragraph(ends, "dim")}'
    return page.render_section(Message("Curves"), body + _render_validations(report), "curves")


def _render_held_out(report: Report, say: Callable[[str], str], mark: Mark | None) -> str:
    bands = [
        Line(say(band) if band else say(Message("all timesteps")), groups.list_points(), number)
        for number, (band, groups) in enumerate(sorted(report.contents.log.validation.items()))
    ]
    return render_chart(say(Message("Held-out loss")), bands, empty="", x_label=say(Message("step")), mark=mark)


def _render_validations(report: Report) -> str:
    """Render the held-out losses as a folded table."""
    validation, page = report.contents.log.validation, report.page
    if not validation:
        return ""
    bands = sorted(validation)
    values = {band: dict(groups.list_points()) for band, groups in validation.items()}
    steps = sorted({step for points in values.values() for step in points})
    rows = [
        (str(step), *(f"{values[band][step]:.4g}" if step in values[band] else "" for band in bands)) for step in steps
    ]
    head = (Message("Step"), *(band or Message("all timesteps") for band in bands))
    return page.render_details(Message("Held-out losses as a table"), page.render_table(head, rows))


def render_previews(report: Report) -> str:
    """Render the previews: a row for each prompt, and in it one image for each step."""
    page, previews = report.page, report.previews
    if not previews:
        return ""
    drawn = {step for preview in previews for step in preview.files}
    notes: list[str] = []
    if len(previews) < report.num_prompts:
        notes.append(Message("{shown} of {drawn} prompts are shown.", shown=len(previews), drawn=report.num_prompts))
    if len(report.steps) < len(drawn):
        notes.append(Message("{shown} of {drawn} steps are shown.", shown=len(report.steps), drawn=len(drawn)))
    if any("clips" in event for event in report.contents.log.facts.previews.values()):
        notes.append(Message("Of clips, the first frame is shown."))
    rows = "".join(_render_prompt(report, preview) for preview in previews)
    body = f"{rows}{page.render_paragraph(Joined(' ', [*notes, *_describe_limits(report)]), 'dim')}"
    return page.render_section(Message("Previews"), body, "previews")


def _describe_limits(report: Report) -> list[str]:
    """Say how many images the limit of a report left out, and how many could not be read."""
    album = report.album
    lines: list[str] = []
    if album.omitted:
        lines.append(OMITTED(count=album.omitted, size=format_bytes(pictures.MOST_BYTES)))
    if album.unreadable:
        lines.append(UNREADABLE(count=album.unreadable))
    return lines


def _render_prompt(report: Report, preview: pictures.Preview) -> str:
    page, cells = report.page, ""
    best = report.contents.best
    for step in report.steps:
        name = Message("Step {step}", step=step) if step else Message("Before training")
        if best and step == best[0] and step:
            name = Message("Step {step} (best)", step=step)
        image = _render_image(report, preview.files.get(step), f"{translate(page.language, name)}: {preview.prompt}")
        cells += f"<li><figure>{image}<figcaption>{page.say(name)}</figcaption></figure></li>"
    columns = f'style="--columns:{len(report.steps)}"'
    return f'<div class="prompt"><h3>{page.say(preview.prompt)}</h3><ol class="strip" {columns}>{cells}</ol></div>'


def _render_image(report: Report, path: Any, text: str) -> str:
    inlined = report.album.get(path) if path is not None else None
    if inlined is None:
        return '<span class="blank">–</span>'
    url, width, height = inlined
    small = ' class="small"' if max(width, height) <= pictures.SMALL else ""
    return f'<img{small} src="{url}" width="{width}" height="{height}" alt="{report.page.say(text)}">'


def render_strengths(report: Report) -> str:
    """Render drawings: a row for each LoRA, and a column for each strength."""
    page, body = report.page, ""
    for drawing in report.strengths:
        head = [Message("LoRA"), *(Message("strength {value}", value=f"{value:g}") for value in drawing.columns)]
        head = [Message("without LoRA") if text == "strength 0" else text for text in head]
        rows = [
            (
                page.say(name),
                *(
                    _render_image(report, files.get(value), f"{name}, {value:g}: {drawing.prompt}")
                    for value in drawing.columns
                ),
            )
            for name, files in drawing.rows
        ]
        table = page.render_table(head, rows, drawing.prompt)
        body += f'<div class="strengths">{table}</div>'
    return page.render_section(Message("Strengths"), body, "strengths")


def render_dataset(report: Report) -> str:
    """Render number, sizes, buckets and captions of the images, and the folders that they come from."""
    contents, page = report.contents, report.page
    data = contents.log.facts.data
    if not data:
        return ""
    smallest, largest = (_format_size(data.get(name)) for name in ("smallest", "largest"))
    captions: object = ""
    if is_finite_number(data.get("captioned")) and is_finite_number(data.get("distinct_captions")):
        captions = Plural(
            "{count} image has a caption; {distinct} captions differ",
            "{count} images have a caption; {distinct} captions differ",
        )(
            count=data["captioned"],
            distinct=data["distinct_captions"],
        )
    facts = [
        (Message("Images"), format_number(data.get("images"))),
        (Message("Held out for validation"), format_number(data.get("held_out"))),
        (Message("With a mask"), format_number(data.get("masked")) if data.get("masked") else ""),
        (Message("Captions"), captions),
        (
            Message("Image sizes"),
            (smallest if smallest == largest else Message("{least} to {most}", least=smallest, most=largest))
            if smallest
            else "",
        ),
        (Message("Samples per epoch"), format_number(data.get("samples_per_epoch"))),
        (Message("Steps per epoch"), format_number(data.get("steps_per_epoch"))),
    ]
    body = page.render_facts(facts)
    buckets = data.get("buckets")
    if isinstance(buckets, dict) and buckets:
        most = max((count for count in buckets.values() if is_finite_number(count)), default=1) or 1
        rows = [
            (
                page.say(size.replace("x", " × ")),
                f'{format_number(count)} <i class="meter" style="width:{6 * count / most:.2f}em"></i>',
            )
            for size, count in buckets.items()
            if is_finite_number(count) and count >= 0
        ]
        body += page.render_table((Message("Bucket (pixels)"), Message("Images")), rows)
    listed = data.get("folders")
    folders = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    if folders:
        folder_rows = [
            (page.say(row.get("name")), format_number(row.get("images")), format_number(row.get("repeats")))
            for row in folders
        ]
        body += page.render_table((Message("Folder"), Message("Images"), Message("Repeats")), folder_rows)
    return page.render_section(Message("Dataset"), f'<div class="columns">{body}</div>', "dataset")


def _format_size(size: Any) -> str:
    return (
        " × ".join(map(str, size))
        if isinstance(size, list) and len(size) == 2 and all(map(is_finite_number, size))
        else ""
    )


def render_settings(report: Report) -> str:
    """Render the settings that differ from their defaults, with what they are and why they have their value."""
    contents, page = report.contents, report.page
    reasons = contents.find_reasons()
    changed: list[tuple[str, ...]] = []
    automatic: list[tuple[str, ...]] = []
    for key, value, default in contents.list_differences():
        if key in IN_THE_HEAD:
            continue
        meaning = page.say(words.get_meaning(key, page.language))
        if why := reasons.get(key):
            meaning += f'<b class="why">{page.say(why)}</b>'
        title = page.say(words.get_title(key, page.language))
        row = (f"{title}<code>{page.say(key)}</code>", page.format_value(value), page.format_value(default), meaning)
        (automatic if default == "auto" else changed).append(row)
    head = (Message("Setting"), Message("Value"), Message("Default"), Message("Meaning"))
    body = page.render_table(head, changed, stacked=True) if changed else ""
    if automatic:
        about = Message("Settings whose default is auto: set by hand, or chosen for this base model and machine")
        body += page.render_details(about, page.render_table(head, automatic, stacked=True))
    if body:
        body += page.render_paragraph(Message("All settings are in config.toml in the run folder."), "dim")
    return page.render_section(Message("Settings that differ from their defaults"), body, "settings")


def render_verification(report: Report) -> str:
    """Render the verification of each file in words, and its checks as a table."""
    page, body = report.page, ""
    verified = [file for file in report.contents.files if isinstance(file.report.get("checks"), list)]
    for file in verified:
        checks = [check for check in file.report["checks"] if isinstance(check, dict)]
        judged = [check for check in checks if check.get("judged", True)]
        failed = [check for check in judged if not check.get("ok")]
        line = (
            Message("{file}: {failed} of {count} checks failed.", file=file.name, failed=len(failed), count=len(judged))
            if failed
            else Message("{file}: all {count} checks passed.", file=file.name, count=len(judged))
        )
        rows = [_render_check(page, check) for check in checks if check.get("name") not in COSTS]
        table = page.render_table((Message("Check"), Message("Outcome"), Message("Result")), rows, stacked=True)
        body += page.render_paragraph(line, "bad" if failed else "good")
        body += (
            table
            if failed or file is verified[0]
            else page.render_details(Message("Checks of {file}", file=file.name), table)
        )
    if body:
        intro = Message(
            "Each file was loaded into a clean diffusers pipeline and compared with the model that was trained: its "
            "weights, its prediction and its previews."
        )
        body = page.render_paragraph(intro) + body
    return page.render_section(Message("Verification"), body, "verification")


def _render_check(page: Page, check: dict[str, Any]) -> tuple[str, str, str]:
    name = str(check.get("name"))
    mark = _render_mark(page, bool(check.get("ok")), PASSED)
    if not check.get("judged", True):
        mark = f'<span class="dim">{page.say(MEASURED)}</span>'
    return page.say(CHECKS.get(name, name)), mark, page.say(check.get("detail", ""))


def _describe_sensitivity(event: dict[str, Any]) -> Message | str:
    """Describe the measurement of the layers' errors before training; "" if there was none."""
    if not all(is_finite_number(event.get(name)) for name in ("layers", "worst_before", "worst", "bound")):
        return ""
    values = {name: f"{event[name]:.3g}" for name in ("worst_before", "worst", "bound")}
    moved = len(event["moved"]) if isinstance(event.get("moved"), list) else 0
    if not moved:
        return Message(
            "The error of {layers} quantized layers was measured before training. The largest is {worst}, within the "
            "bound of {bound}.",
            layers=event["layers"],
            **values,
        )
    return Message(
        "The error of {layers} quantized layers was measured before training, and {count} of them got a more precise "
        "storage. The largest error was {worst_before} and is now {worst} (bound: {bound}).",
        layers=event["layers"],
        count=moved,
        **values,
    )


def _list_costs(page: Page, file: ResultFile) -> Iterator[tuple[str, str]]:
    """Yield what verification measured of the quantized base, as rows of a table."""
    checks = file.report.get("checks")
    for check in checks if isinstance(checks, list) else ():
        if isinstance(check, dict) and check.get("name") in COSTS:
            yield page.say(CHECKS[check["name"]]), page.say(check.get("detail", ""))


def render_quantization(report: Report) -> str:
    """Render how the base is stored, and what that costs, as far as the run has measured it."""
    contents, page = report.contents, report.page
    storage = contents.log.facts.model.get("storage")
    stored = Message("Storage of the base model: {line}", line=storage) if isinstance(storage, str) else ""
    body = page.render_paragraph(stored, "pre") + page.render_paragraph(
        _describe_sensitivity(contents.find_newest("sensitivity"))
    )
    costs = {file.name: list(_list_costs(page, file)) for file in contents.files}
    name, rows = max(costs.items(), key=lambda entry: len(entry[1]), default=("", []))
    if rows:
        caption = Message("Measured with {file}", file=name)
        body += page.render_table((Message("Measure"), Message("Result")), rows, caption, stacked=True)
    return page.render_section(Message("What quantization costs"), body, "quantization")


def render_warnings(report: Report) -> str:
    """Render the warnings of the run, those of its images among them."""
    page, facts = report.page, report.contents.log.facts
    texts = list(dict.fromkeys(event["text"] if isinstance(event.get("text"), str) else "" for event in facts.warnings))
    items = "".join(f"<li>{page.say(text)}</li>" for text in texts[-MOST_WARNINGS:])
    more = len(texts) - MOST_WARNINGS
    rest = (
        page.render_paragraph(Message("{count} earlier warnings are in the log of the run.", count=more), "dim")
        if more > 0
        else ""
    )
    return page.render_section(Message("Warnings"), f"<ul>{items}</ul>{rest}" if items else "", "warnings")


def render_environment(report: Report) -> str:
    """Render versions, hardware and this program's commit."""
    contents, page = report.contents, report.page
    machine = contents.find_newest("environment")
    versions = machine.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    ram, gpu = machine.get("ram_bytes"), machine.get("gpu")
    memory = f" ({format_bytes(machine['gpu_bytes'])})" if is_finite_number(machine.get("gpu_bytes")) else ""
    start, model = contents.log.facts.start, contents.log.facts.model
    trainable = model.get("trainable")
    facts = [
        ("GPU", f"{gpu}{memory}" if gpu else ""),
        (Message("CPU cores"), format_number(machine.get("cpus"))),
        (Message("RAM"), format_bytes(int(ram)) if is_finite_number(ram) else ""),
        (Message("System"), machine.get("system", "")),
        (Message("Processes"), format_number(start.get("processes"))),
        (Message("Peak memory"), f"{contents.peak_gb:.3g} GiB" if contents.peak_gb else ""),
        (Message("Trainable parameters"), format_count(trainable) if is_finite_number(trainable) else ""),
        (Message("Starts"), contents.starts if contents.starts > 1 else ""),
        (Message("Commit"), machine.get("commit", "")),
    ]
    body = page.render_facts(facts)
    if identity := model.get("base_sha256"):
        label = page.say(Message("SHA-256 of the base model:"))
        body += f'<p class="dim">{label} <code>{page.say(identity)}</code></p>'
    rows = [(page.say(name), page.say(version)) for name, version in versions.items()]
    if rows:
        body += page.render_details(
            Message("Versions"), page.render_table((Message("Package"), Message("Version")), rows)
        )
    return page.render_section(Message("Environment"), body, "environment")


SECTIONS: Sequence[Callable[[Report], str]] = (
    render_files,
    render_curves,
    render_previews,
    render_strengths,
    render_dataset,
    render_settings,
    render_verification,
    render_quantization,
    render_warnings,
    render_environment,
)
