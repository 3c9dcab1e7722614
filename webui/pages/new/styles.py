"""Styles of the page, and those that follow the draft: unused settings hide, and problems show under their settings."""

from collections.abc import Iterable
from typing import Any

from lora_fp8.errors import UserError

from ... import form, sanitize, translations
from ...context import Ui
from ...draft import Draft
from .questions import CLIPS, SIMPLE, make_id

STYLE = """
<style>
#new-views .form {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(260px, 100%), 1fr));
  background: var(--block-background-fill);
}
.setting code { font-size: 11px; color: var(--body-text-color) !important; }
.setting:last-child:has(textarea[rows="3"]) { grid-column: 1 / -1; }
.setting:has(> .table-container) { container-type: inline-size; }
.setting :is(.header-table, .virtual-body) { table-layout: fixed !important; width: 100% !important; }
.setting .header-cell { font-size: 12px; text-align: left !important; }
.setting .header-cell * { word-break: keep-all !important; overflow-wrap: normal !important; }
/* Sorts and filters, of no use; and what selects a row or column, which a second click on a cell would hit. */
.setting :is(.header-cell .cell-menu-button, .toolbar, .selection-button) { display: none !important; }
[role="menuitem"][aria-label$=" column"], [role="menuitem"][aria-label*=" column to the "] { display: none !important; }
.setting .select-all-checkbox { display: none; }
.setting :is(.header-cell, .body-cell) {
  width: var(--share) !important; min-width: 0 !important; max-width: none !important;
  flex: 0 0 var(--share) !important; font-family: var(--font) !important;
}
.setting [data-editable]:empty::before { color: var(--body-text-color-subdued); }
.setting > .container { height: auto !important; }
.setting::after {
  display: block; white-space: pre-wrap; font-size: 13px; padding-top: 4px; color: var(--body-text-color-subdued);
}
/* A problem is red only where somebody has been, or after Start: head.js names those fields. */
:is(.setting.been, body.tried-to-start .setting)::after { color: #b91c1c; }
.dark :is(.setting.been, .tried-to-start .setting)::after { color: #f87171; }
.setting-group { margin-bottom: 18px; }
.style-only { display: none !important; }
#new-side {
  align-self: flex-start; padding: 14px; border-radius: 12px; gap: 12px;
  background: var(--block-background-fill); border: 1px solid var(--border-color-primary);
}
#new-views { counter-reset: step; }
.step {
  counter-increment: step; padding: 16px 18px 18px; gap: 14px; border-radius: 12px;
  background: var(--block-background-fill); border: 1px solid var(--border-color-primary);
}
.step .prose h2 { display: flex; align-items: center; gap: 10px; margin: 0; font-size: 18px; }
.step .prose h2::before {
  content: counter(step); display: inline-flex; align-items: center; justify-content: center; width: 24px; height: 24px;
  flex: none; border-radius: 50%; font-size: 13px; background: var(--primary-600); color: #fff;
}
.step .prose h3 { margin: 4px 0 0; font-size: 15px; }
#new-side > * { flex-shrink: 0; }
#new-state .html-container, #new-summary .html-container { padding: 0; }
#new-start-box { gap: 10px; background: var(--block-background-fill); z-index: 60; }
#new-state .state { margin: 0; padding: 8px 12px; border-radius: 8px; font-weight: 600; overflow-wrap: anywhere; }
#new-state .ready { background: #dcfce7; color: #166534; }
#new-state .open { background: var(--background-fill-secondary); color: var(--body-text-color); font-weight: 500; }
.dark #new-state .ready { background: #14532d; color: #bbf7d0; }
#new-summary summary { cursor: pointer; padding: 6px 0; color: var(--body-text-color-subdued); font-size: 13px; }
#new-summary details p { font-size: 13px; color: var(--body-text-color-subdued); }
table.estimate td { text-align: right !important; font-weight: 600; }
table.estimate th { width: auto !important; }
@media (min-width: 900px) {
  /* The list below the button says it in full. */
  #new-state:has(.open) { display: none; }
  #new-side { position: sticky; top: 12px; max-height: calc(100vh - 84px); overflow-y: auto; flex-wrap: nowrap; }
  #new-start-box {
    position: sticky; top: -14px; width: calc(100% + 28px); margin: -14px -14px 0; padding: 14px 14px 8px;
  }
}
@media (max-width: 899px) {
  #new-start-box {
    position: fixed; left: 0; right: 0; bottom: 0; padding: 8px 12px calc(8px + env(safe-area-inset-bottom));
    border-top: 1px solid var(--border-color-primary); box-shadow: 0 -4px 16px rgb(0 0 0 / .12);
  }
  /* A border in place of the padding, in which a part of the third line would be visible. */
  #new-state .state {
    display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 2; overflow: hidden; padding-block: 0;
    border-block: 8px solid transparent;
  }
  body:has(#new-start-box) .gradio-container > .main { padding-bottom: 150px !important; }
  body:has(#new-start-box) :is(#problem, .toast-wrap) { bottom: 136px !important; }
}
#new-summary ul { margin: 4px 0 10px; padding-left: 18px; }
#new-summary li { margin: 3px 0; overflow-wrap: anywhere; }
#new-summary p { margin: 6px 0; }
#new-side table.facts code { font-size: 11px; }
#new-side table.facts.wide :is(th, td) { overflow-wrap: break-word; padding-right: 8px !important; }
#new-side table.facts.wide td:nth-child(3) { overflow-wrap: anywhere; }
#new-foreign table.facts td:first-child { width: 42%; }
#new-sections { display: flex; flex-wrap: wrap; gap: 6px; padding: 4px 0; }
#new-sections button {
  margin: 0; padding: 3px 10px; border-radius: 999px; font-size: 13px; cursor: pointer; color: var(--body-text-color);
  background: var(--block-background-fill); border: 1px solid var(--border-color-primary);
}
#new-sections button:hover { border-color: var(--primary-600); }
.setting-group { scroll-margin-top: 12px; }
#new-side button[data-do="default"] {
  padding: 0; border: 0; background: none; font: inherit; font-size: 12px; text-decoration: underline; cursor: pointer;
  color: var(--link-text-color);
}
#new-toml .cm-editor { font-family: var(--font-mono); font-size: 13px; }
</style>
"""
WIDE = {"path": 4, "repeats": 1.3, "trigger": 2, "regularization": 2.1, "resolution": 1.6, "weight": 1.1}
PATH = 3
WIDE |= {"control": PATH, "mask": PATH, "prefix": 2, "suffix": 2}
"""Columns of the table of folders that need more room than the others."""
UNIT = 62
"""Width in pixels of a normal column, enough for the longest word of its title."""
STACKED = """@container (max-width: {width}px) {{
  {table} .virtual-table-viewport {{ max-height: none !important; }}
  {table} .header-table {{ position: absolute; visibility: hidden; }}
  {table} .virtual-row {{ flex-wrap: wrap; border-bottom: 1px solid var(--border-color-primary); }}
  {table} .body-cell {{ display: block; width: auto !important; flex: 1 1 88px !important; border: 0 !important; }}
  {table} .body-cell::before {{
    display: block; padding: 6px 8px 0; font-size: 12px; color: var(--body-text-color-subdued);
  }}
  {table} .cell-wrap {{ height: auto !important; min-height: 30px !important; padding: 0 8px 4px; }}
  {table} .virtual-row:has([aria-colindex="1"] [data-editable]:empty) [aria-colindex]:not([aria-colindex="1"]) {{
    display: none;
  }}
  {cells}
}}"""
"""Style for a narrow table of folders: each folder becomes a block, with each value below its title."""


class Styles:
    """Styles that depend on the draft."""

    def __init__(self, ui: Ui, draft: Draft):
        self.ui, self.draft = ui, draft

    def style_settings(self, text: str, findings: list[tuple[str, str]], everything: bool) -> str:
        """Return a style that hides settings without effect and shows each problem under its setting."""
        rules: list[str] = []
        try:
            values = form.read_values(text, self.draft.home)
            set_here = form.find_origins(text, self.draft.home)
        except UserError:
            return ""
        wrong: dict[str, list[str]] = {}
        for key, line in findings:
            wrong.setdefault(key, []).append(line)
        for view in ("new", "set"):
            rules += self._style_table(_compute_column_shares(values, everything, view), view)
        if not everything:
            hidden = [
                key
                for key in form.find_unused(values)
                # A setting with a value stays visible: training will warn that it has no effect.
                if key not in wrong
                and set_here.get(key) != ""
                and form.is_same_value(values[key], form.collect_settings()[key].default)
            ]
            if hidden:
                rules.append(f"{_make_selector('set', hidden)} {{ display: none; }}")
        if unasked := [key for key in form.find_unused(values) if key in SIMPLE and key not in wrong]:
            row = ", #new-clips" if set(CLIPS) <= set(unasked) else ""  # hides its frame too
            rules.append(f"{_make_selector('new', unasked)}{row} {{ display: none; }}")
        changed = [
            key
            for key, setting in form.collect_settings().items()
            if key in set_here and not form.is_same_value(values[key], setting.default)
        ]
        if changed:
            rules.append(f"{_make_selector('set', changed)} {{ box-shadow: inset 3px 0 var(--primary-600); }}")
        for key, lines in wrong.items():
            if key:
                ids = f"#{make_id('set', key)}::after, #{make_id('new', key)}::after"
                ids += ", #new-images::after" if key == "dataset.folders" else ""  # their table may be closed
                rules.append(f"{ids} {{ content: {_quote_css(chr(10).join(lines))}; }}")
        return f"<style>{' '.join(rules)}</style>" if rules else ""

    def _style_table(self, shares: dict[str, float], view: str) -> Iterable[str]:
        """Yield style rules for the table of folders in a view: its columns, or blocks if it is too narrow."""
        yield from _style_columns(shares, view)
        table, cells = f"#{make_id(view, 'dataset.folders')}", []
        for number, column in enumerate(form.collect_settings()["dataset.folders"].columns, 1):
            cell = f'{table} .body-cell[aria-colindex="{number}"]'
            cells.append(
                f"{cell}::before {{ content: {_quote_css(translations.get_label(self.ui.language, column.key))}; }}"
            )
            if WIDE.get(column.name, 1) >= PATH:
                cells.append(f"{cell} {{ flex-basis: 100% !important; }}")
        empty = f'{table} .body-cell[aria-colindex="1"] [data-editable]:empty::before'
        yield f"{empty} {{ content: {_quote_css(self.ui.say('new.pictures.row'))}; }}"
        yield f"{table} .label p {{ padding-left: 8px; }}"  # the mark of a change would cover a letter
        width = round(UNIT * sum(shares.values())) - 1
        yield STACKED.format(table=table, width=width, cells=" ".join(cells))


def _make_selector(prefix: str, keys: Iterable[str]) -> str:
    """Return a CSS selector of the fields of these settings."""
    return ", ".join(f"#{make_id(prefix, key)}" for key in sorted(keys))


def _compute_column_shares(values: dict[str, Any], everything: bool, view: str) -> dict[str, float]:
    """Return the relative width of each visible column of the table of folders.

    A column is visible if a row sets it. Control images are also visible where the model is shown them. Prefix,
    suffix, regularization, weight, resolution and mask are always visible in the view of all settings ("set"), not in
    the simple one ("new").
    """
    rows = values["dataset.folders"] if isinstance(values["dataset.folders"], list) else []
    wanted = dict.fromkeys(("prefix", "suffix", "regularization", "weight", "resolution", "mask"), view == "set")
    wanted |= {"control": "dataset.control_resolution" not in form.find_unused(values)}
    return {
        column.name: WIDE.get(column.name, 1)
        for column in form.collect_settings()["dataset.folders"].columns
        if everything
        or wanted.get(column.name, True)
        or any(isinstance(row, dict) and row.get(column.name, column.default) != column.default for row in rows)
    }


def _style_columns(shares: dict[str, float], view: str) -> Iterable[str]:
    """Yield a style rule for each column of the table of folders in a view."""
    for number, column in enumerate(form.collect_settings()["dataset.folders"].columns, 1):
        share = f"--share: {100 * shares.get(column.name, 0) / sum(shares.values()):.1f}%"
        style = share if column.name in shares else "display: none !important"
        yield f'#{make_id(view, "dataset.folders")} [aria-colindex="{number}"] {{ {style}; }}'


def _quote_css(text: str) -> str:
    """Quote text as a CSS string inside HTML. Nothing in it ends the string or the style sheet."""
    return (
        '"'
        + "".join(c if c.isalnum() or c in " .,:;-_=()" else f"\\{ord(c):x} " for c in sanitize.strip_unseen(text))
        + '"'
    )
