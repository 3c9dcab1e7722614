// Search in all settings: instant, as everything it needs is in the page. Every word has to be in a setting's names (here
// and in other trainers) or its description.
const normalizeSearch = (text) => text.trim().toLowerCase().replaceAll("_", " ").split(/\s+/).filter(Boolean);
const searchSettings = (field) => {
  const index = document.querySelector("#new-index");
  const words = normalizeSearch(field.value);
  const hidden = [];
  let matches = 0;
  for (const [section, settings] of Object.entries(JSON.parse(index.dataset.texts))) {
    const others = Object.keys(settings).filter((id) => !words.every((word) => settings[id].includes(word)));
    const all = others.length === Object.keys(settings).length;
    matches += all ? 0 : 1;
    hidden.push(...others, ...(all ? [section] : []));
  }
  let style = document.querySelector("#search-style");
  if (!style) document.head.append((style = Object.assign(document.createElement("style"), { id: "search-style" })));
  style.textContent = hidden.length ? `${hidden.map((id) => `#${id}`).join()} { display: none !important; }` : "";
  index.textContent = matches ? "" : index.dataset.nothing.replace("{text}", () => field.value);
};
document.addEventListener("input", ({ target }) => {
  if (target.closest?.("#new-search")) searchSettings(target);
});
document.addEventListener("click", ({ target }) => {
  const section = target.closest?.("#new-sections [data-section]")?.dataset.section;
  if (section) document.getElementById(section).scrollIntoView();
});
