"use strict";
// Tabs: without this script all panels stand below one another, and so they do on paper.
for (const box of document.querySelectorAll(".tabs")) {
  const panels = [...box.children].filter((child) => child.classList.contains("panel"));
  const list = document.createElement("div");
  list.className = "tablist";
  list.setAttribute("role", "tablist");
  const buttons = panels.map((panel, number) => {
    const button = document.createElement("button");
    button.type = "button";
    button.id = `${box.dataset.name}-tab-${number}`;
    button.textContent = panel.querySelector(".title").textContent;
    button.setAttribute("role", "tab");
    panel.id = `${box.dataset.name}-panel-${number}`;
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-labelledby", button.id);
    button.setAttribute("aria-controls", panel.id);
    button.addEventListener("click", () => show(number));
    list.append(button);
    return button;
  });
  const show = (chosen) => {
    panels.forEach((panel, number) => { panel.hidden = number !== chosen; });
    buttons.forEach((button, number) => {
      button.setAttribute("aria-selected", String(number === chosen));
      button.tabIndex = number === chosen ? 0 : -1;
    });
  };
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const now = buttons.indexOf(document.activeElement);
    if (!step || now < 0) return;
    const next = (now + step + buttons.length) % buttons.length;
    show(next);
    buttons[next].focus();
    event.preventDefault();
  });
  box.prepend(list);
  box.classList.add("tabbed");
  show(0);
}
// On paper everything is unfolded that is not very long.
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open]):not(.long)")];
  for (const one of folded) one.open = true;
});
addEventListener("afterprint", () => { for (const one of folded) one.open = false; });

const source = document.getElementById("map-data");
if (source) drawMap(JSON.parse(source.textContent));

function drawMap(data) {
  const box = document.getElementById("map-box"), canvas = box.querySelector("canvas"), pen = canvas.getContext("2d");
  const label = document.getElementById("map-label"), model = document.getElementById("map-model");
  const chooser = document.getElementById("map-class"), count = data.files.length;
  const sheet = new Image();
  const view = { x: 0, y: 0, zoom: 1 }; // the middle of the view, in units of the map
  let points = data.maps[0].at, marked = -1, under = -1, waiting = false;

  // how far the maps reach from their middle, so that they fill a box of any shape
  const reach = [0, 1].map((axis) => Math.max(1e-6, ...data.maps.flatMap(
    (map) => map.at.filter((_, i) => i % 2 === axis).map((value) => Math.abs(value) / data.scale))));
  const room = 72; // for pictures at the edges
  const size = () => Math.min(
    (canvas.clientWidth - room) / reach[0], (canvas.clientHeight - room) / reach[1]) / 2 * view.zoom;
  const screenX = (i) => canvas.clientWidth / 2 + (points[2 * i] / data.scale - view.x) * size();
  const screenY = (i) => canvas.clientHeight / 2 - (points[2 * i + 1] / data.scale - view.y) * size();
  const colour = (i, strength) => `hsl(${(data.class[i] * 137.508) % 360} 62% 50% / ${strength})`;
  const tile = () => Math.min(64, 2.1 * size() * Math.sqrt(reach[0] * reach[1] / count)); // side of a picture where points lie evenly

  function draw() {
    waiting = false;
    const dense = window.devicePixelRatio || 1, wide = canvas.clientWidth, high = canvas.clientHeight;
    if (canvas.width !== Math.round(wide * dense) || canvas.height !== Math.round(high * dense)) {
      canvas.width = Math.round(wide * dense);
      canvas.height = Math.round(high * dense);
    }
    pen.setTransform(dense, 0, 0, dense, 0, 0);
    pen.clearRect(0, 0, wide, high);
    const side = tile(), pictures = side >= 14 && sheet.complete && sheet.naturalWidth > 0;
    for (const wanted of [false, true]) for (let i = 0; i < count; i++) {
      if ((data.class[i] === marked) !== wanted) continue;
      const x = screenX(i), y = screenY(i);
      if (x < -side || y < -side || x > wide + side || y > high + side) continue;
      pen.globalAlpha = marked >= 0 && !wanted ? 0.16 : 1;
      if (pictures) picture(i, x, y, side);
      else dot(i, x, y, wanted ? 5 : 3.2);
    }
    pen.globalAlpha = 1;
    if (under >= 0) ring(screenX(under), screenY(under), pictures ? side * 0.72 : 8);
    box.dataset.view = `${view.x.toFixed(4)} ${view.y.toFixed(4)} ${view.zoom.toFixed(4)}`;
  }
  function picture(i, x, y, side) {
    const at = data.cell * (i % data.columns), down = data.cell * Math.floor(i / data.columns);
    pen.fillStyle = colour(i, 1);
    pen.fillRect(x - side / 2 - 2, y - side / 2 - 2, side + 4, side + 4);
    pen.drawImage(sheet, at, down, data.cell, data.cell, x - side / 2, y - side / 2, side, side);
  }
  function dot(i, x, y, radius) {
    pen.fillStyle = colour(i, 0.9);
    pen.beginPath();
    pen.arc(x, y, radius, 0, 7);
    pen.fill();
  }
  function ring(x, y, radius) {
    pen.strokeStyle = getComputedStyle(canvas).color;
    pen.lineWidth = 2;
    pen.beginPath();
    pen.arc(x, y, radius, 0, 7);
    pen.stroke();
  }
  function redraw() {
    if (!waiting) { waiting = true; requestAnimationFrame(draw); }
  }
  function move(right, up) {
    view.x = Math.max(-1.2, Math.min(1.2, view.x + right));
    view.y = Math.max(-1.2, Math.min(1.2, view.y + up));
    redraw();
  }
  function zoom(factor, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) {
    const before = size();
    view.zoom = Math.max(0.8, Math.min(60, view.zoom * factor));
    const change = 1 / before - 1 / size(); // what lies under (x, y) stays there
    move((x - canvas.clientWidth / 2) * change, -(y - canvas.clientHeight / 2) * change);
  }
  function whole() {
    Object.assign(view, { x: 0, y: 0, zoom: 1 });
    redraw();
  }
  function nearest(x, y) {
    let found = -1, best = Math.max(14, tile() * 0.7) ** 2;
    for (let i = 0; i < count; i++) {
      const far = (screenX(i) - x) ** 2 + (screenY(i) - y) ** 2;
      if (far < best) { best = far; found = i; }
    }
    return found;
  }
  function look(i) {
    if (i === under) return;
    under = i;
    label.replaceChildren();
    if (i >= 0) {
      const shown = document.createElement("div"), words = document.createElement("div"), name = document.createElement("b");
      const times = 96 / data.cell;
      shown.className = "picture";
      Object.assign(shown.style, {
        width: "96px", height: "96px", backgroundImage: `url(${data.sheet})`,
        backgroundSize: `${data.columns * 96}px auto`,
        backgroundPosition: `${-data.cell * (i % data.columns) * times}px ${-data.cell * Math.floor(i / data.columns) * times}px`,
      });
      name.textContent = data.classes[data.class[i]];
      words.append(name, document.createElement("br"), data.files[i]);
      label.append(shown, words);
    }
    redraw();
  }
  function mark(number) {
    marked = number;
    chooser.value = String(number);
    redraw();
  }

  const fingers = new Map();
  let dragged = false;
  const place = (event) => {
    const edge = canvas.getBoundingClientRect();
    return { x: event.clientX - edge.left, y: event.clientY - edge.top };
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, place(event));
    dragged = fingers.size > 1;
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = place(event), last = fingers.get(event.pointerId);
    if (!last) { look(nearest(now.x, now.y)); return; }
    const [right, down] = [now.x - last.x, now.y - last.y];
    if (fingers.size === 1) {
      if (!dragged && Math.hypot(right, down) < 4) return;
      dragged = true;
      move(-right / size(), down / size());
    } else {
      const other = [...fingers].find(([id]) => id !== event.pointerId)[1];
      const apart = (one) => Math.hypot(one.x - other.x, one.y - other.y);
      zoom(apart(now) / Math.max(apart(last), 1), (now.x + other.x) / 2, (now.y + other.y) / 2);
    }
    fingers.set(event.pointerId, now);
  });
  const lift = (event) => {
    const last = fingers.get(event.pointerId);
    if (last && !dragged && event.type === "pointerup") {
      const found = nearest(last.x, last.y);
      look(found);
      mark(found < 0 || data.class[found] === marked ? -1 : data.class[found]);
    }
    fingers.delete(event.pointerId);
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") look(-1); });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const at = place(event);
    zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), at.x, at.y);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const step = 0.15 / view.zoom;
    const act = {
      ArrowLeft: () => move(-step, 0), ArrowRight: () => move(step, 0),
      ArrowUp: () => move(0, step), ArrowDown: () => move(0, -step),
      "+": () => zoom(1.3), "=": () => zoom(1.3), "-": () => zoom(1 / 1.3), 0: whole,
    }[event.key];
    if (act) { act(); event.preventDefault(); }
  });
  document.getElementById("map-in").addEventListener("click", () => zoom(1.5));
  document.getElementById("map-out").addEventListener("click", () => zoom(1 / 1.5));
  document.getElementById("map-whole").addEventListener("click", whole);
  model.addEventListener("change", () => { points = data.maps[Number(model.value)].at; redraw(); });
  chooser.addEventListener("change", () => mark(Number(chooser.value)));
  sheet.addEventListener("load", redraw);
  sheet.src = data.sheet;
  new ResizeObserver(draw).observe(canvas);
  let kept = {};
  addEventListener("beforeprint", () => {
    kept = { ...view };
    Object.assign(view, { x: 0, y: 0, zoom: 1 });
    draw();
  });
  addEventListener("afterprint", () => { Object.assign(view, kept); draw(); });
}
