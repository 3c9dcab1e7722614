"""HTML panels that ticks keep up to date, with buttons that call Python.

A page of this kind has a few gr.HTML and one function that paints them. Gradio patches only what has changed, so that a
tick moves neither the pointer nor the scroll position.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context

from lora_fp8.common.chart import SCRIPT as CHARTS

STYLE = (Path(__file__).parent / "runs.css").read_text(encoding="utf-8")
CLICKS = """
element.addEventListener('click', event => {
  const button = event.target.closest('[data-do]');
  if (!button || button.disabled) return;
  const data = {...button.dataset}, what = JSON.stringify(data);
  window.pressed = (window.pressed || []).filter(press => Date.now() - press.at < 15000);  // an answer may never come
  if (window.pressed.some(press => press.what === what)) return;
  window.pressed.push({what, at: Date.now()});
  trigger('click', data);
});
// Gradio patches by place: the button that has the focus may become another's, or go. The focus stays with what it was
// on; where that has gone, it goes to the next button of the same job, or to the first of the panel, or to the panel.
const describe = button =>
  button && {do: button.dataset.do, id: button.dataset.id, name: button.dataset.name, text: button.innerText};
let held = null;
element.addEventListener('focusin', event => { held = describe(event.target.closest('[data-do]')); });
element.addEventListener('focusout', event => setTimeout(() => {
  const now = document.activeElement;
  if (now === document.body ? event.target.isConnected : !element.contains(now)) held = null;
}));
new MutationObserver(() => {
  const now = document.activeElement;
  const same = (button, names) => names.every(name => describe(button)[name] === held[name]);
  if (!held || (now !== document.body && (!element.contains(now) || same(now, ['do', 'id', 'name', 'text'])))) return;
  const all = [...element.querySelectorAll('[data-do]')].filter(button => !button.disabled);
  const next = all.find(button => same(button, ['do', 'id', 'name', 'text']))
    || all.find(button => same(button, ['do', 'id', 'name'])) || (held.id && all.find(button => same(button, ['id'])));
  const goal = next || element.querySelector('a[href], [data-do]') || element;
  held = describe(goal.closest('[data-do]'));  // without focus events, as in the background, this would go on for ever
  if (goal === element) element.tabIndex = -1;
  goal.focus();
}).observe(element, {subtree: true, childList: true, attributes: true, characterData: true});
// What became of a button may name a page to go to.
const go = () => {
  const link = element.querySelector('[data-go]');
  if (!link) return;
  const address = link.dataset.go;
  delete link.dataset.go;  // who comes back stays
  location.assign(address);
};
new MutationObserver(go).observe(element, {subtree: true, childList: true, attributes: true});
go();
"""
SLIDER = """
element.addEventListener('input', event => {
  const pair = event.target.closest('.ab');
  if (pair) pair.style.setProperty('--cut', event.target.value + '%');
});
element.addEventListener('load', event => {  // two clips that move begin together when both are there
  const pair = event.target.closest('.ab');
  const images = pair ? [...pair.querySelectorAll('img[src*="moving="]')] : [];
  const both = images.map(image => image.src).join(' ');
  if (images.length < 2 || pair.dataset.begun === both || !images.every(image => image.complete)) return;
  pair.dataset.begun = both;
  for (const image of images) image.src = image.src;
}, true);
"""
ASKED = """async () => {
  const from = document.activeElement;
  if (!['force', 'kill', 'delete'].includes(from?.dataset.do)) return;
  for (let turn = 0; turn < 200; turn++) {  // it is drawn a moment after the answer
    const question = [...document.querySelectorAll('.ask')].find(panel => panel.checkVisibility());
    if (question) {
      window.asking = {...from.dataset};
      return question.querySelector('input, textarea, button').focus();
    }
    await new Promise(done => setTimeout(done, 25));
    if (document.activeElement !== from && document.activeElement !== document.body) return;
  }
}"""
"""Moves the focus to the question that a button opened, for people without a pointer."""
ANSWERED = """async () => {
  const {do: what, id} = window.asking || {};
  const open = () => [...document.querySelectorAll('.ask')].some(panel => panel.checkVisibility());
  for (let turn = 0; turn < 200 && open(); turn++) await new Promise(done => setTimeout(done, 25));
  if (!what || open() || document.activeElement !== document.body) return;
  const all = [...document.querySelectorAll('[data-do]')].filter(button => button.dataset.id === id);
  const next = all.find(button => button.dataset.do === what) || all[0]
    || document.querySelector('.card a[href], [data-do]');
  next?.focus();
  window.asking = null;
}"""
"""Moves the focus back to that button after the answer; otherwise it would be lost."""
_numbers = itertools.count(time.time_ns())
SECONDS = 1.5
"""From one tick to the next."""


def make_panel(**given: Any) -> gr.HTML:
    """Make an empty panel. Elements with data-do="..." are buttons (see `read_click`); charts show their values."""
    return gr.HTML("", css_template=STYLE, js_on_load=CLICKS + CHARTS + SLIDER, apply_default_css=False, **given)


def render_toast(text: str, kind: str = "", more: str = "") -> str:
    """Render a message that disappears after it was read (static/head.js). The arguments are HTML already."""
    return f'<p class="toast{kind}" role="status" data-number="{next(_numbers)}"{more}>{text}</p>'


def read_click(event: gr.EventData) -> dict[str, str]:
    """Return the data-* attributes of a pressed button: {"do": "stop", "id": "12"}. They come from the browser."""
    return {str(key): str(value) for key, value in dict(event._data or {}).items()}


def on_press(panel: gr.HTML, do: Callable[..., Any], then: str = "", **given: Any) -> None:
    """Bind what the buttons of a panel do. Presses are handled in order (static/ask.js).

    A second press of the same button is dropped while the first has no answer.

    Args:
        then: a JavaScript function that is called after the answer.
    """
    pressed = panel.click(do, trigger_mode="multiple", **make_private_event(queue=False), **given)
    pressed.then(None, js=f"async () => {{ window.pressed.shift(); {then and f'await ({then})();'} }}")


def make_private_event(**given: Any) -> dict[str, Any]:
    """Return the arguments of an event that is no public endpoint and shows no progress, unless `given` says otherwise.

    Gradio keeps the progress of every component that an event ever showed it on, hidden or not, and at each later event
    looks each of them up in the whole page: without `show_progress_on`, a tick of a page of 300 components takes 50 ms.
    """
    progress = {} if "show_progress" in given else {"show_progress": "hidden", "show_progress_on": ()}
    return {**progress, "concurrency_limit": None, "api_visibility": "private", **given}


def refresh_on_ticks(
    paint: Callable[..., Any], inputs: dict[str, Any], outputs: Sequence[Any], seconds: float = SECONDS
) -> None:
    """Call `paint` when the page opens and at every tick."""
    timer = gr.Timer(seconds)
    gr.on(
        [get_load_event(), timer.tick],
        paint,
        inputs_kwargs=inputs,
        outputs=list(outputs),
        queue=False,
        trigger_mode="always_last",
        **make_private_event(),
    )


def get_load_event() -> Any:
    """Return the event of the page being opened."""
    if Context.root_block is None:
        raise RuntimeError("get_load_event: call it while a page is being built")
    return Context.root_block.load


def skip_unchanged(values: Sequence[Any], seen: dict[str, int]) -> tuple[list[Any], dict[str, int]]:
    """Replace values that the window has already (by the hashes in `seen`) with gr.skip(). Also returns the hashes."""
    now = {str(number): hash(value) for number, value in enumerate(values)}
    sent = [gr.skip() if seen.get(str(i)) == now[str(i)] else value for i, value in enumerate(values)]
    return sent, now
