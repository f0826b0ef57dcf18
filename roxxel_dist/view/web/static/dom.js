"use strict";
// Elements, and how numbers are written.

/** An element: attributes by name, `on...` for listeners; children are nodes or text, null is left out. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  setAttributes(element, attributes);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** The same in SVG. */
function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAttributes(element, attributes);
  element.append(...children);
  return element;
}

function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
}

/** Show `build(value)` in an element; nothing is touched where the value is what it was. */
function fill(element, value, build) {
  const key = JSON.stringify(value ?? null);
  if (element.shownKey === key) return;
  element.shownKey = key;
  element.replaceChildren(...[build(value)].flat().filter((node) => node));
}

/** A card with a heading. */
function card(title, ...children) {
  return h("section", { class: "card" }, h("h2", {}, title), ...children);
}

const NONE = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

const format = {
  /** Four significant digits, or all of an integer. */
  number(value) {
    if (!isNumber(value)) return value === null || value === undefined || value === "" ? NONE : String(value);
    if (Number.isInteger(value)) return value.toLocaleString("en-US");
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  },
  /** Four significant digits, also where the last are zeros: for a column. */
  digits: (value) => (isNumber(value) && Math.abs(value) >= 1e-4 && Math.abs(value) < 1e4 ? value.toPrecision(4) : format.number(value)),
  loss: (value) => (isNumber(value) ? value.toFixed(4) : NONE),
  integer: (value) => (isNumber(value) ? Math.round(value).toLocaleString("en-US") : NONE),
  share: (value) => (isNumber(value) ? `${(100 * value).toFixed(1)}%` : NONE),
  gigabytes: (value) => (isNumber(value) ? `${value.toFixed(2)} GB` : NONE),
  /** 12.3k, 4.5M. */
  scaled(value, digits = (number) => number.toFixed(1)) {
    if (!isNumber(value)) return NONE;
    for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (Math.abs(value) >= size) return `${digits(value / size)}${unit}`;
    return value.toFixed(0);
  },
  /** 42 s, 3 min 20 s, 2 h 5 min, 3 d 4 h. */
  duration(seconds) {
    if (!isNumber(seconds)) return NONE;
    const s = Math.max(0, Math.round(seconds));
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min${s < 600 && s % 60 ? ` ${s % 60} s` : ""}`;
    if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
    return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
  },
  time(unix) {
    if (!unix) return NONE;
    const date = new Date(unix * 1000);
    const two = (n) => String(n).padStart(2, "0");
    const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
    return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  },
};

/** The newest value of a metric in words; the page gets null for one that is not finite. */
const newest = (row, name, form) => (row[name] === null ? "not finite" : form(row[name]));

const LIVING = new Set(["training", "searching", "running", "starting", "restarting", "stopping"]);
const BAD = new Set(["failed", "lost", "stopped rank", "damaged, renamed"]);

/** The state of something, with a dot: never by colour alone. */
function badge(state) {
  const kind = LIVING.has(state) ? "live" : BAD.has(state) ? "bad" : state === "finished" || state === "done" ? "good" : "still";
  return h("span", { class: `badge ${kind}` }, state);
}
