// The viewer of a drawing: a slider moves between the drawn strengths, buttons between checkpoints, and a click in the
// grid shows that image large. What is chosen stays while more images arrive.
let choice = null;
const show = (scroll) => {
  const viewer = element.querySelector('.viewer');
  if (!viewer) { choice = null; return; }
  const drawing = viewer.closest('[data-drawing]').dataset.drawing;
  if (choice && choice.drawing !== drawing) choice = null;
  const cells = JSON.parse(viewer.dataset.cells);
  if (!choice || !cells.length) return;
  const near = (cell) => Math.abs(cell.strength - choice.strength);
  const ofLora = cells.filter((cell) => cell.lora === choice.lora);
  const cell = (ofLora.length ? ofLora : cells).reduce((best, other) => (near(other) < near(best) ? other : best));
  const image = viewer.querySelector('img.drawn'), name = viewer.querySelector('.drawn-name');
  if (image.getAttribute('src') !== cell.address) { image.src = cell.address; image.alt = cell.name; }
  if (name.textContent !== cell.name) name.textContent = cell.name;
  const slider = viewer.querySelector('.strength input'), output = viewer.querySelector('.strength output');
  if (slider) {
    const place = String(JSON.parse(slider.dataset.strengths).indexOf(cell.strength));
    if (slider.value !== place) slider.value = place;
    if (output.textContent !== String(cell.strength)) output.textContent = String(cell.strength);
  }
  for (const button of viewer.querySelectorAll('.pick')) {
    const pressed = String(Number(button.dataset.lora) === cell.lora);
    if (button.getAttribute('aria-pressed') !== pressed) button.setAttribute('aria-pressed', pressed);
  }
  const still = matchMedia('(prefers-reduced-motion: reduce)').matches;
  if (scroll) viewer.scrollIntoView({block: 'nearest', behavior: still ? 'auto' : 'smooth'});
};
const choose = (target, values, scroll) => {
  const viewer = element.querySelector('.viewer');
  const cells = JSON.parse(viewer.dataset.cells), last = cells[cells.length - 1];
  const drawing = viewer.closest('[data-drawing]').dataset.drawing;
  choice = {lora: last?.lora, strength: last?.strength, ...(choice || {}), drawing, ...values};
  show(scroll);
};
element.addEventListener('input', (event) => {
  const slider = event.target.closest('.strength input');
  if (slider) choose(slider, {strength: JSON.parse(slider.dataset.strengths)[Number(slider.value)]});
});
element.addEventListener('click', (event) => {
  const button = event.target.closest('.pick, .cell');
  if (!button) return;
  const strength = button.dataset.strength === undefined ? {} : {strength: Number(button.dataset.strength)};
  choose(button, {lora: Number(button.dataset.lora), ...strength}, button.matches('.cell'));
});
new MutationObserver(() => show()).observe(element, {subtree: true, childList: true, attributes: true});
