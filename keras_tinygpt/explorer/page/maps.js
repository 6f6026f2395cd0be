// Attention maps: one large, all small, and what a token reads and who reads it.

import { stretch, viridis } from "./colors.js";
import { byId, make, percent, visible } from "./dom.js";

const LISTED = 5;

// Maps as they travel, in whole units, as weights from 0 to 1.
export function scaledMaps(maps, unit) {
  const scaledRow = (row) => row.map((weight) => weight * unit);
  return maps.map((block) => block.map((head) => head.map(scaledRow)));
}

// Whether a token may read another; `span` is how many it reads, null for all.
function isReadable(query, key, span) {
  return key <= query && (span === null || query - key < span);
}

// Draws the rows of a map, a pixel a weight; what is masked stays transparent.
export function drawMap(canvas, rows, span) {
  const length = rows.length;
  canvas.width = length;
  canvas.height = length;
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(length, length);
  rows.forEach((row, query) => {
    row.forEach((weight, key) => {
      if (!isReadable(query, key, span)) return;
      const color = viridis(stretch(weight));
      pixels.data.set([...color, 255], 4 * (query * length + key));
    });
  });
  context.putImageData(pixels, 0, 0);
}

// The weights of one token: how much it reads of each token, and each of it.
export function linksOf(rows, token) {
  return {
    reads: rows[token],
    readBy: rows.map((row, query) => (query > token ? row[token] : 0)),
  };
}

export function strongest(weights) {
  return weights.indexOf(Math.max(...weights));
}

// Colours the tokens of a strip by what one of them reads and who reads it.
export function colorByAttention(list, rows, token) {
  const { reads, readBy } = linksOf(rows, token);
  for (const item of list.children) {
    const index = Number(item.dataset.index);
    const weight = index <= token ? reads[index] : readBy[index];
    item.classList.toggle("read", index <= token);
    item.classList.toggle("reading", index > token);
    item.classList.toggle("pointed", index === token);
    item.style.setProperty("--share", stretch(weight));
    item.dataset.weight = weight;
  }
}

export function fillLinks(tokens, rows, token) {
  const { reads, readBy } = linksOf(rows, token);
  fillLinkList(byId("reads"), tokens, reads);
  fillLinkList(byId("read-by"), tokens, readBy);
}

function fillLinkList(list, tokens, weights) {
  const best = weights
    .map((weight, index) => ({ weight, index }))
    .filter(({ weight }) => weight > 0)
    .sort((first, second) => second.weight - first.weight)
    .slice(0, LISTED);
  list.replaceChildren(
    ...best.map(({ weight, index }) =>
      make(
        "li",
        { "data-index": index, "data-weight": weight },
        make("b", {}, visible(tokens[index])),
        ` at ${index}: ${percent(weight)}`,
      ),
    ),
  );
  if (!best.length) list.append(make("li", { class: "none" }, "no token"));
}

// Marks a row and a column of the large map.
export function markCell(box, length, query, key) {
  box.style.setProperty("--row", query / length);
  box.style.setProperty("--column", key / length);
  box.style.setProperty("--size", 1 / length);
}

// The query and key under the pointer.
export function cellAt(box, event, length) {
  const { left, top, width, height } = box.getBoundingClientRect();
  const place = (offset, size) =>
    Math.min(Math.max(Math.floor((offset / size) * length), 0), length - 1);
  return {
    query: place(event.clientY - top, height),
    key: place(event.clientX - left, width),
  };
}

export function describeCell(tokens, rows, query, key, span) {
  const name = (index) => `\u201c${visible(tokens[index])}\u201d (${index})`;
  if (!isReadable(query, key, span)) {
    const reason = key > query ? "it comes later" : "it is too far back";
    return `${name(query)} cannot read ${name(key)}: ${reason}.`;
  }
  return `${name(query)} reads ${name(key)} with ${percent(rows[query][key])}.`;
}

// A sentence on a head; `metrics` are those of the whole model.
export function describeHead(metrics, block, head) {
  if (metrics === null) return "A single token says nothing about a head.";
  const of = (name) => metrics[name][block][head];
  return (
    `Looks ${of("distance").toFixed(1)} tokens back on average; entropy `
    + `${of("entropy").toFixed(2)} nats, ${percent(of("entropy_share"))} of the most `
    + `possible. ${percent(of("previous"))} of the weight is on the token before, `
    + `${percent(of("first"))} on the first, ${percent(of("own"))} on itself.`
  );
}

// The overview: a row a block, with a map and a switch for each head.
export function makeGrid(box, blocks, heads, onPick, onSwitch) {
  box.style.setProperty("--heads", heads);
  for (let block = 0; block < blocks; block += 1) {
    box.append(make("h4", {}, `Block ${block}`));
    for (let head = 0; head < heads; head += 1) {
      box.append(gridCell(block, head, onPick, onSwitch));
    }
  }
}

function gridCell(block, head, onPick, onSwitch) {
  const name = `block ${block}, head ${head}`;
  const pick = make(
    "button",
    { type: "button", class: "pick", "aria-label": `Look at ${name}` },
    make("canvas"),
    make("span", { class: "caption" }),
  );
  const off = make("button", { type: "button", class: "off", "data-name": name });
  pick.addEventListener("click", () => onPick(block, head));
  off.addEventListener("click", () => onSwitch(block, head));
  return make("div", { class: "head", "data-head": `${block}.${head}` }, pick, off);
}

export function fillGrid(box, view, isOff, span) {
  for (const cell of box.querySelectorAll(".head")) {
    const [block, head] = cell.dataset.head.split(".").map(Number);
    drawMap(cell.querySelector("canvas"), view.weights[block][head], span);
    cell.classList.toggle("switched-off", isOff(block, head));
    tellSwitch(cell.querySelector(".off"), isOff(block, head));
    cell
      .querySelector(".caption")
      .replaceChildren(...headCaption(view.metrics, block, head));
  }
}

function tellSwitch(button, isOff) {
  button.textContent = isOff ? "turn on" : "turn off";
  button.setAttribute("aria-label", `${button.textContent} ${button.dataset.name}`);
  button.classList.toggle("is-off", isOff);
}

function headCaption(metrics, block, head) {
  if (metrics === null) return [];
  const distance = metrics.distance[block][head].toFixed(1);
  const entropy = metrics.entropy[block][head].toFixed(1);
  const parts = [`${distance} back,`, `${entropy} nats`];
  return parts.flatMap((part) => [make("span", {}, part), " "]);
}

export function selectHead(box, block, head) {
  for (const cell of box.querySelectorAll(".head")) {
    const chosen = cell.dataset.head === `${block}.${head}`;
    cell.querySelector(".pick").setAttribute("aria-pressed", chosen);
  }
}

// The head whose attention is the most certain: the one to begin with.
export function sharpestHead(metrics) {
  if (metrics === null) return [0, 0];
  const all = metrics.entropy_share.flatMap((row, block) =>
    row.map((share, head) => ({ share, block, head })),
  );
  const { block, head } = all.reduce((best, each) =>
    each.share < best.share ? each : best,
  );
  return [block, head];
}
