"use strict";
// Curves that zoom and say their values, drawn by uPlot.

const settings = { x: "step", log: false, smooth: 0 };
const charts = new Set();
const SHOWN_IN_TIP = 8;
/** Steps of an axis of whole numbers. */
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];
/** Curves behind whose smooth form the plain one is drawn faintly, at most. */
const MOST_BEHIND = 6;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** The colour of the curve of a number; ten, and then again with dashes. */
const seriesColour = (number) => colour(`--series-${number % 10}`);

/** The same colour, for an area. */
const faint = (hex) => `${hex}50`;

/** The dot of a curve at the cursor, 7 pixels wide. */
const cursorPoint = () => h("div", { style: { width: "7px", height: "7px", marginLeft: "-3.5px", marginTop: "-3.5px" } });

/** Exponential mean, corrected at its beginning. */
function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, total = 0;
  return values.map((value) => {
    if (!isNumber(value)) return value;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

/** Places on another axis: the values of `curve` at some steps, between its points in proportion. */
function along(steps, curve) {
  const [xs, ys] = curve;
  let i = 0;
  return steps.map((step) => {
    while (i < xs.length - 2 && xs[i + 1] < step) i += 1;
    if (xs.length < 2) return ys[0];
    return ys[i] + ((step - xs[i]) / (xs[i + 1] - xs[i] || 1)) * (ys[i + 1] - ys[i]);
  });
}

/**
 * A figure. `update` takes series: {label, curve: [xs, ys], tokens: the curve of tokens, gaps: [step, number] of values
 * that are not finite, number: its colour, points: whether each is drawn, only: whether no line is}. A curve of many rows
 * is [xs, means, least, largest], which are drawn as a band.
 */
class Chart {
  constructor(title, { height = 260, axis = null, form = format.number, plain = false, logX = false, whole = false, names = null } = {}) {
    Object.assign(this, { title, height, axis, form, plain, logX, names, whole: whole || Boolean(names), series: [], marks: [], hidden: new Set(), index: null });
    this.note = h("span", { class: "note" });
    this.legend = h("div", { class: "legend", role: "group", "aria-label": `Curves of ${title}` });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart", onkeydown: (event) => this.key(event) });
    this.tip = h("div", { class: "tip", "aria-hidden": "true", hidden: true });
    this.said = h("p", { class: "hidden", "aria-live": "polite" });
    const zoom = (text, label, act) => h("button", { type: "button", class: "small", "aria-label": `${label}: ${title}`, title: label, onclick: act }, text);
    const buttons = h("span", { class: "zoom" }, zoom("+", "Zoom in", () => this.zoom(0.5)), zoom("−", "Zoom out", () => this.zoom(2)), zoom("⤢", "Show all", () => this.showAll()));
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, h("strong", {}, title), this.note, buttons), this.plot, this.tip, this.legend, this.said);
    this.plot.style.height = `${height}px`;
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.plot);
    this.touches();
    charts.add(this);
  }

  close() {
    this.observer.disconnect();
    this.uplot?.destroy();
    charts.delete(this);
  }

  /** Show series, and a line at each of `marks`: [step, kind]. */
  update(series, marks = []) {
    const key = JSON.stringify([series, settings, marks]);
    if (key === this.drawn) return;
    const kinds = (list) => JSON.stringify([list.map((one) => [one.label, one.number, one.points, one.curve.length]), this.behind]);
    const before = kinds(this.series);
    [this.drawn, this.series] = [key, series];
    this.behind = settings.smooth > 0 && !this.plain && series.length <= MOST_BEHIND;
    const places = (steps, tokens) => (settings.x === "tokens" && !this.axis && tokens?.[0].length ? along(steps, tokens) : steps);
    const sorted = [...marks].sort(([a], [b]) => a - b), at = places(sorted.map(([step]) => step), series[0]?.tokens);
    this.marks = sorted.map(([, kind], i) => [at[i], kind]);
    for (const one of series) this.marks.push(...places((one.gaps ?? []).map(([step]) => step), one.tokens).map((place) => [place, "gap"]));
    const isSame = before === kinds(series);
    const main = series.map((one) => this.table(one, settings.smooth));
    const behind = this.behind ? series.map((one) => this.table(one, 0)) : [];
    this.bands = series.map((one, i) => [one, i]).filter(([{ curve }]) => curve.length > 2);
    const bands = this.bands.flatMap(([one]) => [3, 2].map((side) => this.table({ ...one, curve: [one.curve[0], one.curve[side]] }, 0)));
    const tables = [...main, ...behind, ...bands];
    this.firstBand = 1 + main.length + behind.length;
    this.data = tables.length ? (tables.length === 1 ? tables[0] : uPlot.join(tables)) : [[], []];
    if (!isSame) this.showLegend();
    this.describe();
    if (!this.uplot || !isSame || this.isLog !== this.log || this.axisName !== this.axisTitle()) this.build();
    else this.setData();
  }

  get log() {
    return settings.log && !this.plain;
  }

  axisTitle() {
    return this.axis ?? settings.x;
  }

  /** [xs, ys] of a series as it is drawn. */
  table({ curve, tokens, points }, smooth) {
    const [steps, values] = curve;
    let xs = settings.x === "tokens" && !this.axis && tokens?.[0].length ? along(steps, tokens) : steps;
    let ys = points || this.plain ? values : smoothed(values, smooth);
    if (this.log) ys = ys.map((value) => (value > 0 ? value : null));
    return [xs, ys];
  }

  setData() {
    const { min, max } = this.uplot.scales.x;
    this.uplot.setData(this.data, !this.zoomed);
    if (this.zoomed) this.uplot.setScale("x", { min, max });
  }

  build() {
    const width = this.plot.clientWidth;
    this.uplot?.destroy();
    this.uplot = null;
    this.zoomed = false;
    if (!width || !this.series.length) return;
    [this.isLog, this.axisName] = [this.log, this.axisTitle()];
    const [ink, grid] = [colour("--muted"), colour("--grid")];
    const axis = { stroke: ink, font: "12px system-ui, sans-serif", grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const many = this.series.length > 12;
    const tick = (value) => (Math.abs(value) >= 1e4 ? format.scaled(value, (number) => String(Number(number.toPrecision(3)))) : format.number(value));
    const line = (one, more) => ({
      label: one.label, stroke: seriesColour(one.number), width: one.only ? 0 : many ? 1 : 1.6, spanGaps: true,
      dash: one.number >= 10 ? [6, 4] : undefined, show: !this.hidden.has(one.label),
      paths: one.step ? uPlot.paths.stepped({ align: 1 }) : undefined,
      points: { show: Boolean(one.points || one.only) || one.curve[0].length === 1, size: one.only ? 6 : 5, fill: seriesColour(one.number) },
      ...more,
    });
    this.uplot = new uPlot({
      width, height: this.height, padding: [8, 26, 0, 0],
      scales: { x: { time: false, distr: this.logX ? 3 : 1 }, y: { distr: this.isLog ? 3 : 1 } },
      axes: [
        { ...axis, ...(this.whole ? { incrs: WHOLE } : {}), space: 70, size: 28, label: this.axisName, labelSize: 20, labelFont: "12px system-ui, sans-serif", labelGap: 0, values: (_, ticks) => ticks.map((at) => (at === null ? "" : this.names ? this.names[at] ?? "" : tick(at))) },
        { ...axis, size: 58, values: (_, ticks) => ticks.map((at) => (at === null ? "" : this.form === format.share ? `${+(100 * at).toPrecision(3)}%` : tick(at))) },
      ],
      series: [{}, ...this.series.map((one) => line(one)), ...(this.behind ? this.series.map((one) => line(one, { alpha: one.points ? 0 : 0.25, width: 1, points: { show: false } })) : []), ...this.bands.flatMap(([one]) => [0, 1].map(() => line(one, { alpha: 0.5, width: 0.7, points: { show: false } })))],
      bands: this.bands.map(([one], i) => ({ series: [this.firstBand + 2 * i, this.firstBand + 2 * i + 1], fill: faint(seriesColour(one.number)) })),
      legend: { show: false },
      focus: { alpha: many ? 0.25 : 1 },
      cursor: { drag: { x: true, y: false, dist: 6 }, focus: { prox: 40 }, points: { size: 7, show: (u, i) => (i < this.firstBand ? cursorPoint() : null) } },
      hooks: { drawClear: [(u) => this.drawMarks(u)], setCursor: [() => this.tell()], setScale: [(u, name) => name === "x" && this.noteZoom()] },
    }, this.data, this.plot);
    this.uplot.over.addEventListener("dblclick", () => { this.zoomed = false; });
  }

  /** A dotted line where a phase begins, a dashed one where training resumed, a short one where a value is not finite. */
  drawMarks(u) {
    const { ctx, bbox } = u, bottom = bbox.top + bbox.height;
    const looks = { phase: ["--muted", [2, 4], 1], resume: ["--live", [7, 4], 1], gap: ["--bad", [], 3] };
    ctx.save();
    for (const [mark, kind] of this.marks) {
      const x = Math.round(u.valToPos(mark, "x", true)), [name, dash, width] = looks[kind];
      if (x < bbox.left || x > bbox.left + bbox.width || (kind === "phase" && x === bbox.left)) continue;
      ctx.strokeStyle = colour(name);
      ctx.lineWidth = width * devicePixelRatio;
      ctx.setLineDash(dash.map((part) => part * devicePixelRatio));
      ctx.beginPath();
      ctx.moveTo(x, kind === "gap" ? bottom - 14 * devicePixelRatio : bbox.top);
      ctx.lineTo(x, bottom);
      ctx.stroke();
    }
    ctx.restore();
  }

  resize() {
    if (this.uplot && this.plot.clientWidth !== this.uplot.width) this.uplot.setSize({ width: this.plot.clientWidth, height: this.height });
    else if (!this.uplot) this.build();
  }

  span() {
    const xs = this.data[0];
    return [xs[0], xs[xs.length - 1]];
  }

  noteZoom() {
    const { min, max } = this.uplot.scales.x, [first, last] = this.span();
    this.zoomed = min > first || max < last;
  }

  zoom(factor) {
    if (!this.uplot) return;
    const { min, max } = this.uplot.scales.x, [first, last] = this.span();
    const middle = this.index === null ? (min + max) / 2 : this.data[0][this.index];
    const half = ((max - min) * factor) / 2;
    const [left, right] = [Math.max(first, middle - half), Math.min(last, middle + half)];
    if (right > left) this.uplot.setScale("x", { min: left, max: right });
  }

  showAll() {
    if (!this.uplot) return;
    const [min, max] = this.span();
    this.uplot.setScale("x", { min, max });
  }

  /** The keys of a chart that has the focus. */
  key(event) {
    if (!this.uplot) return;
    const xs = this.data[0], far = Math.max(1, Math.round(xs.length / 20));
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -far, PageDown: far, Home: -xs.length, End: xs.length };
    if (event.key in moves) {
      this.index = Math.min(xs.length - 1, Math.max(0, (this.index ?? (moves[event.key] < 0 ? xs.length : -1)) + moves[event.key]));
      this.uplot.setCursor({ left: this.uplot.valToPos(xs[this.index], "x"), top: 20 });
      this.said.textContent = this.reading(this.index).map(([label, value]) => `${label} ${value}`).join(", ");
    } else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "0" || event.key === "Escape") this.showAll();
    else return;
    event.preventDefault();
  }

  /** A finger moves the cursor sideways; two fingers zoom. */
  touches() {
    let apart = 0;
    const distance = ([a, b]) => Math.abs(a.clientX - b.clientX);
    this.plot.addEventListener("touchstart", (event) => { if (event.touches.length === 2) apart = distance(event.touches); }, { passive: true });
    this.plot.addEventListener("touchmove", (event) => {
      if (!this.uplot) return;
      const box = this.uplot.over.getBoundingClientRect();
      if (event.touches.length === 1) this.uplot.setCursor({ left: event.touches[0].clientX - box.left, top: event.touches[0].clientY - box.top });
      else if (event.touches.length === 2 && Math.abs(distance(event.touches) - apart) > 24) {
        this.zoom(distance(event.touches) > apart ? 0.8 : 1.25);
        apart = distance(event.touches);
      }
    }, { passive: true });
  }

  /** [label, value] of the axis and of each curve near a place. */
  reading(index) {
    const xs = this.data[0];
    const values = this.series.map((one, i) => {
      let at = index;
      const ys = this.data[i + 1];
      for (let away = 1; !isNumber(ys[at]) && away < xs.length; away += 1) at = isNumber(ys[index - away]) ? index - away : isNumber(ys[index + away]) ? index + away : at;
      const band = this.bands.findIndex(([, number]) => number === i), [high, low] = [0, 1].map((side) => this.data[this.firstBand + 2 * band + side]?.[at]);
      const text = band >= 0 && isNumber(low) && isNumber(high) && low !== high ? ` (${this.form(low)} to ${this.form(high)})` : "";
      return [one.label, isNumber(ys[at]) ? `${this.form(ys[at])}${text}` : NONE, one.number, i];
    });
    return [[this.axisTitle(), this.place(xs[index])], ...values.filter(([label]) => !this.hidden.has(label))];
  }

  /** A place on the x axis in words. */
  place(x) {
    if (!isNumber(x)) return NONE;
    if (this.names) return this.names[x] ?? NONE;
    return this.axis && !this.whole ? format.number(x) : format.integer(x);
  }

  /** Show what the cursor points at. */
  tell() {
    const { idx, left, top } = this.uplot.cursor;
    this.tip.hidden = idx === null || idx === undefined || left < 0;
    if (this.tip.hidden) return;
    let lines = this.reading(idx);
    if (lines.length > SHOWN_IN_TIP + 1) {
      const near = ([, , , i]) => Math.abs(this.uplot.valToPos(this.data[i + 1][idx] ?? Infinity, "y") - top);
      lines = [lines[0], ...lines.slice(1).sort((a, b) => near(a) - near(b)).slice(0, SHOWN_IN_TIP)];
    }
    this.tip.replaceChildren(...lines.map(([label, value, number]) => {
      const line = h("div", {}, number === undefined ? null : h("i", { class: `dot series-${number % 10}` }), h("span", {}, label), h("b", {}, value));
      return line;
    }));
    const over = this.uplot.over, width = this.tip.offsetWidth, place = over.offsetLeft + left;
    const isLeft = left > over.clientWidth / 2;
    this.tip.style.left = `${Math.max(0, Math.min(isLeft ? place - width - 14 : place + 14, this.plot.clientWidth - width))}px`;
    this.tip.style.top = `${this.plot.offsetTop + 12}px`;
  }

  showLegend() {
    this.legend.hidden = this.series.length < 2 || this.series.length > 12;
    this.legend.replaceChildren(...(this.legend.hidden ? [] : this.series.map((one, i) => h("button", {
      type: "button", class: "small", "aria-pressed": String(!this.hidden.has(one.label)),
      onclick: (event) => {
        const show = this.hidden.delete(one.label) || (this.hidden.add(one.label), false);
        event.currentTarget.setAttribute("aria-pressed", String(show));
        this.uplot?.setSeries(i + 1, { show });
        if (this.behind) this.uplot?.setSeries(this.series.length + i + 1, { show });
        const band = this.bands.findIndex(([, number]) => number === i);
        if (band >= 0) for (const side of [0, 1]) this.uplot?.setSeries(this.firstBand + 2 * band + side, { show });
      },
    }, h("i", { class: `dot series-${one.number % 10}`, "aria-hidden": "true" }), one.label))));
  }

  /** What the chart is, in words. */
  describe() {
    const ends = this.series.filter((one) => one.curve[1].length).map((one) => `${one.label}: ${this.form(one.curve[1].at(-1))} last, ${this.form((one.curve[2] ?? one.curve[1]).reduce((a, b) => (b < a ? b : a)))} lowest, ${this.form((one.curve[3] ?? one.curve[1]).reduce((a, b) => (b > a ? b : a)))} highest`);
    const gaps = this.series.filter((one) => one.gaps?.length).map((one) => {
      const count = one.gaps.reduce((sum, [, number]) => sum + number, 0);
      return `${one.label}: ${count.toLocaleString("en-US")} ${count === 1 ? "value" : "values"} not finite, first at step ${one.gaps[0][0].toLocaleString("en-US")}`;
    });
    const edge = this.series.find((one) => one.edge)?.edge;
    if (edge) gaps.push(`${edge} far away, drawn at the edge`);
    this.note.textContent = [...(this.series.length === 1 && !this.series[0].only && this.series[0].curve[1].length ? [this.form(this.series[0].curve[1].at(-1))] : []), ...gaps.slice(0, 3)].join(" · ");
    const count = this.series.length === 1 ? "1 curve" : `${this.series.length} curves`;
    this.plot.setAttribute("aria-label", `${this.title}, ${count} over ${this.axisTitle()}. ${[...ends.slice(0, 6), ...gaps.slice(0, 6)].join("; ")}. Arrow keys read values, plus and minus zoom, 0 shows all.`);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts) chart.build();
});

/** What applies to all curves of a view; `redraw` is called when it changes. `more` are controls of the view's own. */
function chartControls(redraw, { tokens = true } = {}, ...more) {
  const select = h("select", { onchange: (event) => { settings.x = event.target.value; redraw(); } },
    ["step", "tokens"].map((name) => h("option", { value: name, selected: settings.x === name }, name)));
  const log = h("input", { type: "checkbox", checked: settings.log, onchange: (event) => { settings.log = event.target.checked; redraw(); } });
  const smooth = h("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: String(settings.smooth), oninput: (event) => { settings.smooth = Number(event.target.value); redraw(); } });
  return h("div", { class: "controls" }, more,
    tokens ? h("label", {}, "Over ", select) : null,
    h("label", {}, log, " Logarithmic"),
    h("label", {}, "Smooth ", smooth));
}
