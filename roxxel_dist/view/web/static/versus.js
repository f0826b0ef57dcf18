"use strict";
// A comparison of two configurations: the verdict, the interval after each pair, the pairs.

function versusCard({ text, each, names, metric, level }) {
  const rows = each.map(({ seed, a, b, difference, low, high, mean }, i) => [String(i + 1), String(seed), format.loss(a), format.loss(b), signed(difference, 4), isNumber(low) ? estimate({ value: mean, low, high }) : NONE]);
  return card("A against B", h("p", { class: "lead" }, text), h("p", { class: "note" }, `A: ${names.A}. B: ${names.B}. The interval of ${format.share(level)} holds at all pairs together.`),
    each.some(({ low }) => isNumber(low)) ? h("figure", { class: "chart surface" }, h("figcaption", {}, h("strong", {}, `Mean of ${metric} of A less B, after each pair`)), intervalsOf(each)) : null,
    plainTable("Pairs", ["Pair", "Seed", "A", "B", "A less B", "Mean and interval"], rows, [0, 1, 2, 3, 4]));
}

function intervalsOf(each) {
  const { width, height, side, edge } = SURFACE, known = each.map((one, i) => ({ ...one, x: i + 1 })).filter(({ low }) => isNumber(low));
  const low = Math.min(0, ...known.map((one) => one.low)), high = Math.max(0, ...known.map((one) => one.high));
  const x = (pair) => side + ((pair - 0.5) / each.length) * (width - side - edge), y = (value) => edge + ((high - value) / (high - low || 1)) * (height - 2 * edge);
  const bars = known.flatMap((one) => [svg("line", { x1: x(one.x), x2: x(one.x), y1: y(one.low), y2: y(one.high), class: "line" }), svg("circle", { cx: x(one.x), cy: y(one.mean), r: 4, class: "dot" })]);
  const ends = [svg("line", { x1: side, x2: width - edge, y1: y(0), y2: y(0), class: "zero" }), words(side - 6, y(0) + 4, "0", "end")];
  const labels = [[high, edge + 4], [low, height - edge]].filter(([value]) => value).map(([value, at]) => words(side - 6, at, format.number(value), "end"));
  return pictureOf(`Interval after each of ${each.length} pairs`, ...ends, ...bars, ...labels, words(width / 2, height - 6, "pairs"));
}
