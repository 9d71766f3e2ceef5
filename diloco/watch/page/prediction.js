// Shows the planner's prediction for the run beside the measurements of its islands at the chosen moment.
"use strict";
let predicted = null;
const percent = (v) => (100 * v).toFixed(1) + " %";
const signed = (v) => (v < 0 ? "" : "+") + percent(v);
const rate = (v) => human(v, "bit/s");

// Returns the lowest and the highest value as text; only one of them if both have the same text.
function spanText(values, show) {
  if (!values.length) return "–";
  const ends = [show(Math.min(...values)), show(Math.max(...values))];
  return ends[0] === ends[1] ? ends[0] : ends.join(" to ");
}

// Returns the last held-out loss relative to data-parallel training on as many tokens; null if it is not known.
function measuredGap(t) {
  const newest = names().map((name) => until(run.islands[name].evals, t)).filter((r) => r && r[2] !== null).sort((a, b) => b[1] - a[1])[0];
  const known = (run.baseline?.evals ?? []).filter((r) => r[2] !== null);
  for (let i = 1; newest && i < known.length; i++) {
    const [a, b] = [known[i - 1], known[i]];
    if (a[1] <= newest[1] && newest[1] <= b[1] && a[1] < b[1]) return newest[2] / (a[2] + (newest[1] - a[1]) / (b[1] - a[1]) * (b[2] - a[2])) - 1;
  }
  return null;
}

function predictionRows(t) {
  const p = predicted, paces = names().map((name) => until(run.islands[name].pace, t)).filter(Boolean);
  const field = (i) => paces.map((row) => row[i]).filter((v) => v !== null), or = (v, show) => (v === null ? "–" : show(v));
  const left = run.num_rounds - Math.max(0, ...names().map((name) => until(run.islands[name].rounds, t)?.[19] ?? 0));
  const law = "2503.09799" + (p.is_extrapolated ? ", extrapolated" : "");
  return [
    ["time per round", duration(p.round_seconds), spanText(field(1), duration)],
    ["share of time in inner steps", percent(p.utilisation), spanText(field(2), percent)],
    ["sent per island and round", human(p.round_bytes, "B"), spanText(field(3), (v) => human(v, "B"))],
    ["rate in a reduce", or(p.reduce_rate, rate), spanText(field(4), rate)],
    [`link needed for ${(100 * p.target).toFixed(0)} % in inner steps`, p.needed_rate === null ? "none is fast enough" : rate(p.needed_rate), ""],
    ...(left > 0 ? [[`the ${left} rounds to come`, duration(left * p.round_seconds), spanText(field(1).map((v) => left * v), duration)]] : []),
    [`loss to data-parallel (${law})`, signed(p.loss_gap), or(measuredGap(t), signed)],
  ];
}

// Returns a sentence about what took the time that the prediction gives to inner steps, if more than a tenth is missing.
function difference() {
  const shares = run.overview?.headline.shares ?? {}, missing = predicted.utilisation - (shares.computing ?? predicted.utilisation);
  if (missing <= 0.1) return [];
  const told = Object.entries(shares).filter(([name, share]) => name !== "computing" && share >= 0.01).sort((a, b) => b[1] - a[1]);
  return [make("p", `Over the whole run ${percent(shares.computing)} of the time was in inner steps, ${percent(predicted.utilisation)} are predicted. The rest: ${told.map(([name, share]) => `${name} ${percent(share)}`).join(", ")}. The prediction knows of no evaluations, saves, absences and set-up.`)];
}

function drawPrediction(t) {
  const lines = names().map((name, i) => ({ label: name, color: colorOf(i), width: 1.5,
    points: run.islands[name].pace.slice(0, countUntil(run.islands[name].pace, t)).filter((r) => r[4] !== null).map((r) => [r[0] - first, r[4]]) }))
    .map((line) => ({ ...line, points: withGaps(line.label, line.points, t) }));
  const known = predicted && !predicted.unknown, ends = lines.flatMap((line) => line.points.map((p) => p[0])), level = (label, value, dash) => (
    { label, color: css("--grey"), width: 2, dash, points: ends.length ? [[Math.min(...ends), value], [Math.max(...ends), value]] : [] });
  const levels = known ? [level("link (solid)", predicted.link_rate, []), ...(predicted.reduce_rate ? [level("predicted (dashed)", predicted.reduce_rate, [6, 4])] : [])] : [];
  drawChart("rates", [...lines, ...levels], duration, (v) => human(v));
  const place = byId("predicted");
  if (!known) { place.replaceChildren(make("p", predicted ? `No prediction: ${predicted.unknown}.` : "It is being computed.", "empty")); return; }
  const table = make("table"), head = make("tr");
  for (const title of ["", "predicted", "measured"]) head.append(make("th", title));
  table.append(head, ...predictionRows(t).map((cells) => { const row = make("tr"); row.append(...cells.map((cell) => make("td", cell))); return row; }));
  place.replaceChildren(table, ...difference(), make("p", `Assumed: ${predicted.assumed.join("; ")}.`));
}
