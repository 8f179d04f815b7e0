// The picture that is searched by, and the box on it.

const stage = document.getElementById("stage");
const image = document.getElementById("picture");
const box = document.getElementById("box");
const drop = document.getElementById("drop");
const LEAST = 4; // pixels on the screen; less is a click, not a box

let natural = [0, 0]; // pixels of the picture itself
let area = null; // the box as shares of the picture: [left, top, width, height]
let changed = () => {};

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

export function onBox(action) {
  changed = action;
}

// The box in pixels of the picture, or null.
export function pixels() {
  if (!area) return null;
  const [left, top, width, height] = area;
  const x = Math.round(left * natural[0]);
  const y = Math.round(top * natural[1]);
  const across = clamp(Math.round(width * natural[0]), 1, natural[0] - x);
  return [x, y, across, clamp(Math.round(height * natural[1]), 1, natural[1] - y)];
}

export function setBox(shares) {
  area = shares;
  box.hidden = !area;
  document.getElementById("whole").hidden = !area;
  if (!area) return;
  const names = ["left", "top", "width", "height"];
  names.forEach((name, i) => { box.style[name] = `${100 * area[i]}%`; });
}

const SHOWN = { stage: "seen", boxhint: "seen", invitation: "none", unseen: "unseen" };
let turn = 0; // of the picture that was asked for last: an earlier one that is slow to decode changes nothing any more

function reveal(state) {
  for (const [id, when] of Object.entries(SHOWN)) document.getElementById(id).hidden = when !== state;
  document.getElementById("clear").hidden = state === "none";
  drop.classList.toggle("full", state === "seen");
}

// Show a picture. One that the browser cannot show can still be searched by.
export async function display(url, size) {
  setBox(null);
  turn += 1;
  const mine = turn;
  const old = image.src;
  image.src = url;
  let seen = true;
  try {
    await image.decode();
  } catch {
    seen = false; // the service says what is wrong with it
  }
  if (old.startsWith("blob:")) URL.revokeObjectURL(old);
  if (mine !== turn) return;
  natural = size && size[0] ? size : [image.naturalWidth, image.naturalHeight];
  reveal(seen ? "seen" : "unseen");
}

export function hide() {
  setBox(null);
  turn += 1;
  if (image.src.startsWith("blob:")) URL.revokeObjectURL(image.src);
  image.removeAttribute("src");
  reveal("none");
}

function place(event) {
  const frame = image.getBoundingClientRect();
  const x = clamp((event.clientX - frame.left) / frame.width, 0, 1);
  return [x, clamp((event.clientY - frame.top) / frame.height, 0, 1)];
}

let start = null;

stage.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  event.preventDefault();
  stage.focus();
  stage.setPointerCapture(event.pointerId);
  start = place(event);
});

stage.addEventListener("pointermove", (event) => {
  if (!start) return;
  const end = place(event);
  const corner = [Math.min(start[0], end[0]), Math.min(start[1], end[1])];
  setBox([...corner, Math.abs(end[0] - start[0]), Math.abs(end[1] - start[1])]);
});

function finish() {
  if (!start) return;
  start = null;
  if (!area) return;
  const small = area[2] * image.clientWidth < LEAST || area[3] * image.clientHeight < LEAST;
  if (small) setBox(null);
  changed();
}

stage.addEventListener("pointerup", finish);
stage.addEventListener("pointercancel", finish);

const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

stage.tabIndex = 0;
stage.setAttribute("role", "group");
stage.setAttribute("aria-label", "The picture. B for a box, arrows move it, Shift and arrows resize it, Enter searches.");
stage.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const step = STEPS[event.key];
  if (event.key === "b" || event.key === "B") {
    setBox([0.25, 0.25, 0.5, 0.5]);
    changed();
  } else if (event.key === "Escape" && area) {
    setBox(null);
    changed();
  } else if (event.key === "Enter") {
    changed();
  } else if (step && area) {
    const [left, top, width, height] = area;
    const [x, y] = step.map((one) => 0.02 * one);
    if (event.shiftKey) setBox([left, top, clamp(width + x, 0.02, 1 - left), clamp(height + y, 0.02, 1 - top)]);
    else setBox([clamp(left + x, 0, 1 - width), clamp(top + y, 0, 1 - height), width, height]);
  } else return;
  event.preventDefault();
});
