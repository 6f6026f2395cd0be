// The page: what is shown of a model and a text, and what the reader does about it.

import { ask, askLines, recorded } from "./api.js";
import { drawScale } from "./colors.js";
import { byId, visible } from "./dom.js";
import {
  cellAt, colorByAttention, describeCell, describeHead, drawMap, fillGrid, fillLinks,
  makeGrid, markCell, scaledMaps, selectHead, sharpestHead, strongest,
} from "./maps.js";
import { fillCandidates, settings, setUpSliders } from "./next.js";
import { fillStages } from "./path.js";
import {
  colorBySurprise, describeSurprise, fillStrip, fillSurpriseLegend, makeStrip,
  selectToken,
} from "./text.js";

const state = {
  model: null,
  view: null, // the last answer to "read"
  prompt: null, // what the prompt said when that was asked
  position: 0, // the chosen token
  pointed: null, // the token under the pointer
  key: null, // the token it is seen to read on the map; null for the one it reads most
  block: null,
  head: null,
  without: [], // [block, head] of those switched off
  draws: 0, // since the prompt was read: each draw has a seed of its own
};
const running = {}; // what can be stopped, by name

// Runs one task of a name at a time: a new one stops the one before.
async function run(name, task) {
  running[name]?.abort();
  const controller = new AbortController();
  running[name] = controller;
  document.body.dataset.busy = true;
  tell("");
  try {
    await task(controller.signal);
  } catch (error) {
    if (error.name !== "AbortError") tell(error.message);
  } finally {
    if (running[name] === controller) delete running[name];
    document.body.dataset.busy = Object.keys(running).length > 0;
  }
}

function tell(message) {
  byId("message").textContent = message;
  byId("message").hidden = message === "";
}

// Reading -------------------------------------------------------------------------

// Asks for a text or for ids and shows the answer; `position` is of the shown tokens.
function read(question, position = Infinity) {
  running.predict?.abort(); // it is about the view before
  return run("read", async (signal) => {
    const asked = { ...question, without: state.without };
    const view = await ask("/api/read", asked, signal);
    const unit = state.model.weight_unit;
    state.view = { ...view, weights: scaledMaps(view.weights ?? [], unit) };
    if ("text" in question) state.prompt = asInBox(question.text);
    state.position = Math.min(position, view.tokens.length - 1);
    state.key = null;
    showView();
    await predict(signal);
  });
}

// Asks what follows the chosen token.
async function predict(signal) {
  const { view, position, without } = state;
  const question = { ids: view.ids, position, without, ...settings() };
  const answer = await ask("/api/position", question, signal);
  byId("next-token").textContent = visible(view.tokens[position]);
  fillCandidates(byId("candidates"), answer.candidates, without.length > 0);
  byId("whole-note").hidden = without.length === 0;
  if (answer.stages.length) {
    fillStages(byId("stages"), answer.stages, answer.candidates);
  }
}

function showView() {
  const { view, model } = state;
  for (const id of ["tokens", "readers"]) fillStrip(byId(id), view.tokens);
  colorBySurprise(byId("tokens"), view.surprise, model.surprise_levels);
  if (model.blocks) showHeads();
  showPosition();
  byId("status").textContent =
    view.start > 0
      ? `${view.ids.length} tokens; the model reads the last ${model.length} of them.`
      : `${view.ids.length} tokens of at most ${model.length} that the model reads.`;
}

function showPosition() {
  const { view, position, model } = state;
  for (const id of ["tokens", "readers"]) selectToken(byId(id), position);
  byId("token-note").textContent = describeSurprise(view, position);
  if (model.blocks) showLinks();
}

function pick(position) {
  if (position === state.position) return;
  state.position = position;
  state.key = null;
  showPosition();
  run("predict", predict);
}

// Heads ---------------------------------------------------------------------------

const isOff = (block, head) =>
  state.without.some(([b, h]) => b === block && h === head);

const rows = () => state.view.weights[state.block][state.head];

function showHeads() {
  const { view } = state;
  if (state.block === null) [state.block, state.head] = sharpestHead(view.metrics);
  byId("heads").hidden = false;
  fillGrid(byId("grid"), view, isOff, state.model.attention_window);
  byId("restore").hidden = state.without.length === 0;
  showHead();
}

function showHead() {
  const { view, block, head } = state;
  selectHead(byId("grid"), block, head);
  byId("head-title").textContent = `Block ${block}, head ${head}`;
  byId("head-metrics").textContent = describeHead(view.metrics, block, head);
  byId("switch").textContent = isOff(block, head) ? "Turn it on" : "Turn it off";
  byId("map-box").classList.toggle("switched-off", isOff(block, head));
  drawMap(byId("map"), rows(), state.model.attention_window);
}

// What the token under the pointer, else the chosen one, reads and is read by.
function showLinks() {
  const { view, model, position } = state;
  const token = state.pointed ?? position;
  const key = state.key ?? strongest(rows()[token]);
  colorByAttention(byId("readers"), rows(), token);
  fillLinks(view.tokens, rows(), token);
  markCell(byId("map-box"), view.tokens.length, token, key);
  byId("readout").textContent = describeCell(
    view.tokens, rows(), token, key, model.attention_window,
  );
}

function lookAt(block, head) {
  Object.assign(state, { block, head, key: null });
  showHead();
  showLinks();
}

function switchHead(block, head) {
  const others = state.without.filter(([b, h]) => b !== block || h !== head);
  const isOn = others.length === state.without.length;
  if (recorded !== null) others.length = 0; // it knows one head off at a time
  changeWithout(isOn ? [...others, [block, head]] : others);
}

function changeWithout(without) {
  state.without = without;
  read({ ids: state.view.ids }, state.position);
}

function point(token, key = null) {
  state.pointed = token;
  state.key = key;
  showLinks();
}

const MOVES = {
  ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
};

function moveOnMap(event) {
  if (!(event.key in MOVES)) return;
  event.preventDefault();
  const last = state.view.tokens.length - 1;
  const [down, right] = MOVES[event.key];
  const key = state.key ?? strongest(rows()[state.position]);
  const within = (place) => Math.min(Math.max(place, 0), last);
  if (down !== 0) pick(within(state.position + down));
  point(null, within(key + right));
}

function setUpHeads({ blocks, heads }) {
  byId("no-heads").hidden = blocks > 0;
  byId("heads").hidden = true; // until there is a view
  byId("path-card").hidden = blocks === 0;
  if (!blocks) return;
  makeGrid(byId("grid"), blocks, heads, lookAt, switchHead);
  drawScale(byId("scale"));
  makeStrip(byId("readers"), pick, (token) => point(token));
  byId("switch").addEventListener("click", () => switchHead(state.block, state.head));
  byId("restore").addEventListener("click", () => changeWithout([]));
  const box = byId("map-box");
  const cell = (event) => cellAt(box, event, state.view.tokens.length);
  box.addEventListener("keydown", moveOnMap);
  box.addEventListener("pointermove", (event) => {
    const { query, key } = cell(event);
    point(query, key);
  });
  box.addEventListener("pointerleave", () => point(null));
  box.addEventListener("click", (event) => pick(cell(event).query));
}

// Writing -------------------------------------------------------------------------

async function draw(count) {
  if (running.write) {
    running.write.abort();
    return;
  }
  if (!isPromptRead()) await readPrompt();
  if (!isPromptRead()) return; // it was refused
  await run("write", async (signal) => {
    byId("write").textContent = "Stop";
    const { ids, text } = state.view;
    const grown = { ids: [...ids], text };
    const seed = Number(byId("seed").value) + state.draws;
    const question = { ids, count, seed, without: state.without, ...settings() };
    state.draws += 1;
    try {
      for await (const piece of askLines("/api/write", question, signal)) {
        if (piece.ids) grow(grown, piece);
      }
    } finally {
      byId("write").textContent = "Write on";
      if (grown.ids.length > ids.length) await readGrown(grown.ids);
    }
  });
}

// The text of all ids: a character may take several, and come in parts.
async function readGrown(ids) {
  await read({ ids });
  if (state.view.ids.length !== ids.length) return; // something else was asked
  state.prompt = asInBox(state.view.text);
  byId("prompt").value = state.prompt;
}

const isPromptRead = () => byId("prompt").value === state.prompt;

// The browser knows one kind of line end.
const asInBox = (text) => text.replace(/\r\n?/g, "\n");

function readPrompt() {
  state.draws = 0;
  return read({ text: byId("prompt").value });
}

function grow(grown, piece) {
  grown.ids.push(...piece.ids);
  grown.text += piece.text;
  byId("prompt").value = grown.text;
  byId("tokens").append(piece.text);
}

function setUpWriting({ most_new_tokens: most }) {
  byId("count").max = most;
  byId("step").addEventListener("click", () => draw(1));
  byId("write").addEventListener("click", () => draw(byId("count").valueAsNumber));
  byId("seed").addEventListener("input", () => {
    state.draws = 0;
  });
}

// Beginning -----------------------------------------------------------------------

function describeModel(model) {
  const facts = [
    `${model.parameters.toLocaleString("en")} parameters`,
    model.blocks
      ? `${model.blocks} blocks of ${model.heads} heads`
      : `${model.layers} LSTM layer${model.layers > 1 ? "s" : ""}`,
    `vectors of ${model.hidden_dim}`,
    `${model.vocab_size.toLocaleString("en")} tokens (${model.tokenizer})`,
  ];
  if (model.positions) facts.push(`${model.positions} positions`);
  byId("name").textContent = model.name;
  byId("facts").textContent = facts.join(" \u00b7 ");
  document.title = `${model.name} \u2013 tinygpt explorer`;
}

function setUpPrompt(model) {
  byId("prompt").maxLength = model.most_characters;
  byId("prompt").value = model.prompt;
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    readPrompt();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) readPrompt();
  });
}

// What needs the model does not work in a page that was written to a file.
function setUpRecord() {
  const ids = [
    "prompt", "read", "step", "write", "count", "seed", "temperature", "top-k", "top-p",
  ];
  for (const id of ids) byId(id).disabled = true;
  byId("record-note").hidden = false;
}

await run("start", async (signal) => {
  const model = await ask("/api/model", undefined, signal);
  state.model = model;
  describeModel(model);
  setUpPrompt(model);
  setUpSliders(model, () => state.view && run("predict", predict));
  setUpWriting(model);
  setUpHeads(model);
  makeStrip(byId("tokens"), pick);
  fillSurpriseLegend(byId("surprise-legend"), model.surprise_levels);
  if (recorded !== null) setUpRecord();
  await read({ text: model.prompt });
});
