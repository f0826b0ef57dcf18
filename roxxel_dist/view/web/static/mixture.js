"use strict";
// What a study found of its mixtures: shares, the law's surface as a curve or a triangle, effects, the confirmation.

const SURFACE = { width: 420, height: 240, side: 52, edge: 26 };

/** A number of the law with its interval. */
const estimate = ({ value, low, high }, digits = 4) => `${signed(value, digits)} (${signed(low, digits)} to ${signed(high, digits)})`;
const signed = (value, digits) => (isNumber(value) ? `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}` : NONE);

/** How many of 100 intervals held: the least and the most of many kinds of studies. */
const rangeOf = ([low, high]) => `${Math.round(100 * low)} to ${Math.round(100 * high)}%`;

/** The cards of all mixtures of a study. */
function mixtureCards({ mixtures, passes, gains, level, held, confirm, trials_of_law: trials, law_is_contradicted: misses, trials_whole: whole, seeds, trials_needed: needed, other_parameters: others }, { metric, goal }) {
  const interval = misses ? "too narrow, because the trials contradict it" : `of ${format.share(level)} if the losses follow it`;
  const often = misses ? "" : ` In simulated studies ${rangeOf(held.law)} of such intervals held where they do (${rangeOf(held.pairs)} of those of two data sets together), and ${rangeOf(held.beside)} where they do not and the trials do not show it.`;
  const cards = mixtures.map((one) => card(`Mixture of phase ${one.phases.join(", ")}`,
    h("p", { class: "note" }, trials ? lawOf(trials, interval, others) + often : `Too few trials for a law: ${whole} trained to their end, and it needs ${needed}.`),
    sharesTable(one, passes), surfaceFigure(one, metric, goal, seeds), ...effectTables(one, metric)));
  const better = Object.entries(gains).map(([name, gain]) => [`best less ${name}`, estimate(gain)]);
  if (better.length) cards.push(card("The best mixture beside its baselines", plainTable("Gain by the law", ["", `${metric}, by the law`], better)));
  return confirm ? [...cards, confirmCard(confirm, metric)] : cards;
}

const lawOf = (trials, interval, others) => `By a log-linear law of ${trials} trials, with intervals ${interval}, for trainings as long as a trial${others.length ? `, with the best trial's ${others.join(", ")}` : ""}.`;

function sharesTable({ names, shares, effects }, passes) {
  const kinds = Object.keys(shares), read = Object.keys(passes).length > 0;
  const head = ["Data set", ...kinds, ...(read ? ["Passes of the best"] : []), ...(effects.length ? ["A tenth more of it"] : [])];
  const rows = names.map((name, i) => [name, ...kinds.map((kind) => format.share(shares[kind][i])), ...(read ? [isNumber(passes[name]) ? passes[name].toFixed(2) : NONE] : []), ...(effects.length ? [estimate(effects[i])] : [])]);
  return plainTable("Shares", head, rows, kinds.map((_, i) => i + 1));
}

/** The surface of two or three data sets: a picture, and its numbers in a table. */
function surfaceFigure({ names, surface }, metric, goal, seeds) {
  if (!surface.length) return null;
  const values = surface.map(({ low, high }) => [low, high]).flat(), low = Math.min(...values), high = Math.max(...values);
  const picture = names.length === 2 ? curveOf(names, surface, low, high, bestOf(surface, goal)) : triangleOf(names, surface, goal);
  const rows = surface.map(({ shares, value, low: from, high: to }) => [...shares.map((share) => format.share(share)), format.loss(value), `${format.loss(from)} to ${format.loss(to)}`]);
  return h("figure", { class: "chart surface" }, h("figcaption", {}, h("strong", {}, `${metric} over the shares`), h("span", { class: "note" }, `with the ${seeds === 1 ? "one seed" : `${seeds} seeds`} of the trials: others move all of it`)), picture,
    h("details", {}, h("summary", {}, "Numbers"), plainTable("Surface", [...names, "Predicted", "Interval"], rows, names.map((_, i) => i))));
}

function pictureOf(label, ...children) {
  return svg("svg", { viewBox: `0 0 ${SURFACE.width} ${SURFACE.height}`, width: String(SURFACE.width), height: String(SURFACE.height), role: "img", "aria-label": label }, ...children);
}

const words = (x, y, text, anchor = "middle") => {
  const element = svg("text", { x, y, "text-anchor": anchor });
  element.textContent = text;
  return element;
};

function curveOf(names, surface, low, high, best) {
  const { width, height, side, edge } = SURFACE;
  const shares = surface.map((point) => point.shares[0]), first = Math.min(...shares), last = Math.max(...shares);
  const x = (share) => side + ((share - first) / (last - first || 1)) * (width - side - edge);
  const y = (value) => edge + ((high - value) / (high - low || 1)) * (height - 2 * edge);
  const line = (name, list) => list.map((point) => `${x(point.shares[0]).toFixed(1)},${y(point[name]).toFixed(1)}`);
  const band = [...line("low", surface), ...line("high", [...surface].reverse())].join(" ");
  return pictureOf(`Predicted value by the share of ${names[0]}: best at ${format.share(best.shares[0])}`,
    svg("polygon", { points: band, class: "band" }), svg("polyline", { points: line("value", surface).join(" "), class: "line" }),
    words(side - 6, edge + 4, format.number(high), "end"), words(side - 6, height - edge, format.number(low), "end"),
    words(side, height - 6, format.share(first), "start"), words(width - edge, height - 6, format.share(last), "end"), words(width / 2, height - 6, `share of ${names[0]}`));
}

function triangleOf(names, surface, goal) {
  const { width, height, edge } = SURFACE, best = bestOf(surface, goal);
  const long = height - 2 * edge, half = long / Math.sqrt(3), middle = width / 2;
  const values = surface.map(({ value }) => value), low = Math.min(...values), high = Math.max(...values);
  const dots = surface.map((point) => {
    const [top, left, right] = point.shares;
    const dot = svg("circle", { cx: middle + (right - left) * half, cy: edge + (1 - top) * long, r: point === best ? 12 : 9, class: point === best ? "best" : "dot", fill: goodness((goal === "maximize" ? point.value - low : high - point.value) / (high - low || 1)) });
    const title = svg("title");
    title.textContent = `${names.map((name, i) => `${name} ${format.share(point.shares[i])}`).join(", ")}: ${format.loss(point.value)} (${format.loss(point.low)} to ${format.loss(point.high)})`;
    dot.append(title);
    return dot;
  });
  const shares = names.map((name, i) => `${name} ${format.share(best.shares[i])}`).join(", ");
  return pictureOf(`Triangle of the shares: best at ${shares}`, ...dots, words(middle, 12, names[0]), words(middle - half - 14, height - 4, names[1]), words(middle + half + 14, height - 4, names[2]));
}

const bestOf = (surface, goal) => surface.reduce((best, point) => ((goal === "maximize" ? point.value > best.value : point.value < best.value) ? point : best));

function effectTables({ names, crossed, interactions }, metric) {
  const sets = Object.keys(crossed), tables = [];
  if (sets.length) {
    tables.push(h("h3", {}, "What a tenth more of a data set does to the validation loss of each"),
      plainTable("Effects on each validation set", ["More of", ...sets], names.map((name, i) => [name, ...sets.map((set) => estimate(crossed[set][i]))])));
  }
  if (interactions.length) {
    tables.push(h("h3", {}, "What a tenth more of two does, beyond the sum of both"),
      plainTable("Interactions", ["Data sets", metric], interactions.map(({ names: pair, ...value }) => [pair.join(" and "), estimate(value)])));
  }
  return tables;
}

function confirmCard({ factor, trial, seeds, values, gains }, metric) {
  const mean = (list) => (list.length ? format.loss(list.reduce((a, b) => a + b, 0) / list.length) : NONE);
  const verdict = ({ inside }) => (inside === null ? NONE : inside ? "inside" : badge("outside"));
  return card("Confirmation", h("p", { class: "note" }, `Trial ${trial} and its baselines, for ${factor} × the steps, with ${seeds.length} new seeds. Predictions are for the steps of a trial.`),
    plainTable("Confirmed values", ["Mixture", `Mean ${metric}`, "Seeds"], Object.entries(values).map(([name, list]) => [name, mean(list), `${list.length} of ${seeds.length}`]), [1, 2]),
    plainTable("Predicted and measured", ["Best less", "Predicted", "Measured", "Inside the interval"], gains.map((one) => [one.against, one.predicted ? estimate(one.predicted) : NONE, one.measured ? estimate(one.measured) : NONE, verdict(one)])));
}
