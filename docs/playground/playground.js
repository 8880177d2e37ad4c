// The page around `tools/playground`, which is `blocksparse` as WebAssembly: all numbers come from there.
"use strict";

const element = (id) => document.getElementById(id);
const grouped = (number) => Math.round(number).toLocaleString("en-US");

// Round numbers, each at most half as large again as the last: what sliders step through.
const ROUND = [0, 1, 2, 3];
for (let power = 4; power <= 1 << 17; power *= 2) ROUND.push(power, power * 1.5);
const between = (least, most) => ROUND.filter((number) => number >= least && number <= most);
const LENGTHS = between(32, 1 << 17);
const HEADS = [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64, 96, 128];
const BLOCKS = [8, 16, 32, 64, 128];
const MOST_SLIDERS = 8;

const PATIENCE = 5000;

const state = { pattern: "fixed:128,32,4", length: 1024, heads: 4, block: 32 };
let notation = [];
let view = null;

// The library, in a worker: some layouts take long, and some end it.

function work() {
  let library = null;
  self.onmessage = ({ data }) => {
    if (data instanceof Uint8Array) {
      library = new WebAssembly.Instance(new WebAssembly.Module(data)).exports;
      return;
    }
    const buffer = (length) => {
      // First: it may grow the memory, which is another one then.
      const start = library.playground_buffer(length);
      return new Uint8Array(library.memory.buffer, start, length);
    };
    const request = new TextEncoder().encode(JSON.stringify(data));
    buffer(request.length).set(request);
    const length = library.playground_answer();
    self.postMessage(JSON.parse(new TextDecoder().decode(buffer(length))));
  };
}

const WORK = URL.createObjectURL(new Blob([`(${work})()`], { type: "text/javascript" }));
let worker = null;

function start() {
  worker = new Worker(WORK);
  worker.postMessage(Uint8Array.from(atob(WASM), (char) => char.charCodeAt(0)));
}

function ask(request) {
  if (!worker) start();
  return new Promise((answer) => {
    const end = (error) => {
      worker.terminate();
      worker = null;
      answer({ view: null, error });
    };
    const timer = setTimeout(end, PATIENCE, `This layout takes longer than ${PATIENCE / 1000} seconds, too long for a page.`);
    worker.onmessage = ({ data }) => (clearTimeout(timer), answer(data));
    worker.onerror = (event) => {
      event.preventDefault();
      clearTimeout(timer);
      end("This layout is too large for a page.");
    };
    worker.postMessage(request);
  });
}

// The state, in the address.

function address({ pattern: text, length, heads, block }) {
  const pattern = encodeURIComponent(text).replace(/%(3A|2C|2F|20)/g, (code) => (code === "%20" ? "" : decodeURIComponent(code)));
  return `#pattern=${pattern}&length=${length}&heads=${heads}&block=${block}`;
}

// When it has been the same for a moment: browsers refuse an address that changes with every move of a slider.
let addressing = 0;

function writeAddress() {
  clearTimeout(addressing);
  addressing = setTimeout(() => history.replaceState(null, "", address(state)), 300);
}

function readAddress() {
  const fields = new URLSearchParams(location.hash.slice(1));
  if (fields.has("pattern")) state.pattern = fields.get("pattern");
  for (const name of ["length", "heads", "block"]) {
    if (/^\d+$/.test(fields.get(name))) state[name] = Number(fields.get(name));
  }
}

// Sliders.

function slider(name, change) {
  const label = document.createElement("label");
  const shown = document.createElement("output");
  const input = Object.assign(document.createElement("input"), { type: "range", min: 0 });
  label.append(name, shown, input);
  input.addEventListener("input", () => change(label.values[input.value]));
  label.set = (values, value) => {
    label.values = values;
    input.max = values.length - 1;
    const nearest = values.findLastIndex((number) => number <= value);
    input.value = Math.max(nearest, 0);
    shown.value = grouped(value);
  };
  return label;
}

// The numbers of the pattern's text, with the names that the notation has for them.
function numbersOf(text) {
  const found = [];
  for (const part of text.matchAll(/([a-z-]+)\s*:([\d,\s]*)/g)) {
    const form = notation.find((form) => form.split(":")[0] === part[1]);
    const names = (form ?? "").replace(/[[\]]|\(.*/g, "").split(":").pop().split(",").filter((name) => name && name !== "…");
    const start = part.index + part[0].length - part[2].length;
    [...part[2].matchAll(/\d+/g)].forEach((number, index) => {
      const name = (names[Math.min(index, names.length - 1)] ?? "number").toLowerCase();
      found.push({ name: `${part[1]}: ${name}`, at: start + number.index, text: number[0] });
    });
  }
  return found;
}

function showSliders() {
  const sizes = [
    ["Length", "length", LENGTHS],
    ["Heads", "heads", HEADS],
    ["Block size", "block", BLOCKS],
  ];
  const box = element("sizes");
  sizes.forEach(([name, field, values], index) => {
    if (!box.children[index]) box.append(slider(name, (value) => update({ [field]: value })));
    box.children[index].set(values, state[field]);
  });
  const numbers = numbersOf(state.pattern);
  const few = numbers.slice(0, MOST_SLIDERS);
  const names = few.map((number) => number.name).join();
  const values = between(0, Math.max(state.length, ...few.map((number) => Number(number.text))));
  const list = element("numbers");
  if (list.dataset.names !== names) {
    list.dataset.names = names;
    list.replaceChildren(...few.map(({ name }, index) => slider(name, (value) => {
      const { at, text } = numbersOf(state.pattern)[index];
      const pattern = state.pattern;
      update({ pattern: pattern.slice(0, at) + value + pattern.slice(at + text.length) });
    })));
  }
  few.forEach(({ text }, index) => list.children[index].set(values, Number(text)));
}

// Pictures.

function colour(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function paint(canvas, rows, cell) {
  const [pair, masked, empty, line] = ["--pair", "--masked", "--empty", "--soft"].map(colour);
  const side = rows.length;
  const width = Math.max(view.block / cell, 1);
  const kept = new Set();
  const blockOf = (row, column) => Math.floor(row / width) * side + Math.floor(column / width);
  const each = (use) => rows.forEach((digits, row) => [...digits].forEach((digit, column) => use(row, column, parseInt(digit, 16) / 15)));
  each((row, column, share) => share && kept.add(blockOf(row, column)));
  const image = new ImageData(side, side);
  each((row, column, share) => {
    const under = kept.has(blockOf(row, column)) ? masked : empty;
    const mixed = pair.map((channel, index) => under[index] + (channel - under[index]) * share);
    image.data.set([...mixed, 255], (row * side + column) * 4);
  });
  const size = Math.round(canvas.clientWidth * devicePixelRatio);
  canvas.width = canvas.height = size;
  const small = Object.assign(document.createElement("canvas"), { width: side, height: side });
  small.getContext("2d").putImageData(image, 0, 0);
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = size < side;
  context.drawImage(small, 0, 0, size, size);
  const block = (width * size) / side;
  if (block < 6) return;
  context.fillStyle = `rgb(${line} / 0.2)`.replaceAll(",", " ");
  for (let at = block; at < size; at += block) {
    context.fillRect(Math.round(at), 0, 1, size);
    context.fillRect(0, Math.round(at), size, 1);
  }
}

function pointed(event, rows, cell) {
  const box = event.target.getBoundingClientRect();
  const at = (offset, size) => Math.min(Math.max(Math.floor((offset / size) * rows.length), 0), rows.length - 1);
  const [row, column] = [at(event.clientY - box.top, box.height), at(event.clientX - box.left, box.width)];
  const share = parseInt(rows[row][column], 16) / 15;
  const range = (index) => (cell === 1 ? index : `${index * cell} to ${Math.min((index + 1) * cell, view.length) - 1}`);
  const sees = cell === 1 ? (share ? "attends" : "does not attend") : share ? `${Math.round(share * 100)}% of pairs` : "no pair";
  return `query ${range(row)}, key ${range(column)}: ${sees}`;
}

function showHeads() {
  const box = element("heads");
  box.className = ["", "one", "two"][view.pictures.length] ?? "";
  const figures = view.pictures.map(({ users, blocks, rows }) => {
    const [figure, caption, canvas] = ["figure", "figcaption", "canvas"].map((name) => document.createElement(name));
    const all = view.all_blocks / view.heads;
    const text = Object.assign(document.createElement("span"), { textContent: ` · ${grouped(blocks)} of ${grouped(all)} blocks` });
    caption.append(users, text);
    canvas.addEventListener("pointermove", (event) => (element("hover").value = pointed(event, rows, view.cell)));
    canvas.addEventListener("pointerleave", () => (element("hover").value = ""));
    figure.append(caption, canvas);
    return figure;
  });
  box.replaceChildren(...figures);
  box.querySelectorAll("canvas").forEach((canvas, index) => paint(canvas, view.pictures[index].rows, view.cell));
}

// Numbers.

const percent = (share) => `${(share * 100).toPrecision(3)}%`;

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const unit = Math.min(Math.floor(Math.log2(Math.max(count, 1)) / 10), units.length - 1);
  return `${Number((count / 1024 ** unit).toPrecision(3))} ${units[unit]}`;
}

function showNumbers() {
  const [dense, sparse] = view.score_bytes;
  const texts = {
    density: percent(view.density),
    pairs: `${grouped(view.pairs)} of ${grouped(view.heads * view.length ** 2)}`,
    "block-density": percent(view.block_density),
    blocks: `${grouped(view.blocks)} of ${grouped(view.all_blocks)}`,
    scores: bytes(sparse),
    "dense-scores": `dense: ${bytes(dense)}`,
    "speed-up": `${view.speed_up.toPrecision(view.speed_up < 1 ? 2 : 3)}×`,
    over: `over dense ${view.causal ? "causal " : ""}attention, forward`,
    rust: view.rust,
    command: view.command,
    link: location.href.split("#")[0] + address(view),
  };
  for (const [id, text] of Object.entries(texts)) element(id).textContent = text;
}

// All of it.

let busy = false;
let changed = false;

async function update(changes) {
  Object.assign(state, changes);
  writeAddress();
  if (element("pattern").value !== state.pattern) element("pattern").value = state.pattern;
  showSliders();
  changed = true;
  if (busy) return;
  busy = true;
  element("result").setAttribute("aria-busy", true);
  while (changed) {
    changed = false;
    const request = { ...state };
    show(request, await ask(request));
  }
  element("result").setAttribute("aria-busy", false);
  busy = false;
}

function show(request, answer) {
  if (answer.notation && !notation.length) {
    notation = answer.notation;
    element("examples").append(...answer.examples.map((text) => new Option(text)));
    element("notation").append(...notation.map((form) => Object.assign(document.createElement("li"), { textContent: form })));
    showSliders();
  }
  element("pattern").setAttribute("aria-invalid", answer.error !== null);
  element("error").hidden = answer.error === null;
  element("error").textContent = answer.error ?? "";
  element("result").classList.toggle("stale", answer.error !== null);
  if (!answer.view) return;
  view = { ...request, ...answer.view };
  showNumbers();
  showHeads();
}

function main() {
  element("pattern").addEventListener("input", (event) => update({ pattern: event.target.value }));
  element("examples").addEventListener("change", (event) => {
    if (event.target.value) update({ pattern: event.target.value });
    event.target.value = "";
  });
  window.addEventListener("hashchange", () => (readAddress(), update({})));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view && showHeads());
  window.addEventListener("resize", () => view && showHeads());
  for (const button of document.querySelectorAll("button")) {
    const text = button.textContent;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(element(button.dataset.copy).textContent);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = text), 1200);
    });
  }
  readAddress();
  update({});
}

if (typeof WASM === "undefined") {
  element("error").hidden = false;
  element("error").textContent = "blocksparse.js is not built: run tools/playground/build in a checkout.";
} else {
  main();
}
