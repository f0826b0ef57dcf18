"use strict";
// Parallel coordinates: a line a trial over an axis a parameter; a band on an axis chooses trials.

const PARALLEL = { height: 300, top: 46, bottom: 34, side: 70, apart: 118, below: 20 };
const MOST_NAMES = 14;

/** The ends of an axis on which most values can be told apart; one that is far away is drawn at its edge. */
function limitsOf(values) {
  const median = (list) => { const sorted = [...list].sort((a, b) => a - b), half = sorted.length >> 1; return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2; };
  const middle = median(values), distances = values.map((value) => Math.abs(value - middle));
  const usual = median(distances) || Math.min(...distances.filter((distance) => distance > 0));
  const inside = values.filter((_, i) => !(distances[i] > 30 * usual));
  return [Math.min(...inside), Math.max(...inside)];
}

/** A value of a parameter in words, as the commands write it; `undefined` is one that a trial does not have. */
function valueText(value) {
  if (value === undefined) return NONE;
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  return typeof value === "object" ? JSON.stringify(value) : format.number(value);
}

/** An axis with a place for each of some values. */
function choicesOf(name, listed, there) {
  const values = new Map([...listed, ...there].map((value) => [JSON.stringify(value), valueText(value)]));
  const keys = [...values.keys()], last = keys.length - 1;
  const place = (key) => (last ? keys.indexOf(key) / last : 0.5);
  const every = Math.ceil(keys.length / MOST_NAMES);
  const ticks = keys.map((key) => [place(key), values.get(key)]).filter((_, i) => i % every === 0 || i === last);
  return { name, keys, ticks, place: (value) => (value === undefined ? null : place(JSON.stringify(value))), text: (at) => values.get(keys[Math.round(at * last)]) ?? "" };
}

/**
 * An axis: where a value lies, from 0 at the bottom to 1, and the ticks. Null is a value; `undefined` is none. `scale` is
 * what the study knows of a parameter: its choices, or whether it is logarithmic and its ends.
 */
function scaleOf(name, values, scale = {}, isMetric = false) {
  const there = values.filter((value) => value !== undefined);
  if (scale.choices) return choicesOf(name, scale.choices, there);
  if (!there.every(isNumber)) return choicesOf(name, [], [...there].sort((a, b) => isNumber(b) - isNumber(a) || (isNumber(a) ? a - b : String(a) < String(b) ? -1 : 1)));
  const [least, most] = isMetric ? limitsOf(there) : [Math.min(...there), Math.max(...there)];
  const [first, high] = scale.ends ? [Math.min(least, scale.ends[0]), Math.max(most, scale.ends[1])] : [least, most];
  const positive = there.filter((value) => value > 0);
  const log = Boolean(scale.log) && positive.length > 0, low = log && first <= 0 ? Math.min(...positive) : first;
  const to = log ? Math.log : (value) => value, from = log ? Math.exp : (value) => value;
  const inside = (value) => Math.min(high, Math.max(low, value));
  const place = (value) => (!isNumber(value) ? null : high === low ? 0.5 : (to(inside(value)) - to(low)) / (to(high) - to(low)));
  const number = (value) => format.number(Number.isInteger(value) ? value : Number(value.toPrecision(3)));
  const [below, above] = [there.some((value) => value < low) ? "≤ " : "", there.some((value) => value > high) ? "≥ " : ""];
  const text = (at) => (at === 0 ? below + number(low) : at === 1 ? above + number(high) : number(Number(from(to(low) + at * (to(high) - to(low))).toPrecision(3))));
  return { name, place, text, ticks: [0, 0.25, 0.5, 0.75, 1].map((at) => [at, text(at)]) };
}

/** A colour between that of bad and that of good trials: 0 to 1. */
function goodness(share) {
  const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
  const at = Math.min(0.999, Math.max(0, share)) * (stops.length - 1), i = Math.floor(at);
  return `rgb(${stops[i].map((from, k) => Math.round(from + (at - i) * (stops[i + 1][k] - from))).join(",")})`;
}

class Parallel {
  /** `onchoose(numbers)`: the trials within all bands, or null where there is no band. */
  constructor(onchoose) {
    this.onchoose = onchoose;
    this.bands = new Map();
    this.canvas = h("div", { class: "scroll" });
    this.said = h("p", { class: "note", "aria-live": "polite" });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, h("strong", {}, "All trials over all parameters"),
      h("button", { type: "button", class: "small", onclick: () => this.clear() }, "Clear selection")), this.canvas, this.said);
    this.drawn = 0;
    this.observer = new ResizeObserver(() => { if (this.trials && this.canvas.clientWidth !== this.drawn) this.draw(); });
    this.observer.observe(this.canvas);
  }

  clear() {
    this.bands.clear();
    this.draw();
    this.choose();
  }

  update(trials, names, metric, goal, scales) {
    const key = JSON.stringify([trials.map(({ number, value, params, state }) => [number, value, params, state]), names, metric, scales]);
    if (key === this.key) return;
    this.key = key;
    this.trials = trials.filter(({ value }) => isNumber(value));
    this.best = this.trials.reduce((best, one) => (!best || (goal === "maximize" ? one.value > best.value : one.value < best.value) ? one : best), null);
    this.scales = [...names.map((name) => scaleOf(name, this.trials.map(({ params }) => params[name]), scales[name])), scaleOf(metric, this.trials.map(({ value }) => value), {}, true)];
    this.leftOut = new Set(names.filter((name) => this.trials.some(({ params }) => params[name] === undefined)));
    const order = [...this.trials].sort((a, b) => (goal === "maximize" ? a.value - b.value : b.value - a.value));
    this.rank = new Map(order.map((one, i) => [one.number, order.length < 2 ? 1 : i / (order.length - 1)]));
    this.order = order;
    this.draw();
  }

  places(trial) {
    return this.scales.map((scale, i) => scale.place(i === this.scales.length - 1 ? trial.value : trial.params[scale.name]));
  }

  chosen() {
    if (!this.bands.size) return null;
    return this.trials.filter((trial) => {
      const places = this.places(trial);
      return [...this.bands].every(([name, [low, high]]) => {
        const at = places[this.scales.findIndex((scale) => scale.name === name)];
        return at !== null && at >= low - 1e-9 && at <= high + 1e-9;
      });
    });
  }

  choose() {
    const chosen = this.chosen();
    const numbers = chosen && new Set(chosen.map(({ number }) => number));
    for (const [number, line] of this.lines) line.classList.toggle("out", Boolean(numbers) && !numbers.has(number));
    this.said.textContent = chosen ? `${chosen.length} of ${this.trials.length} trials are in all bands` : "Drag along an axis to select trials; with the keyboard: Tab to an axis, arrow keys move a band, Shift makes it larger or smaller, Delete removes it.";
    this.onchoose(numbers);
  }

  draw() {
    const { height, top, bottom, side, apart, below } = PARALLEL, count = this.scales.length;
    this.drawn = this.canvas.clientWidth;
    const width = Math.max(2 * side + apart * (count - 1), Math.min(this.drawn, 1600) - 2);
    const x = (i) => (count === 1 ? width / 2 : side + (i * (width - 2 * side)) / (count - 1));
    const y = (at) => top + (1 - at) * (height - top - bottom);
    const picture = svg("svg", { class: "parallel", width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Parallel coordinates of ${this.trials.length} trials over ${this.scales.map(({ name }) => name).join(", ")}` });
    this.lines = new Map(this.order.map((trial) => {
      // A trial without the parameter passes below its axis: a line through it would look like a value.
      const points = this.places(trial).map((at, i) => `${x(i).toFixed(1)},${(at === null ? y(0) + below : y(at)).toFixed(1)}`);
      const line = svg("polyline", { points: points.join(" "), class: trial === this.best ? "best" : null, "data-trial": trial.number });
      line.style.stroke = trial === this.best ? "" : goodness(this.rank.get(trial.number));
      line.append(svg("title", {}, `trial ${trial.number}: ${format.number(trial.value)}`));
      picture.append(line);
      return [trial.number, line];
    }));
    this.scales.forEach((scale, i) => picture.append(this.axis(scale, x(i), y, i === count - 1 ? "end" : i ? "middle" : "start")));
    this.canvas.replaceChildren(picture);
    this.choose();
  }

  axis(scale, x, y, anchor) {
    const [low, high] = [y(0), y(1)], { side, below } = PARALLEL;
    const nameX = anchor === "middle" ? x : anchor === "start" ? x - side + 4 : x + side - 4;
    const band = svg("rect", { class: "band", x: x - 9, width: 18 });
    const place = (event) => Math.min(1, Math.max(0, (low - (event.clientY - group.ownerSVGElement.getBoundingClientRect().top)) / (low - high)));
    const set = (range) => {
      if (range) this.bands.set(scale.name, range);
      else this.bands.delete(scale.name);
      const [from, to] = range ?? [0, 0];
      setAttributes(band, { y: y(to), height: Math.max(0, y(from) - y(to)) });
      setAttributes(group, { "aria-valuenow": String(Math.round(50 * (from + to))), "aria-valuetext": range ? `${scale.text(from)} to ${scale.text(to)}` : "no band" });
    };
    const keys = (event) => {
      const [from, to] = this.bands.get(scale.name) ?? [0, 0.25], step = 0.05;
      const sign = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1 }[event.key];
      if (event.key === "Delete" || event.key === "Escape" || event.key === "Backspace") set(null);
      else if (!sign) return;
      else if (!this.bands.has(scale.name)) set([from, to]);
      else if (event.shiftKey) set([from, Math.min(1, Math.max(from, to + sign * step))]);
      else if (from + sign * step >= -1e-9 && to + sign * step <= 1 + 1e-9) set([from + sign * step, to + sign * step]);
      event.preventDefault();
      this.choose();
    };
    let begun = null;
    const group = svg("g", {
      class: "axis", tabindex: "0", role: "slider", "aria-label": `Band of ${scale.name}`, "aria-valuemin": "0", "aria-valuemax": "100", "aria-orientation": "vertical",
      onkeydown: keys,
      onpointerdown: (event) => { begun = place(event); group.setPointerCapture(event.pointerId); },
      onpointermove: (event) => { if (begun !== null) { const now = place(event); set([Math.min(begun, now), Math.max(begun, now)]); this.choose(); } },
      onpointerup: (event) => { if (begun !== null && Math.abs(place(event) - begun) < 0.015) set(null); begun = null; this.choose(); },
    },
    svg("rect", { class: "hit", x: x - 16, width: 32, y: high - 8, height: low - high + 16 }),
    svg("line", { x1: x, x2: x, y1: high, y2: low }), band,
    svg("text", { class: "name", x: nameX, y: 18, "text-anchor": anchor }, svg("title", {}, scale.name), scale.name.length > 16 ? `…${scale.name.slice(-15)}` : scale.name),
    ...(this.leftOut.has(scale.name) ? [svg("text", { x: x + 8, y: low + below + 4 }, "left out")] : []),
    ...scale.ticks.map(([at, text]) => svg("text", { x: x + 8, y: y(at) + 4 }, text.length > 12 ? `${text.slice(0, 11)}…` : text)));
    set(this.bands.get(scale.name) ?? null);
    return group;
  }
}
