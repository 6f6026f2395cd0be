// Small helpers to build elements and to write tokens and shares.

const BLANKS = { " ": "\u2423", "\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d" };

export function byId(id) {
  return document.getElementById(id);
}

// make("td", { class: "number", "data-token": 3 }, "text", child)
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// A token as it can be seen: blanks and line ends as symbols.
export function visible(text) {
  return text.replace(/[ \n\t\r]/g, (blank) => BLANKS[blank]) || "\u2205";
}

export function percent(share) {
  const value = 100 * share;
  if (value === 0) return "0 %";
  if (value < 0.1) return "< 0.1 %";
  return `${value.toFixed(value < 10 ? 1 : 0)} %`;
}

// A bar whose length the style sheet takes from --share, from 0 to 1.
export function bar(kind, share) {
  const element = make("span", { class: `bar ${kind}` });
  element.style.setProperty("--share", share);
  return element;
}
