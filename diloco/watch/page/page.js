// Keeps the data that the server has sent, and shows the run at the chosen moment.
"use strict";
let run = null, first = 0, last = 0, chosen = null, isConnected = false;

function make(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

const names = () => Object.keys(run.islands).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
const colorOf = (i) => COLORS[i % COLORS.length];
const until = (rows, t) => rows[countUntil(rows, t) - 1];

function findSpan() {
  first = Infinity; last = 0;
  for (const rows of Object.values(run.islands)) {
    for (const kind of ["work", "steps", "rounds", "evals", "events"]) {
      if (!rows[kind].length) continue;
      first = Math.min(first, rows[kind][0][0]);
      last = Math.max(last, rows[kind].at(-1)[kind === "work" ? 1 : 0]);
    }
  }
  if (first > last) first = last;
}

// Returns in words what an island does, whether that is a problem, and the cause if there is one.
function stateOf(name, t) {
  const rows = run.islands[name];
  const kinds = ["steps", "rounds", "evals", "events"];
  const newest = Math.max(0, ...kinds.map((kind) => until(rows[kind], t)?.[0] ?? 0));
  const event = until(rows.events, t);
  const present = until(rows.presence, t), isAway = present && !present[1];
  if (!newest) return isAway ? ["no answer", true, present[2]] : ["not started", false];
  const ago = duration(t - newest);
  if (event && event[3] && event[0] >= newest) {
    const now = chosen === null && !byId("saved-run") ? Date.now() / 1000 : t;
    return [`${event[1]} ${duration(now - event[0])} ago`, ENDED.includes(event[1])];
  }
  if (isAway && present[0] > newest) return [`no answer for ${ago}`, true, present[2]];
  const losers = losersOf(name, newest, t);
  if (losers.length) return [`silent for ${ago}, lost to ${losers.join(", ")}`, true];
  const steps = countUntil(rows.steps, t), a = rows.steps[Math.max(0, steps - 20)], b = rows.steps[steps - 1];
  const usual = steps > 1 ? (b[0] - a[0]) / Math.min(steps - 1, 20) : 10;
  const missed = t - newest > 2 * usual ? roundWithout(name, newest, t) : null;
  if (missed !== null) return [`silent for ${ago}, not in round ${missed}`, true];
  return t - newest > Math.max(15, 5 * usual) ? [`silent for ${ago}`, true] : [`last record ${ago} ago`, false];
}

// Returns the islands that have recorded, after the time `newest`, that they lost the island `name`.
function losersOf(name, newest, t) {
  return names().filter((other) => other !== name && run.islands[other].events.slice(-50).some((e) => e[1] === "lost" && e[0] > newest && e[0] <= t && e[2].startsWith(name + ": ")));
}

// Returns the latest round that other islands committed without this one after its last record; null if there is none.
function roundWithout(name, newest, t) {
  let missed = null;
  for (const [other, rows] of Object.entries(run.islands)) {
    const r = other === name ? undefined : until(rows.rounds, t);
    if (r && r[3] && r[0] > newest && !run.groups[r[9]].includes(name)) missed = Math.max(missed ?? 0, r[1]);
  }
  return missed;
}

// Returns the texts about an island's code and hardware.
function machineOf(name, t) {
  const note = run.notes.filter((n) => n[1] === name && n[0] <= t && n[2].startsWith("started")).at(-1);
  return [note?.[2].replace(/^started[^:]*: config \S+, /, "").replace(/, restart \d+$/, ""), run.machines[name]].filter(Boolean);
}

// What is equal on all islands is said once, above them.
const isShared = (text) => names().length > 1 && names().every((name) => machineOf(name, last).includes(text));
const sharedMachine = () => machineOf(names()[0] ?? "", last).filter(isShared).map((text) => `, all on ${text.replace(/^.*, on /, "")}`).join("");

function drawCards(t) {
  byId("cards").replaceChildren(...names().map((name, i) => {
    const rows = run.islands[name], card = make("article"), [state, isBad, why] = stateOf(name, t), list = make("dl");
    const step = until(rows.steps, t), round = until(rows.rounds, t), held = until(rows.evals, t);
    const lossRow = rows.steps.slice(0, countUntil(rows.steps, t)).reverse().find((row) => row[3] !== null);
    card.style.borderLeftColor = colorOf(i);
    card.classList.toggle("bad", isBad);
    const title = make("h2", name);
    title.append(make("span", state));
    const facts = [["step", step ? step[1] + (run.total_steps ? "/" + run.total_steps : "") : "–"], ["round", round ? round[19] : 0],
      ["loss", lossRow ? lossRow[3].toFixed(4) : "–"], ["held-out", held?.[2] != null ? held[2].toFixed(4) : "–"],
      ["tokens", human(step?.[2])], ["tok/s", human(step?.[4])],
      ["ok/abort", round ? `${round[7]}/${round[8]}` : "–"], ["sent", human(round?.[6], "B")]];
    for (const [key, value] of facts) list.append(make("dt", key), make("dd", value));
    card.append(title, list);
    if (why) card.append(make("p", why, "bad"));
    const event = until(rows.events, t);
    const progress = progressOf(event);
    if (progress) card.append(progress);
    if (event) card.append(make("p", `${event[1]}${event[2] ? ": " + event[2] : ""}`));
    const machine = machineOf(name, t).filter((text) => !isShared(text)).join(", ");
    if (machine) card.append(make("p", machine));
    return card;
  }));
}

// Returns the tokens of all islands at a time, interpolated between held-out evaluations; null if there are fewer than two.
function tokensAt(evals, time) {
  if (evals.length < 2) return null;
  const i = Math.min(Math.max(countUntil(evals, time), 1), evals.length - 1), [a, b] = [evals[i - 1], evals[i]];
  return Math.max(0, a[1] + (b[0] > a[0] ? (time - a[0]) / (b[0] - a[0]) : 0) * (b[1] - a[1]));
}

function drawBytes(t) {
  drawChart("bytes", names().map((name, i) => ({ label: name, color: colorOf(i), width: 1.5,
    points: withGaps(name, run.islands[name].rounds.slice(0, countUntil(run.islands[name].rounds, t)).map((r) => [r[0] - first, r[6]]), t) })), duration, (v) => human(v, "B"));
}

function findAttempts(t) {
  const attempts = new Map();
  for (const [name, rows] of Object.entries(run.islands)) for (const r of rows.rounds) {
    if (r[0] > t) break;
    const key = `${r[1]} ${r[2]}`, known = attempts.get(key) ?? { rows: [], time: 0 };
    known.rows.push([name, r]);
    known.time = Math.max(known.time, r[0]);
    attempts.set(key, known);
  }
  return [...attempts.values()].sort((a, b) => b.time - a.time);
}

// Returns the island that came last to a round: it waited least, and the other islands waited for it.
function lastToCome(attempt) {
  if (attempt.rows.length < 2) return "";
  const waits = attempt.rows.map(([name, r]) => [r[4], name]).sort((a, b) => a[0] - b[0]), longest = waits.at(-1)[0];
  return longest - waits[0][0] > 0.05 ? `${waits[0][1]} (${duration(longest - waits[0][0])})` : "";
}

function drawRounds(attempts) {
  byId("rounds").closest("table").classList.toggle("no-attempts", attempts.every((a) => !a.rows[0][1][2]));
  byId("rounds").replaceChildren(...attempts.slice(0, 60).map((attempt) => {
    const row = make("tr"), r = attempt.rows[0][1], digests = new Set(attempt.rows.filter((a) => a[1][3]).map((a) => a[1][10]));
    const cause = attempt.rows.map((a) => a[1][11]).find(Boolean) ?? "", isCommitted = digests.size > 0, who = run.groups[r[9]];
    row.append(make("td", duration(attempt.time - first)), make("td", r[1]), make("td", r[2]),
      make("td", isCommitted ? "committed" + (cause && `: ${cause}`) : `aborted: ${cause || "no cause recorded"}`, isCommitted ? "" : "bad"),
      make("td", who.length > 6 ? `${who.length} islands` : who.join(" ")),
      make("td", [...digests].map((d) => d.slice(0, 8)).join(" ≠ "), digests.size > 1 ? "bad" : ""), make("td", lastToCome(attempt)), make("td", notesOf(attempt)));
    return row;
  }));
  const counts = new Map();
  for (const attempt of attempts) { const who = lastToCome(attempt).split(" (")[0]; if (who) counts.set(who, (counts.get(who) ?? 0) + 1); }
  const told = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 4).map(([name, n]) => `${name} ${n}×`);
  byId("waited").textContent = told.length ? `Slowest island per round: ${told.join(", ")}.` : "No island kept the others waiting.";
}

function drawHappened(t) {
  const isTrouble = (text) => TROUBLE.includes(text.split(":")[0]), booked = new Set(run.notes.map((n) => n[1]));
  const rows = run.notes.map((n) => [n[0], n[1], n[2], isTrouble(n[2])]).concat(run.faults.map((f) => [f[0], f[2].join(" ") || "network", `fault ${f[1]}: ${f[3]}`, !f[4]]));
  // Events that the logbook does not have: of islands whose folder is elsewhere, and what islands note about each other.
  for (const [name, island] of Object.entries(run.islands)) for (const e of island.events)
    if (!booked.has(name) || e[1] === "lost" || e[1] === "downloading") rows.push([e[0], name, `${e[1]}: ${e[2]}`, TROUBLE.includes(e[1])]);
  for (const [name, island] of Object.entries(run.islands)) for (const p of island.presence)
    rows.push([p[0], name, p[1] ? "answers" : `no answer: ${p[2]}`, !p[1]]);
  const which = byId("which").value, shown = rows.filter((r) => r[0] <= t && (which === "all" || r[3])).sort((a, b) => b[0] - a[0]).slice(0, 200);
  byId("happened").replaceChildren(...shown.map((r) => {
    const row = make("tr");
    row.append(make("td", duration(r[0] - first)), make("td", r[1]), make("td", r[2], r[3] ? "bad" : STARTED.includes(r[2].split(":")[0]) ? "good" : ""));
    return row;
  }));
}

function drawSources(t) {
  const total = new Map();
  for (const rows of Object.values(run.islands)) for (const [name, tokens] of Object.entries(until(rows.sources, t)?.[1] ?? {})) total.set(name, (total.get(name) ?? 0) + tokens);
  const sum = [...total.values()].reduce((a, b) => a + b, 0), table = make("table");
  byId("sources").parentElement.hidden = !sum;
  for (const [name, tokens] of [...total].sort((a, b) => b[1] - a[1])) {
    const row = make("tr"), share = Object.assign(make("meter"), { max: sum, value: tokens }), cell = make("td");
    cell.append(share);
    row.append(make("td", name), make("td", human(tokens)), make("td", (100 * tokens / sum).toFixed(1) + " %"), cell);
    table.append(row);
  }
  byId("sources").replaceChildren(table);
}

function draw() {
  if (!run) return;
  // A run whose last record is minutes old is over: its state at that record is shown, instead of a silent run. So is a
  // saved page's.
  const now = Date.now() / 1000, isOver = now - last >= 600 || byId("saved-run"), t = chosen ?? (isOver ? last : Math.max(now, last));
  const attempts = findAttempts(t);
  drawOverview(t); drawCards(t); drawLosses(t); drawBytes(t); drawRounds(attempts); drawHappened(t); drawSources(t); drawGradients(t); drawExperts(t); drawTraffic(t); drawRanks(t); drawPrediction(t); if (typeof drawControl === "function") drawControl();
  const end = Math.min(t, last), shown = Number(byId("window").value);
  // Attempts are ordered by their ends, the newest first.
  const begin = shown && attempts.length > shown ? attempts[shown].time : first;
  drawGantt(names(), run.islands, run.faults, begin, end, first);
  byId("moment").textContent = duration(Math.min(t, last) - first);
  byId("live").setAttribute("aria-pressed", String(chosen === null));
  if (chosen === null) byId("scrubber").value = 1000;
  byId("link").textContent = !isConnected ? "no connection" : now - last < 600 ? "live" : `last record ${new Date(last * 1000).toLocaleString()}`;
  if (byId("saved-run")) byId("link").textContent = "saved page";
}

let isDue = false;
function drawSoon() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => { isDue = false; draw(); });
}

const noRows = () => ({ steps: [], work: [], rounds: [], evals: [], events: [], sources: [], presence: [], ranks: [], pace: [], experts: [], pauses: [], traffic: [] });

function take(more) {
  const add = (known, rows) => { for (const kind in rows) known[kind].push(...rows[kind]); };
  for (const [name, rows] of Object.entries(more.islands)) add(run.islands[name] ??= noRows(), rows);
  if (more.baseline) add(run.baseline ??= noRows(), more.baseline);
  run.groups.push(...more.groups);
  run.faults.push(...more.faults);
  run.notes.push(...more.notes);
  run.incidents.push(...more.incidents);
  if (more.overview) run.overview = more.overview;
}

function takeSnapshot(snapshot) {
  run = snapshot;
  isConnected = true;
  byId("name").textContent = run.name;
  document.title = `${run.name} · diloco watch`;
  byId("facts").textContent = `${Object.keys(run.islands).length} islands` + (run.num_params ? `, ${human(run.num_params)} parameters` : "") + sharedMachine();
  findSpan();
  noteVisit();
  listOverlays();
  if (findAttempts(last).length > 60) byId("window").value = "20";
  drawSoon();
}

// Follows the run on the server. A page that was saved as a file has its data within it.
function follow() {
  const saved = byId("saved-run");
  if (saved) {
    const data = JSON.parse(saved.textContent);
    predicted = data.predicted;
    takeSnapshot(data.snapshot);
    return;
  }
  const source = new EventSource("events");
  source.addEventListener("snapshot", (event) => takeSnapshot(JSON.parse(event.data)));
  source.addEventListener("predicted", (event) => { predicted = JSON.parse(event.data); drawSoon(); });
  source.addEventListener("more", (event) => { take(JSON.parse(event.data)); findSpan(); drawSoon(); });
  source.addEventListener("error", () => { isConnected = false; drawSoon(); });
}

function begin() {
  legendOf("legend", ACTIVITIES);
  legendOf("rank-legend", RANK_TIMES);
  byId("legend").append(make("span", "× fault"), make("span", "▲ joined", "good"), make("span", "┆ away", "bad"));
  addSaveButtons();
  follow();
  byId("scrubber").addEventListener("input", (event) => {
    const share = event.target.value / 1000;
    chosen = share >= 1 ? null : first + share * (last - first);
    drawSoon();
  });
  byId("live").addEventListener("click", () => { chosen = null; drawSoon(); });
  byId("overlay").addEventListener("change", takeOther);
  for (const id of ["window", "which", "since", "loss-x", "loss-y", "loss-smooth"]) byId(id).addEventListener("change", drawSoon);
  addEventListener("resize", drawSoon);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawSoon);
  setInterval(() => { if (chosen === null && run && Date.now() / 1000 - last < 600) drawSoon(); }, 2000);
}

begin();
