// The plot of losses: against tokens, time or bytes; linear, zoomed or logarithmic; smoothed; beside another run.
"use strict";
const others = {};

// Returns points of the mean over the values around each one, over about `width` values.
function smooth(points, width) {
  if (width < 2) return points;
  const half = Math.floor(width / 2), sums = [0];
  for (const p of points) sums.push(sums.at(-1) + p[1]);
  return points.map((p, i) => {
    const from = Math.max(0, i - half), to = Math.min(points.length, i + half + 1);
    return [p[0], (sums[to] - sums[from]) / (to - from)];
  });
}

// Returns the function from a row's time to the x axis that the reader chose; it returns null where that is unknown.
function axisOf(which, evals, rounds) {
  if (which === "tokens") return (time) => tokensAt(evals, time);
  if (which === "time") return (time) => time - first;
  const sent = rounds.length ? rounds : [[first, 0]];
  return (time) => sent[Math.max(0, countUntil(sent, time) - 1)][1];
}

// Returns [time, bytes that all islands have sent] after each attempt.
function bytesSent(t) {
  const rows = names().flatMap((name) => run.islands[name].rounds.filter((r) => r[0] <= t).map((r) => [r[0], name, r[6]])).sort((a, b) => a[0] - b[0]);
  const sent = new Map(), points = [[first, 0]];
  let sum = 0;
  for (const [time, name, bytes] of rows) {
    sum += bytes - (sent.get(name) ?? 0);
    sent.set(name, bytes);
    points.push([time, sum]);
  }
  return points;
}

function overlayOf(which) {
  const name = byId("overlay").value;
  if (name === "baseline") return which === "bytes" ? [] : baselineLines(which === "tokens");
  const rows = others[name];
  if (!rows) return [];
  const field = { time: 0, tokens: 1, bytes: 3 }[which];
  return [{ label: name, color: css("--grey"), width: 2, dash: [6, 4], points: rows.map((r) => [r[field], r[2]]) }];
}

// Returns [x, text] of the moment at which the first island entered each stage of the run after the first one.
function stageMarks(t, x) {
  const begun = new Map();
  for (const name of names()) for (const e of run.islands[name].events) {
    const number = e[1] === "stage" && e[0] <= t ? parseInt(e[2]) : NaN;
    if (number > 1 && !(begun.get(number) <= e[0])) begun.set(number, e[0]);
  }
  return [...begun].map(([number, time]) => [x(time), `stage ${number}`]).filter((mark) => mark[0] !== null);
}

function drawLosses(t) {
  const held = new Map(), which = byId("loss-x").value, width = Number(byId("loss-smooth").value);
  for (const name of names()) for (const r of run.islands[name].evals) if (r[0] <= t && r[2] !== null && !held.has(r[1])) held.set(r[1], r);
  const evals = [...held.values()].sort((a, b) => a[0] - b[0]), x = axisOf(which, evals, which === "bytes" ? bytesSent(t) : []);
  const lines = names().map((name, i) => {
    const rows = run.islands[name].steps, own = rows.slice(0, countUntil(rows, t)).filter((r) => r[3] !== null).map((r) => [x(r[0]), r[3]]).filter((p) => p[0] !== null);
    return { label: name, color: colorOf(i), width: 1, points: withGaps(name, smooth(own, width), t, x) };
  });
  const thick = { label: "held-out", color: css("--ink"), width: 3, points: evals.map((r) => [which === "tokens" ? r[1] : x(r[0]), r[2]]) };
  const text = which === "time" ? duration : (v) => human(v, which === "bytes" ? "B" : "");
  drawChart("loss", [...lines, ...overlayOf(which), thick], text, (v) => v.toFixed(2), byId("loss-y").value, stageMarks(t, x));
}

async function takeOther() {
  const name = byId("overlay").value;
  if (name && name !== "baseline" && !others[name]) {
    const reply = await fetch(`other?name=${encodeURIComponent(name)}`);
    if (reply.ok) others[name] = await reply.json();
  }
  drawSoon();
}

function listOverlays() {
  const place = byId("overlay"), known = [...(run.baseline ? ["baseline"] : []), ...(run.others ?? [])];
  place.replaceChildren(new Option("nothing", ""), ...known.map((name) => new Option(name === "baseline" ? "data-parallel" : name, name)));
  if (run.baseline) place.value = "baseline";
  place.parentElement.hidden = !known.length;
}
