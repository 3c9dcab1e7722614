"""Line charts as HTML: a stretched SVG for the lines and HTML for the text, so that both stay sharp at every width.

`SCRIPT` shows the values under the pointer, for charts inside of `element` (js_on_load of a gr.HTML, or a loop around
it). It reads the numbers from the chart itself, so that a redrawn chart needs no new script.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .markup import escape, strip_unseen

Point = tuple[int, float]
"""Step and value."""
WIDTH, HEIGHT = 1000, 300


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        colour: index of its colour; the same measure keeps its colour.
        faint: thin and pale, for the raw loss behind the smoothed one.
        dot: a point of it that stands out.
    """

    label: str
    points: Sequence[Point]
    colour: int = 0
    faint: bool = False
    dot: Point | None = None


@dataclass(frozen=True)
class Mark:
    """A place on the x axis that is marked by a vertical line, with its entry in the legend."""

    x: float
    label: str


def render_chart(
    title: str,
    lines: Sequence[Line],
    *,
    empty: str,
    log: bool = False,
    x_label: str = "",
    mark: Mark | None = None,
) -> str:
    """Render a figure with axes, legend and lines.

    Args:
        empty: text while there is nothing to draw.
        log: use a logarithmic y axis, without values of 0 and below.
        mark: left out if it lies outside the lines.
    """
    lines = [replace(line, points=[p for p in line.points if not log or p[1] > 0]) for line in lines]
    lines = [line for line in lines if line.points]
    head = f"<figcaption><b>{escape(title)}</b>"
    if not lines:
        return f'<figure class="chart">{head}</figcaption><p class="empty">{escape(empty)}</p></figure>'
    for line in lines:
        if line.label:
            faint = " faint" if line.faint else ""
            head += f'<span class="key c{line.colour % 8}{faint}"><i></i>{escape(line.label)}</span>'
    x_low, x_high = _find_range([x for line in lines for x, _ in line.points])
    dots = [line.dot[1] for line in lines if line.dot and (not log or line.dot[1] > 0)]
    y_low, y_high, y_ticks = _choose_axis([*dots, *(y for line in lines for _, y in line.points)], log)

    def across(x: float) -> float:
        return (x - x_low) / (x_high - x_low)

    def up(y: float) -> float:
        return (_scale_y(y, log) - y_low) / (y_high - y_low)

    drawn, words, below = "", "", ""
    if mark is not None and x_low <= mark.x <= x_high:
        head += f'<span class="key mark"><i></i>{escape(mark.label)}</span>'
        drawn += f'<path class="mark" d="M{WIDTH * across(mark.x):.1f} 0V{HEIGHT}"/>'
    for value in y_ticks:
        y = HEIGHT * (1 - up(value))
        drawn += f'<path class="grid" d="M0 {y:.1f}H{WIDTH}"/>'
        words += f'<span style="top:{100 * (1 - up(value)):.2f}%">{format_number(value)}</span>'
    for value in _choose_ticks(x_low, x_high, 5):
        if value == round(value):
            below += f'<span style="left:{100 * across(value):.2f}%">{format_number(value)}</span>'
    for line in lines:
        places = [(WIDTH * across(x), HEIGHT * (1 - up(y))) for x, y in line.points]
        places *= 2 if len(places) == 1 else 1  # a line to itself has round ends: a dot
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        drawn += f'<path class="line c{line.colour % 8}{" faint" if line.faint else ""}" d="{path}"/>'
        if line.dot and x_low <= line.dot[0] <= x_high and (not log or line.dot[1] > 0):
            x, y = WIDTH * across(line.dot[0]), HEIGHT * (1 - up(line.dot[1]))
            drawn += f'<path class="line dot c{line.colour % 8}" d="M{x:.1f} {y:.1f}L{x:.1f} {y:.1f}"/>'
    of = f'<div class="of">{escape(x_label)}</div>' if x_label else ""
    data = {
        "x": [x_low, x_high],
        "lines": [
            {
                "label": strip_unseen(line.label),
                "colour": line.colour % 8,
                "at": [[x, float(f"{y:.4g}")] for x, y in line.points],
            }
            for line in lines
        ],
        "unit": x_label,
    }
    return (
        f'<figure class="chart" data-chart="{escape(json.dumps(data, separators=(",", ":")))}">{head}</figcaption>'
        f'<div class="area"><div class="y">{words}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{drawn}</svg></div>'
        f'<div class="x">{below}</div>{of}</figure>'
    )


def format_number(value: float) -> str:
    """Format a number briefly: 0.05, 1e-5, 12k."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    if size < 1e-3:
        digits, _, power = f"{value:.3e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.4g}"


def _find_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 1, high + 1)


def _choose_axis(values: Sequence[float], log: bool) -> tuple[float, float, list[float]]:
    """Return the lower and upper end of the axis (as logarithms if `log`) and the values of its labels."""
    low, high = min(values), max(values)
    if log:
        bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
        top = max(top, bottom + 1)
        every = math.ceil((top - bottom) / 6)
        return bottom, top, [10.0**power for power in range(bottom, top + 1, every)]
    if low > 0 and low < 0.4 * high:
        low = 0.0
    if high == low:
        low, high = (0.0, high or 1.0) if high >= 0 else (low, 0.0)
    room = 0.04 * (high - low)
    return (low if low == 0 else low - room), high + room, _choose_ticks(low, high, 5)


def _choose_ticks(low: float, high: float, about: int) -> list[float]:
    """Return round numbers between the two."""
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number_ * step for number_ in range(first, math.floor(high / step + 1e-9) + 1)]


def _scale_y(value: float, log: bool) -> float:
    return math.log10(value) if log else value


SCRIPT = """
const tip = document.getElementById('chart-tip') || document.body.appendChild(
  Object.assign(document.createElement('div'), {id: 'chart-tip'}));
const rule = document.getElementById('chart-rule') || document.body.appendChild(
  Object.assign(document.createElement('div'), {id: 'chart-rule'}));
const style = {position: 'fixed', pointerEvents: 'none', zIndex: 999, display: 'none'};
Object.assign(tip.style, style, {background: '#18181b', color: '#fafafa', borderRadius: '6px', padding: '6px 10px',
  font: '12px/1.5 system-ui, sans-serif', whiteSpace: 'pre'});
Object.assign(rule.style, style, {width: '1px', background: 'currentColor', opacity: 0.4});
const hide = () => { tip.style.display = rule.style.display = 'none'; };
element.addEventListener('pointerleave', hide);
element.addEventListener('pointermove', event => {
  const svg = event.target.closest('.area')?.querySelector('svg');
  if (!svg) return hide();
  const box = svg.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
  if (share < 0 || share > 1) return hide();
  const chart = JSON.parse(svg.closest('figure').dataset.chart);
  const x = chart.x[0] + share * (chart.x[1] - chart.x[0]);
  let nearest = null;
  const rows = chart.lines.map(line => {
    let low = 0, high = line.at.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (line.at[middle][0] < x) low = middle + 1; else high = middle;
    }
    if (low > 0 && x - line.at[low - 1][0] < line.at[low][0] - x) low -= 1;
    const point = line.at[low];
    if (nearest === null || Math.abs(point[0] - x) < Math.abs(nearest - x)) nearest = point[0];
    return [line.label, point];
  });
  const near = rows.filter(row => Math.abs(row[1][0] - nearest) <= (chart.x[1] - chart.x[0]) / 50);
  const values = near.map(([label, point]) => (label ? label + ': ' : '') + point[1]);
  tip.textContent = [chart.unit + ' ' + nearest, ...values].join('\\n');
  tip.style.display = rule.style.display = 'block';
  const at = box.left + (nearest - chart.x[0]) / (chart.x[1] - chart.x[0]) * box.width;
  Object.assign(rule.style, {left: at + 'px', top: box.top + 'px', height: box.height + 'px'});
  const right = at + tip.offsetWidth + 24 > window.innerWidth;
  Object.assign(tip.style, {left: (right ? at - tip.offsetWidth - 12 : at + 12) + 'px', top: box.top + 8 + 'px'});
});
"""
