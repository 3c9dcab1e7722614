"""HTML that is kept up to date by ticks, with buttons that call Python.

A page of this kind is a few gr.HTML and one function that paints them. Gradio patches what has changed into what is on
the screen, so that a tick disturbs neither the pointer nor the scroll position.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context

from .chart import SCRIPT as CHARTS

STYLE = (Path(__file__).parent / "runs.css").read_text(encoding="utf-8")
CLICKS = """
element.addEventListener('click', event => {
  const button = event.target.closest('[data-do]');
  if (!button || button.disabled) return;
  const data = {...button.dataset}, what = JSON.stringify(data);
  window.pressed = (window.pressed || []).filter(one => Date.now() - one.at < 15000);  // an answer may never come
  if (window.pressed.some(one => one.what === what)) return;
  window.pressed.push({what, at: Date.now()});
  trigger('click', data);
});
// Gradio patches by place: the button that has the focus may become another's, or go. The focus stays with what it was
// on; where that has gone, it goes to the next button of the same job, or to the first of the panel, or to the panel.
const told = one => one && {do: one.dataset.do, id: one.dataset.id, name: one.dataset.name, text: one.innerText};
let held = null;
element.addEventListener('focusin', event => { held = told(event.target.closest('[data-do]')); });
element.addEventListener('focusout', event => setTimeout(() => {
  const now = document.activeElement;
  if (now === document.body ? event.target.isConnected : !element.contains(now)) held = null;
}));
new MutationObserver(() => {
  const now = document.activeElement;
  const same = (one, names) => names.every(name => told(one)[name] === held[name]);
  if (!held || (now !== document.body && (!element.contains(now) || same(now, ['do', 'id', 'name', 'text'])))) return;
  const all = [...element.querySelectorAll('[data-do]')].filter(one => !one.disabled);
  const next = all.find(one => same(one, ['do', 'id', 'name', 'text']))
    || all.find(one => same(one, ['do', 'id', 'name'])) || (held.id && all.find(one => same(one, ['id'])));
  const goal = next || element.querySelector('a[href], [data-do]') || element;
  held = told(goal.closest('[data-do]'));  // a window in the background tells of no focus: this would go on for ever
  if (goal === element) element.tabIndex = -1;
  goal.focus();
}).observe(element, {subtree: true, childList: true, attributes: true, characterData: true});
// What became of a button may name a page to go to.
const go = () => {
  const told = element.querySelector('[data-go]');
  if (!told) return;
  const address = told.dataset.go;
  delete told.dataset.go;  // who comes back stays
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
    const question = [...document.querySelectorAll('.ask')].find(one => one.checkVisibility());
    if (question) {
      window.asking = {...from.dataset};
      return question.querySelector('input, textarea, button').focus();
    }
    await new Promise(done => setTimeout(done, 25));
    if (document.activeElement !== from && document.activeElement !== document.body) return;
  }
}"""
"""Goes to the question that a button has opened, for who has no pointer."""
ANSWERED = """async () => {
  const {do: what, id} = window.asking || {};
  const open = () => [...document.querySelectorAll('.ask')].some(one => one.checkVisibility());
  for (let turn = 0; turn < 200 && open(); turn++) await new Promise(done => setTimeout(done, 25));
  if (!what || open() || document.activeElement !== document.body) return;
  const all = [...document.querySelectorAll('[data-do]')].filter(one => one.dataset.id === id);
  const next = all.find(one => one.dataset.do === what) || all[0] || document.querySelector('.card a[href], [data-do]');
  next?.focus();
  window.asking = null;
}"""
"""And back to that button when it was answered; the focus would be nowhere."""
SECONDS = 1.5
"""From one tick to the next."""


def panel(**given: Any) -> gr.HTML:
    """An empty piece of page. What has data-do="..." in it is a button (see `clicked`), charts tell their values."""
    return gr.HTML("", css_template=STYLE, js_on_load=CLICKS + CHARTS + SLIDER, apply_default_css=False, **given)


def clicked(event: gr.EventData) -> dict[str, str]:
    """The data-* attributes of the button that was pressed: {"do": "stop", "id": "12"}. They come from the browser."""
    return {str(key): str(value) for key, value in dict(event._data or {}).items()}


def on_press(panel: gr.HTML, do: Callable[..., Any], then: str = "", **given: Any) -> None:
    """Bind what the buttons in a panel do. Each press counts and comes in its turn (static/ask.js), but for another one
    of the same button while its answer is on the way. `then`: JavaScript, a function, for when the answer is there."""
    pressed = panel.click(do, trigger_mode="multiple", **quiet(queue=False), **given)
    pressed.then(None, js=f"async () => {{ window.pressed.shift(); {then and f'await ({then})();'} }}")


def quiet(**given: Any) -> dict[str, Any]:
    """How events that are no public endpoint are bound."""
    return {"show_progress": "hidden", "concurrency_limit": None, "api_visibility": "private", **given}


def keep_painted(
    paint: Callable[..., Any], inputs: dict[str, Any], outputs: Sequence[Any], seconds: float = SECONDS
) -> None:
    """Call `paint` when the page is opened and at every tick."""
    timer = gr.Timer(seconds)
    gr.on(
        [opened(), timer.tick],
        paint,
        inputs_kwargs=inputs,
        outputs=list(outputs),
        queue=False,
        trigger_mode="always_last",
        **quiet(),
    )


def opened() -> Any:
    """The event of the page being opened."""
    return Context.root_block.load


def changed(values: Sequence[Any], seen: dict[str, int]) -> tuple[list[Any], dict[str, int]]:
    """What to send of these values to who has `seen` the last ones; gr.skip() in place of what has not changed."""
    now = {str(number): hash(value) for number, value in enumerate(values)}
    sent = [gr.skip() if seen.get(str(i)) == now[str(i)] else value for i, value in enumerate(values)]
    return sent, now
