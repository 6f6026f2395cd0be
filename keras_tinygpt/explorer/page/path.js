// The stream of one token: what was added where, and what could be read from it.

import { bar, make, percent, visible } from "./dom.js";

export function fillStages(table, stages) {
  const longest = Math.max(...stages.map((stage) => stage.length));
  table.tBodies[0].replaceChildren(...stages.map((stage) => stageRow(stage, longest)));
}

function stageRow(stage, longest) {
  const isEmbedding = stage.block === null;
  const name = isEmbedding ? "embedding" : `block ${stage.block} ${stage.part}`;
  const row = make("tr", { class: stage.part, "data-length": stage.length });
  row.append(
    make("th", { scope: "row" }, name),
    make("td", { class: "guesses" }, ...stage.guesses.map(guess)),
    make("td", { class: "measure" }, bar("length", stage.length / longest), number(stage.length)),
    make("td", { class: "measure" }, ...change(stage, longest)),
  );
  return row;
}

function guess({ text, probability }) {
  const chip = make("span", { class: "guess", "data-probability": probability });
  chip.style.setProperty("--share", probability);
  chip.append(make("b", {}, visible(text)), ` ${percent(probability)}`);
  return chip;
}

function change(stage, longest) {
  if (stage.change === null) return ["\u2013"];
  return [bar("change", stage.change / longest), number(stage.change)];
}

function number(value) {
  return make("span", { class: "number" }, value.toFixed(1));
}
