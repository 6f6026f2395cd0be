// A text as a row of tokens, one tab stop, walked through with the arrow keys.

import { make, percent, visible } from "./dom.js";

const STEPS = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };

// A strip on a list element. `onPick(index)` is told of clicks and keys,
// `onPoint(index or null)` of the pointer.
export function makeStrip(list, onPick, onPoint = () => {}) {
  list.addEventListener("click", (event) => {
    const index = indexOf(event.target);
    if (index !== null) onPick(index);
  });
  list.addEventListener("pointerover", (event) => onPoint(indexOf(event.target)));
  list.addEventListener("pointerleave", () => onPoint(null));
  list.addEventListener("keydown", (event) => {
    const index = indexOf(document.activeElement);
    const next = nextIndex(event.key, index, list.children.length);
    if (next === null) return;
    event.preventDefault();
    onPick(next);
    list.children[next].focus();
  });
  return list;
}

function indexOf(element) {
  const token = element.closest("[data-index]");
  return token === null ? null : Number(token.dataset.index);
}

function nextIndex(key, index, count) {
  if (index === null) return null;
  if (key === "Home") return 0;
  if (key === "End") return count - 1;
  if (!(key in STEPS)) return null;
  return Math.min(Math.max(index + STEPS[key], 0), count - 1);
}

export function fillStrip(list, tokens) {
  list.replaceChildren(
    ...tokens.map((text, index) => {
      const shown = text === "\n" ? "\u21b5\n" : text || "\u2205";
      const options = { class: "token", role: "option", "data-index": index };
      const item = make("li", { ...options, "aria-label": visible(text) }, shown);
      item.classList.toggle("faint", text === "\n");
      return item;
    }),
  );
}

export function selectToken(list, position) {
  for (const item of list.children) {
    const chosen = Number(item.dataset.index) === position;
    item.setAttribute("aria-selected", chosen);
    item.tabIndex = chosen ? 0 : -1;
  }
}

// The class of a surprise: 0 for the first level and below, and so on.
export function surpriseClass(nats, levels) {
  const above = levels.findIndex((level) => nats <= level);
  return above < 0 ? levels.length : above;
}

export function colorBySurprise(list, surprise, levels) {
  surprise.forEach((nats, index) => {
    const item = list.children[index];
    if (nats === null) return;
    item.dataset.nats = nats;
    item.classList.add(`surprise-${surpriseClass(nats, levels)}`);
    item.title = `${nats.toFixed(2)} nats`;
  });
}

export function fillSurpriseLegend(list, levels) {
  const names = levels.map((level, index) =>
    index === 0 ? `up to ${level}` : `${levels[index - 1]} to ${level}`,
  );
  names.push(`above ${levels.at(-1)} nats`);
  list.replaceChildren(
    ...names.map((name, index) =>
      make("li", {}, make("i", { class: `swatch surprise-${index}` }), name),
    ),
  );
}

// What a token cost, in words.
export function describeSurprise(view, position) {
  const name = `\u201c${visible(view.tokens[position])}\u201d`;
  const nats = view.surprise[position];
  const costs = view.surprise.filter((cost) => cost !== null);
  const mean = costs.reduce((sum, cost) => sum + cost, 0) / costs.length;
  const all = costs.length ? ` The text costs ${mean.toFixed(2)} nats a token.` : "";
  if (nats === null) return `${name} is the first token that is read.${all}`;
  const chance = percent(Math.exp(-nats));
  return `${name} was expected with ${chance}: ${nats.toFixed(2)} nats.${all}`;
}
