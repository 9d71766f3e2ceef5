// Panels of norms, cosines, noise and ranks, and of the baseline. A row's fields are described in diloco/watch/view/history.py.
"use strict";
const TROUBLE = ["died", "hung", "failed", "lost", "alone", "minority", "refused", "not saved", "dropped", "waiting"];
const RANK_TIMES = { "reading text": "#CC79A7", computing: "#56B4E9", "no processor": "#E69F00", "process stopped": "#D55E00", waiting: "#C9CCD3" };

// Returns one line per island with one field of its committed rounds.
function roundLines(t, field, width = 1.5) {
  return names().map((name, i) => ({ label: name, color: colorOf(i), width,
    points: run.islands[name].rounds.slice(0, countUntil(run.islands[name].rounds, t)).filter((r) => r[3] && r[field] !== null).map((r) => [r[0] - first, r[field]]) }))
    .map((line) => ({ ...line, points: withGaps(line.label, line.points, t) }));
}

// The mean's norm is the same on every island that took part.
function meanLine(t) {
  const rows = new Map();
  for (const name of names()) for (const r of run.islands[name].rounds) if (r[0] <= t && r[3] && r[14] !== null && !rows.has(r[1])) rows.set(r[1], [r[0] - first, r[14]]);
  return { label: "mean", color: css("--ink"), width: 3, points: [...rows.values()].sort((a, b) => a[0] - b[0]) };
}

function drawGradients(t) {
  const short = (v) => v.toPrecision(2);
  drawChart("norms", [...roundLines(t, 13), meanLine(t)], duration, short);
  drawChart("cosines", roundLines(t, 15), duration, (v) => v.toFixed(2));
  const noise = names().map((name, i) => ({ label: name, color: colorOf(i), width: 1.5,
    points: withGaps(name, run.islands[name].steps.slice(0, countUntil(run.islands[name].steps, t)).filter((r) => r[5] !== null).map((r) => [r[0] - first, r[5]]), t) }));
  const hasNoise = noise.some((line) => line.points.some((p) => p[1] !== null));
  byId("noise").parentElement.hidden = !hasNoise;
  if (hasNoise) drawChart("noise", noise, duration, (v) => human(v));
}

// The load of an expert is its tokens divided by the mean over the experts of its layer: 1 at balance.
function drawExperts(t) {
  const worst = names().map((name, i) => ({ label: name, color: colorOf(i), width: 1.5,
    points: withGaps(name, run.islands[name].experts.slice(0, countUntil(run.islands[name].experts, t)).map((r) => [r[0] - first, Math.max(...Object.values(r[1]))]), t) }));
  const hasExperts = worst.some((line) => line.points.some((p) => p[1] !== null));
  for (const id of ["loads", "layers"]) byId(id).parentElement.hidden = !hasExperts;
  if (!hasExperts) return;
  drawChart("loads", worst, duration, (v) => v.toFixed(1));
  const now = names().map((name) => until(run.islands[name].experts, t)?.[1] ?? {}), table = make("table");
  const layers = [...new Set(now.flatMap(Object.keys))].sort((a, b) => a - b), most = Math.max(...now.flatMap(Object.values));
  for (const layer of layers) {
    const load = Math.max(...now.map((loads) => loads[layer] ?? 0)), row = make("tr"), cell = make("td");
    cell.append(Object.assign(make("meter"), { max: most, value: load }));
    row.append(make("td", `layer ${layer}`), make("td", load.toFixed(2)), cell);
    table.append(row);
  }
  byId("layers").replaceChildren(table);
}

// Shows what rank 0 of each island sent to other ranks in one inner step, beside the plan and the bytes between islands.
function drawTraffic(t) {
  const table = make("table"), head = make("tr");
  for (const title of ["", "axis", "measured", "planned", "so far"]) head.append(make("th", title));
  table.append(head);
  for (const name of names()) {
    const r = until(run.islands[name].traffic, t), step = until(run.islands[name].steps, t), sent = until(run.islands[name].rounds, t)?.[6] ?? 0;
    if (!r || !step) continue;
    const steps = step[1] - run.islands[name].steps[0][1] + 1;
    const add = (...cells) => { const row = make("tr"); row.append(...cells.map((cell) => make("td", cell))); table.append(row); };
    for (const [axis, bytes] of Object.entries(r[2]).sort()) add(name, axis, human(bytes, "B"), human(r[3][axis], "B"), human(bytes * steps, "B"));
    add(name, "to other islands", human(sent / steps, "B"), "", human(sent, "B"));
  }
  byId("traffic").parentElement.hidden = table.rows.length < 2;
  byId("traffic").replaceChildren(table);
}

// Returns the losses of data-parallel training on the same tokens. Its times are relative to its own beginning.
function baselineLines(isTokens) {
  const rows = run.baseline;
  if (!rows || !rows.evals.length) return [];
  const began = Math.min(rows.evals[0][0], rows.steps[0]?.[0] ?? Infinity);
  const points = rows.evals.filter((r) => r[2] !== null).map((r) => [isTokens ? r[1] : r[0] - began, r[2]]);
  return [{ label: "data-parallel", color: css("--grey"), width: 2, dash: [6, 4], points }];
}

const stoppedOf = (row) => row[6] ?? 0;
const waitOf = (row) => row[1] - row[2] - row[3] - row[4] - stoppedOf(row);

// The other ranks wait for the rank that itself waits least, waits between steps included.
function drawRanks(t) {
  const shown = names().map((name) => [name, until(run.islands[name].ranks, t)]).filter(([, row]) => row);
  byId("ranks").parentElement.hidden = !shown.length;
  const table = make("table");
  for (const [name, [, round, ranks]] of shown) {
    const least = ranks.reduce((a, b) => (waitOf(b) - b[5] < waitOf(a) - a[5] ? b : a)), most = Math.max(...ranks.map((r) => waitOf(r) - r[5]));
    const behind = most - (waitOf(least) - least[5]), isSlow = behind > 0.1 * least[1] && behind > 0.05;
    for (const r of ranks) {
      const row = make("tr"), bar = make("td", "", "bar"), parts = [r[2], r[3], r[4], stoppedOf(r), Math.max(0, waitOf(r))], total = Math.max(parts.reduce((a, b) => a + b, 0), 1e-9);
      Object.values(RANK_TIMES).forEach((color, i) => {
        const piece = make("i");
        piece.style.background = color;
        piece.style.width = (100 * parts[i] / total).toFixed(1) + "%";
        bar.append(piece);
      });
      bar.title = Object.keys(RANK_TIMES).map((key, i) => `${key} ${duration(parts[i])}`).join(", ");
      const held = isSlow && r === least;
      row.append(make("td", r === ranks[0] ? `${name}, round ${round}` : ""), make("td", `rank ${r[0]}`), make("td", duration(r[1])), bar,
        make("td", held ? `the others waited ${duration(behind)} for it${stoppedOf(r) > 0.5 ? ": its process was stopped" : ""}` : "", held ? "bad" : ""));
      table.append(row);
    }
  }
  byId("ranks").replaceChildren(table);
}

function legendOf(id, colors) {
  for (const [text, color] of Object.entries(colors)) {
    const entry = make("span"), box = make("i");
    box.style.background = color;
    entry.append(box, text === "aborted" ? "aborted attempt" : text);
    byId(id).append(entry);
  }
}

// Returns notes on an attempt: number of signatures of its state, audits, and the islands whose parts were left out.
function notesOf(attempt) {
  const most = (field) => Math.max(...attempt.rows.map((a) => a[1][field])), gated = new Map();
  for (const [, r] of attempt.rows) for (const [name, n] of Object.entries(r[18])) gated.set(name, (gated.get(name) ?? 0) + n);
  return [most(16) && most(16) < run.groups[attempt.rows[0][1][9]].length ? `signed by ${most(16)} only` : "", most(17) ? `${most(17)} parts audited` : "",
    ...[...gated].map(([name, n]) => `${n} parts of ${name} left out`)].filter(Boolean).join(", ");
}

// Returns a progress bar of a joiner's download, from the text of its event "downloading"; null for other events.
function progressOf(event) {
  const found = event && event[1] === "downloading" ? /(\d+) of (\d+) parts/.exec(event[2]) : null;
  return found ? Object.assign(make("progress"), { value: Number(found[1]), max: Number(found[2]) }) : null;
}
