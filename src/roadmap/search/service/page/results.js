// What was found: one column for each index.

import { show } from "./api.js";

const columns = document.getElementById("columns");

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function frame(index, found, shown) {
  const made = element("span", { className: "frame" });
  if (!shown) {
    made.textContent = "No picture";
    return made;
  }
  const image = element("img", { alt: "", decoding: "async", loading: "lazy" });
  image.addEventListener("error", () => { made.textContent = "Picture not there"; });
  show(image, index, found.id).catch(() => { made.textContent = "Picture not there"; });
  made.append(image);
  return made;
}

// Names of folders have no blanks to break a line at.
function breakable(text) {
  return text.split(/(?<=[_/.-])/).flatMap((part) => [part, element("wbr")]);
}

function card(facts, found, rank, expected, choose) {
  const label = found.metadata.label;
  const words = element("span", { className: "words" });
  if (found.score !== null) {
    const meter = element("meter", { min: 0, max: 1, value: Math.max(0, found.score) });
    meter.setAttribute("aria-hidden", "true");
    const score = element("b", { textContent: found.score.toFixed(3), title: "Cosine with the query; 1 is the same" });
    words.append(element("span", { className: "score" }, element("span", { textContent: `${rank}` }), score), meter);
  }
  words.append(element("span", { className: "label" }, ...breakable(label === null ? "without a label" : label)));
  words.append(element("span", { className: "id" }, element("bdi", { textContent: found.id })));
  const made = element("button", { type: "button", className: "card", title: describe(found) });
  if (found.id === expected) made.classList.add("expected");
  const score = found.score === null ? "" : `, score ${found.score.toFixed(3)}`;
  made.setAttribute("aria-label", `${rank}: ${label === null ? found.id : label}${score}. Search by it`);
  made.append(frame(facts.name, found, facts.shown), words);
  made.addEventListener("click", () => choose(facts.name, found));
  return element("li", {}, made);
}

function describe(found) {
  return Object.entries(found.metadata).map(([name, value]) => `${name}: ${value === null ? "–" : value}`).join("\n");
}

// answers: [{facts, answer, count, problem}]; again(facts, offset) gives the next page of one index.
export function render(answers, { expected, choose, again }) {
  columns.classList.toggle("two", answers.length > 1);
  columns.replaceChildren(...answers.map(({ facts, answer, count, problem }) => {
    const column = element("div", { className: "column" });
    column.dataset.index = facts.name;
    const model = facts.model_name ? ` · ${facts.model_name}` : "";
    const many = count === undefined ? "" : ` · ${count.toLocaleString()} ${count === 1 ? "row" : "rows"}`;
    const note = element("span", { textContent: `${model}${many}` });
    if (answers.length > 1 || many) column.append(element("h2", { textContent: facts.name }, note));
    if (problem) {
      column.append(element("p", { className: "empty", textContent: problem }));
      return column;
    }
    const grid = element("ol", { className: "grid" });
    const add = (results, offset) => {
      grid.append(...results.map((found, i) => card(facts, found, offset + i + 1, expected, choose)));
    };
    add(answer.results, 0);
    column.append(grid);
    if (!answer.results.length) column.append(element("p", { className: "empty", textContent: facts.vectors ? "Nothing passes the filter." : "The index is empty." }));
    if (answer.more) column.append(moreButton(grid, facts, again, add));
    return column;
  }));
}

function moreButton(grid, facts, again, add) {
  const button = element("button", { type: "button", className: "more", textContent: "More" });
  button.addEventListener("click", async () => {
    button.disabled = true;
    const offset = grid.children.length;
    const answer = await again(facts, offset);
    button.disabled = false;
    if (!answer) return;
    add(answer.results, offset);
    grid.children[offset]?.querySelector("button").focus();
    if (!answer.more) button.remove();
  });
  return button;
}

export function verdict(answers) {
  const made = answers.filter(({ answer }) => answer && answer.expected).map(({ facts, answer }) => {
    const { id, rank, score, among, passes } = answer.expected;
    if (rank === null) return element("p", {}, ...breakable(id), ` is not in ${facts.name}.`);
    const line = element("p", {}, element("b", { textContent: `Rank ${rank.toLocaleString()}` }));
    line.append(` of ${among.toLocaleString()}, score ${score.toFixed(3)}${answers.length > 1 ? `, in ${facts.name}` : ""}. `);
    const last = answer.results[answer.results.length - 1];
    if (!passes) line.append("The filter leaves it out; this is the rank it would have.");
    else if (rank > answer.results.length && last) line.append(`The last one shown scores ${last.score.toFixed(3)}.`);
    return line;
  });
  document.getElementById("verdict").replaceChildren(...made);
}
