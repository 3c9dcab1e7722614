// Runs before Gradio's own scripts: app.py puts it at the beginning of the page, behind ask.js, with LANGUAGE and GRADIO.
// Gradio asks the browser for its language ("Drop file here"); here the address decides.
for (const [name, value] of [["language", LANGUAGE], ["languages", [LANGUAGE]]])
  Object.defineProperty(navigator, name, { get: () => value });
document.documentElement.lang = LANGUAGE;

// Light, dark, or as the system has it. Gradio asks the system; it gets our answer where somebody chose.
const themes = ["system", "light", "dark"];
const theme = () => {
  const kept = localStorage.getItem("lora_fp8_theme");
  return themes.includes(kept) ? kept : "system";
};
const askSystem = window.matchMedia.bind(window);
window.matchMedia = (query) => {
  const answer = askSystem(query);
  if (!/prefers-color-scheme:\s*dark/.test(query) || theme() === "system") return answer;
  return new Proxy(answer, {
    get: (target, key) => {
      if (key === "matches") return theme() === "dark";
      const value = target[key];
      return typeof value === "function" ? value.bind(target) : value;
    },
  });
};
const paint = () => {
  const chosen = theme();
  const dark = chosen === "dark" || (chosen === "system" && askSystem("(prefers-color-scheme: dark)").matches);
  document.documentElement.style.colorScheme = dark ? "dark" : "light";
  document.body?.classList.toggle("dark", dark);
  mark();
};
const mark = () => {
  for (const button of document.querySelectorAll("#site-header [data-theme]"))
    button.setAttribute("aria-pressed", String(button.dataset.theme === theme()));
};
// Some of Gradio's words have one language, and its check boxes in tables have no name at all.
const NAMES = ["aria-label", "title", "placeholder"];
const TEXTS = ".meta-text, .toast-title";
const CELLS = "[role=gridcell] input[type=checkbox]:not([aria-label])";
const translate = (one) => {
  for (const name of NAMES) {
    const ours = GRADIO[one.getAttribute(name)];
    if (ours && !one.closest(".html-container")) one.setAttribute(name, ours);  // what is in there is our own
  }
};
const mend = (node) => {
  if (node.nodeType === Node.TEXT_NODE) {
    const [, front, theirs, behind] = node.data.match(/^(\s*)(.*?)((?: \|)?\s*)$/s);
    if (GRADIO[theirs] && node.parentElement?.closest(TEXTS)) node.data = front + GRADIO[theirs] + behind;
  }
  if (node.nodeType !== Node.ELEMENT_NODE) return;
  translate(node);
  for (const one of node.querySelectorAll(NAMES.map((name) => `[${name}]`).join())) translate(one);
  for (const one of node.querySelectorAll(TEXTS)) one.childNodes.forEach(mend);
  for (const box of node.querySelectorAll(CELLS)) {
    const column = box.closest("[role=gridcell]").getAttribute("aria-colindex");
    box.setAttribute("aria-label", box.closest("[role=grid]").querySelector(`th[aria-colindex="${column}"]`).title);
    box.closest("[role=button]")?.setAttribute("role", "none");  // the box is the button
  }
};
const mended = (records) => {
  for (const { type, target, addedNodes } of records) {
    if (type === "attributes") translate(target);
    else addedNodes.forEach(mend);
  }
};
const start = () => {
  paint();
  mend(document.body);
  new MutationObserver(mended).observe(
    document.body, { childList: true, subtree: true, attributes: true, attributeFilter: NAMES });
  // Gradio draws the header when it is ready, and again later.
  new MutationObserver(mark).observe(document.body, { childList: true, subtree: true });
};
if (document.body) start();
else document.addEventListener("DOMContentLoaded", start);
askSystem("(prefers-color-scheme: dark)").addEventListener("change", () => setTimeout(paint));

document.addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-theme]");
  if (button) {
    localStorage.setItem("lora_fp8_theme", button.dataset.theme);
    paint();
  }
  const language = event.target.closest?.("a[data-language]");
  if (language) {
    // The same page with the same question (?run=...), in the other language; the next visit begins there.
    document.cookie = `lora_fp8_language=${language.dataset.language}; path=/; max-age=31536000; samesite=strict`;
    language.search = location.search;
  }
});

// Gradio 6.31 tells of what is typed at keypress only: not of what is pasted, deleted or written with an input method.
const told = (event) => {
  if (event.isComposing || !event.target.matches?.("input[data-testid=textbox], textarea[data-testid=textbox]")) return;
  event.target.dispatchEvent(new KeyboardEvent("keypress"));
};
document.addEventListener("input", told);
document.addEventListener("compositionend", told);

// Who clicks twice means it once: the second click would queue a second job, or take the first one back.
const ONCE = "[data-do=rerun], [data-do=resume], #new-start, #new-back, #auto-begin, #tools-later, #kit";
document.addEventListener("click", (event) => {
  if (event.detail > 1 && event.target.closest?.(ONCE)) event.stopImmediatePropagation();
}, true);

// The open list of a menu scrolls, and Tab would stop at it; it closes then, and the focus is nowhere.
document.addEventListener("keydown", (event) => {
  if (event.key === "Tab") for (const list of document.querySelectorAll("[role=listbox]")) list.tabIndex = -1;
}, true);

// Settings that were changed since the view was opened, and when. Start takes their values along, and so does the way
// to another view: what is typed right before the click may not have reached the server by itself. Another view takes
// only what was changed just now, as another window may have set it since.
const touched = new Map();
for (const kind of ["input", "change", "click"])
  document.addEventListener(kind, (event) => {
    const one = event.target.closest?.(".setting, #new-toml");
    if (one) touched.set(one.id, Date.now());
  });
window.touchedSettings = () => [...touched.keys()];
window.leftSettings = () => {
  const late = [...touched].filter(([, at]) => Date.now() - at < SLOWEST).map(([id]) => id);
  touched.clear();
  window.opening();
  return late;
};

// While a view, or the editor of a caption, waits for what it shall hold, nothing can be typed into it: the answer would
// take its place. The tabs themselves stay, with the focus on them. Several answers can be on their way: the page's, and
// that of the tab which Gradio selects while it draws; the last one unlocks.
const LOCKED = "#new-views [role=tabpanel], #dataset-caption";
let waiting = 0;
let openedAt;
let left;  // what had the focus when its panel was locked, which takes the focus away
const lock = (on) => {
  const now = document.activeElement;
  if (on && now?.closest(LOCKED)) left = now;
  for (const panel of document.querySelectorAll(LOCKED)) panel.inert = on;
  if (on) return;
  if (document.activeElement === document.body) left?.focus();
  left = undefined;
};
const unlock = () => {
  clearTimeout(openedAt);
  waiting = 0;
  lock(false);
};
window.opening = () => {
  waiting += 1;
  typed.clear();
  lock(true);
  clearTimeout(openedAt);
  openedAt = setTimeout(unlock, SLOWEST);
};
window.opened = () => {
  waiting -= 1;
  if (waiting <= 0) unlock();
};
// Gradio tells of another view a moment after the click; what is typed in that moment would be gone, too.
document.addEventListener("click", (event) => {
  const tab = event.target.closest?.("#new-views button[role=tab]");
  if (!tab || tab.ariaSelected === "true") return;
  lock(true);
  clearTimeout(openedAt);
  openedAt = setTimeout(unlock, SLOWEST);
}, true);
// What a choice changes beside itself (a preset's steps) is painted when its answer is there. What was typed into those
// fields in the meantime is the newer: it is put there again, and told to the server.
const typed = new Map();
let choosing = 0;
let chosenAt;
const forget = () => {
  choosing = 0;
  typed.clear();
};
document.addEventListener("input", ({ target }) => {
  if (choosing > 0 && target.matches?.(".setting :is(input, textarea)[data-testid=textbox]")) typed.set(target, target.value);
});
window.choosing = () => {
  choosing += 1;
  clearTimeout(chosenAt);
  chosenAt = setTimeout(forget, SLOWEST);
};
window.chosen = () => {
  choosing -= 1;
  setTimeout(() => {
    for (const [field, text] of typed) {
      if (!field.isConnected || field.value === text) continue;
      field.value = text;
      field.dispatchEvent(new Event("input", { bubbles: true }));
    }
    if (choosing <= 0) forget();
  });
};
