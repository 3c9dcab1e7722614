// The image workbench (webui/images): a grid of images with a caption box beneath each, a large view, automatic captions
// and uploads. panel.py mounts it and gives it its texts; webui/images/routes.py answers it.

const TICK = 1500; // ms between looks at the server while something is at work there
const REST = 3000; // ms otherwise
const AT_ONCE = 2; // uploads on their way at a time
const MOST_FILES = 5000; // image_folders.MOST_UPLOADED
const MOST_REFUSED = 8; // sentences about refused files that are shown
const NEAR = 6; // images before the end of a page from which the next page is fetched
const FRESH = 10_000; // ms from which a folder that has changed is listed again
const PHONE = "(max-width: 640px)";
const KEPT_MODEL = "lora_fp8_captioner";
const NAME = "pictures"; // of a new dataset
const SIDES = ["left", "top", "right", "bottom"]; // of a crop
const ALL_OF_IT = [0, 0, 1, 1];
const LEAST_CUT = 0.01; // a crop that is dragged is at least as wide and high, as a share

export function mount(element, trigger, given) {
  const host = element.querySelector(".workbench");
  if (!host || host.dataset.mounted) return;
  host.dataset.mounted = "yes";
  new Workbench(host, trigger, given).start();
}

let ids = 0;
const ALL = { query: "", showing: "all", finding: "", label: "" }; // a filter that all images pass
const nextId = (prefix) => `wb-${prefix}-${(ids += 1)}`;

// Make an element. `given` has its class, text, listeners (functions), and attributes; undefined and false leave one out.
const make = (tag, given = {}, ...inside) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "text") element.textContent = value;
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...inside.filter((part) => part != null));
  return element;
};
const button = (text, click, more = {}) => make("button", { type: "button", class: "wb-button", text, click, ...more });

// Replaces what an element holds where it is made of something else now. A button that is replaced while it is pressed
// hears no click, and one that is replaced while it has the focus loses it.
const madeOf = new WeakMap();
const rebuild = (element, parts, build) => {
  const now = JSON.stringify(parts);
  if (madeOf.get(element) === now) return;
  madeOf.set(element, now);
  element.replaceChildren(...build());
};
const show = (element, on) => { element.hidden = !on; };
const clean = (text) => text.replace(/\r\n?/g, "\n").trim(); // as webui/images/captions.is_same_text
const fill = (text, values = {}) => text.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);

class Refused extends Error {}

// The caption of one image: as the file has it, as it is typed, and what is being done about the difference.
class Caption {
  constructor(workbench, row) {
    this.workbench = workbench;
    this.name = row.name;
    this.loaded = row.caption;
    this.text = row.typed ?? row.caption;
    this.state = row.typed == null ? "" : "failed";
    this.note = "";
    this.theirs = null; // what somebody else wrote meanwhile
    this.watchers = new Set();
    this.work = Promise.resolve();
  }

  get dirty() { return clean(this.text) !== clean(this.loaded); }

  // Take what the server says, unless something is typed that it does not have.
  take(row) {
    if (this.dirty || this.state === "saving") return;
    if (clean(this.loaded) !== clean(row.caption)) this.state = "";
    this.loaded = row.caption;
    this.text = row.caption;
    this.tell();
  }

  type(text) {
    this.text = text;
    if (this.state !== "saving" && this.theirs == null) this.state = this.dirty ? "typed" : "";
    this.tell();
  }

  tell() { for (const watcher of this.watchers) watcher(); }

  save() {
    this.work = this.work.then(() => this.put());
    return this.work;
  }

  async put() {
    if (!this.dirty || this.theirs != null) return;
    const text = this.text;
    this.state = "saving";
    this.tell();
    try {
      const given = { name: this.name, loaded: this.loaded, caption: text };
      const answer = await this.workbench.ask("save", { ...this.workbench.purpose(), ...given });
      if (answer.outcome === "changed") {
        this.theirs = answer.caption;
        this.state = "changed";
        this.note = answer.message;
      } else {
        this.workbench.stamp = answer.stamp; // what this window has written is no news to it
        this.loaded = answer.caption;
        if (this.text === text) this.text = answer.caption;
        this.state = this.dirty ? "typed" : "saved";
        this.note = "";
        this.workbench.saved(answer);
      }
    } catch (error) {
      this.state = "failed";
      this.note = error.message;
    }
    this.tell();
  }

  // Somebody else has changed the caption: take theirs, or write one's own over it.
  settle(mine) {
    this.loaded = this.theirs;
    this.theirs = null;
    this.note = "";
    if (!mine) this.text = this.loaded;
    this.state = this.dirty ? "typed" : "";
    this.tell();
    return mine ? this.save() : undefined;
  }
}

// The box of a caption, with what became of it. There may be two of one caption: in the grid and in the large view.
class Box {
  constructor(workbench) {
    this.workbench = workbench;
    const { say } = workbench;
    const id = nextId("caption");
    this.label = make("label", { class: "wb-unseen", for: id });
    this.area = make("textarea", {
      id, rows: 3, spellcheck: "false", placeholder: say("caption.empty"),
      input: () => this.caption?.type(this.area.value),
      blur: () => this.caption?.save(),
    });
    this.state = make("span", { class: "wb-state", role: "status" });
    this.note = make("p", { class: "wb-note", role: "alert", hidden: true });
    this.watch = () => this.paint();
  }

  show(caption, row) {
    const { say } = this.workbench;
    this.caption?.watchers.delete(this.watch);
    this.caption = caption;
    caption.watchers.add(this.watch);
    this.label.textContent = say("caption.of", { file: row.label });
    // A caption in an unknown encoding would be lost if another were written over it.
    this.unreadable = row.unreadable;
    this.area.disabled = Boolean(row.unreadable || row.excluded);
    this.area.placeholder = this.area.disabled ? "" : say("caption.empty");
    this.paint();
  }

  paint() {
    const { caption, workbench: { say } } = this;
    if (this.area.value !== caption.text && clean(this.area.value) !== clean(caption.text)) this.area.value = caption.text;
    this.state.textContent = caption.state ? say(`state.${caption.state}`) : "";
    this.state.dataset.state = caption.state;
    show(this.note, Boolean(caption.note || this.unreadable));
    rebuild(this.note, [caption.note, caption.theirs, this.unreadable], () => {
      if (!caption.note) return [this.unreadable];
      if (caption.theirs == null) return [caption.note, button(say("again"), () => this.caption.save())];
      return [
        caption.note,
        make("q", { text: caption.theirs || say("caption.empty") }),
        button(say("take_theirs"), () => this.caption.settle(false)),
        button(say("keep_mine"), () => this.caption.settle(true)),
      ];
    });
  }
}

// Join sentences. After a Chinese full stop stands no space.
const joinSentences = (lines) => lines.join(" ").replace(/([。！？]) /g, "$1");

// An image within its own frame, so that the crop lies where training takes it.
class Picture {
  constructor(workbench) {
    this.workbench = workbench;
    this.image = make("img", {
      loading: "lazy", decoding: "async",
      load: () => this.fit(this.image.naturalWidth, this.image.naturalHeight),
      error: () => this.fail(),
    });
    this.crop = make("i", { class: "wb-crop", hidden: true });
    this.frame = make("span", { class: "wb-frame" }, this.image, this.crop);
    this.broken = make("span", { class: "wb-broken", hidden: true });
    this.element = make("span", { class: "wb-picture" }, this.frame, this.broken);
  }

  show(row, address) {
    if (this.address !== address) {
      this.address = address;
      show(this.frame, true);
      show(this.broken, false);
      if (address) this.image.src = address;
      else this.fail();
    }
    this.row = row;
    this.image.alt = row.label;
    show(this.crop, Boolean(row.crop));
    const { style } = this.crop;
    if (row.crop) for (const side of ["left", "top", "width", "height"]) style[side] = `${100 * row.crop[side]}%`;
    if (row.size) this.fit(...row.size);
  }

  // The sides of the frame as shares of the space, which is as wide and high as the style says.
  fit(width, height) {
    if (!width || !height) return;
    this.frame.style.aspectRatio = `${width} / ${height}`;
    this.frame.classList.toggle("wb-tall", width * 3 < height * 4);
  }

  fail() {
    show(this.frame, false);
    show(this.broken, true);
    this.broken.textContent = this.row?.badges[0]?.title ?? this.workbench.say("broken");
  }
}

class Cell {
  constructor(workbench) {
    this.workbench = workbench;
    this.picture = new Picture(workbench);
    this.open = make("button", {
      type: "button", class: "wb-open", click: () => workbench.large.open(this.row),
      keydown: (event) => workbench.grid.moveBy(event, this),
    }, this.picture.element);
    this.badges = make("span", { class: "wb-badges" });
    this.tick = make("input", {
      type: "checkbox", class: "wb-tick", change: () => workbench.choose(this.row.name, this.tick.checked),
    });
    this.box = new Box(workbench);
    this.box.area.addEventListener("keydown", (event) => workbench.grid.handleKey(event, this));
    this.name = make("span", { class: "wb-name" });
    const tick = workbench.isDataset ? this.tick : null;
    this.element = make("li", { class: "wb-cell" },
      make("div", { class: "wb-top" }, this.open, this.badges, tick),
      this.box.label, this.box.area, this.box.note,
      make("p", { class: "wb-meta" }, this.name, this.box.state));
  }

  show(row) {
    const { say } = this.workbench;
    this.row = row;
    this.element.dataset.name = row.name;
    this.picture.show(row, row.thumbnail);
    this.open.setAttribute("aria-label", say("enlarge", { file: row.label }));
    this.open.title = row.figures.join(" · ");
    this.name.textContent = row.label;
    this.name.title = row.label;
    this.tick.checked = this.workbench.chosen.has(row.name);
    this.tick.setAttribute("aria-label", say("choose", { file: row.label }));
    this.element.classList.toggle("wb-chosen", this.tick.checked);
    this.element.classList.toggle("wb-excluded", row.excluded);
    const first = row.badges.slice(0, 1).map((badge) => make("span", {
      class: `wb-badge ${badge.level}`, title: badge.detail, text: badge.title,
    }));
    const rest = row.badges.length > 1 ? [make("span", { class: "wb-badge", text: `+${row.badges.length - 1}` })] : [];
    const clip = row.video ? [make("span", { class: "wb-badge", text: "▶" })] : [];
    this.badges.replaceChildren(...clip, ...first, ...rest);
    this.box.show(this.workbench.caption(row), row);
  }

  type() {
    this.box.area.focus({ preventScroll: true });
    this.element.scrollIntoView({ block: "nearest" });
  }
}

// A page of the images. Cells are kept by name, so that what is typed and where the focus is stays.
class Grid {
  constructor(workbench) {
    this.workbench = workbench;
    this.cells = new Map();
    this.element = make("ol", { class: "wb-grid", focusin: () => this.prepare() });
  }

  // The next page is fetched before it is wanted.
  prepare() {
    const { list } = this;
    if (list.length - list.findIndex((cell) => cell.element.contains(document.activeElement)) <= NEAR)
      this.workbench.fetchAhead();
  }

  show(rows) {
    const before = this.cells;
    this.cells = new Map();
    for (const row of rows) {
      const cell = before.get(row.name) ?? new Cell(this.workbench);
      cell.show(row);
      this.cells.set(row.name, cell);
    }
    const wanted = [...this.cells.values()].map((cell) => cell.element);
    const now = [...this.element.children];
    if (wanted.length !== now.length || wanted.some((element, number) => element !== now[number]))
      this.element.replaceChildren(...wanted);
  }

  get list() { return [...this.cells.values()]; }

  handleKey(event, cell) {
    if (event.isComposing) return;
    if (event.key === "Escape") cell.open.focus();
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      cell.box.caption.save();
      this.goOn(cell, event.shiftKey ? -1 : 1);
    }
  }

  // Exclude an image; the next one has the focus.
  async leaveOut(cell) {
    const { list } = this;
    const next = list[list.indexOf(cell) + 1] ?? list[list.indexOf(cell) - 1];
    await this.workbench.edit([cell.row.name], { exclude: true });
    this.cells.get(next?.row.name)?.open.focus();
  }

  // On to the box of the next image, also on the next page. While that is on its way, nothing can be typed into the box
  // that is being left.
  async goOn(cell, step) {
    const { list } = this;
    const next = list[list.indexOf(cell) + step];
    if (next) return next.type();
    cell.box.area.readOnly = true;
    const turned = await this.workbench.turn(step);
    cell.box.area.readOnly = false;
    if (turned) (step > 0 ? this.list[0] : this.list.at(-1))?.type();
  }

  async moveBy(event, cell) {
    const { list } = this;
    if (event.key === "Delete" && !cell.row.excluded) return this.leaveOut(cell);
    const columns = Math.max(1, list.findIndex((other) => other.element.offsetTop !== list[0].element.offsetTop));
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -list.length, End: list.length };
    const step = steps[event.key];
    if (!step || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const edge = event.key === "Home" || event.key === "End";
    const wanted = list.indexOf(cell) + step;
    const next = list[edge ? Math.max(0, Math.min(list.length - 1, wanted)) : wanted];
    if (next) return next.open.focus();
    if (await this.workbench.turn(Math.sign(step))) (step > 0 ? this.list[0] : this.list.at(-1))?.open.focus();
  }
}

// Turns, crops and excludes the image of the large view. They are edits of the folder's list: no image file is written.
class Edits {
  constructor(large) {
    this.large = large;
    const { say } = large.workbench;
    const named = (key) => ({ "aria-label": say(key), title: say(key) });
    this.exclude = button("", () => this.toggle(), { title: say("exclude.about") });
    this.cut = button(say("crop"), () => this.begin(), { "aria-expanded": "false" });
    this.line = make("span", { class: "wb-dim", role: "status" });
    this.tools = make("div", { class: "wb-row" },
      button("⟲", () => this.turn(270), named("turn.left")), button("⟳", () => this.turn(90), named("turn.right")),
      this.cut, this.exclude, this.line);
    this.sides = SIDES.map((side) => make("input", {
      type: "number", min: 0, max: 100, step: "any", "aria-label": say(`crop.${side}`), input: () => this.typed(),
    }));
    this.panel = make("div", { class: "wb-row wb-cutting", hidden: true },
      make("span", { class: "wb-dim", text: say("crop.about") }),
      ...SIDES.map((side, number) => make("label", {}, `${say(`crop.${side}`)} `, this.sides[number])),
      button(say("crop.apply"), () => this.apply(this.box), { class: "wb-button main" }),
      button(say("crop.whole"), () => this.apply(ALL_OF_IT)), button(say("cancel"), () => this.end()));
    this.area = make("i", { class: "wb-cut", hidden: true });
    const { frame } = large.picture;
    frame.append(this.area);
    frame.addEventListener("pointerdown", (event) => this.drag(event));
  }

  get cutting() { return !this.panel.hidden; }

  show(row) {
    this.end();
    this.exclude.textContent = this.large.workbench.say(row.excluded ? "include" : "exclude");
  }

  begin() {
    if (this.cutting) return this.end();
    const { row, picture } = this.large;
    picture.show({ ...row, crop: undefined, size: undefined }, row.uncropped);
    this.draw(row.cut);
    show(this.panel, true);
    show(this.area, true);
    picture.element.classList.add("wb-cutting-now");
    this.cut.setAttribute("aria-expanded", "true");
    this.sides[0].focus();
  }

  end() {
    if (!this.cutting) return;
    show(this.panel, false);
    show(this.area, false);
    const { row, picture } = this.large;
    picture.element.classList.remove("wb-cutting-now");
    this.cut.setAttribute("aria-expanded", "false");
    picture.show(row, row.large);
  }

  draw(box) {
    this.box = box;
    const [left, top, right, bottom] = box;
    const values = { left, top, width: right - left, height: bottom - top };
    for (const [name, value] of Object.entries(values)) this.area.style[name] = `${100 * value}%`;
    this.sides.forEach((side, number) => {
      if (side !== document.activeElement) side.value = String(Math.round(1000 * box[number]) / 10);
    });
  }

  typed() {
    const box = this.sides.map((side) => Number(side.value) / 100);
    if (box.every((side) => side >= 0 && side <= 1) && box[0] < box[2] && box[1] < box[3]) this.draw(box);
  }

  drag(event) {
    if (!this.cutting) return;
    event.preventDefault();
    document.activeElement?.blur(); // so that its field shows what is dragged
    const { frame } = this.large.picture;
    const at = ({ clientX, clientY }) => {
      const { left, top, width, height } = frame.getBoundingClientRect();
      const share = (value, length) => Math.min(1, Math.max(0, value / length));
      return [share(clientX - left, width), share(clientY - top, height)];
    };
    const [x, y] = at(event);
    const move = (moved) => {
      const [toX, toY] = at(moved);
      const box = [Math.min(x, toX), Math.min(y, toY), Math.max(x, toX), Math.max(y, toY)];
      if (box[2] - box[0] > LEAST_CUT && box[3] - box[1] > LEAST_CUT) this.draw(box);
    };
    frame.setPointerCapture(event.pointerId);
    frame.addEventListener("pointermove", move);
    frame.addEventListener("lostpointercapture", () => frame.removeEventListener("pointermove", move), { once: true });
  }

  turn(degrees) {
    this.end();
    return this.send({ turn: degrees });
  }

  async apply(box) {
    await this.send({ crop: box.map((side) => Math.round(side * 1e4) / 1e4) });
    const { workbench, row } = this.large;
    this.large.show(workbench.grid.cells.get(row.name)?.row ?? row);
    this.cut.focus();
  }

  async send(values) {
    const { workbench, row } = this.large;
    this.line.textContent = await workbench.edit([row.name], values);
  }

  async toggle() {
    const { large } = this;
    const { grid } = large.workbench;
    const at = grid.list.findIndex((cell) => cell.row.name === large.row.name);
    const next = grid.list[at + 1] ?? grid.list[at - 1];
    await this.send({ exclude: !large.row.excluded });
    if (grid.cells.has(large.row.name)) return;
    const still = grid.cells.get(next?.row.name);
    if (still) large.show(still.row);
    else large.element.close();
  }
}

// One image, large, with its caption box in view; on a phone the whole screen.
class Large {
  constructor(workbench) {
    this.workbench = workbench;
    const { say } = workbench;
    this.picture = new Picture(workbench);
    this.picture.image.loading = "eager";
    this.edits = new Edits(this);
    this.box = new Box(workbench);
    this.box.area.rows = 4;
    this.title = make("h2", { id: nextId("large") });
    this.place = make("span", { class: "wb-dim" });
    this.figures = make("p", { class: "wb-dim" });
    this.badges = make("ul", { class: "wb-problems" });
    this.back = button("‹", () => this.go(-1), { "aria-label": say("back"), title: say("back") });
    this.next = button("›", () => this.go(1), { "aria-label": say("next"), title: say("next") });
    this.save = button(say("save_next"), () => this.go(1), { class: "wb-button main" });
    this.element = make("dialog", {
      class: "wb-large", "aria-labelledby": this.title.id,
      keydown: (event) => this.handleKey(event),
      close: () => this.left(),
      // A click beside the image closes it, but not the end of a drag that began inside.
      pointerdown: (event) => { this.beside = event.target === this.element; },
      click: (event) => event.target === this.element && this.beside && this.element.close(),
    },
    make("div", { class: "wb-sheet" },
      make("header", {}, this.title, this.place, button("×", () => this.element.close(), {
        class: "wb-button plain", "aria-label": say("close"),
      })),
      this.picture.element, this.edits.tools, this.edits.panel, this.figures, this.badges,
      make("div", { class: "wb-caption" }, this.box.label, this.box.area, this.box.note,
        make("div", { class: "wb-row" }, this.back, this.next, this.box.state, this.save))));
    // A phone's keyboard covers what is at the bottom: the large view ends above it.
    window.visualViewport?.addEventListener("resize", () => {
      this.element.style.setProperty("--seen", `${window.visualViewport.height}px`);
    });
  }

  open(row) {
    this.edits.line.textContent = "";
    this.show(row);
    if (!this.element.open) this.element.showModal();
    // On a phone the keyboard would cover half of the image before it was seen.
    if (!window.matchMedia(PHONE).matches) this.box.area.focus();
  }

  show(row) {
    const { workbench } = this;
    this.row = row;
    this.edits.show(row);
    this.picture.show(row, row.large);
    this.title.textContent = row.label;
    this.place.textContent = `${workbench.position(row.name)} / ${workbench.matching}`;
    this.figures.textContent = row.figures.join(" · ");
    this.badges.replaceChildren(...row.badges.map((badge) => make("li", {
      class: badge.level, text: badge.detail ? workbench.say("badge", badge) : badge.title,
    })));
    this.box.show(workbench.caption(row), row);
  }

  async go(step) {
    this.box.caption.save();
    const names = [...this.workbench.grid.cells.keys()];
    let next = this.workbench.grid.cells.get(names[names.indexOf(this.row.name) + step]);
    if (!next && (await this.workbench.turn(step))) {
      const { list } = this.workbench.grid;
      next = step > 0 ? list[0] : list.at(-1);
    }
    if (!next) return;
    this.show(next.row);
    if (!window.matchMedia(PHONE).matches) this.box.area.focus();
  }

  handleKey(event) {
    if (event.isComposing) return;
    const typing = event.target === this.box.area || event.target.matches("input");
    if (event.key === "Delete" && !typing) return this.edits.toggle();
    const steps = { PageUp: -1, PageDown: 1, ...(typing ? {} : { ArrowLeft: -1, ArrowRight: 1 }) };
    const enter = event.key === "Enter" && (event.ctrlKey || event.metaKey);
    const step = enter ? (event.shiftKey ? -1 : 1) : steps[event.key];
    if (!step) return;
    event.preventDefault();
    this.go(step);
  }

  left() {
    this.box.caption?.save();
    this.edits.end();
    this.workbench.grid.cells.get(this.row.name)?.open.focus();
  }
}

// Automatic captions: which model, what kind, and the job while it runs.
class Auto {
  constructor(workbench) {
    this.workbench = workbench;
    const { say } = workbench;
    this.toggle = button(say("auto"), () => this.open(this.panel.hidden), { "aria-expanded": "false" });
    this.toggle.id = "auto-open";
    this.models = make("div", { class: "wb-models", role: "radiogroup", "aria-label": say("auto.model") });
    this.other = make("input", { type: "text", placeholder: say("auto.other_hint"), "aria-label": say("auto.other"), spellcheck: "false" });
    this.kinds = make("div", { class: "wb-row", role: "radiogroup", "aria-label": say("auto.kind") });
    this.kinds.append(...["text", "tags"].map((kind) => make("label", {}, make("input", {
      type: "radio", name: nextId("x").replace(/\d+$/, "kind"), value: kind, checked: kind === "text", change: () => this.paint(),
    }), ` ${say(`auto.${kind}`)}`)));
    this.overwrite = make("input", { type: "checkbox", change: () => this.decide(this.append) });
    this.append = make("input", { type: "checkbox", change: () => this.decide(this.overwrite) });
    this.appending = make("label", {}, this.append, ` ${say("auto.append")}`);
    this.more = make("summary", {});
    this.trigger = make("input", { type: "text", id: nextId("trigger") });
    this.options = this.makeOptions();
    this.begin = button("", () => this.start(), { class: "wb-button main" });
    this.begin.id = "auto-begin";
    this.panel = make("div", { class: "wb-panel", hidden: true },
      make("p", { class: "wb-dim", text: say("auto.about") }), this.models, this.kinds,
      make("label", {}, this.overwrite, ` ${say("auto.overwrite")}`), this.appending,
      make("details", {}, this.more, ...Object.values(this.options).map(({ row }) => row),
        make("label", { for: this.trigger.id, text: say("auto.trigger") }), this.trigger),
      make("div", { class: "wb-row" }, this.begin));
    this.bar = make("i");
    this.line = make("span", { role: "status" });
    this.stop = button(say("auto.stop"), () => this.end());
    this.detail = make("pre", { hidden: true, tabindex: "0" });
    this.job = make("div", { class: "wb-job", hidden: true, id: "dataset-job" },
      make("div", { class: "wb-row" }, this.line, this.stop), make("div", { class: "wb-bar" }, this.bar), this.detail);
  }

  // What some models have a use for and others not: each with its row, which is hidden where it has none.
  makeOptions() {
    const { say } = this.workbench;
    const beneath = (name, input) => {
      input.id = nextId(name);
      return { input, row: make("div", {}, make("label", { for: input.id, text: say(`auto.${name}`) }), input) };
    };
    const beside = (name) => {
      const input = make("input", { type: "checkbox" });
      return { input, row: make("label", {}, input, ` ${say(`auto.${name}`)}`) };
    };
    const number = () => make("input", { type: "number", min: 0, max: 1, step: 0.05 });
    return {
      prompt: beneath("prompt", make("textarea", { rows: 2 })),
      threshold: beneath("threshold", number()),
      character_threshold: beneath("character_threshold", number()),
      exclude: beneath("exclude", make("input", { type: "text", spellcheck: "false" })),
      rating: beside("rating"),
      keep_underscores: beside("keep_underscores"),
    };
  }

  async open(on) {
    show(this.panel, on);
    this.toggle.setAttribute("aria-expanded", String(on));
    if (!on || this.listed) return;
    const { models, thresholds } = await this.workbench.ask("models", {});
    this.listed = models;
    for (const [name, usual] of Object.entries(thresholds)) {
      this.options[name].input.value = this.options[name].usual = String(usual);
    }
    const kept = localStorage.getItem(KEPT_MODEL);
    const first = models.find((one) => one.model === kept) ?? models.find((one) => one.here)
      ?? models.find((one) => one.model.includes("Florence-2-large")) ?? models[0];
    this.models.replaceChildren(...models.map((one) => this.offer(one, one === first)), this.offerOther(!first));
    this.paint();
  }

  offer(model, checked) {
    const { say } = this.workbench;
    const size = model.here ? say("auto.here") : model.size;
    return make("label", { class: "wb-model" },
      make("input", { type: "radio", name: "wb-model", value: model.model, checked, change: () => this.paint() }),
      make("span", {}, make("b", { text: model.title }), " ", make("span", { class: "wb-tag", text: size }),
        make("small", { text: model.purpose }), model.obstacle ? make("small", { class: "wb-note", text: model.obstacle }) : ""));
  }

  offerOther(checked) {
    const choose = () => { radio.checked = true; this.paint(); };
    const radio = make("input", { type: "radio", name: "wb-model", value: "", checked, change: () => this.paint() });
    this.other.addEventListener("focus", choose);
    this.other.id = "auto-model-other";
    return make("div", { class: "wb-model", id: "auto-model" },
      make("label", {}, radio, make("b", { text: this.workbench.say("auto.other") })), this.other);
  }

  get model() { return this.models.querySelector("input[type=radio]:checked")?.value || this.other.value.trim(); }

  // Existing captions are replaced, or tags are added to them, or they stay.
  decide(other) {
    other.checked = false;
    this.paint();
  }

  get appends() { return this.append.checked && this.kind === "tags"; }

  get kind() { return this.kinds.querySelector("input:checked").value; }

  paint() {
    const { say, without, total } = this.workbench;
    const chosen = this.listed?.find((one) => one.model === this.model);
    const kinds = chosen?.kinds ?? ["text", "tags"];
    show(this.kinds, kinds.length > 1);
    if (!kinds.includes(this.kind)) this.kinds.querySelector(`[value=${kinds[0]}]`).checked = true;
    for (const [name, { row }] of Object.entries(this.options)) show(row, !chosen || chosen.options.includes(name));
    const more = !chosen ? "auto.more_all" : chosen.options.includes("prompt") ? "auto.more" : "auto.more_tags";
    this.more.textContent = say(more);
    show(this.appending, this.kind === "tags");
    const count = this.overwrite.checked || this.appends ? total : without;
    this.begin.textContent = say("auto.begin", { count });
    this.begin.disabled = !count;
    this.toggle.textContent = without ? say("auto.missing", { count: without }) : say("auto");
  }

  // The options that are shown and changed; the others are left to the program.
  get changed() {
    const shown = Object.entries(this.options).filter(([, { row }]) => !row.hidden);
    const given = shown.map(([name, { input, usual }]) => {
      if (input.type === "checkbox") return [name, input.checked];
      return [name, input.value.trim() === usual ? "" : input.value];
    });
    return Object.fromEntries(given);
  }

  async start() {
    this.begin.disabled = true;
    try {
      const given = { model: this.model, kind: this.kind, trigger: this.trigger.value, ...this.changed };
      await this.workbench.saveAll();
      const answer = await this.workbench.ask("caption", {
        ...this.workbench.purpose(), ...given, overwrite: this.overwrite.checked, append: this.appends,
      });
      localStorage.setItem(KEPT_MODEL, this.model);
      this.workbench.note(answer.message);
      this.watched = answer.job?.id;
      this.open(false);
      this.show(answer.job);
      this.workbench.soon();
    } catch (error) {
      this.workbench.note(error.message, true);
    }
    this.paint();
  }

  async end() {
    try {
      this.workbench.note((await this.workbench.ask("stop", { folder: this.workbench.folder })).message);
    } catch (error) {
      this.workbench.note(error.message, true);
    }
    this.workbench.soon();
  }

  // A job that ended before this window looked is history: the queue has it.
  show(job) {
    const { say } = this.workbench;
    if (job && !job.ended) this.watched = job.id;
    const shown = job && job.id === this.watched;
    show(this.job, Boolean(shown));
    this.running = Boolean(shown && !job.ended);
    if (!shown) return;
    this.line.textContent = [job.label, job.sentence, job.note].filter(Boolean).join(" · ");
    this.job.classList.toggle("failed", job.failed);
    this.bar.style.width = job.total ? `${(100 * job.done) / job.total}%` : job.ended ? "100%" : "0";
    this.bar.parentElement.classList.toggle("waiting", !job.ended && !job.total);
    show(this.stop, !job.ended);
    show(this.detail, Boolean(job.detail));
    this.detail.textContent = job.detail;
  }
}

// Files, folders and archives: dropped or chosen, sent one by one, each with its answer.
class Uploads {
  constructor(workbench) {
    this.workbench = workbench;
    const { say, given } = workbench;
    const isNew = given.page === "new";
    this.files = make("input", {
      type: "file", multiple: true, accept: given.taken.join(), class: "wb-unseen", tabindex: "-1", "aria-hidden": "true",
      change: () => this.chosen(this.files),
    });
    this.folder = make("input", {
      type: "file", webkitdirectory: true, multiple: true, class: "wb-unseen wb-folder", tabindex: "-1", "aria-hidden": "true",
      change: () => this.chosen(this.folder),
    });
    this.name = make("input", {
      type: "text", id: nextId("name"), value: NAME, input: () => { this.named = true; },
    });
    this.drop = make("div", { class: "wb-drop", id: isNew ? "new-drop" : "dataset-drop" },
      make("p", { text: say("drop") }),
      make("div", { class: "wb-row" },
        button(say("files"), () => this.files.click(), { class: "wb-button main" }),
        button(say("folder"), () => this.folder.click())), this.files, this.folder,
      make("p", { class: "wb-dim", text: say("drop.about") }));
    this.set = make("div", { class: "wb-set", id: isNew ? "new-set" : "dataset-new-set" },
      make("label", { for: this.name.id, text: say("set") }), this.name,
      make("small", { class: "wb-dim", text: say(isNew ? "set.about" : "set.about_open") }));
    this.bar = make("i");
    this.line = make("span", { role: "status" });
    this.progress = make("div", { class: "wb-job", hidden: true },
      make("div", { class: "wb-row" }, this.line, button(say("cancel"), () => this.cancel())),
      make("div", { class: "wb-bar" }, this.bar));
    const beside = make("div", { class: "wb-beside" }, this.set, isNew ? this.offerFolders() : null);
    this.add = make("div", { class: "wb-add" }, this.drop, beside);
    this.summary = make("summary", { text: say("add") });
    this.element = make("details", { class: "wb-adding", open: true }, this.summary, this.add);
    show(this.summary, !isNew);
    for (const kind of ["dragenter", "dragover"])
      this.drop.addEventListener(kind, (event) => { event.preventDefault(); this.drop.classList.add("over"); });
    for (const kind of ["dragleave", "drop"]) this.drop.addEventListener(kind, () => this.drop.classList.remove("over"));
    this.drop.addEventListener("drop", (event) => {
      event.preventDefault();
      // Read before the first await: the list is empty afterwards.
      const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
      const files = [...event.dataTransfer.files];
      this.dropped(entries, files);
    });
  }

  // A folder is open on the Dataset page: what is sent is added to it, unless a name is typed.
  fold() {
    this.element.open = false;
    if (!this.named) this.name.value = "";
  }

  // A folder that the server has already.
  offerFolders() {
    const { say } = this.workbench;
    const list = make("datalist", { id: nextId("folders") });
    // A refused path stays in the field, to be corrected or allowed.
    const take = async (action) => {
      const given = { folder: path.value };
      try {
        const { folder } = await this.workbench.ask(action, given);
        path.value = "";
        this.workbench.note("");
        this.workbench.filled(folder);
      } catch (error) {
        this.workbench.note(error.message, true);
        path.focus();
        const { allowable } = await this.workbench.ask("ask_to_allow", given).catch(() => ({}));
        const allow = button(say("existing.allow"), () => take("allow"), { id: "new-allow" });
        if (allowable) this.workbench.message.append(allow);
      }
    };
    const add = () => take("folder");
    const path = make("input", {
      type: "text", id: nextId("folder"), list: list.id, placeholder: say("existing.example"), spellcheck: "false",
      autocomplete: "off",
      focus: async () => {
        const { folders } = await this.workbench.ask("folders", {});
        list.replaceChildren(...folders.map((folder) => make("option", { value: folder })));
      },
      keydown: (event) => event.key === "Enter" && !event.isComposing && add(),
    });
    return make("div", { class: "wb-set", id: "new-folder" },
      make("label", { for: path.id, text: say("existing") }), path, list,
      button(say("existing.add"), add, { id: "new-add" }));
  }

  chosen(input) {
    const files = [...input.files].map((file) => ({ file, path: file.webkitRelativePath || file.name }));
    input.value = "";
    this.send(files);
  }

  async dropped(entries, files) {
    if (!entries.length) return this.send(files.map((file) => ({ file, path: file.name })));
    const found = [];
    for (const entry of entries) await this.walk(entry, found);
    this.send(found);
  }

  async walk(entry, found) {
    if (found.length > MOST_FILES) return;
    const path = entry.fullPath.replace(/^\//, "");
    if (entry.isFile) found.push({ file: await new Promise((take, fail) => entry.file(take, fail)), path });
    if (!entry.isDirectory) return;
    const reader = entry.createReader();
    for (;;) {
      const part = await new Promise((take, fail) => reader.readEntries(take, fail));
      if (!part.length) return;
      for (const inner of part) await this.walk(inner, found);
    }
  }

  async send(files) {
    const { say, given } = this.workbench;
    const meant = files.filter(({ path }) => !path.split("/").some((part) => part.startsWith(".") || given.ignored.includes(part)));
    if (!meant.length) return this.workbench.note(say("upload.none"), true);
    if (meant.length > MOST_FILES)
      return this.workbench.note(say("upload.many", { count: meant.length, most: MOST_FILES }), true);
    const tops = new Set(meant.map(({ path }) => path.split("/")[0]));
    const top = tops.size === 1 && meant.every(({ path }) => path.includes("/")) ? [...tops][0] : "";
    const isAdded = given.page === "dataset" && this.workbench.folder; // to the open folder, unless a name is typed
    if (top && !this.named && !isAdded) this.name.value = top;
    const named = meant.map(({ file, path }) => ({ file, path: top ? path.slice(top.length + 1) : path }));
    const isTaken = ({ path }) => given.taken.some((suffix) => path.toLowerCase().endsWith(suffix));
    const queue = named.filter(isTaken);
    const refused = named.filter((one) => !isTaken(one)).map(({ path }) => say("upload.kind", { file: path }));
    const added = { taken: 0, captions: 0, there: 0 };
    const total = { count: queue.length, added, done: 0, refused, folder: "", archives: 0 };
    this.stopped = new AbortController();
    show(this.progress, true);
    this.workbench.note("");
    this.paint(total);
    const worker = async () => {
      while (queue.length && !this.stopped.signal.aborted) {
        const { file, path } = queue.shift();
        try {
          await this.put(file, path, total);
        } catch (error) {
          if (!this.stopped.signal.aborted) total.refused.push(error.message);
        }
        total.done += 1;
        this.paint(total);
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, worker));
    show(this.progress, false);
    this.finish(total);
  }

  async put(file, path, total) {
    const name = this.name.value.trim();
    const where = name ? { name } : { folder: this.workbench.folder };
    const query = new URLSearchParams({ ...where, file: path });
    const { signal } = this.stopped;
    const answer = await this.workbench.fetch(`upload?${query}`, { method: "POST", body: file, signal });
    total.folder = answer.folder;
    if (answer.task) total.archives += 1;
    if (answer.added) total.added[answer.added] += 1;
    // An archive fills the folder while the window goes on looking.
    if (answer.task) await this.workbench.finished(answer.folder, answer.task.number, (task) => {
      this.line.textContent = this.workbench.say("upload.unpacking", { done: task.done, total: task.total });
      this.bar.style.width = `${(100 * task.done) / Math.max(1, task.total)}%`;
    }).then((task) => {
      total.lines = task.lines;
      total.refused.push(...task.refused);
      if (task.error) throw new Refused(task.error);
    });
  }

  paint(total) {
    this.line.textContent = this.workbench.say("upload.progress", { done: total.done, total: total.count });
    this.bar.style.width = `${(100 * total.done) / total.count}%`;
  }

  cancel() { this.stopped?.abort(); }

  finish(total) {
    const { say } = this.workbench;
    const lines = [...(total.lines ?? [])];
    if (total.folder && total.count > total.archives) {
      const { taken, captions, there } = total.added;
      if (there) lines.unshift(say("upload.there", { count: there }));
      if (captions) lines.unshift(say("upload.captions", { count: captions }));
      lines.unshift(say("upload.taken", { count: taken, folder: total.folder.split(/[/\\]/).at(-1) }));
    }
    this.workbench.note(joinSentences(lines));
    if (total.refused.length) this.workbench.listRefused(total.refused);
    if (total.folder) this.workbench.filled(total.folder, total.refused.length > 0);
  }
}

class Workbench {
  constructor(host, trigger, given) {
    Object.assign(this, { host, trigger, given });
    this.say = (key, values) => {
      const { texts } = given;
      return fill((values?.count === 1 && texts[`${key}-one`]) || texts[key] || key, values);
    };
    this.folder = "";
    this.folders = [];
    this.captions = new Map();
    this.chosen = new Set();
    this.isDataset = given.page === "dataset";
    this.filter = { ...ALL };
    this.extra = {}; // family, resolution and clips that the Dataset page examines the folder for
    this.offset = this.matching = this.total = this.without = 0;
    this.stamp = "";
    this.shownTask = 0;
  }

  // -- the server

  async fetch(path, options) {
    let answer;
    try {
      answer = await fetch(`/images/${this.given.language}/${path}`, options);
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new Refused(this.say("offline"));
    }
    const content = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Refused(content.error ?? content.detail ?? this.say("failed"));
    return content;
  }

  ask(action, values) {
    return this.fetch(action, {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(values),
    });
  }

  purpose() { return { folder: this.folder, ...this.extra }; }

  // -- what is shown

  start() {
    const { say, given } = this;
    this.uploads = new Uploads(this);
    this.auto = new Auto(this);
    this.grid = new Grid(this);
    this.large = new Large(this);
    this.message = make("div", { class: "wb-message", id: `${given.page}-taken`, role: "status" });
    this.tabs = make("div", { class: "wb-folders", role: "group", "aria-label": say("folders"), hidden: true });
    this.counts = make("span", { class: "wb-counts" });
    this.undo = button(say("undo"), () => this.step("undo"), { disabled: true });
    this.redo = button(say("redo"), () => this.step("redo"), { disabled: true });
    this.search = make("input", {
      type: "search", placeholder: say("search"), "aria-label": say("search"), input: () => this.searched(),
    });
    this.showing = make("select", { "aria-label": say("showing"), change: () => this.filterBy({ showing: this.showing.value }) },
      ...["all", "uncaptioned", ...(this.isDataset ? ["chosen"] : []), "excluded"].map((kind) => make("option", {
        value: kind, text: say(`showing.${kind}`),
      })));
    this.cleared = button(say("clear"), () => this.filterBy(ALL), { hidden: true });
    this.pager = make("nav", { class: "wb-row wb-pager", "aria-label": say("pages"), hidden: true });
    this.empty = make("p", { class: "wb-empty", hidden: true });
    this.examining = make("span", { class: "wb-dim" });
    this.picking = make("span", { class: "wb-row", hidden: !this.isDataset },
      button(say("choose_all"), () => this.chooseAll()), button(say("choose_none"), () => this.chooseNone()),
      this.excluding = button("", () => this.leaveOutChosen(), { title: say("exclude.about") }),
      this.picked = make("span", { class: "wb-dim", role: "status" }));
    this.tools = make("div", { class: "wb-row wb-tools" }, this.counts, this.auto.toggle, this.undo, this.redo,
      make("span", { class: "wb-row wb-filters" }, this.search, this.showing, this.cleared));
    this.keys = make("p", { class: "wb-dim wb-keys", text: say("keys"), tabindex: "-1" });
    this.skip = button(say("skip"), () => this.keys.focus(), { class: "wb-button wb-skip" }); // seen by the keyboard only
    this.body = make("div", { hidden: true },
      this.isDataset ? null : this.tabs, this.tools,
      this.picking, this.auto.panel, this.auto.job, this.skip, this.grid.element, this.empty,
      make("div", { class: "wb-row wb-foot" }, this.pager, this.examining), this.keys);
    this.table = button(say("table"), () => this.showTable(this.table.ariaExpanded !== "true"), {
      "aria-expanded": "false", "aria-controls": "new-folders", id: "new-folders-open", hidden: given.page !== "new",
    });
    this.host.append(...(this.isDataset ? [this.tabs] : []), this.uploads.element, this.uploads.progress, this.message,
      this.body, this.table, this.large.element);
    window.addEventListener("beforeunload", (event) => this.leave(event));
    window.addEventListener("pagehide", () => this.sendRest());
    if (this.isDataset) this.listen();
    this.watch();
  }

  // What the rest of the Dataset page asks for: a folder and what it is examined for, captions that it has changed, and
  // images that its tags and findings name.
  listen() {
    window.saveCaptions = () => this.saveAll();
    document.addEventListener("dataset-purpose", () => this.takePurpose());
    document.addEventListener("captions-changed", () => this.folder && this.load({ fresh: true }));
    document.addEventListener("click", ({ target }) => {
      const pressed = target.closest?.("#dataset-tabs [data-show]");
      if (!pressed) return;
      document.querySelector("#dataset-tabs button[role=tab]").click(); // the first has the images
      const { show: what, name, label } = pressed.dataset;
      if (what === "image") this.reveal(name);
      else this.filterBy({ ...ALL, ...(what === "tag" ? { query: `[${name}]` } : { finding: name, label }) });
    });
    this.takePurpose();
  }

  takePurpose() {
    if (!window.datasetPurpose) return;
    const { folder, ...extra } = JSON.parse(window.datasetPurpose);
    this.extra = extra;
    if (folder === this.folder) this.load();
    else {
      this.uploads.fold();
      this.open(folder);
    }
  }

  // Enlarge an image that may be on another page of the grid.
  async reveal(name) {
    await this.filterBy(ALL);
    const { names } = await this.ask("names", { ...this.purpose(), ...this.filter });
    const { perPage } = this.given;
    this.offset = Math.floor(Math.max(0, names.indexOf(name)) / perPage) * perPage;
    await this.load();
    const cell = this.grid.cells.get(name);
    if (cell) this.large.open(cell.row);
  }

  // The table of folders belongs to the form. It stays in the page while it is closed, as Gradio sends its value.
  showTable(on) {
    document.getElementById("new-folders")?.classList.toggle("open", on);
    this.table.ariaExpanded = String(on);
  }

  note(line, wrong = false) {
    this.message.replaceChildren(...(line ? [make("p", { class: wrong ? "wrong" : "", text: line })] : []));
  }

  // Below what was added: each refused file with its reason, on a line of its own.
  listRefused(sentences) {
    const { say } = this;
    const rows = sentences.slice(0, MOST_REFUSED);
    if (sentences.length > rows.length) rows.push(say("upload.more", { count: sentences.length - rows.length }));
    this.message.append(make("div", { class: "wb-refused wrong" },
      make("p", { text: say("upload.refused", { count: sentences.length }) }),
      make("ul", {}, ...rows.map((text) => make("li", { text })))));
  }

  async open(folder) {
    this.folder = folder;
    this.captions = new Map();
    this.offset = 0;
    show(this.body, Boolean(folder));
    if (folder) await this.load({ fresh: true });
  }

  list(offset, more = {}) {
    const chosen = this.filter.showing === "chosen" ? [...this.chosen] : [];
    return this.ask("list", { ...this.purpose(), ...this.filter, chosen, offset, count: this.given.perPage, ...more });
  }

  async load(more = {}) {
    const asked = (this.asked = (this.asked ?? 0) + 1);
    this.ahead = undefined;
    if (more.fresh) this.freshAt = Date.now();
    try {
      const answer = await this.list(this.offset, more);
      if (asked === this.asked) this.paint(answer);
    } catch (error) {
      this.note(error.message, true);
    }
  }

  fetchAhead() {
    const offset = this.offset + this.given.perPage;
    if (offset >= this.matching || this.ahead?.offset === offset) return;
    this.ahead = { offset, answer: this.list(offset).catch(() => null) };
  }

  paint(answer) {
    const { say } = this;
    Object.assign(this, { offset: answer.offset, matching: answer.matching, total: answer.total, stamp: answer.stamp });
    for (const row of answer.rows) this.caption(row).take(row);
    this.grid.show(answer.rows);
    this.excluded = answer.excluded;
    this.saved(answer);
    this.paintChosen();
    const shown = answer.rows.find((row) => row.name === this.large.row?.name);
    if (shown && this.large.element.open && !this.large.edits.cutting) this.large.show(shown);
    const { perPage } = this.given;
    const pages = Math.ceil(this.matching / perPage);
    show(this.pager, pages > 1);
    const page = Math.floor(this.offset / perPage);
    rebuild(this.pager, [page, pages], () => [
      button(say("page.back"), () => this.turn(-1), { disabled: page === 0 }),
      make("span", { text: say("page", { page: page + 1, pages }) }),
      button(say("page.on"), () => this.turn(1), { disabled: page + 1 >= pages }),
    ]);
    show(this.empty, !answer.rows.length);
    const some = this.total + this.excluded > 0;
    this.empty.textContent = joinSentences([say(some ? "nothing" : "no_images"), answer.problem]);
    for (const part of [this.tools, this.keys]) show(part, some);
    show(this.picking, this.isDataset && some);
    if (this.isDataset && !some) this.uploads.element.open = true;
    show(this.cleared, Boolean(this.filter.query || this.filter.finding || this.filter.showing !== "all"));
    this.cleared.textContent = this.filter.label ? `${this.filter.label} ×` : say("clear");
    this.cleared.title = say("clear");
  }

  saved({ without, history }) {
    this.without = without;
    const counts = this.say(without ? "counts" : "counts.all", { count: this.total, without });
    this.counts.textContent = counts + (this.excluded ? this.say("counts.excluded", { count: this.excluded }) : "");
    for (const what of ["undo", "redo"]) {
      this[what].disabled = !history[what];
      this[what].title = history[what];
    }
    if (history.problem) this.note(history.problem, true);
    this.auto.paint();
  }

  caption(row) {
    if (!this.captions.has(row.name)) this.captions.set(row.name, new Caption(this, row));
    return this.captions.get(row.name);
  }

  position(name) { return this.offset + [...this.grid.cells.keys()].indexOf(name) + 1; }

  // Turn the page. Resolves to true if there was one.
  async turn(step) {
    const { perPage } = this.given;
    const offset = this.offset + step * perPage;
    if (offset < 0 || offset >= this.matching) return false;
    const ahead = this.ahead?.offset === offset ? await this.ahead.answer : null;
    this.offset = offset;
    this.ahead = undefined;
    if (ahead) this.paint(ahead);
    else await this.load();
    this.grid.element.scrollIntoView({ block: "nearest" });
    return true;
  }

  searched() {
    clearTimeout(this.searching);
    this.searching = setTimeout(() => this.filterBy({ query: this.search.value }), 250);
  }

  filterBy(change) {
    clearTimeout(this.searching);
    Object.assign(this.filter, change);
    this.search.value = this.filter.query;
    this.showing.value = this.filter.showing;
    this.offset = 0;
    this.selected();
    return this.load();
  }

  // -- the selection, for edits of many captions

  choose(name, on) {
    if (on) this.chosen.add(name);
    else this.chosen.delete(name);
    this.grid.cells.get(name)?.element.classList.toggle("wb-chosen", on);
    this.selected();
  }

  async chooseAll() {
    const { names } = await this.ask("names", { ...this.purpose(), ...this.filter });
    for (const name of names) this.chosen.add(name);
    this.repaintChosen();
  }

  chooseNone() {
    this.chosen.clear();
    this.repaintChosen();
  }

  repaintChosen() {
    for (const cell of this.grid.list) cell.show(cell.row);
    this.selected();
  }

  // Exclude the chosen images, or include them where the excluded ones are shown.
  async leaveOutChosen() {
    const names = [...this.chosen];
    this.chosen.clear();
    await this.edit(names, { exclude: this.filter.showing !== "excluded" });
    this.selected();
  }

  paintChosen() {
    this.excluding.textContent = this.say(this.filter.showing === "excluded" ? "include.chosen" : "exclude.chosen");
    this.excluding.disabled = !this.chosen.size;
    this.picked.textContent = this.chosen.size ? this.say("chosen", { count: this.chosen.size }) : "";
  }

  selected() {
    this.paintChosen();
    if (this.isDataset) this.trigger("select", { ...this.filter, chosen: JSON.stringify([...this.chosen]) });
  }

  // -- edits and tasks

  async saveAll() {
    await Promise.all([...this.captions.values()].filter((caption) => caption.dirty).map((caption) => caption.save()));
  }

  // Turn, crop or exclude images. Resolves to what was done, in a sentence.
  async edit(names, values) {
    let message;
    await this.saveAll();
    try {
      ({ message } = await this.ask("edit", { ...this.purpose(), names, ...values }));
      this.note(message);
    } catch (error) {
      ({ message } = error);
      this.note(message, true);
    }
    await this.load({ fresh: true });
    return message;
  }

  async step(what) {
    await this.saveAll();
    this.undo.disabled = this.redo.disabled = true;
    try {
      const { task } = await this.ask("undo", { folder: this.folder, what });
      const done = await this.finished(this.folder, task.number, ({ done: count, total }) => {
        this.note(this.say("working", { done: count, total }));
      });
      this.note(done.error || joinSentences(done.lines), Boolean(done.error));
    } catch (error) {
      this.note(error.message, true);
    }
    await this.load({ fresh: true });
  }

  // Look at a task of a folder until it has ended.
  async finished(folder, number, progress) {
    for (;;) {
      const { task } = await this.ask("task", { folder });
      if (!task || task.number !== number) return { lines: [], refused: [], error: "" };
      if (!task.running) return task;
      if (task.total) progress(task);
      await new Promise((done) => setTimeout(done, 400));
    }
  }

  // Files have come into a folder; `partly`: some were refused, which the message says.
  filled(folder, partly = false) {
    this.knownFolders = "";
    this.filledAt = Date.now();
    if (!this.isDataset) this.trigger("upload", { folder });
    if (folder && (!this.isDataset || folder === this.folder)) this.open(folder);
    else if (folder && !partly) this.goTo(folder);
    else if (folder) this.message.append(button(this.say("open"), () => this.goTo(folder)));
    this.soon();
  }

  goTo(folder) { location.search = `?${new URLSearchParams({ folder })}`; }

  // -- the watch

  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.watch(), 100);
  }

  async watch() {
    let busy = false;
    if (!document.hidden && this.host.checkVisibility()) {
      try {
        const { folder } = this;
        const answer = await this.ask("state", { ...this.purpose(), draft: true });
        this.offerFolders(answer.folders);
        if (folder === this.folder) busy = await this.takeState(answer);
      } catch (error) {
        if (!this.isDataset && this.folder) this.open("");
      }
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.watch(), busy ? TICK : REST);
  }

  async takeState(answer) {
    if (!answer.stamp) return false;
    const ran = this.auto.running;
    this.auto.show(answer.job);
    const { examining } = answer;
    const progress = examining && this.say(examining.total ? "examining" : "examining.start", examining);
    this.examining.textContent = answer.problem || progress || "";
    // What is shown is read again at once; the whole list, which takes longer, now and then.
    const changed = answer.stamp !== this.stamp;
    this.stale ||= changed;
    const fresh = this.stale && (ran ? !this.auto.running : !this.auto.running && Date.now() - this.freshAt > FRESH);
    if (fresh) this.stale = false;
    if (fresh || changed) await this.load(fresh ? { fresh } : {});
    return Boolean(this.auto.running || examining);
  }

  // The folders of New training: with one there is nothing to choose, and the first is open.
  offerFolders(folders) {
    const known = JSON.stringify(folders);
    if (known === this.knownFolders && folders.some((one) => one.path === this.folder)) return;
    this.knownFolders = known;
    this.folders = folders;
    // A folder that was just added comes with one of the next answers.
    const expected = this.folder && Date.now() - (this.filledAt ?? 0) < 4 * REST;
    const isOpen = folders.some((one) => one.path === this.folder);
    if (!this.isDataset && !isOpen && !expected) this.open(folders.find((one) => !one.missing)?.path ?? "");
    const remove = (one) => button("×", () => this.trigger("delete", { folder: one.path }), {
      class: "wb-button plain", "aria-label": this.say("folder.remove", { folder: one.name }),
      title: this.say("folder.remove", { folder: one.name }),
    });
    this.tabs.replaceChildren(
      ...(this.isDataset ? [make("span", { class: "wb-dim", text: this.say("folders.draft") })] : []),
      ...folders.map((one) => make("span", { class: "wb-chip" },
        button(this.label(one), () => this.switchTo(one.path), {
          disabled: one.missing,
          "aria-pressed": String(one.path === this.folder), title: one.path, class: "wb-button plain",
        }),
        this.isDataset ? null : remove(one))));
    show(this.tabs, folders.length > 0);
  }

  label({ name, empty, missing }) {
    return empty || missing ? this.say(missing ? "folder.missing" : "folder.empty", { folder: name }) : name;
  }

  async switchTo(path) {
    await this.saveAll();
    if (this.isDataset) return this.goTo(path);
    this.filter = { ...ALL };
    this.knownFolders = "";
    await this.open(path);
    this.offerFolders(this.folders);
  }

  // -- leaving the page

  get unsaved() { return [...this.captions.values()].filter((caption) => caption.dirty); }

  leave(event) {
    if (this.unsaved.some((caption) => caption.state === "failed" || caption.state === "changed")) event.preventDefault();
  }

  // What was typed right before the page is left.
  sendRest() {
    for (const caption of this.unsaved) {
      if (caption.theirs != null || caption.state === "saving") continue;
      const given = { ...this.purpose(), name: caption.name, loaded: caption.loaded, caption: caption.text };
      const body = new Blob([JSON.stringify(given)], { type: "application/json" });
      navigator.sendBeacon(`/images/${this.given.language}/save`, body);
    }
  }
}
