"use strict";
// The views: the list, a run, a study, a job, and runs compared. Each has `element`, `update(items)` and `close()`.

const MOST_CURVES = 20;
const MOST_COMPARED = 8;
const address = (...parts) => `#/${parts.join("/")}`;
const itemLink = (id, name) => h("a", { href: address("item", id) }, name);

const LONG_PREFIX = 16;

/** The folder that all names begin with, where it is long enough to be in the way. */
function sharedFolder(names) {
  if (names.length < 2) return "";
  let prefix = names[0].slice(0, names[0].lastIndexOf("/") + 1);
  while (prefix && !names.every((name) => name.startsWith(prefix))) prefix = prefix.slice(0, prefix.lastIndexOf("/", prefix.length - 2) + 1);
  return prefix.length > LONG_PREFIX ? prefix : "";
}

/** The curves of an item by metric. */
function curvesOf(sections) {
  return Object.fromEntries(Object.entries(sections).filter(([name]) => name.startsWith("curve/")).map(([name, curve]) => [name.slice(6), curve]));
}

/** Runs, studies and jobs in tables, and the curves of the runs that are chosen. */
class ListView {
  constructor(go) {
    this.go = go;
    this.chosen = new Set();
    this.metric = "train_loss";
    this.filter = h("input", { type: "search", placeholder: "part of a name", oninput: () => this.update(this.items) });
    this.compare = h("button", { type: "button", class: "main", disabled: true, onclick: () => go(address("compare", ...this.chosen)) }, "Compare");
    const metric = h("label", {}, "Curves of ", h("select", { onchange: (event) => { this.metric = event.target.value; this.update(this.items); } },
      h("option", { value: "train_loss" }, "training loss"), h("option", { value: "val_loss" }, "validation loss")));
    this.chart = new Chart("Loss", { height: 320, form: format.loss });
    this.note = h("p", { class: "note" });
    this.runs = new SortedTable({ caption: "Runs", key: ({ id }) => id, columns: this.columns(), sort: null, mark: ({ id }) => (this.chosen.has(id) ? "chosen" : "") });
    this.runs.onsort = () => this.draw();
    this.studies = new SortedTable({ caption: "Studies", key: ({ id }) => id, sort: null, columns: [
      { name: "name", title: "Name", value: ({ head }) => head.name, show: ({ id, head }) => itemLink(id, head.name) },
      { name: "state", title: "State", value: ({ head }) => head.state, show: ({ head }) => badge(head.state) },
      { name: "trials", title: "Trials", numeric: true, value: ({ head }) => head.trials, show: ({ head }) => `${head.trials}${head.cap ? ` of ${head.cap}` : ""}` },
      { name: "best", title: "Best", numeric: true, value: ({ head }) => head.best, show: ({ head }) => format.digits(head.best) },
      { name: "metric", title: "Metric", value: ({ head }) => `${head.goal} ${head.metric}` },
      { name: "method", title: "Method", value: ({ head }) => head.method },
    ] });
    this.jobs = new SortedTable({ caption: "Jobs", key: ({ id }) => id, sort: null, columns: [
      { name: "name", title: "Job", value: ({ head }) => head.name, show: ({ id, head }) => itemLink(id, head.name) },
      { name: "state", title: "State", value: ({ head }) => head.state, show: ({ head }) => badge(head.state) },
      { name: "step", title: "Step", numeric: true, value: ({ head }) => head.step },
      { name: "ranks", title: "Ranks", numeric: true, value: ({ head }) => head.nprocs },
      { name: "begun", title: "Begun", value: ({ head }) => head.begun, show: ({ head }) => format.time(head.begun) },
    ] });
    this.cards = {
      run: card("Runs", h("div", { class: "controls" }, h("label", {}, "Filter ", this.filter), this.compare, this.note), this.runs.element),
      study: card("Studies", this.studies.element),
      job: card("Jobs", this.jobs.element),
    };
    this.curves = card("Curves", chartControls(() => this.draw(), {}, metric), this.chart.element);
    this.none = h("p", { class: "card", hidden: true }, "There is nothing to show.");
    this.summary = h("p", { class: "lead" });
    this.element = h("div", {}, h("h1", {}, "Runs and studies"), this.summary, this.none, this.curves, Object.values(this.cards));
  }

  columns() {
    const number = (name, title, form, value) => ({ name, title, numeric: true, value, show: (row) => form(value(row)) });
    return [
      { name: "name", title: "Name", value: ({ head }) => head.name, show: ({ id, short, head }) => h("a", { href: address("item", id), title: head.name }, short) },
      { name: "choose", title: "", keep: true, value: () => 0, show: ({ id, head }) => h("input", { type: "checkbox", "aria-label": `Plot and compare ${head.name}`, checked: this.chosen.has(id), onchange: (event) => { if (event.target.checked) this.chosen.add(id); else this.chosen.delete(id); this.update(this.items); } }) },
      { name: "state", title: "State", value: ({ head }) => head.state, show: ({ head }) => h("span", {}, badge(head.state), head.read < 1 ? ` reading ${format.share(head.read)}` : "") },
      number("step", "Step", format.integer, ({ head }) => head.step),
      { name: "done", title: "Done", numeric: true, value: ({ head }) => (head.last_step ? head.step / head.last_step : null), show: ({ head }) => (head.last_step ? format.share(Math.min(1, head.step / head.last_step)) : NONE) },
      { ...number("train_loss", "Loss", format.loss, ({ head }) => head.row.train_loss), show: ({ head }) => newest(head.row, "train_loss", format.loss) },
      { ...number("val_loss", "Validation", format.loss, ({ head }) => head.row.val_loss), show: ({ head }) => newest(head.row, "val_loss", format.loss) },
      number("best", "Best", format.loss, ({ head }) => head.best),
      number("rate", "Tokens/s", format.scaled, ({ head }) => head.row.tokens_per_s),
      number("mfu", "MFU", format.share, ({ head }) => head.row.mfu),
      number("memory", "Memory", format.gigabytes, ({ head }) => head.row.vram_gb ?? head.row.ram_gb),
      { name: "updated", title: "Last row", value: ({ head }) => head.updated, show: ({ head }) => format.time(head.updated) },
    ];
  }

  update(items) {
    this.items = items;
    const rows = items.filter(([, sections]) => sections.head).map(([id, sections]) => ({ id, sections, head: sections.head }));
    const of = (kind) => rows.filter(({ head }) => head.kind === kind);
    const text = this.filter.value.trim().toLowerCase();
    const shared = sharedFolder(of("run").map(({ head }) => head.name));
    const runs = of("run").map((row) => ({ ...row, short: row.head.name.slice(shared.length) })).filter(({ head }) => [head.name, head.title, ...(head.tags ?? [])].some((words) => words?.toLowerCase().includes(text)));
    this.runs.update(runs);
    this.studies.update(of("study"));
    this.jobs.update(of("job"));
    for (const [kind, element] of Object.entries(this.cards)) element.hidden = !of(kind).length;
    const living = rows.filter(({ head }) => LIVING.has(head.state)).length;
    const many = (count, name, names) => (count ? [`${count} ${count === 1 ? name : names}`] : []);
    this.summary.textContent = [...many(of("run").length, "run", "runs"), ...many(of("study").length, "study", "studies"), ...many(of("job").length, "job", "jobs"), `${living} active`].join(" · ");
    this.none.hidden = rows.length > 0;
    this.draw();
  }

  draw() {
    const rows = (this.runs.shown ?? []).filter(({ sections }) => sections[`curve/${this.metric}`]);
    const wanted = this.chosen.size ? rows.filter(({ id }) => this.chosen.has(id)) : rows;
    const drawn = wanted.slice(0, MOST_CURVES);
    this.curves.hidden = !this.cards.run.hidden === false;
    this.chart.update(drawn.map(({ short, sections }, i) => ({ label: short, curve: sections[`curve/${this.metric}`], tokens: sections["curve/tokens"], gaps: sections.gaps?.[this.metric], number: i, points: this.metric === "val_loss" && sections[`curve/${this.metric}`][0].length < 40 })));
    this.note.textContent = wanted.length > drawn.length ? `The first ${drawn.length} of ${wanted.length} are drawn: sort or select others.` : "";
    this.compare.disabled = this.chosen.size < 2 || this.chosen.size > MOST_COMPARED;
    this.compare.textContent = this.chosen.size ? `Compare ${this.chosen.size}` : "Compare";
    this.compare.title = `Choose 2 to ${MOST_COMPARED} runs`;
  }

  close() {
    this.chart.close();
  }
}

/** The charts of a run: [title, metrics or a test of a name, options]. */
const GROUPS = [
  ["Loss", ["train_loss", "val_loss"], { height: 320, form: format.loss }],
  ["Loss of each data set", (name) => name.startsWith("loss/"), { form: format.loss }],
  ["Validation loss of each data set", (name) => name.startsWith("val_loss/"), { form: format.loss }],
  ["Bits per byte of the validation", (name) => /^val_bpb(\/|$)/.test(name), { form: format.loss }],
  ["Tokens per second", ["tokens_per_s"], { form: format.scaled, plain: true }],
  ["Milliseconds per step", ["ms_per_step"], { plain: true }],
  ["MFU", ["mfu"], { form: format.share, plain: true }],
  ["Memory (GB)", ["vram_gb", "ram_gb"], { plain: true }],
  ["Load of experts (1: an even share)", ["expert_load_max", "expert_load_mean", "expert_load_min"], { plain: true }],
  ["Choices that experts drop", ["expert_dropped"], { form: format.share, plain: true }],
  ["Learning rate", ["lr"], { plain: true }],
  ["Gradient norm", ["grad_norm"], {}],
];
const NO_CHART = new Set(["tokens", "phase", "train_bal", "val_bal"]);

/** Charts that are made as their metrics come. */
class ChartGrid {
  constructor() {
    this.charts = new Map();
    this.first = h("div");
    this.rest = h("div", { class: "grid" });
  }

  update(runs, marks = []) {
    this.marks = marks;
    const names = [...new Set(runs.flatMap(({ curves }) => Object.keys(curves)))].filter((name) => !NO_CHART.has(name));
    const used = new Set();
    for (const [title, which, options] of GROUPS) {
      const members = names.filter((name) => (Array.isArray(which) ? which.includes(name) : which(name)));
      members.forEach((name) => used.add(name));
      if (members.length) this.show(title, members, options, runs);
    }
    for (const name of names.filter((one) => !used.has(one))) this.show(name, [name], {}, runs);
  }

  show(title, members, options, runs) {
    if (!this.charts.has(title)) {
      const chart = new Chart(title, { height: 200, ...options });
      this.charts.set(title, chart);
      (title === "Loss" ? this.first : this.rest).append(h("div", { class: "card" }, chart.element));
    }
    let number = 0;
    const { marks } = this;
    const series = runs.flatMap(({ name, curves, gaps }, i) => members.filter((member) => curves[member]).map((member) => ({
      label: runs.length > 1 ? (members.length > 1 ? `${name}: ${member}` : name) : member.replace(/^(val_)?loss\//, ""),
      curve: curves[member], tokens: curves.tokens, gaps: gaps?.[member], number: runs.length > 1 ? i + (member === "val_loss" ? 10 : 0) : number++,
      points: member.startsWith("val_loss") && curves[member][0].length < 60,
    })));
    this.charts.get(title).update(series, marks);
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}

/** One run. */
class RunView {
  constructor() {
    const part = (attributes = {}) => h("div", attributes);
    this.title = part();
    this.phases = part();
    this.tiles = h("dl", { class: "tiles" });
    this.grid = new ChartGrid();
    this.marks = h("span", { class: "note" });
    this.controls = chartControls(() => this.draw());
    this.controls.append(this.marks);
    this.blend = part();
    this.ranks = part();
    this.time = part();
    this.checkpoints = part();
    this.config = h("details", { class: "card" }, h("summary", {}, "Config"), h("div"));
    this.element = h("div", {}, this.title, this.phases, this.tiles, this.controls, this.grid.first, this.ranks, h("div", { class: "columns" }, this.blend, this.time, this.checkpoints), this.grid.rest, this.config);
  }

  update([[, sections]]) {
    this.sections = sections;
    const head = sections.head;
    if (!head) return;
    fill(this.title, [head.name, head.title, head.tags, head.state, head.path, head.read], () => [
      h("h1", {}, head.name, badge(head.state), head.read < 1 ? h("small", { class: "note" }, `reading its logs: ${format.share(head.read)}`) : null),
      head.title || head.tags?.length ? h("p", { class: "about" }, [head.title, ...head.tags.map((tag) => `#${tag}`)].filter(Boolean).join("  ")) : null,
    ]);
    if (sections.phases) {
      fill(this.phases, [sections.phases, head.step, head.last_step], () => phaseBar(head, sections.phases));
      fill(this.blend, sections.phases, (value) => blendTable(value));
    }
    fill(this.tiles, head, runTiles);
    if (sections.ranks) fill(this.ranks, sections.ranks, ranksCard);
    if (sections.time) fill(this.time, sections.time, timeCard);
    if (sections.checkpoints) fill(this.checkpoints, sections.checkpoints, checkpointsCard);
    this.config.hidden = !sections.config || !Object.keys(sections.config).length;
    fill(this.config.lastElementChild, sections.config, (config) => plainTable("Config", ["Field", "Value"], Object.entries(config ?? {}).map(([name, value]) => [name, typeof value === "object" && value !== null ? JSON.stringify(value) : String(value)])));
    this.draw();
  }

  draw() {
    const begins = (this.sections.phases?.phases ?? []).slice(1).map(({ first }) => [first, "phase"]);
    const resumes = (this.sections.resumes ?? []).map((step) => [step, "resume"]);
    const words = [begins.length ? "dotted lines: phases begin" : "", resumes.length ? `dashed lines: training went on after a restart (${resumes.length})` : ""].filter(Boolean).join(" · ");
    this.marks.textContent = words;
    this.grid.update([{ name: this.sections.head?.name, curves: curvesOf(this.sections), gaps: this.sections.gaps }], [...begins, ...resumes]);
  }

  close() {
    this.grid.close();
  }
}

/** Some runs over one another: their curves, their numbers, and how their configs differ. */
class CompareView {
  constructor() {
    this.numbers = h("div");
    this.config = h("div");
    this.grid = new ChartGrid();
    this.element = h("div", {}, h("h1", {}, "Compare"), chartControls(() => this.draw()), this.grid.first, h("div", { class: "columns" }, card("Numbers", this.numbers), card("Config: fields that differ", this.config)), this.grid.rest);
  }

  update(items) {
    this.runs = items.filter(([, sections]) => sections.head?.kind === "run").map(([id, sections]) => ({ id, head: sections.head, config: sections.config ?? {}, name: sections.head.name, curves: curvesOf(sections), gaps: sections.gaps }));
    const names = this.runs.map(({ name }) => name);
    const rows = [
      ["State", ({ head }) => head.state], ["Step", ({ head }) => format.integer(head.step)],
      ["Training loss", ({ head }) => newest(head.row, "train_loss", format.loss)], ["Validation loss", ({ head }) => newest(head.row, "val_loss", format.loss)],
      ["Best validation loss", ({ head }) => format.loss(head.best)], ["Tokens read", ({ head }) => format.scaled(head.row.tokens)],
      ["Tokens per second", ({ head }) => format.scaled(head.row.tokens_per_s)], ["MFU", ({ head }) => format.share(head.row.mfu)], ["Goodput", ({ head }) => format.share(head.goodput)],
    ].map(([title, text]) => [title, ...this.runs.map(text)]).filter(([, ...texts]) => texts.some((text) => text !== NONE));
    const numeric = names.map((_, i) => i + 1);
    fill(this.numbers, [names, rows], () => plainTable("Numbers", ["", ...names], rows, numeric));
    const different = differences(this.runs.map(({ config }) => config));
    fill(this.config, [names, different], () => (different.length ? plainTable("Config differences", ["Field", ...names], different) : h("p", { class: "note" }, "No field differs.")));
    this.draw();
  }

  draw() {
    this.grid.update(this.runs);
  }

  close() {
    this.grid.close();
  }
}

/** One study: its trials. */
class StudyView {
  constructor() {
    this.title = h("div");
    this.lead = h("p", { class: "note" });
    this.tiles = h("dl", { class: "tiles" });
    this.chosen = null;
    this.best = new Chart("Best so far", { axis: "trial", plain: true, whole: true });
    this.curves = new Chart("Curves of the trials", { axis: "step", height: 300 });
    this.parallel = new Parallel((numbers) => { this.chosen = numbers; if (this.trials) this.list(); });
    this.slices = h("div", { class: "grid" });
    this.sliceCharts = new Map();
    this.importance = h("div");
    this.mixture = h("div");
    this.versus = h("div");
    this.filter = h("input", { type: "search", placeholder: "state, value of a parameter …", oninput: () => this.list() });
    this.count = h("span", { class: "note" });
    this.table = null;
    this.tableCard = card("Trials", h("div", { class: "controls" }, h("label", {}, "Filter ", this.filter), this.count));
    this.parallelCard = h("div", { class: "card" }, this.parallel.element);
    this.bestCard = h("div", { class: "card" }, this.best.element);
    this.element = h("div", {}, this.title, this.lead, this.tiles, this.versus, this.parallelCard,
      h("div", { class: "columns" }, this.bestCard, h("div", { class: "card" }, this.curves.element)),
      this.importance, this.mixture, this.slices, this.tableCard);
  }

  update([[, sections]]) {
    const head = sections.head;
    if (!head) return;
    this.head = head;
    this.trials = Object.entries(sections).filter(([name]) => name.startsWith("trial/")).map(([, trial]) => trial).sort((a, b) => a.number - b.number);
    const rows = this.trials.map(({ params }) => params);
    const all = [...new Set([...(sections.parameters ?? []), ...rows.flatMap((row) => Object.keys(row))])];
    this.names = all.filter((name) => new Set(rows.map((row) => JSON.stringify(row[name]))).size > 1);
    fill(this.title, [head.name, head.state], () => h("h1", {}, head.name, badge(head.state)));
    this.lead.textContent = `${head.method}, ${head.goal} ${head.metric}; scheduler: ${head.scheduler ?? "none"}`;
    fill(this.tiles, head, () => tiles([
      [`Best ${head.metric}`, format.digits(head.best), head.best_trial === null ? "" : `trial ${head.best_trial}`],
      ["Trials", `${head.trials}${head.cap ? ` of ${head.cap}` : ""}`],
      ...Object.entries(head.counts).filter(([, count]) => count).map(([name, count]) => [name[0].toUpperCase() + name.slice(1), String(count)]),
      ["Time left", format.duration(head.left_s)], ["Steps left", isNumber(head.steps_left) ? format.integer(head.steps_left) : NONE],
    ]));
    if (sections.versus) fill(this.versus, sections.versus, versusCard);
    this.bestCard.hidden = this.slices.hidden = Boolean(sections.versus);
    if (sections.importance) fill(this.importance, sections.importance, importanceCard);
    if (sections.mixture) fill(this.mixture, sections.mixture, (found) => mixtureCards(found, head));
    this.parallelCard.hidden = Boolean(sections.versus) || !this.names.length || !this.trials.some(({ value }) => isNumber(value));
    if (!this.parallelCard.hidden) this.parallel.update(this.trials, this.names, head.metric, head.goal, sections.scales ?? {});
    this.scales = sections.scales ?? {};
    this.draw();
    this.list();
  }

  draw() {
    const ended = this.trials.filter(({ value }) => isNumber(value));
    let best = null;
    const lowest = ended.map(({ value }) => (best = best === null ? value : this.head.goal === "maximize" ? Math.max(best, value) : Math.min(best, value)));
    const numbers = ended.map(({ number }) => number);
    const [low, high] = ended.length ? limitsOf(ended.map(({ value }) => value)) : [0, 0];
    const inside = (value) => Math.min(high, Math.max(low, value));
    const edge = ended.filter(({ value }) => value < low || value > high).length;
    this.best.update(ended.length ? [{ label: "best so far", curve: [numbers, lowest.map(inside)], number: 0, step: true }, { label: "trial", curve: [numbers, ended.map(({ value }) => inside(value))], number: 1, only: true, edge }] : []);
    for (const name of this.names) {
      const scale = this.scales[name] ?? {};
      const keys = scale.choices?.map((value) => JSON.stringify(value));
      const place = (value) => (keys ? keys.indexOf(JSON.stringify(value)) : value);
      const dots = ended.map(({ params, value }) => [place(params[name]), inside(value)]).filter(([x]) => isNumber(x) && x >= (keys ? 0 : -Infinity)).sort(([a], [b]) => a - b);
      if (new Set(dots.map(([x]) => x)).size < 4) continue;
      if (!this.sliceCharts.has(name)) {
        const chart = new Chart(`${this.head.metric} over ${name}`, { height: 200, axis: name, plain: true, logX: dots[0][0] > 0 && Boolean(scale.log), names: scale.choices?.map(valueText) });
        this.sliceCharts.set(name, chart);
        this.slices.append(h("div", { class: "card" }, chart.element));
      }
      this.sliceCharts.get(name).update([{ label: this.head.metric, curve: [dots.map(([x]) => x), dots.map(([, y]) => y)], number: 1, only: true, edge }]);
    }
  }

  /** The trials that the filter and the bands leave, in the table and as curves. */
  list() {
    const text = this.filter.value.trim().toLowerCase();
    const rows = this.trials.filter((trial) => (!this.chosen || this.chosen.has(trial.number)) && (!text || JSON.stringify([trial.number, trial.state, trial.params, trial.why]).toLowerCase().includes(text)));
    const key = this.names.join("\n");
    if (!this.table || this.tableKey !== key) {
      const columns = [
        { name: "trial", title: "Trial", numeric: true, value: ({ number }) => number, show: ({ number }) => (number === this.head.best_trial ? `★ ${number}` : String(number)) },
        { name: "value", title: this.head.metric, numeric: true, value: ({ value, reports }) => value ?? reports[1].at(-1), show: ({ value, reports }) => format.digits(value ?? reports[1].at(-1)) },
        { name: "state", title: "State", value: ({ state }) => state, show: ({ state }) => badge(state) },
        { name: "step", title: "Step", numeric: true, value: ({ reports }) => reports[0].at(-1) },
        { name: "time", title: "Time", numeric: true, value: ({ seconds }) => seconds, show: ({ seconds }) => format.duration(seconds) },
        ...this.names.map((name) => ({ name: `p ${name}`, title: name, numeric: this.trials.every(({ params }) => params[name] === undefined || isNumber(params[name])), value: ({ params }) => params[name], show: ({ params }) => valueText(params[name]) })),
        { name: "why", title: "Why it ended or paused", value: ({ why }) => why ?? "", show: ({ why }) => why ?? "" },
      ];
      const table = new SortedTable({ caption: "Trials", columns, key: ({ number }) => number, sort: "value", descending: this.head.goal === "maximize", mark: ({ number }) => (number === this.head.best_trial ? "best" : "") });
      if (this.table) this.table.element.replaceWith(table.element);
      else this.tableCard.append(table.element);
      [this.table, this.tableKey] = [table, key];
    }
    this.table.update(rows);
    this.count.textContent = rows.length === this.trials.length ? "" : `${rows.length} of ${this.trials.length}`;
    const drawn = this.table.shown.filter(({ reports }) => reports[0].length).slice(0, MOST_CURVES);
    this.curves.update(drawn.map(({ number, reports }, i) => ({ label: `trial ${number}`, curve: reports, number: i })));
  }

  close() {
    for (const chart of [this.best, this.curves, ...this.sliceCharts.values()]) chart.close();
  }
}

/** Which parameters matter. */
function importanceCard(shares) {
  const rows = Object.entries(shares).sort(([, a], [, b]) => b - a);
  if (!rows.length) return null;
  return card("Which parameters matter", h("p", { class: "note" }, "Share of each parameter in the variance of the metric, by a Gaussian process."),
    plainTable("Importance", ["Parameter", "", "Share"], rows.map(([name, share]) => [name, h("span", { class: "bars" }, h("span", { class: "bar realised", style: { width: `${Math.max(0.5, 100 * share)}%` } })), format.share(share)]), [2]));
}

/** One job that trains in no run directory here. */
class JobView {
  constructor() {
    this.title = h("div");
    this.about = h("p", { class: "note" });
    this.tiles = h("dl", { class: "tiles" });
    this.ranks = h("div");
    this.lines = h("pre", { tabindex: "0" });
    this.element = h("div", {}, this.title, this.about, this.tiles, this.ranks, card("Last lines", this.lines));
  }

  update([[, { head, ranks, lines }]]) {
    if (!head) return;
    fill(this.title, [head.name, head.state], () => h("h1", {}, head.name, badge(head.state)));
    this.about.textContent = `${head.command} in ${head.path}`;
    fill(this.tiles, head, () => tiles([["Step", format.integer(head.step)], ["Attempt", String(head.attempt + 1)], ["Ranks", String(head.nprocs)], ["Hosts", String(head.hosts.length), head.hosts.slice(0, 4).join(", ")], ["Begun", format.time(head.begun)], ["Exit code", head.code === null ? NONE : String(head.code)]]));
    if (ranks) fill(this.ranks, ranks, ranksCard);
    this.lines.textContent = (lines ?? []).join("\n");
  }

  close() {}
}
