// Questions to the server; in a page without one, the answers recorded in the page.

export const recorded = readRecord(document.getElementById("recorded"));

function readRecord(element) {
  return element === null ? null : JSON.parse(element.textContent);
}

export async function ask(path, question, signal) {
  if (recorded !== null) return remember(path, question);
  const response = await send(path, question, signal);
  return response.json();
}

// The lines of an answer that comes piece by piece, as objects.
export async function* askLines(path, question, signal) {
  const response = await send(path, question, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (waiting + value).split("\n");
    waiting = lines.pop();
    for (const line of lines) {
      const answer = JSON.parse(line);
      if (answer.error) throw new Error(answer.error);
      yield answer;
    }
  }
}

async function send(path, question, signal) {
  const options = { signal };
  if (question !== undefined) {
    options.method = "POST";
    options.headers = { "Content-Type": "application/json" };
    options.body = JSON.stringify(question);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer; is tinygpt explore still running?");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new Error(answer.error ?? `the server answered ${response.status}`);
}

function remember(path, question) {
  if (path === "/api/model") return recorded.model;
  if (path === "/api/read") return { ...recorded.read, without: question.without };
  const [head] = question.without;
  if (head === undefined) return recorded.positions[question.position];
  if (question.position === recorded.positions.length - 1) {
    return recorded.heads[head.join(".")];
  }
  throw new Error(
    "This file knows the prediction without a head at the last token alone; "
    + "tinygpt explore shows them all.",
  );
}
