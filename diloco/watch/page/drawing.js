// Charts and the Gantt. A row's fields are described in diloco/watch/view/history.py.
"use strict";
const COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#7A5C00"];
const ACTIVITIES = { "inner steps": "#56B4E9", wait: "#C9CCD3", reduce: "#E69F00", evaluating: "#009E73", saving: "#CC79A7", aborted: "#D55E00" };
const FAILED = "#D55E00", STARTED_COLOR = "#009E73";
const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function human(value, unit = "") {
  if (value === null || value === undefined) return "–";
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return (value / size).toPrecision(3) + " " + letter + unit;
  return (Number.isInteger(value) ? value : value.toPrecision(3)) + (unit && " " + unit);
}

function duration(seconds) {
  const s = Math.max(0, seconds);
  if (s < 60) return s.toFixed(s < 10 ? 1 : 0) + " s";
  if (s < 3600) return Math.floor(s / 60) + " min " + Math.floor(s % 60) + " s";
  if (s < 172800) return Math.floor(s / 3600) + " h " + Math.floor((s % 3600) / 60) + " min";
  return Math.floor(s / 86400) + " days";
}

// Returns the number of rows whose time is at most t; rows are ordered by time.
function countUntil(rows, t) {
  let low = 0, high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] <= t) low = middle + 1; else high = middle;
  }
  return low;
}

const charts = {};
// Draws a chart; each line is { label, color, width, points: [[x, y], ...] }. A y of null is a gap. `look` of the y axis:
// linear, log, or zoom, which leaves out what only the first fifth of the x axis shows. Without a point the panel is hidden.
// `marks` are [x, text] of vertical lines.
function drawChart(id, lines, xText, yText, look = "linear", marks = []) {
  const place = byId(id), shown = lines.filter((line) => line.points.some((p) => p[1] !== null));
  place.closest("section").hidden = !shown.length;
  if (!shown.length) {
    charts[id]?.plot.destroy();
    delete charts[id];
    place.replaceChildren();
    return;
  }
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const key = JSON.stringify([place.clientWidth, dark, look, xText.name, shown.map((line) => line.label)]);
  // Mode 2 widens a gap to the line's own neighbouring points: other lines have points within it.
  const data = uPlot.join(shown.map((line) => [line.points.map((p) => p[0]), line.points.map((p) => p[1])]), shown.map(() => [1, 2]));
  if (charts[id]?.key === key) { Object.assign(charts[id], { lines: shown, marks }).plot.setData(data); return; }
  charts[id]?.plot.destroy();
  place.replaceChildren();
  const axis = { stroke: css("--grey"), grid: { stroke: css("--faint"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  const made = charts[id] = { key, lines: shown, marks, title: place.closest("section").querySelector("h2").firstChild.textContent.trim() };
  const y = look === "log" ? { distr: 3 } : look === "zoom" ? { range: () => zoomOf(made.lines) } : {};
  const options = {
    width: Math.max(200, place.clientWidth), height: 260, legend: { show: shown.length <= 9, live: false },
    cursor: { drag: { x: true, y: false } }, hooks: { draw: [(plot) => drawMarks(plot, made.marks)] }, scales: { x: { time: false }, y },
    axes: [{ ...axis, values: (_, ticks) => ticks.map((v) => (v === null ? "" : xText(v))), space: 90 }, { ...axis, size: 58, values: (_, ticks) => ticks.map((v) => (v === null ? "" : yText(v))) }],
    series: [{}, ...shown.map((line) => ({ label: line.label, stroke: line.color, width: line.width, dash: line.dash, spanGaps: false, points: { show: line.width > 2 && line.points.length < 40 } }))],
  };
  made.plot = new uPlot(options, data, place);
}

// Draws a dashed vertical line with its text at each mark within the plot.
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot, scale = devicePixelRatio || 1;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = css("--grey");
  ctx.lineWidth = scale;
  ctx.font = `${12 * scale}px system-ui`;
  ctx.textBaseline = "top";
  ctx.textAlign = "left";
  ctx.setLineDash([4 * scale, 4 * scale]);
  for (const [value, text] of marks) {
    const x = plot.valToPos(value, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillText(text, x + 4 * scale, bbox.top + 2 * scale);
  }
  ctx.restore();
}

// Returns the range of the values after the first fifth of the x axis.
function zoomOf(lines) {
  const points = lines.flatMap((line) => line.points), xs = points.map((p) => p[0]);
  const begin = xs.reduce((a, b) => Math.min(a, b)), end = xs.reduce((a, b) => Math.max(a, b));
  const late = points.filter((p) => p[1] !== null && p[0] >= begin + 0.2 * (end - begin)).map((p) => p[1]);
  const low = late.reduce((a, b) => Math.min(a, b)), high = late.reduce((a, b) => Math.max(a, b));
  return [low - 0.05 * (high - low || 1), high + 0.05 * (high - low || 1)];
}

// Draws the time in which an island had no processes: a dashed frame, with a mark where it began.
function drawAbsence(draw, from, to, y, h, absence, hasBegin) {
  draw.strokeStyle = absence[3] ? FAILED : css("--grey");
  draw.lineWidth = 1;
  draw.setLineDash([3, 3]);
  draw.strokeRect(from + 0.5, y + 0.5, Math.max(to - from - 1, 1), h - 1);
  draw.setLineDash([]);
  if (!hasBegin) return;
  draw.fillStyle = draw.strokeStyle;
  draw.fillRect(from - 1.5, y - 3, 3, h + 6);
}

// Draws the lanes of `names` from `start` to `end`; `islands` has the rows by name. Times are shown relative to `first`.
const gantt = { bars: [] };
function drawGantt(names, islands, faults, start, end, first) {
  gantt.bars = [];
  const canvas = byId("gantt"), left = innerWidth < 500 ? 62 : 84, lane = names.length > 12 ? 18 : 30;
  const width = canvas.parentElement.clientWidth, height = names.length * lane + 26, scale = devicePixelRatio || 1;
  canvas.width = width * scale; canvas.height = height * scale; canvas.style.height = height + "px";
  const draw = canvas.getContext("2d");
  draw.scale(scale, scale);
  draw.font = "12px system-ui";
  draw.textBaseline = "middle";
  const span = Math.max(end - start, 1e-6), at = (t) => left + (Math.min(Math.max(t, start), end) - start) / span * (width - left - 8);
  const bar = (from, to, y, color, h, name, what) => {
    if (to < start || from > end) return;
    gantt.bars.push([name, what, from - first, to - first]);
    draw.fillStyle = color;
    draw.fillRect(at(from), y, Math.max(at(to) - at(from), 1), h);
  };
  names.forEach((name, i) => {
    const y = i * lane + 4, h = lane - 10, rows = islands[name];
    draw.fillStyle = css("--ink");
    draw.textAlign = "left";
    draw.fillText(name, 0, y + h / 2, left - 6);
    for (const a of absencesOf(name, end)) drawAbsence(draw, at(Math.max(a[0], start)), at(Math.min(a[1] ?? end, end)), y, h, a, a[0] >= start);
    for (const [from, to] of rows.work) bar(from, Math.min(to, end), y, ACTIVITIES["inner steps"], h, name, "inner steps");
    for (const [from, to, what] of rows.pauses) bar(from, Math.min(to, end), y, ACTIVITIES[what] ?? ACTIVITIES.wait, h, name, what);
    for (const r of rows.rounds) {
      if (r[0] > end) break;
      const reduce = r[0] - r[5], wait = reduce - r[4];
      if (r[3]) { bar(wait, reduce, y, ACTIVITIES.wait, h, name, "wait"); bar(reduce, r[0], y, ACTIVITIES.reduce, h, name, "reduce"); }
      else bar(wait, r[0], y + h / 4, ACTIVITIES.aborted, h / 2, name, "aborted attempt");
    }
    for (const e of rows.events) if (e[1] === "joined" && e[0] >= start && e[0] <= end) {
      draw.fillStyle = STARTED_COLOR;
      draw.beginPath();
      draw.moveTo(at(e[0]), y + h); draw.lineTo(at(e[0]) - 4, y + h + 6); draw.lineTo(at(e[0]) + 4, y + h + 6);
      draw.fill();
    }
    draw.strokeStyle = FAILED;
    draw.lineWidth = 2;
    for (const f of faults) if (!f[4] && f[0] >= start && f[0] <= end && f[2].includes(name)) {
      const x = at(f[0]), m = y + h / 2;
      draw.beginPath();
      draw.moveTo(x - 5, m - 5); draw.lineTo(x + 5, m + 5); draw.moveTo(x - 5, m + 5); draw.lineTo(x + 5, m - 5);
      draw.stroke();
    }
  });
  draw.fillStyle = css("--grey");
  const ticks = width < 500 ? 2 : 6;
  for (let i = 0; i <= ticks; i++) {
    draw.textAlign = i === ticks ? "right" : i ? "center" : "left";
    draw.fillText(duration(start - first + span * i / ticks), at(start + span * i / ticks), height - 8);
  }
}
