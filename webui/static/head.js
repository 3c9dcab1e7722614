// Runs before Gradio's own scripts: app.py puts it at the beginning of the page, after ask.js, with LANGUAGE and GRADIO.
// Gradio takes the browser's language ("Drop file here"); here the address decides.
for (const [name, value] of [["language", LANGUAGE], ["languages", [LANGUAGE]]])
  Object.defineProperty(navigator, name, { get: () => value });
document.documentElement.lang = LANGUAGE;

// Light, dark, or the system's theme. Gradio asks the system; if the user chose a theme, it gets that.
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
// Some texts of Gradio exist in English only, and its checkboxes in tables have no name.
const NAMES = ["aria-label", "title", "placeholder"];
const TEXTS = ".meta-text, .toast-title";
const CELLS = "[role=gridcell] input[type=checkbox]:not([aria-label])";
const translate = (element) => {
  for (const name of NAMES) {
    const ours = GRADIO[element.getAttribute(name)];
    if (ours && !element.closest(".html-container")) element.setAttribute(name, ours);  // that is our own HTML
  }
};
const mend = (node) => {
  if (node.nodeType === Node.TEXT_NODE) {
    const [, front, theirs, behind] = node.data.match(/^(\s*)(.*?)((?: \|)?\s*)$/s);
    if (GRADIO[theirs] && node.parentElement?.closest(TEXTS)) node.data = front + GRADIO[theirs] + behind;
  }
  if (node.nodeType !== Node.ELEMENT_NODE) return;
  translate(node);
  for (const element of node.querySelectorAll(NAMES.map((name) => `[${name}]`).join())) translate(element);
  for (const element of node.querySelectorAll(TEXTS)) element.childNodes.forEach(mend);
  for (const box of node.querySelectorAll(CELLS)) {
    const column = box.closest("[role=gridcell]").getAttribute("aria-colindex");
    box.setAttribute("aria-label", box.closest("[role=grid]").querySelector(`th[aria-colindex="${column}"]`).title);
    box.closest("[role=button]")?.setAttribute("role", "none");  // the box is the button
  }
};
const mendAdded = (records) => {
  for (const { type, target, addedNodes } of records) {
    if (type === "attributes") translate(target);
    else addedNodes.forEach(mend);
  }
};
const start = () => {
  paint();
  mend(document.body);
  new MutationObserver(mendAdded).observe(
    document.body, { childList: true, subtree: true, attributes: true, attributeFilter: NAMES });
  new MutationObserver(showToasts).observe(
    document.body, { childList: true, subtree: true, attributes: true, attributeFilter: ["data-number"] });
  // Gradio draws the header when it is ready, and again later.
  new MutationObserver(mark).observe(document.body, { childList: true, subtree: true });
};
// A message is shown for as long as it takes to read it, an error twice as long. Its number changes each time, so that the
// same text is shown again.
const READ = { least: 6000, each: 90 };  // ms; each: per character
const leave = (toast) => {
  if (toast.numbered === toast.dataset.number) return;
  const number = toast.dataset.number;
  toast.numbered = number;
  toast.classList.remove("gone");
  const times = toast.classList.contains("wrong") ? 2 : 1;
  const end = () => {
    if (toast.numbered !== number) return;
    if (document.hidden) setTimeout(end, 1000);
    else toast.classList.add("gone");
  };
  setTimeout(end, times * Math.max(READ.least, READ.each * toast.textContent.length));
};
const showToasts = () => {
  for (const toast of document.querySelectorAll(".toast[data-number]")) leave(toast);
};
if (document.body) start();
else document.addEventListener("DOMContentLoaded", start);
askSystem("(prefers-color-scheme: dark)").addEventListener("change", () => setTimeout(paint));

// A file that is dropped beside the field for it would be opened in place of the page.
for (const kind of ["dragover", "drop"])
  document.addEventListener(kind, (event) => {
    if (event.defaultPrevented || !event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    event.dataTransfer.dropEffect = "none";
  });
document.addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-theme]");
  if (button) {
    localStorage.setItem("lora_fp8_theme", button.dataset.theme);
    paint();
  }
  const language = event.target.closest?.("a[data-language]");
  if (language) {
    // The same page with the same query (?run=...) in the other language; the next visit starts in it.
    document.cookie = `lora_fp8_language=${language.dataset.language}; path=/; max-age=31536000; samesite=strict`;
    language.search = location.search;
  }
});

// Gradio 6.31 sends typed text at key presses only, but not text that is pasted, deleted or entered with an input method.
const sendKeypress = (event) => {
  if (event.isComposing || !event.target.matches?.("input[data-testid=textbox], textarea[data-testid=textbox]")) return;
  event.target.dispatchEvent(new KeyboardEvent("keypress"));
};
document.addEventListener("input", sendKeypress);
document.addEventListener("compositionend", sendKeypress);

// A double click counts once: the second click would queue a second job, or undo the first.
const ONCE = "[data-do=rerun], [data-do=resume], #new-start, #new-back, #auto-begin, #tools-later, #kit, #push"
  + ", .preset-panel [data-do]";
document.addEventListener("click", (event) => {
  if (event.detail > 1 && event.target.closest?.(ONCE)) event.stopImmediatePropagation();
}, true);

// The open list of a menu scrolls, so Tab would stop at it; it closes then, and the focus would be lost.
document.addEventListener("keydown", (event) => {
  if (event.key === "Tab") for (const list of document.querySelectorAll("[role=listbox]")) list.tabIndex = -1;
}, true);

// Settings that were changed since the view was opened, and when. Start and a change of the view send their values along,
// because what was typed right before the click may not have reached the server. A change of the view sends only recent
// changes, as another window may have set the others since.
const touched = new Map();
for (const kind of ["input", "change", "click"])
  document.addEventListener(kind, (event) => {
    const field = event.target.closest?.(".setting, #new-toml");
    if (field) touched.set(field.id, Date.now());
  });
// What a person has not come to yet is not shown as a mistake: problems are red in fields that were left, and after Start.
document.addEventListener("focusout", ({ target }) => target.closest?.(".setting")?.classList.add("been"));
document.addEventListener("click", ({ target }) => {
  if (target.closest?.("#new-start")) document.body.classList.add("tried-to-start");
}, true);
// A problem in the summary leads to its setting, in the view that is open or else among all settings; Start leads to the
// first. Base model and images are chosen in sections of their own.
const SECTIONS = { "-model-path": "#new-base-search", "-dataset-folders": "#new-drop button" };
const findField = (id) => [SECTIONS[id], `#new${id}`, `#set${id}`]
  .map((place) => place && document.querySelector(place)).find((field) => field?.checkVisibility());
const showSetting = (id, tries = 20) => {
  const field = findField(id);
  if (!field && tries === 20) document.querySelectorAll("#new-views button[role=tab]")[1]?.click();
  if (field && !field.closest("[inert]")) {
    field.scrollIntoView({ block: "center" });
    (field.matches("input, button") ? field : field.querySelector("input, textarea"))?.focus({ preventScroll: true });
  } else if (tries) setTimeout(() => showSetting(id, tries - 1), 250);
};
document.addEventListener("click", ({ target }) => {
  const problem = target.closest?.(".to-setting");
  if (problem) showSetting(problem.dataset.setting);
});
window.showFirstProblem = () => setTimeout(() => document.querySelector("#new-summary .to-setting")?.click(), 100);
window.touchedSettings = () => [...touched.keys()];
window.leftSettings = () => {
  const late = [...touched].filter(([, at]) => Date.now() - at < SLOWEST).map(([id]) => id);
  touched.clear();
  window.opening();
  return late;
};

// While a view waits for its content, nothing can be typed into it: the answer would overwrite it.
// The tabs stay usable and keep the focus. Several answers can be on their way: the page's, and that of the tab that
// Gradio selects while it draws. The last one unlocks.
const LOCKED = "#new-views [role=tabpanel]";
let waiting = 0;
let openedAt;
let left;  // the focused element when its panel was locked, which removes the focus
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
// After a refused event Gradio calls no follow-up, so what that would have unlocked is unlocked here.
window.unanswered = () => {
  unlock();
  forget();
  window.pressed = [];
};
// Gradio reports a change of the view a moment after the click; input in that moment would be lost too.
document.addEventListener("click", (event) => {
  const tab = event.target.closest?.("#new-views button[role=tab]");
  if (!tab || tab.ariaSelected === "true") return;
  lock(true);
  clearTimeout(openedAt);
  openedAt = setTimeout(unlock, SLOWEST);
}, true);
// Other fields that a choice changes (a preset's steps) are painted when its answer comes. Text that was typed into them in
// the meantime is newer: it is restored, and sent to the server.
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
