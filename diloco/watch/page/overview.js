// The first line about a run, and under it what happened since a time that the reader chooses. The server finds the
// figures (diloco/overview/); an incident is [time, island, kind, severity, cause, cure].
"use strict";
const VISITS = "diloco watch: last visit of ";
const SHOWN = 7;  // More would push the cards and the losses off the first screen.
const JOINED_KINDS = ["lost", "refused"];  // As in diloco/overview/since.py.
const ENDED = ["died", "failed", "hung"], STARTED = ["joined", "started", "started again", "resumed", "caught up"];
let lastVisit = null;

// Reads when this browser last showed the run, and notes that it shows it now.
function noteVisit() {
  try {
    const key = VISITS + run.name, known = Number(localStorage.getItem(key));
    lastVisit = known > 0 ? known : null;
    localStorage.setItem(key, String(Date.now() / 1000));
  } catch { lastVisit = null; }  // A browser may refuse to keep anything.
  byId("since").querySelector("[value=visit]").hidden = lastVisit === null;
  byId("since").value = lastVisit === null ? "0" : "visit";
}

function sinceTime(end) {
  const which = byId("since").value;
  if (which === "visit") return lastVisit ?? first;
  return which === "0" ? first : end - Number(which);
}

// Returns incidents of one kind, island and cause as one, with their number and islands; the worst first, then the newest.
function joinIncidents(rows) {
  const alike = new Map();
  for (const row of [...rows].sort((a, b) => a[0] - b[0])) {
    const isJoined = JOINED_KINDS.includes(row[2]), cause = row[4].replace(/\b[0-9a-f]{8,}\b|\d+(\.\d+)?/g, "#");
    const key = JSON.stringify(isJoined ? [row[2]] : [row[1], row[2], cause]), known = alike.get(key);
    alike.set(key, { row, count: (known?.count ?? 0) + 1, islands: (known?.islands ?? new Set()).add(row[1]) });
  }
  return [...alike.values()].sort((a, b) => b.row[3] - a.row[3] || b.row[0] - a.row[0]);
}

// Returns in words how many rounds an island missed in its failures since a time, and whether it is still away.
function missedBy(name, begin) {
  const failures = (run.overview?.absences[name] ?? []).filter((a) => a[3] && (a[1] === null || a[1] >= begin));
  const missed = failures.reduce((sum, a) => sum + a[4], 0);
  return (missed ? `, missed ${missed} round${missed === 1 ? "" : "s"}` : "") + (failures.some((a) => a[1] === null) ? ", is away" : "");
}

function summaryOf(rows, begin) {
  const count = (kinds) => rows.filter((r) => kinds.includes(r[2])).length, words = [], ended = new Map();
  for (const r of rows) if (ENDED.includes(r[2])) ended.set(r[1], (ended.get(r[1]) ?? 0) + 1);
  for (const [name, n] of [...ended].sort()) words.push(`${name} died ${n === 1 ? "once" : n === 2 ? "twice" : n + " times"}${missedBy(name, begin)}`);
  const joined = [...new Set(rows.filter((r) => r[2] === "joined").map((r) => r[1]))];
  if (joined.length) words.push(`${joined.join(", ")} joined`);
  // The same words as in diloco/overview/since.py.
  for (const [kind, one, many] of [["aborted", "attempt aborted", "attempts aborted"], ["left out", "exclusion", "exclusions"],
    ["loss spike", "loss spike", "loss spikes"], ["not saved", "checkpoint not saved", "checkpoints not saved"]])
    if (count([kind])) words.push(`${count([kind])} ${count([kind]) > 1 ? many : one}`);
  words.push(count(["disagreement"]) ? `${count(["disagreement"])} DISAGREEMENTS` : "no disagreement");
  return words.join("; ");
}

function drawOverview(t) {
  const line = run.overview?.headline;
  byId("overview").hidden = !line;
  if (!line) return;
  byId("headline").replaceChildren(...line.text.split(" · ").map((text, i) => make("span", text, i ? "" : line.is_trouble ? "bad state" : "state")));
  const begin = sinceTime(Math.min(t, last)), rows = run.incidents.filter((r) => r[0] >= begin && r[0] <= t);
  byId("since-text").textContent = ` (${clock(begin)}): ${summaryOf(rows, begin)}`;
  const joined = joinIncidents(rows);
  byId("incidents").replaceChildren(...joined.slice(0, SHOWN).map(({ row, count, islands }) => {
    const item = make("li", undefined, row[3] >= 3 ? "bad" : row[3] === 1 ? "good" : "");
    const who = islands.size > 4 ? `${islands.size} islands` : [...islands].sort().join(", ");
    const what = `${who || "run"} ${row[2]}${count > 1 ? ` ${count}×, last` : ""}`;
    item.append(make("time", clock(row[0])), make("b", what), make("span", row[4]), make("i", row[5]));
    return item;
  }));
  byId("more-incidents").textContent = joined.length > SHOWN ? `and ${joined.length - SHOWN} more below, in "What happened"` : "";
  byId("past").hidden = chosen === null;
}

const clock = (t) => new Date(t * 1000).toLocaleString([], Date.now() / 1000 - t < 72000 ? { hour: "2-digit", minute: "2-digit" } : { dateStyle: "short", timeStyle: "short" });

// Returns the absences of an island up to a time: [begin, end or null, cause, whether it is a failure, missed rounds].
const absencesOf = (name, t) => (run.overview?.absences[name] ?? []).filter((a) => a[0] <= t);

// Returns points of time and value with a gap in each absence of the island, so that no line is drawn through it.
function withGaps(name, points, t, xOf = (time) => time - first) {
  const gaps = absencesOf(name, t).map((a) => xOf((a[0] + (a[1] ?? Math.max(last, a[0]))) / 2)).filter((x) => x !== null);
  return gaps.length ? [...points, ...gaps.map((x) => [x, null])].sort((a, b) => a[0] - b[0]) : points;
}
