"""Line charts as HTML: a stretched SVG for the lines and HTML for the text, so that both stay sharp at every width.

`SCRIPT` shows the values under the pointer, for charts inside of `element` (js_on_load of a gr.HTML, or a loop around
it). It reads the numbers from the chart itself, so that a redrawn chart needs no new script.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    lines = [_keep_drawable(line, log) for line in lines]
    lines = [line for line in lines if line.points]
    head = f"<figcaption><b>{escape(title)}</b>"
    if not lines:
        return f'<figure class="chart">{head}</figcaption><p class="empty">{escape(empty)}</p></figure>'
    axes = Axes.around(lines, log)
    head += "".join(_render_key(line) for line in lines if line.label)
    svg = ""
    if mark is not None and axes.x_low <= mark.x <= axes.x_high:
        head += f'<span class="key mark"><i></i>{escape(mark.label)}</span>'
        svg += f'<path class="mark" d="M{WIDTH * axes.scale_x(mark.x):.1f} 0V{HEIGHT}"/>'
    svg += "".join(f'<path class="grid" d="M0 {HEIGHT * axes.scale_y(value):.1f}H{WIDTH}"/>' for value in axes.y_ticks)
    svg += "".join(_render_line(line, axes) for line in lines)
    y_labels = "".join(
        f'<span style="top:{100 * axes.scale_y(value):.2f}%">{format_number(value)}</span>' for value in axes.y_ticks
    )
    x_labels = "".join(
        f'<span style="left:{100 * axes.scale_x(value):.2f}%">{format_number(value)}</span>'
        for value in _choose_ticks(axes.x_low, axes.x_high, 5)
        if value == round(value)
    )
    x_title = f'<div class="of">{escape(x_label)}</div>' if x_label else ""
    data = escape(json.dumps(_list_values(lines, axes, x_label), separators=(",", ":")))
    return (
        f'<figure class="chart" data-chart="{data}">{head}</figcaption>'
        f'<div class="area"><div class="y">{y_labels}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{svg}</svg></div>'
        f'<div class="x">{x_labels}</div>{x_title}</figure>'
    )


@dataclass(frozen=True)
class Axes:
    """The ranges of both axes, and where a value lies on them.

    Attributes:
        y_low, y_high: ends of the y axis, as logarithms if `log`.
        y_ticks: values with a label.
    """

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    y_ticks: Sequence[float]
    log: bool

    @classmethod
    def around(cls, lines: Sequence[Line], log: bool) -> "Axes":
        """Return axes on which all points and dots of the lines have room."""
        dots = [line.dot[1] for line in lines if line.dot]
        x_low, x_high = _find_range([x for line in lines for x, _ in line.points])
        return cls(x_low, x_high, *_choose_axis([*dots, *(y for line in lines for _, y in line.points)], log), log)

    def scale_x(self, x: float) -> float:
        """Return the distance of x from the left end, as a fraction of the width."""
        return (x - self.x_low) / (self.x_high - self.x_low)

    def scale_y(self, y: float) -> float:
        """Return the distance of y from the top, as a fraction of the height."""
        height = math.log10(y) if self.log else y
        return 1 - (height - self.y_low) / (self.y_high - self.y_low)


def _keep_drawable(line: Line, log: bool) -> Line:
    """Return the line without what has no place on a logarithmic axis."""
    if not log:
        return line
    dot = line.dot if line.dot and line.dot[1] > 0 else None
    return replace(line, points=[point for point in line.points if point[1] > 0], dot=dot)


def _render_key(line: Line) -> str:
    """Render a line's entry in the legend."""
    faint = " faint" if line.faint else ""
    return f'<span class="key c{line.colour % 8}{faint}"><i></i>{escape(line.label)}</span>'


def _render_line(line: Line, axes: Axes) -> str:
    """Render a line and its dot as SVG paths."""
    places = [(WIDTH * axes.scale_x(x), HEIGHT * axes.scale_y(y)) for x, y in line.points]
    places *= 2 if len(places) == 1 else 1  # a line to itself has round ends: a dot
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    svg = f'<path class="line c{line.colour % 8}{" faint" if line.faint else ""}" d="{path}"/>'
    if line.dot and axes.x_low <= line.dot[0] <= axes.x_high:
        x, y = WIDTH * axes.scale_x(line.dot[0]), HEIGHT * axes.scale_y(line.dot[1])
        svg += f'<path class="line dot c{line.colour % 8}" d="M{x:.1f} {y:.1f}L{x:.1f} {y:.1f}"/>'
    return svg


def _list_values(lines: Sequence[Line], axes: Axes, unit: str) -> dict[str, Any]:
    """Return the numbers that `SCRIPT` shows under the pointer."""
    return {
        "x": [axes.x_low, axes.x_high],
        "lines": [
            {
                "label": strip_unseen(line.label),
                "colour": line.colour % 8,
                "at": [[x, float(f"{y:.4g}")] for x, y in line.points],
            }
            for line in lines
        ],
        "unit": unit,
    }


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
