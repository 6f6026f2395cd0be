// The sliders and the candidates for the next token.

import { bar, byId, make, percent, visible } from "./dom.js";

const MOST_CHOICES = 100; // of the top-k slider; one step further means all

export function setUpSliders(model, onChange) {
  const choices = Math.min(model.vocab_size, MOST_CHOICES);
  byId("temperature").max = Math.max(2, model.temperature);
  byId("temperature").value = model.temperature;
  byId("top-k").max = choices + 1;
  byId("top-k").value = model.top_k ?? choices + 1;
  byId("top-p").value = model.top_p ?? 1;
  for (const id of ["temperature", "top-k", "top-p"]) {
    byId(id).addEventListener("input", () => {
      tellSettings();
      onChange();
    });
  }
  tellSettings();
}

// The settings as the server takes them; null is no filter.
export function settings() {
  const topK = byId("top-k");
  const topP = Number(byId("top-p").value);
  return {
    temperature: Number(byId("temperature").value),
    top_k: topK.value === topK.max ? null : Number(topK.value),
    top_p: topP >= 1 ? null : topP,
  };
}

function tellSettings() {
  const { temperature, top_k: topK, top_p: topP } = settings();
  const sharp = temperature === 0 ? "0: always the best" : temperature.toFixed(2);
  tellSlider("temperature", sharp);
  tellSlider("top-k", topK === null ? "all" : String(topK));
  tellSlider("top-p", topP === null ? "all" : percent(topP));
}

function tellSlider(id, text) {
  byId(`${id}-value`).textContent = text;
  byId(id).setAttribute("aria-valuetext", text);
}

export function fillCandidates(table, candidates, areHeadsOff) {
  const top = Math.max(
    ...candidates.flatMap((row) => [row.probability, row.chance, row.whole]),
  );
  table.tBodies[0].replaceChildren(
    ...candidates.map((row) => candidateRow(row, top, areHeadsOff)),
  );
}

function candidateRow(row, top, areHeadsOff) {
  const model = make("td", {}, bar("model", row.probability / top));
  if (areHeadsOff) model.append(bar("whole", row.whole / top));
  model.append(make("span", { class: "number" }, percent(row.probability)));
  const drawn = make("td", {}, bar("drawn", row.chance / top));
  drawn.append(make("span", { class: "number" }, percent(row.chance)));
  const token = make("th", { scope: "row" }, visible(row.text));
  const line = make("tr", { class: row.chance === 0 ? "dropped" : "kept" });
  for (const name of ["token", "probability", "chance", "whole"]) {
    line.dataset[name] = row[name];
  }
  line.append(token, model, drawn);
  return line;
}
