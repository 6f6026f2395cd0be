// The stream of one token: what was added where, and what could be read from it.

import { bar, make, percent, visible } from "./dom.js";

// `candidates` are those of the prediction, best first.
export function fillStages(table, stages, candidates) {
  const longest = Math.max(...stages.map((stage) => stage.length));
  const rows = stages.map((stage) => stageRow(stage, longest));
  const best = candidates.slice(0, stages[0].guesses.length);
  rows.push(stageLine("end", "the head: the prediction", best));
  table.tBodies[0].replaceChildren(...rows);
}

function stageRow(stage, longest) {
  const isEmbedding = stage.block === null;
  const name = isEmbedding ? "embedding" : `block ${stage.block} ${stage.part}`;
  const row = stageLine(stage.part, name, stage.guesses);
  row.dataset.length = stage.length;
  row.append(measure("length", stage.length, longest));
  if (!isEmbedding) row.append(measure("added", stage.change, longest));
  return row;
}

function stageLine(kind, name, guesses) {
  return make(
    "tr",
    { class: kind },
    make("th", { scope: "row" }, name),
    make("td", { class: "guesses" }, ...guesses.map(guess)),
  );
}

function guess({ text, probability }) {
  const chip = make("span", { class: "guess", "data-probability": probability });
  chip.style.setProperty("--share", probability);
  chip.append(make("b", {}, visible(text)), ` ${percent(probability)}`);
  return chip;
}

function measure(kind, value, longest) {
  const text = make("span", { class: "number" }, value.toFixed(1));
  const cell = make("td", { class: "measure", "data-label": kind });
  cell.append(bar(kind, value / longest), text);
  return cell;
}
