# SPDX-License-Identifier: Apache-2.0
"""The style and the script of pages: they draw the timeline on a canvas."""

from __future__ import annotations

STYLE = """
body { font: 14px/1.4 sans-serif; margin: 2em; color: #222; background: #fff; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 1.6em; }
.facts { padding-left: 1.2em; color: #555; }
table { border-collapse: collapse; }
td, th { padding: 2px 12px 2px 0; text-align: left; white-space: nowrap; }
td i { display: inline-block; width: 10px; height: 10px; margin-right: 6px; }
td.bar { width: 260px; } td.bar b { display: block; height: 10px; }
canvas { width: 100%; border: 1px solid #ccc; cursor: grab; }
#told { min-height: 1.4em; font-family: monospace; }
"""

SCRIPT = """
const canvas = document.getElementById("timeline");
const pen = canvas.getContext("2d");
const ROW = 20, AXIS = 22;
const spans = DATA.spans.sort((a, b) => a[2] - b[2] || a[4] - b[4]);
const whole = spans.reduce((m, s) => Math.max(m, s[2] + s[3]), 1);
const depth = spans.reduce((m, s) => Math.max(m, s[4]), 0) + 1;
let from = 0, to = whole, dragged = null;

function inTime(us) {
  if (us >= 1e6) return (us / 1e6).toFixed(3) + " s";
  if (us >= 1e3) return (us / 1e3).toFixed(3) + " ms";
  return us.toFixed(1) + " us";
}
function draw() {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  const height = AXIS + depth * ROW;
  canvas.style.height = height + "px";
  canvas.width = width * ratio; canvas.height = height * ratio;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px sans-serif"; pen.textBaseline = "middle";
  const scale = width / (to - from);
  let step = Math.pow(10, Math.floor(Math.log10((to - from) / 5)));
  while ((to - from) / step > 10) step *= 2;
  for (let at = Math.ceil(from / step) * step; at < to; at += step) {
    const x = (at - from) * scale;
    pen.fillStyle = "#ddd"; pen.fillRect(x, 0, 1, height);
    pen.fillStyle = "#555"; pen.fillText(inTime(at), x + 3, AXIS / 2);
  }
  const drawnTo = new Array(depth).fill(-1);
  for (const s of spans) {
    if (s[2] > to || s[2] + s[3] < from) continue;
    const x = Math.max(0, (s[2] - from) * scale);
    const end = Math.min(width, (s[2] + s[3] - from) * scale);
    if (end <= drawnTo[s[4]]) continue;
    const w = Math.max(end - x, 1);
    drawnTo[s[4]] = x + w;
    const y = AXIS + s[4] * ROW;
    pen.fillStyle = DATA.colors[s[1]];
    pen.fillRect(x, y, w, ROW - 2);
    if (w > 40) {
      pen.save(); pen.beginPath(); pen.rect(x, y, w - 3, ROW); pen.clip();
      pen.fillStyle = "#111"; pen.fillText(DATA.names[s[0]], x + 3, y + ROW / 2 - 1);
      pen.restore();
    }
  }
}
function show(first, last) {
  const length = Math.min(Math.max(last - first, 1), whole);
  from = Math.min(Math.max(first, 0), whole - length); to = from + length;
  draw();
}
function timeAt(event) {
  const box = canvas.getBoundingClientRect();
  return from + (event.clientX - box.left) / box.width * (to - from);
}
canvas.addEventListener("wheel", event => {
  event.preventDefault();
  const at = timeAt(event), by = event.deltaY > 0 ? 1.25 : 0.8;
  show(at - (at - from) * by, at + (to - at) * by);
}, { passive: false });
canvas.addEventListener("mousedown", event => {
  dragged = { x: event.clientX, from: from, to: to };
});
window.addEventListener("mouseup", () => { dragged = null; });
canvas.addEventListener("dblclick", () => show(0, whole));
canvas.addEventListener("mousemove", event => {
  const box = canvas.getBoundingClientRect();
  if (dragged) {
    const by = (event.clientX - dragged.x) / box.width * (dragged.to - dragged.from);
    show(dragged.from - by, dragged.to - by);
    return;
  }
  const at = timeAt(event);
  const row = Math.floor((event.clientY - box.top - AXIS) / ROW);
  const s = spans.find(s => s[4] === row && s[2] <= at && at <= s[2] + s[3]);
  document.getElementById("told").textContent = s ?
    DATA.names[s[0]] + " (" + DATA.phases[s[1]] + "): " + inTime(s[3]) + " from " +
    inTime(s[2]) + (s[5] ? " " + JSON.stringify(s[5]) : "") :
    "Point at a span to read about it.";
});
window.addEventListener("resize", draw);

const byName = new Map();
for (const s of spans) {
  const key = s[0] + " " + s[1];
  const of = byName.get(key) || { span: s, count: 0, total: 0, most: 0 };
  of.count += 1; of.total += s[3]; of.most = Math.max(of.most, s[3]);
  byName.set(key, of);
}
const table = document.getElementById("names");
function line(cells, kind) {
  const row = table.insertRow();
  for (const cell of cells) {
    const made = document.createElement(kind);
    made.textContent = cell; row.appendChild(made);
  }
}
line(["name", "phase", "times", "together", "mean", "longest"], "th");
const lines = [...byName.values()].sort((a, b) => b.total - a.total);
for (const of of lines.slice(0, 200)) {
  line([DATA.names[of.span[0]], DATA.phases[of.span[1]], of.count, inTime(of.total),
    inTime(of.total / of.count), inTime(of.most)], "td");
}
draw();
"""
