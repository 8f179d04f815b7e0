// The page: what is asked, when it is searched, and the way back.

import { picture, Refused, search, service } from "./api.js";
import { addCondition, onFilter, setColumns, where } from "./filters.js";
import { display, hide, onBox, pixels, setBox } from "./query.js";
import { render, verdict } from "./results.js";

const K = 24;
const by = (id) => document.getElementById(id);

let facts = []; // of the indexes that are served
let query = {}; // {file} or {id, index}; nothing: the rows are listed
let running = null; // aborts the search that is under way
const trail = [{}]; // queries that were asked, for the way back

function problem(words) {
  by("problem").hidden = !words;
  by("problem").textContent = words || "";
  if (words) by("problem").scrollIntoView({ block: "nearest" });
}

function chosen() {
  const names = [by("first").value, by("second").value].filter(Boolean);
  return names.map((name) => facts.find((one) => one.name === name));
}

const page = (offset = 0) => ({ k: K, offset, where: where(), expect: by("expect").value.trim() });
const asked = () => ({ ...query, box: pixels() });

async function one(index, wanted, signal) {
  try {
    const found = await search(index.name, wanted, page(), signal);
    return { facts: index, answer: found.answers[0], count: found.count, took: found.took };
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return { facts: index, problem: error.message };
  }
}

function summary(answers, milliseconds) {
  if (!answers.some((one) => one.answer?.results.length)) return "Nothing was found.";
  const took = answers.map((one) => one.took).filter(Boolean);
  if (!took.length) return "";
  const embedding = Math.max(...took.map((one) => one.embed));
  const part = embedding ? `, of which embedding ${Math.round(embedding)} ms` : "";
  return `Found in ${Math.round(milliseconds)} ms${part}.`;
}

async function ask() {
  running?.abort();
  const mine = new AbortController();
  running = mine;
  problem("");
  by("status").textContent = "Searching …";
  const began = performance.now();
  try {
    const wanted = asked();
    const answers = await Promise.all(chosen().map((index) => one(index, wanted, mine.signal)));
    if (running !== mine) return;
    const failed = answers.filter((one) => one.problem);
    if (failed.length === answers.length) {
      problem(failed[0].problem);
      by("status").textContent = "";
      by("columns").replaceChildren();
      verdict([]);
      return;
    }
    render(answers, { expected: by("expect").value.trim(), choose, again });
    verdict(answers);
    if (by("why").contains(document.activeElement)) by("verdict").scrollIntoView({ block: "nearest" });
    by("status").textContent = summary(answers, performance.now() - began);
  } catch (error) {
    if (error.name === "AbortError") return;
    by("status").textContent = "";
    problem(`This page made a mistake: ${error.message}`);
  }
}

async function again(index, offset) {
  try {
    return (await search(index.name, asked(), page(offset))).answers[0];
  } catch (error) {
    problem(error.message);
    return null;
  }
}

// Searching and showing the picture go on at the same time: the answer does not wait for the picture.
async function showQuery() {
  if (query.file) return display(URL.createObjectURL(query.file));
  if (query.id === undefined) return hide();
  const index = facts.find((one) => one.name === query.index);
  if (!index?.shown) return hide();
  const wanted = query;
  try {
    const { url, size } = await picture(query.index, query.id, 1024);
    if (query === wanted) await display(url, size);
  } catch {
    hide();
  }
}

function start(next, remember = true) {
  query = next;
  setBox(null);
  if (remember) {
    trail.length = (history.state?.place ?? 0) + 1;
    trail.push(next);
    history.pushState({ place: trail.length - 1 }, "");
  }
  showQuery();
  ask();
}

function choose(index, found) {
  start({ id: found.id, index });
  by("results").focus({ preventScroll: true }); // the button that was pressed goes away
  by("results").scrollIntoView({ block: "nearest" });
}

function take(files) {
  const found = [...(files || [])].find((file) => file.type.startsWith("image/") || file.type === "");
  if (found) start({ file: found });
  else if (files?.length) problem(`${files[0].name || "That"} is not a picture.`);
}

function describe() {
  const [first] = chosen();
  if (!first) return;
  const model = first.model_name ? `, vectors of ${first.model_name}` : "";
  const upload = first.pictures ? "" : ". Its model is not loaded: search by its own pictures";
  by("facts").textContent = `${first.vectors.toLocaleString()} pictures in ${first.name}${model}${upload}.`;
  setColumns(first.columns, first.labels);
}

// An index is compared with the others.
function offerOthers() {
  const [first, second] = [by("first").value, by("second").value];
  const others = facts.map(({ name }) => name).filter((name) => name !== first);
  by("second").replaceChildren(new Option("nothing", ""), ...others.map((name) => new Option(name, name)));
  by("second").value = others.includes(second) ? second : "";
}

async function open() {
  by("status").textContent = "Loading …";
  try {
    facts = (await service()).indexes;
  } catch (error) {
    by("status").textContent = "";
    problem(error.message);
    return;
  }
  by("first").replaceChildren(...facts.map(({ name }) => new Option(name, name)));
  offerOthers();
  by("compare").hidden = facts.length < 2;
  history.replaceState({ place: 0 }, "");
  describe();
  ask();
}

for (const id of ["file", "camera"]) {
  by(id).addEventListener("change", (event) => {
    take(event.target.files);
    event.target.value = "";
  });
}
by("first").addEventListener("change", () => { offerOthers(); describe(); ask(); });
by("second").addEventListener("change", ask);
by("addcondition").addEventListener("click", () => addCondition());
by("filter").addEventListener("toggle", () => { if (by("filter").open && !by("conditions").children.length) addCondition(); });
by("whyform").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
by("whole").addEventListener("click", () => { setBox(null); by("stage").focus(); ask(); });
by("clear").addEventListener("click", () => { start({}); by("file").focus(); });
addEventListener("popstate", (event) => start(trail[event.state?.place ?? 0] || {}, false));
addEventListener("paste", (event) => {
  const files = [...(event.clipboardData?.files || [])];
  if (files.length) { event.preventDefault(); take(files); }
});
addEventListener("dragover", (event) => { event.preventDefault(); by("drop").classList.add("over"); });
addEventListener("dragleave", (event) => { if (!event.relatedTarget) by("drop").classList.remove("over"); });
addEventListener("drop", (event) => {
  event.preventDefault();
  by("drop").classList.remove("over");
  if (event.dataTransfer?.files.length) take(event.dataTransfer.files);
  else problem("That was no file. Save the picture, and drop the file.");
});
onBox(ask);
onFilter(ask);
open();
