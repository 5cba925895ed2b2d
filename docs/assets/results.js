// The filter of docs/results/explore.md: reads the JSON files that the page links to, which `quire bench` wrote.

const QUIRE = "Quire";
const BEST = "the best other library";
const FILTERS = [
  // label, value of a row
  ["batches", (row) => row.kind],
  ["model", (row) => row.model],
  ["cache", (row) => row.kv_dtype],
  ["page size", (row) => String(row.page_size)],
  ["lengths", (row) => (row.uniform ? "equal" : "different")],
];

// Make an element.
const element = (tag, fields = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), fields);
  node.append(...children);
  return node;
};

const isOurs = (name) => name.startsWith(QUIRE);

const micros = (row, name) => (row.results[name] || {}).micros;

// The time to compare with, and whose it is.
function other(row, library) {
  if (library !== BEST) return [micros(row, library), library];
  const timed = Object.keys(row.results).filter((name) => !isOurs(name) && !name.includes("not paged"));
  const times = timed.map((name) => [micros(row, name), name]).filter(([time]) => time !== undefined);
  return times.sort(([a], [b]) => a - b)[0] || [undefined, ""];
}

const format = (time) => (time >= 1000 ? Math.round(time).toLocaleString("en") : time.toPrecision(3));

// A menu, within its label and alone.
function select(label, values, onchange) {
  const menu = element("select", { onchange }, ...values.map((value) => element("option", { textContent: value, value })));
  menu.setAttribute("aria-label", label);
  return [element("label", {}, element("span", { textContent: label }), menu), menu];
}

// Show the controls and the bars of a report.
function show(root, report) {
  const rows = report.rows.filter((row) => micros(row, QUIRE) !== undefined);
  const timed = [...new Set(rows.flatMap((row) => Object.keys(row.results)))].filter(
    (name) => name !== QUIRE && rows.some((row) => micros(row, name) !== undefined),
  );
  const body = element("div", { className: "quire-bars" });
  const summary = element("p", { className: "quire-summary" });
  summary.setAttribute("role", "status");
  const controls = element("div", { className: "quire-controls" });
  const [libraryLabel, library] = select("compared with", [BEST, ...timed], draw);
  controls.append(libraryLabel);
  const menus = FILTERS.map(([name, valueOf]) => {
    const values = [...new Set(rows.map(valueOf))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const [label, menu] = select(name, ["all", ...values], draw);
    controls.append(label);
    return [menu, valueOf];
  });
  const text = element("input", { type: "search", placeholder: "part of a case's name", oninput: draw });
  controls.append(element("label", {}, element("span", { textContent: "case" }), text));

  function draw() {
    const kept = rows
      .filter((row) => menus.every(([menu, valueOf]) => menu.value === "all" || menu.value === valueOf(row)))
      .filter((row) => row.case.toLowerCase().includes(text.value.toLowerCase()))
      .map((row) => [row, ...other(row, library.value)])
      .filter(([, time]) => time !== undefined)
      .map(([row, time, name]) => ({ row, time, name, ratio: time / micros(row, QUIRE) }))
      .sort((a, b) => b.ratio - a.ratio);
    if (!kept.length) {
      summary.textContent = "No case fits.";
      body.replaceChildren();
      return;
    }
    const logs = kept.map(({ ratio }) => Math.log2(ratio));
    const mean = 2 ** (logs.reduce((a, b) => a + b, 0) / logs.length);
    const slower = kept.filter(({ ratio }) => ratio < 1).length;
    summary.textContent =
      `${kept.length} ${kept.length === 1 ? "case" : "cases"}: ${library.value} takes ${mean.toFixed(2)} times as long as Quire ` +
      `(geometric mean). It is faster in ${slower}.`;
    const low = Math.min(-0.5, ...logs);
    const high = Math.max(0.5, ...logs);
    const at = (log) => (100 * (log - low)) / (high - low);
    body.replaceChildren(
      ...kept.map(({ row, time, name, ratio }) => {
        const log = Math.log2(ratio);
        const bar = element("span", { className: ratio < 1 ? "quire-bar slower" : "quire-bar" });
        bar.style.left = `${at(Math.min(log, 0))}%`;
        bar.style.width = `${Math.max(Math.abs(at(log) - at(0)), 0.3)}%`;
        const one = element("span", { className: "quire-one" });
        one.style.left = `${at(0)}%`;
        const numbers = `${ratio.toFixed(2)} (${format(micros(row, QUIRE))} and ${format(time)} µs)`;
        const line = element(
          "div",
          { className: "quire-line", title: `${row.case}: Quire ${format(micros(row, QUIRE))} µs, ${name} ${format(time)} µs` },
          element("span", { className: "quire-case", textContent: row.case }),
          element("span", { className: "quire-track" }, bar, one),
          element("span", { className: "quire-number", textContent: numbers }),
        );
        return line;
      }),
    );
  }

  const facts = report.provenance;
  root.replaceChildren(
    controls,
    element("p", {
      className: "quire-facts",
      textContent: `${facts.device}, ${facts.date}, torch ${facts.torch}, Triton ${facts.triton}. In brackets: Quire's time and the other's.`,
    }),
    summary,
    body,
  );
  draw();
}

// Replace the links of the page by a menu of results.
async function start(root) {
  const links = [...root.querySelectorAll("a")];
  const view = element("div");
  const load = async () => {
    const link = links[files.selectedIndex];
    try {
      const answer = await fetch(link.href);
      if (!answer.ok) throw new Error(answer.statusText);
      show(view, await answer.json());
    } catch (error) {
      view.replaceChildren(element("p", { textContent: `${link.href} could not be read (${error.message}). Open the site from a server.` }));
    }
  };
  const [label, files] = select("results", links.map((link) => link.textContent), load);
  root.replaceChildren(element("div", { className: "quire-controls" }, label), view);
  await load();
}

document.querySelectorAll(".quire-results").forEach(start);
