"""Render the tables and the plot of a results file."""

import json
from typing import Any
from xml.sax.saxutils import escape

Rows = list[dict[str, Any]]
SIGNS = {True: "right", False: "**wrong**", None: "-"}
GOALS = {"fp8 matmul": 1.25, "fp8 matmul + triton": 1.25, "fp8 upcast": 0.9}
"""How fast a compiled step of FLUX should be, relative to one in bf16 that is compiled in the same way."""
"""Target speed of a mode at FLUX 1024 on Hopper, as a multiple of our compiled bf16."""


def render_tables(rows: Rows) -> str:
    """Return the report as Markdown."""
    facts = next((row["facts"] for row in rows if "facts" in row), {})
    wrong = [row for row in rows if row["ok"] is False]
    lines = [f"# What {facts.get('machine', 'this machine')} answered", ""]
    if facts:
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        lines += [f"{facts['date']}; {versions}.", ""]
        keys = ("capability", "gpu_arch", "memory_gib", "gpus", "cuda", "hip", "cores", "minutes", "toy")
        lines += ["; ".join(f"{key} {facts[key]}" for key in keys if facts.get(key)) + ".", ""]
    lines += [line for row in rows if row["name"].startswith("about") for line in (clean(row["note"]), "")]
    if facts.get("toy"):
        lines += ["Toy sizes: these figures only show that the script works.", ""]
    lines += [f"{len(rows)} rows, {len(wrong)} wrong." + " They are listed first." * bool(wrong), ""]
    lines += [f"* {row['stage']}: {row['name']}: {clean(row.get('note', ''))}" for row in wrong]
    lines += [
        "",
        "![Seconds per step](step.svg)",
        "",
        *render_step_table(rows),
        *render_profiles(rows),
        *render_rate_table(rows),
    ]
    for stage in ("numerics", "demo", "processes"):
        lines += ["", f"## {stage}", "", "| question | answer | value | limit | note |", "|---|---|---|---|---|"]
        for row in select_stage(rows, stage):
            value = f"{format_number(row.get('value'))} {row.get('unit', '')}".strip()
            cells = [row["name"], SIGNS[row["ok"]], value, format_number(row.get("limit")), clean(row.get("note", ""))]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def select_stage(rows: Rows, stage: str) -> Rows:
    """Return the rows of one stage."""
    return [row for row in rows if row["stage"] == stage]


def select_steps(rows: Rows) -> Rows:
    """Return the measured steps with `ratio` and `predicted_gib`.

    The ratio is how many times as fast a step is as one in bf16 with the same suffix: compiled, recorded, attention
    kept. The peers' are relative to our compiled one.
    """
    predicted = {row["name"]: row["value"] for row in select_stage(rows, "predict") if row.get("value")}
    found = []
    for row in [*select_stage(rows, "models"), *select_stage(rows, "peers")]:
        if row.get("unit") != "s/step":
            continue
        model, _, mode = row["name"].partition(": ")
        name = f"{model}: bf16" + (split_mode(mode)[1] if row["stage"] == "models" else " compiled")
        beside = next((one["value"] for one in rows if one["name"] == name and one.get("unit") == "s/step"), None)
        kept = ", attention kept" * ("attention kept" in mode)
        guess = predicted.get(f"{model}: {split_mode(mode)[0]}{kept}".replace(" + triton", ""))
        found.append(row | {"ratio": beside / row["value"] if beside else None, "predicted_gib": guess})
    return found


def split_mode(mode: str) -> tuple[str, str]:
    """Split "fp8 matmul compiled recorded" into the way to multiply and the way to run it."""
    start = min((mode.find(word) for word in (" compiled", " recorded", ",") if word in mode), default=len(mode))
    return mode[:start], mode[start:]


def render_step_table(rows: Rows) -> list[str]:
    """Return the table of seconds per step as Markdown lines."""
    lines = ["## Seconds per step", "", "Batch 1, LoRA rank 16, 8-bit AdamW (peers: torch's AdamW), random weights."]
    lines += ["Predicted: base, adapters, optimizer and step, calculated on the meta device without compilation.", ""]
    lines += [
        "| step | s/step | fastest - slowest | x as fast as bf16 run so | goal | peak, GiB | predicted, GiB | off "
        "| note |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for row in select_steps(rows):
        mode = row["name"].split(": ")[1]
        is_goal = row["name"].startswith("flux 1024") and "compiled" in mode
        goal = GOALS.get(split_mode(mode)[0]) if is_goal else None
        guess = row["predicted_gib"]
        peak = row["peak_gib"]
        off = f"{peak / guess - 1:+.1%}" if guess and peak else ""
        cells = [row["name"], f"{row['value']:.4f}", f"{row['fastest']:.4f} - {row['slowest']:.4f}"]
        cells += [
            format_number(row["ratio"]),
            format_number(goal),
            f"{peak:.2f}" if peak else "",
            format_number(guess),
            off,
        ]
        cells += [clean(row.get("note", ""))]
        lines.append("| " + " | ".join(cells) + " |")
    others = [row for row in rows if row["stage"] in ("models", "peers") and row.get("unit") != "s/step"]
    lines += [
        "",
        *[
            f"* {row['name']}: {format_number(row.get('value'))} {row.get('unit', '')} {clean(row.get('note', ''))}"
            for row in others
        ],
    ]
    return lines


def render_profiles(rows: Rows) -> list[str]:
    """Return where each profiled step's GPU time goes, as Markdown lines."""
    lines = []
    for row in rows:
        for half in ("backward", "update") if row["name"].endswith(": profile") and row.get("backward") else ():
            facts = row[half]
            lines += ["", f"### {row['name'].removesuffix(': profile')}: {half}", ""]
            lines += [
                f"{facts['seconds']:.4f} s, of which the GPU works {facts['gpu_seconds']:.4f} s"
                + (f"; {facts['launches']} launches." if facts["launches"] else "."),
                "",
                "| kernel | ms | times |",
                "|---|---|---|",
            ]
            for name, taken, count in facts["kernels"][:10]:
                lines.append(f"| {clean(name)} | {1000 * taken:.2f} | {count} |")
    return ["", "## Where a step's time goes", *lines] if lines else []


def render_rate_table(rows: Rows) -> list[str]:
    """Return the table of rates as Markdown lines."""
    lines = [
        "",
        "## Rates",
        "",
        "| shape (M, N, K) | operation | rate | microseconds | note |",
        "|---|---|---|---|---|",
    ]
    for row in select_stage(rows, "rates"):
        shape, _, operation = row["name"].partition(": ")
        rate = f"{format_number(row.get('value'))} {row.get('unit', '')}".strip()
        size = " ".join(map(str, row.get("shape", ())))
        cells = [
            f"{shape} ({size})",
            operation,
            rate,
            format_number(row.get("microseconds")),
            clean(row.get("note", "")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def plot(rows: Rows) -> str:
    """Return a bar chart of the steps as SVG."""
    steps = select_steps(rows)
    largest: dict[str, float] = {}
    for row in steps:
        model = row["name"].split(":")[0]
        largest[model] = max(largest.get(model, 0.0), row["value"])
    height, left, width = 24, 330, 420
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 110}" height="{height * len(steps) + 20}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
    ]
    for place, row in enumerate(steps):
        y = 10 + height * place
        long = width * row["value"] / largest[row["name"].split(":")[0]]
        color = "#2a6f97" if row["stage"] == "models" else "#b08968"
        parts.append(f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{escape(row["name"])}</text>')
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{long:.1f}" height="{height - 6}" fill="{color}"/>')
        parts.append(f'<text x="{left + long + 6:.1f}" y="{y + 16}">{row["value"]:.3f} s</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def format_number(value: Any) -> str:
    """Format a number with four digits; "" for None."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, int | float) else json.dumps(value)


def clean(text: str) -> str:
    """Return a note that fits into a table cell."""
    return " ".join(text.replace("|", "/").split())
