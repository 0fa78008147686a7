// Elements and words. Text of a model or a file gets into the page here and only as text.

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

// An HTML element; children are elements or strings, and strings become text.
const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

const percent = (share) => `${(100 * share).toFixed(2)} %`;
const interval = (low, high) => (low === null || high === null ? "unknown" : `${(100 * low).toFixed(1)} to ${(100 * high).toFixed(1)} %`);
const amount = (value, digits = 2) => (value === null ? "none" : value.toFixed(digits).replace("-", "\u2212"));
const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

// How an episode ended: the mark is drawn in a box of 16 by 16, so that colour is never alone.
const OUTCOMES = {
  goal: { words: "solved", mark: "M3 8.5 6.5 12 13 4.5" },
  stopped_early: { words: "stopped elsewhere", mark: "M4 4 12 12M12 4 4 12" },
  out_of_turns: { words: "out of turns", mark: "M4 3H12L4 13H12Z" },
  error: { words: "error", mark: "M8 2.5V9M8 12V13.5" },
  running: { words: "cut off", mark: "M3 8H13" },
};

const mark = (outcome) =>
  svg("svg", { class: `mark ${outcome}`, viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: OUTCOMES[outcome].mark }));

// A table with one heading row; every first cell is the heading of its row.
function fillTable(table, caption, headings, rows) {
  const head = el("tr", {}, ...headings.map((text) => el("th", { scope: "col" }, text)));
  const body = rows.map(([first, ...rest]) =>
    el("tr", {}, el("th", { scope: "row" }, first), ...rest.map((text) => el("td", {}, text))));
  table.replaceChildren(el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, ...body));
  return table;
}
