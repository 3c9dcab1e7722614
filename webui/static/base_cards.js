// The base models of New training: which cards are shown. Runs when the search field is there, as gr.HTML's js_on_load.
const search = element.querySelector("input[type=search]");
if (matchMedia("(max-width: 640px)").matches) search.placeholder = search.dataset.short;
const chips = [...element.querySelectorAll("[data-group]")];
const use = element.querySelector("[data-use]");
const count = element.querySelector("[data-count]");
const rules = document.head.appendChild(document.createElement("style"));
const panel = () => document.getElementById("new-base-cards");
let group = chips[0].dataset.group;
let used = "";  // what was taken as a base: it is no search any more

const words = () => search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
const isReference = (text) => /[/\\:]|^~|\.(safetensors|sft|ckpt|gguf)$/i.test(text);
const matching = () => [...panel().querySelectorAll(".choice-card")].filter(
  (card) => words().every((word) => card.dataset.words.includes(word)));
const fill = (target, template, value) => { target.textContent = template.replace("{}", value); };
// Cards are shown by a style sheet of rules, which stays when the server paints the cards anew.
const show = () => {
  if (!panel()) return;
  const text = search.value.trim();
  const seeks = text !== "" && text !== used;
  const found = seeks ? matching() : [];
  const shown = seeks
    ? found.map((card) => `#new-base-cards [data-key="${CSS.escape(card.dataset.key)}"]`)
    : [`#new-base-cards [data-groups~="${group}"]`];
  const style = `#new-base-cards [data-groups] { display: none; } ${shown.join(", ")}${shown.length ? " { display: flex; }" : ""}`;
  if (rules.textContent !== style) rules.textContent = style;
  use.hidden = !seeks || !(isReference(text) || found.length === 0);
  if (!use.hidden) fill(use, use.dataset.use, text.length > 60 ? `${text.slice(0, 59)}…` : text);
  const nothing = seeks && !found.length && !isReference(text);
  count.className = nothing ? "note" : "unseen";
  fill(count, nothing ? count.dataset.none : seeks ? count.dataset.count : "", found.length);
  for (const chip of chips) chip.setAttribute("aria-pressed", String(!seeks && chip.dataset.group === group));
};
const take = (path) => {
  used = search.value.trim();
  window.pressed = window.pressed || [];
  window.pressed.push({ what: path, at: Date.now() });
  trigger("click", { do: "choose", base: path });
  show();
};
for (const chip of chips)
  chip.addEventListener("click", () => {
    group = chip.dataset.group;
    search.value = "";
    show();
  });
search.addEventListener("input", show);
search.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Escape" && search.value) {
    search.value = "";
    show();
  }
  if (event.key === "ArrowDown") {
    event.preventDefault();
    [...panel().querySelectorAll(".choice-card")].find((card) => card.checkVisibility())?.focus();
  }
  if (event.key !== "Enter") return;
  event.preventDefault();
  const text = search.value.trim();
  if (!text) return;
  const found = matching();
  if (isReference(text) || !found.length) take(text);
  else found[0].click();
});
use.addEventListener("click", () => take(search.value.trim()));
// On a phone the chosen base is described above the cards, out of view. What was pasted before is not the base any more.
document.addEventListener("click", (event) => {
  if (!event.target.closest?.(":is(#new-base-cards, #new-base-state) [data-do=choose]")) return;
  document.getElementById("new-base-state").scrollIntoView({ block: "nearest", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  if (used && search.value.trim() === used) search.value = used = "";
  show();
});
const follow = () => {
  if (!panel()) return requestAnimationFrame(follow);
  new MutationObserver(show).observe(panel(), { childList: true, subtree: true, attributes: true, attributeFilter: ["data-words"] });
  show();
};
follow();
