// Conditions on the metadata, as the service takes them.

import { Refused } from "./api.js";

const list = document.getElementById("conditions");
const TESTS = { "==": "is", "!=": "is not", "<": "<", "<=": "≤", ">": ">", ">=": "≥", missing: "is missing" };
const ORDERED = ["==", "!=", "<", "<=", ">", ">=", "missing"];
const BOOLEAN = ["==", "missing"];

let columns = {};
let labels = [];
let changed = () => {};

export function onFilter(action) {
  changed = action;
}

export function setColumns(kinds, names) {
  columns = kinds;
  labels = names;
  const known = document.getElementById("labels") || document.body.appendChild(document.createElement("datalist"));
  known.id = "labels";
  known.replaceChildren(...labels.map((name) => Object.assign(document.createElement("option"), { value: name })));
  for (const row of [...list.children]) if (!(row.querySelector("select").value in columns)) row.remove();
}

function select(values, name) {
  const made = document.createElement("select");
  made.setAttribute("aria-label", name);
  made.replaceChildren(...values.map(([value, text]) => new Option(text, value)));
  return made;
}

function fit(row) {
  const [column, test, value] = row.children;
  const kind = columns[column.value];
  const kept = test.value;
  const tests = kind === "boolean" ? BOOLEAN : ORDERED;
  test.replaceChildren(...tests.map((name) => new Option(TESTS[name], name)));
  test.value = tests.includes(kept) ? kept : "==";
  value.inputMode = kind === "integer" ? "numeric" : kind === "real" ? "decimal" : "text";
  value.placeholder = kind === "boolean" ? "true or false" : kind === "text" ? "text" : "number";
  if (column.value === "label") value.setAttribute("list", "labels");
  else value.removeAttribute("list");
  value.disabled = test.value === "missing";
}

export function addCondition(column = "label", test = "==", wanted = "") {
  const row = document.createElement("div");
  row.className = "condition";
  const value = Object.assign(document.createElement("input"), { type: "text", value: wanted, autocomplete: "off" });
  value.setAttribute("aria-label", "Value");
  const gone = Object.assign(document.createElement("button"), { type: "button", textContent: "✕" });
  gone.setAttribute("aria-label", "Remove the condition");
  const names = select(Object.keys(columns).map((name) => [name, name]), "Column");
  names.value = column in columns ? column : Object.keys(columns)[0];
  row.append(names, select(ORDERED.map((name) => [name, TESTS[name]]), "Test"), value, gone);
  list.append(row);
  fit(row);
  row.children[1].value = test;
  gone.addEventListener("click", () => {
    const filled = value.value.trim() !== "" || row.children[1].value === "missing";
    row.remove();
    document.getElementById("addcondition").focus();
    if (filled) changed();
  });
  row.addEventListener("change", () => {
    fit(row);
    changed();
  });
  value.focus();
}

// A value as its column holds it; text that is no number goes as it is, and the service says what is wrong. A whole
// number that this program would round is refused here.
function typed(text, kind) {
  if (kind === "boolean" && ["true", "false"].includes(text.toLowerCase())) return text.toLowerCase() === "true";
  const number = Number(text);
  if (kind === "integer" && Number.isInteger(number) && !Number.isSafeInteger(number)) {
    throw new Refused(`${text} has more digits than a browser can compare. Ask for it by roadmap search --filter.`);
  }
  return (kind === "integer" || kind === "real") && Number.isFinite(number) ? number : text;
}

export function where() {
  const parts = [];
  for (const row of list.children) {
    const [column, test, value] = row.children;
    if (test.value === "missing") parts.push({ [column.value]: null });
    else if (value.value.trim() !== "") parts.push({ [column.value]: { [test.value]: typed(value.value.trim(), columns[column.value]) } });
  }
  document.getElementById("filtercount").textContent = parts.length ? ` (${parts.length})` : "";
  return parts.length > 1 ? { and: parts } : parts[0] || {};
}
