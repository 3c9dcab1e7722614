"""A drawing as HTML: its state, the viewer with sliders, the grid of all images, and what it was drawn with."""

import json
from collections.abc import Sequence
from typing import Any

from lora_fp8.jobs import ENDED

from ... import run_cards, run_monitor
from ...context import Ui
from ...drawings import Drawing
from ...sanitize import escape, shorten

SIDE = 1280
"""Most pixels of an image in the viewer."""
THUMBNAIL = 320
STAGES = ("download", "encode", "load", "draw")


def render_drawing(ui: Ui, drawing: Drawing | None) -> str:
    """Render a drawing, or what to do where there is none yet."""
    if drawing is None:
        if not run_monitor.has_trainings(ui.place):
            return run_cards.render_empty(ui, ui.say("draw.none"), ui.say("draw.none_about"))
        return f'<p class="empty">{ui.say("draw.empty")}</p>'
    parts = [_render_state(ui, drawing)]
    if drawing.images:
        parts += [_render_viewer(ui, drawing), _render_grid(ui, drawing)]
    parts.append(_render_facts(ui, drawing))
    return f'<section class="card drawing" data-drawing="{escape(drawing.id)}">{"".join(parts)}</section>'


def _render_state(ui: Ui, drawing: Drawing) -> str:
    """Render the prompt, the state with its progress, and the buttons."""
    record, job = drawing.record, drawing.job
    prompt = str(record.get("prompt") or (job.name if job else ""))
    label = f'<span class="state {escape(drawing.state)}">{ui.say(f"state.{drawing.state}")}</span>'
    head = f'<div class="row"><h2>{escape(shorten(prompt, 300))}</h2>{label}</div>'
    lines = ""
    if drawing.state in ("running", "starting", "stopping"):
        lines = _render_progress(ui, record or {"stage": "load"})  # its process has not written anything yet
    elif job is not None and drawing.state in ("queued", "failed", "lost"):
        wrong = " wrong" if drawing.state != "queued" else ""
        text = run_cards.translate_sentence(ui, job.sentence)
        lines = f'<p class="said{wrong}" role="status">{escape(text)}</p>'
        if job.place:
            lines += f'<p class="dim">{ui.say("draw.place", place=job.place)}</p>'
        if wrong:
            lines += run_cards.render_log_tail(job, run_monitor.read_log_tail(job))
    buttons = ""
    if drawing.state in ("running", "starting", "queued"):
        do = "cancel" if drawing.state == "queued" else "stop"
        buttons = run_cards.render_button(do, ui.say("draw.stop"), "danger", id=drawing.id)
    elif drawing.state in ENDED:
        if record.get("grid") == "grid.png":
            for name, key in (("grid.png", "draw.save_grid"), ("drawing.json", "draw.save_record")):
                address = escape(ui.make_download_link(drawing.folder / name))
                buttons += f'<a class="button" href="{address}" download>{ui.say(key)}</a>'
        buttons += run_cards.render_button("delete", ui.say("runs.do.delete"), "danger", id=drawing.id)
    return f'{head}{lines}<div class="buttons">{buttons}</div>'


def _render_progress(ui: Ui, record: dict[str, Any]) -> str:
    """Render the stage, and how many images and steps are done."""
    stage = str(record.get("stage"))
    text = ui.say(f"draw.stage.{stage}") if stage in STAGES else ui.say("state.running")
    done, total, step, steps = (_as_count(record.get(name)) for name in ("done", "total", "step", "steps"))
    share = 0.0
    if stage == "draw" and total:
        text = ui.say("draw.progress", done=done, total=total, step=min(step, steps), steps=steps)
        share = 100 * min(1.0, (done + min(1.0, step / max(1, steps))) / total)
    return f'<p class="said" role="status">{text}</p><div class="bar"><i style="width:{share:.1f}%"></i></div>'


def _render_viewer(ui: Ui, drawing: Drawing) -> str:
    """Render one image large over the base model, with sliders for the cut and for the strength (static/viewer.js)."""
    base = next((image for image in drawing.images if image["lora"] is None), None)
    others = [image for image in drawing.images if image["lora"] is not None]
    names = _name_loras(ui, drawing)
    cells = [
        {
            "lora": image["lora"],
            "strength": image["strength"],
            "address": ui.make_picture_link(drawing.folder / image["file"], SIDE),
            "name": f"{names.get(image['lora'], '')} · {image['strength']:g}",
        }
        for image in others
    ]
    first = cells[-1] if cells else None
    base_name = ui.say("draw.base")
    images, labels = "", ""
    if base is not None:
        images += (
            f'<img src="{escape(ui.make_picture_link(drawing.folder / base["file"], SIDE))}" alt="{escape(base_name)}">'
        )
        labels += f"<span>{escape(base_name)}</span>"
    if first is not None:
        images += f'<img class="drawn" src="{escape(first["address"])}" alt="{escape(first["name"])}">'
        labels += f'<span class="drawn-name">{escape(first["name"])}</span>'
    cut = ""
    if base is not None and first is not None:
        slide = escape(ui.say("run.slide"))
        cut = (
            f'<div class="cut"></div><input type="range" min="0" max="100" value="50" step="0.5" aria-label="{slide}">'
        )
    strengths = sorted({cell["strength"] for cell in cells})
    slider = ""
    if len(strengths) > 1:
        slider = (
            f'<label class="strength">{ui.say("draw.strength")} '
            f'<input type="range" min="0" max="{len(strengths) - 1}" step="1" value="{len(strengths) - 1}" '
            f'data-strengths="{escape(json.dumps(strengths))}"><output>{strengths[-1]:g}</output></label>'
        )
    picks = ""
    if len(names) > 1:
        chosen = first["lora"] if first else None
        picks = "".join(
            f'<button type="button" class="pick" data-lora="{number}" aria-pressed="{str(number == chosen).lower()}">'
            f"{escape(name)}</button>"
            for number, name in names.items()
        )
        picks = f'<div class="picks" role="group" aria-label="{escape(ui.say("draw.steps"))}">{picks}</div>'
    return (
        f'<div class="viewer" data-cells="{escape(json.dumps(cells))}"><div class="ab">{images}{cut}'
        f'<div class="names">{labels}</div></div>{slider}{picks}</div>'
    )


def _render_grid(ui: Ui, drawing: Drawing) -> str:
    """Render a table of all images: a row for each LoRA, a column for each strength."""
    if len(drawing.images) < 3:
        return ""
    names = _name_loras(ui, drawing)
    base = next((image for image in drawing.images if image["lora"] is None), None)
    strengths = sorted({image["strength"] for image in drawing.images if image["lora"] is not None})
    cells = {(image["lora"], image["strength"]): image for image in drawing.images}
    columns = [ui.say("draw.base")] if base is not None else []
    columns += [f"{strength:g}" for strength in strengths]
    rows = ""
    for number, name in names.items():
        row: list[dict[str, Any] | None] = [base] if base is not None else []
        row += [cells.get((number, strength)) for strength in strengths]
        rows += f"<tr><th>{escape(name)}</th>{''.join(_render_cell(ui, drawing, image, name) for image in row)}</tr>"
    head = "".join(f"<th>{escape(text)}</th>" for text in columns)
    return (
        f'<div class="scroll"><table class="pictures"><thead><tr><th>{ui.say("draw.strength")}</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _render_cell(ui: Ui, drawing: Drawing, image: dict[str, Any] | None, name: str) -> str:
    if image is None:
        return "<td></td>"
    text = ui.say("draw.base") if image["lora"] is None else f"{name} · {image['strength']:g}"
    picture = (
        f'<img src="{escape(ui.make_picture_link(drawing.folder / image["file"], THUMBNAIL))}" alt="{escape(text)}">'
    )
    if image["lora"] is None:
        return f"<td>{picture}</td>"
    data = f'data-lora="{image["lora"]}" data-strength="{image["strength"]}"'
    return f'<td><button type="button" class="cell" {data}>{picture}</button></td>'


def _render_facts(ui: Ui, drawing: Drawing) -> str:
    """Render with what the images were drawn, folded."""
    record = drawing.record
    if not record:
        return ""
    size = f"{_as_count(record.get('width'))} × {_as_count(record.get('height'))}"
    places = record.get("loras")
    loras = [lora for lora in places if isinstance(lora, dict)] if isinstance(places, list) else []
    paths = dict.fromkeys(str(lora.get("place", "")) for lora in loras)
    facts = [
        ("draw.prompt", record.get("prompt")),
        ("draw.negative", record.get("negative")),
        ("draw.seed", record.get("seed")),
        ("draw.size", size),
        ("draw.sampling_steps", record.get("steps")),
        ("draw.guidance", record.get("guidance")),
        ("draw.base", record.get("base")),
        ("draw.device", record.get("device")),
        ("draw.lora", "\n".join(paths)),
    ]
    rows = [(ui.say(key), escape(value)) for key, value in facts if value not in (None, "")]
    return f"<details><summary>{ui.say('draw.facts')}</summary>{run_cards.render_table(('', ''), rows)}</details>"


def render_history(ui: Ui, drawings: Sequence[Drawing], opened: Drawing | None) -> str:
    """Render the drawings as small images, newest first; the open one is marked."""
    if len(drawings) < 2:
        return ""
    buttons = ""
    for drawing in drawings:
        text = escape(shorten(drawing.record.get("prompt") or (drawing.job.name if drawing.job else drawing.id), 80))
        image = drawing.images[-1] if drawing.images else None
        link = ui.make_picture_link(drawing.folder / image["file"], THUMBNAIL) if image else ""
        picture = (
            f'<img src="{escape(link)}" alt="" loading="lazy">'
            if image
            else f'<span class="blank">{ui.say(f"state.{drawing.state}")}</span>'
        )
        pressed = str(opened is not None and drawing.id == opened.id).lower()
        buttons += (
            f'<button type="button" data-do="open" data-id="{escape(drawing.id)}" aria-pressed="{pressed}" '
            f'title="{text}">{picture}<span>{text}</span></button>'
        )
    return f'<h2>{ui.say("draw.history")}</h2><div class="history">{buttons}</div>'


def _name_loras(ui: Ui, drawing: Drawing) -> dict[int, str]:
    """Return the names of the LoRAs that have an image, by their number."""
    loras = drawing.record.get("loras")
    names = {}
    for image in drawing.images:
        number = image["lora"]
        if number is not None and isinstance(loras, list) and number < len(loras) and isinstance(loras[number], dict):
            step = loras[number].get("step")
            file = shorten(loras[number].get("name", number), 60)
            names[number] = ui.say("run.at", step=step) if isinstance(step, int) else file
        elif number is not None:
            names[number] = str(number)
    return names


def _as_count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
