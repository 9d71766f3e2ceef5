// Saves any plot as a picture or as a table of its numbers.
"use strict";

function saveAs(name, url) {
  const link = Object.assign(make("a"), { href: url, download: name });
  link.click();
}

const fileName = (title, end) => `${run.name}-${title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}.${end}`;
const cell = (value) => (value === null || value === undefined ? "" : typeof value === "string" ? `"${value.replaceAll('"', '""')}"` : String(value));

function saveTable(title, rows) {
  const text = rows.map((row) => row.map(cell).join(",")).join("\n") + "\n", url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  saveAs(fileName(title, "csv"), url);
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// Saves a canvas on the page's background, with its title above it and the colours' names below it.
function savePicture(title, canvas, legend) {
  const scale = devicePixelRatio || 1, picture = make("canvas"), draw = picture.getContext("2d");
  const perRow = Math.max(1, Math.floor(canvas.width / scale / 150)), rows = Math.ceil(legend.length / perRow);
  picture.width = canvas.width; picture.height = canvas.height + (30 + 20 * rows) * scale;
  draw.scale(scale, scale);
  draw.fillStyle = css("--paper");
  draw.fillRect(0, 0, picture.width, picture.height);
  draw.fillStyle = css("--ink");
  draw.font = "bold 14px system-ui";
  draw.fillText(`${run.name}: ${title}`, 8, 19);
  draw.drawImage(canvas, 0, 30, canvas.width / scale, canvas.height / scale);
  draw.font = "12px system-ui";
  legend.forEach(([text, color], i) => {
    const x = 8 + 150 * (i % perRow), y = 30 + canvas.height / scale + 14 + 20 * Math.floor(i / perRow);
    draw.fillStyle = color;
    draw.fillRect(x, y - 9, 12, 10);
    draw.fillStyle = css("--ink");
    draw.fillText(text, x + 17, y, 128);
  });
  saveAs(fileName(title, "png"), picture.toDataURL("image/png"));
}

function saveChart(id, form) {
  const { plot, lines, title } = charts[id];
  if (form === "PNG") { savePicture(title, plot.ctx.canvas, lines.map((line) => [line.label, line.color])); return; }
  const [xs, ...ys] = plot.data;
  saveTable(title, [["x", ...lines.map((line) => line.label)], ...Array.from(xs, (x, i) => [x, ...ys.map((y) => y[i])])]);
}

function saveGantt(form) {
  const title = "what each island did";
  if (form === "PNG") savePicture(title, byId("gantt"), Object.entries(ACTIVITIES));
  else saveTable(title, [["island", "activity", "begin", "end"], ...gantt.bars]);
}

// Adds the buttons to the title of each panel with a plot.
function addSaveButtons() {
  for (const id of ["loss", "bytes", "rates", "norms", "cosines", "noise", "loads", "gantt"]) {
    const place = make("span", undefined, "save");
    for (const form of ["PNG", "CSV"]) {
      const button = Object.assign(make("button", form), { type: "button", title: `save this plot as ${form}` });
      button.addEventListener("click", () => (id === "gantt" ? saveGantt(form) : charts[id] && saveChart(id, form)));
      place.append(button);
    }
    byId(id).closest("section").querySelector("h2").append(place);
  }
}
