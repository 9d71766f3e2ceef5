// Two runs side by side: their figures and curves in common charts, and below these the page of each run.
"use strict";
const runs = [null, null], KINDS = ["work", "steps", "rounds", "evals"];

function rowsOf(run, kind) {
  return Object.values(run.islands).flatMap((rows) => rows[kind]).sort((a, b) => a[0] - b[0]);
}

function spanOf(run) {
  const times = Object.values(run.islands).flatMap((rows) => KINDS.flatMap((kind) => (rows[kind].length ? [rows[kind][0][0], rows[kind].at(-1)[kind === "work" ? 1 : 0]] : [])));
  return times.length ? [Math.min(...times), Math.max(...times)] : [0, 0];
}

// Keeps one evaluation for each number of tokens, because all islands evaluate the same params.
function evalsOf(run) {
  const known = new Map();
  for (const row of rowsOf(run, "evals")) if (row[2] !== null && !known.has(row[1])) known.set(row[1], row);
  return [...known.values()];
}

// Returns the committed rounds by the time of their first commit.
function committedOf(run) {
  const known = new Map();
  for (const row of rowsOf(run, "rounds")) if (row[3] && !known.has(row[1])) known.set(row[1], row);
  return [...known.values()];
}

// Returns the bytes that all islands together have sent, after each of their rounds.
function bytesOf(run) {
  const sent = new Map(), points = [];
  let sum = 0;
  const all = Object.entries(run.islands).flatMap(([name, rows]) => rows.rounds.map((r) => [r[0], name, r[6]])).sort((a, b) => a[0] - b[0]);
  for (const [time, name, bytes] of all) {
    sum += bytes - (sent.get(name) ?? 0);
    sent.set(name, bytes);
    if (points.length && points.at(-1)[0] === time) points.at(-1)[1] = sum; else points.push([time, sum]);
  }
  return points;
}

function figuresOf(run) {
  const evals = evalsOf(run), [begin, end] = spanOf(run), now = run.figures;
  const best = evals.length ? Math.min(...evals.map((r) => r[2])) : null;
  return {
    islands: now.num_islands, parameters: human(run.num_params), duration: duration(end - begin), tokens: human(now.tokens),
    "tokens/s": human(end > begin ? now.tokens / (end - begin) : null), "rounds committed": now.committed, "attempts aborted": now.aborted,
    sent: human(now.bytes_sent, "B"), "held-out": now.heldout_loss === null ? "–" : now.heldout_loss.toFixed(4), "lowest held-out": best === null ? "–" : best.toFixed(4),
  };
}

function labelOf(i) {
  return runs[0]?.name === runs[1]?.name ? `${runs[i].name} (${i + 1})` : runs[i].name;
}

function cells(tag, values) {
  const row = document.createElement("tr");
  for (const value of values) row.append(Object.assign(document.createElement(tag), { textContent: value }));
  return row;
}

function draw() {
  if (!runs[0] || !runs[1]) return;
  byId("name").textContent = `${labelOf(0)} and ${labelOf(1)}`;
  document.title = `${labelOf(0)} and ${labelOf(1)} · diloco watch`;
  const figures = runs.map(figuresOf);
  byId("titles").replaceChildren(cells("th", ["", labelOf(0), labelOf(1)]));
  byId("figures").replaceChildren(...Object.keys(figures[0]).map((key) => cells("td", [key, figures[0][key], figures[1][key]])));
  const lines = (points) => runs.map((run, i) => ({ label: labelOf(i), color: COLORS[i], width: 2, points: points(run, spanOf(run)[0]) }));
  const loss = (v) => v.toFixed(2);
  drawChart("loss-tokens", lines((run) => evalsOf(run).map((r) => [r[1], r[2]])), (v) => human(v), loss);
  drawChart("loss-time", lines((run, first) => evalsOf(run).map((r) => [r[0] - first, r[2]])), duration, loss);
  drawChart("committed", lines((run, first) => committedOf(run).map((r) => [r[0] - first, r[1] + 1])), duration, (v) => human(v));
  drawChart("bytes", lines((run, first) => bytesOf(run).map(([time, sum]) => [time - first, sum])), duration, (v) => human(v, "B"));
}

let isDue = false;
function drawSoon() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => { isDue = false; draw(); });
}

runs.forEach((_, i) => {
  const source = new EventSource(`run/${i}/events`);
  source.addEventListener("snapshot", (event) => { runs[i] = JSON.parse(event.data); byId("link").textContent = ""; drawSoon(); });
  source.addEventListener("more", (event) => {
    const more = JSON.parse(event.data);
    runs[i].figures = more.figures ?? runs[i].figures;
    for (const [name, rows] of Object.entries(more.islands)) {
      const known = runs[i].islands[name] ??= Object.fromEntries(Object.keys(rows).map((kind) => [kind, []]));
      for (const kind in rows) known[kind].push(...rows[kind]);
    }
    drawSoon();
  });
  source.addEventListener("error", () => { byId("link").textContent = "no connection"; });
});
addEventListener("resize", drawSoon);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawSoon);
