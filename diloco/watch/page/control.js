// Actions of an operator, if diloco watch was started with --control. The server describes each action, and the operator
// must confirm it.
"use strict";
const CONTROL_ACTIONS = { save: "save now", stop: "stop after the round", exclude: "exclude", invite: "invite an island" };

async function send(wish) {
  const options = { method: "POST", headers: { "content-type": "application/json", "x-diloco-control": "1" }, body: JSON.stringify(wish) };
  try {
    const reply = await fetch("act", options);
    return await reply.json();
  } catch {
    return { error: "no connection to diloco watch" };
  }
}

function say(text, buttons = [], isWrong = false) {
  const line = byId("control-said");
  line.replaceChildren(make("span", text, isWrong ? "wrong" : ""), ...buttons);
  buttons[0]?.focus();
}

async function ask(action) {
  const wish = { action, island: action === "invite" ? "" : byId("control-island").value };
  const reply = await send(wish);
  if (reply.error) return say(reply.error, [], true);
  if (!reply.confirm) return say(reply.text);
  const yes = make("button", `yes, ${CONTROL_ACTIONS[action]}`), no = make("button", "no");
  yes.addEventListener("click", async () => {
    const done = await send({ ...wish, confirm: reply.confirm });
    say(done.error ?? done.text, [], Boolean(done.error));
  });
  no.addEventListener("click", () => say(""));
  say(reply.text, [yes, no]);
}

// Shows the panel, with an entry for each island.
function drawControl() {
  if (!run.operator) return;
  const panel = byId("control");
  if (panel.hidden) {
    panel.hidden = false;
    const choice = Object.assign(make("select"), { id: "control-island" });
    choice.setAttribute("aria-label", "island");
    choice.append(Object.assign(make("option", "all islands"), { value: "" }));
    panel.append(make("p", `operator ${run.operator.slice(0, 16)}`), choice);
    for (const [action, text] of Object.entries(CONTROL_ACTIONS)) {
      const button = make("button", text);
      button.addEventListener("click", () => ask(action));
      panel.append(button);
    }
    const said = Object.assign(make("output"), { id: "control-said" });
    said.setAttribute("aria-live", "polite");
    panel.append(said);
  }
  const choice = byId("control-island"), known = new Set([...choice.options].map((option) => option.value));
  for (const name of names()) if (!known.has(name)) choice.append(Object.assign(make("option", name), { value: name }));
}
