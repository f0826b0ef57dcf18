"use strict";
// Parts of a view: what is said of a run, a study or a job besides its curves.

/** Numbers in tiles: [title, text, more]. */
const tiles = (list) => list.filter(([, text]) => text !== NONE && text !== null).map(([title, text, more]) =>
  h("div", { class: "tile" }, h("dt", {}, title), h("dd", {}, text, more ? h("small", {}, more) : null)));

function runTiles({ row = {}, best, left_s, goodput, state }) {
  return tiles([
    ["Training loss", newest(row, "train_loss", format.loss)],
    ["Validation loss", newest(row, "val_loss", format.loss), isNumber(best) ? `best ${format.loss(best)}` : ""],
    ["Tokens per second", format.scaled(row.tokens_per_s), isNumber(row.ms_per_step) ? `${format.number(Math.round(row.ms_per_step))} ms per step` : ""],
    ["MFU", format.share(row.mfu)],
    ["HFU", format.share(row.hfu)],
    ["Busiest expert", isNumber(row.expert_load_max) ? `${format.number(Number(row.expert_load_max.toFixed(2)))} × its share` : NONE],
    ["Dropped by experts", format.share(row.expert_dropped)],
    ["Device memory", format.gigabytes(row.vram_gb)],
    ["Host memory", format.gigabytes(row.ram_gb)],
    ["Learning rate", format.number(row.lr)],
    ["Tokens read", format.scaled(row.tokens)],
    ["Goodput", format.share(goodput)],
    ["Time left", state === "training" ? format.duration(left_s) : NONE],
  ]);
}

/** The phases as a bar with their boundaries, and what the current one is. */
function phaseBar(head, { phases, current, layout }) {
  const last = head.last_step ?? phases.at(-1)?.last;
  if (!last) return null;
  const share = (step) => Math.min(1, Math.max(0, step / last));
  const spans = phases.length ? phases : [{ first: 1, last }];
  const bar = h("div", { class: "phases", role: "progressbar", "aria-label": "Finished steps", "aria-valuemin": "0", "aria-valuemax": String(last), "aria-valuenow": String(Math.min(head.step, last)) },
    spans.map((phase, i) => {
      const length = phase.last - phase.first + 1;
      const done = Math.min(1, Math.max(0, (head.step - phase.first + 1) / length));
      return h("div", { class: `phase${i === current ? " now" : ""}`, style: { flexGrow: String(length) }, title: `phase ${i + 1}: steps ${phase.first} to ${phase.last}` }, h("span", { style: { width: `${100 * done}%` } }));
    }));
  const phase = phases[current], next = phases[current + 1];
  const words = [`Step ${format.integer(head.step)} of ${format.integer(last)} (${format.share(share(head.step))})`];
  if (phase) words.push(`phase ${current + 1} of ${phases.length}: ${phase.batch_size} rows × ${format.integer(phase.seq_len)} tokens, to step ${format.integer(phase.last)}`);
  if (layout) words.push(layout);
  if (next && head.step < last) words.push(`the next phase begins in ${format.integer(Math.max(0, phase.last - head.step))} steps: ${next.batch_size} rows × ${format.integer(next.seq_len)} tokens`);
  return [bar, h("p", { class: "note" }, words.join(" · "))];
}

/** The blend of the current phase: planned, and as it was read. */
function blendTable({ phases, current, realised }) {
  const planned = Object.entries(phases[current]?.weights ?? {});
  if (planned.length < 2) return null;
  const bars = (share, kind) => h("span", { class: `bar ${kind}`, style: { width: `${Math.max(0.5, 100 * share)}%` } });
  const rows = planned.map(([name, share]) => [name, h("span", { class: "bars" }, bars(share, "planned"), name in realised ? bars(realised[name], "realised") : null), format.share(share), name in realised ? format.share(realised[name]) : NONE]);
  return card("Blend of this phase", plainTable("Planned and actual share of each data set", ["Data set", "Shares", "Planned", "Read"], rows, [2, 3]));
}

const STILL_S = 5;

function ranksCard({ ranks, more: others, restarts, attempts, job }) {
  if (!ranks.length && !restarts.length) return null;
  const rows = ranks.map((rank) => {
    const state = rank.state === "stopped" ? "stopped rank" : rank.state;
    const more = rank.still_s > STILL_S ? `for ${format.duration(rank.still_s)}` : "";
    return {
      mark: rank.state === "stopped" ? "bad" : "",
      cells: [String(rank.rank), rank.host, h("span", {}, rank.state === "stopped" ? badge(state) : state, more ? ` ${more}` : ""), format.integer(rank.step), format.integer(rank.behind), isNumber(rank.ms_per_step) ? rank.ms_per_step.toFixed(0) : NONE],
    };
  });
  const table = rows.length ? plainTable("Ranks", ["Rank", "Host", "State", "Step", "Behind", "ms per step"], rows, [3, 4, 5]) : null;
  const list = restarts.length ? [h("h3", {}, restarts.length === 1 ? "1 restart" : `${restarts.length} restarts`), h("ol", { class: "restarts" }, [...restarts].reverse().map((one) => h("li", {}, h("time", {}, format.time(one.time)), h("span", {}, `attempt ${one.attempt} ended at step ${format.integer(one.step)}`), h("span", { class: "cause" }, one.cause))))] : null;
  return card("Ranks", h("p", { class: "note" }, [job ? `job ${job}` : "", attempts > 1 ? `${attempts} attempts` : "", others ? `${format.integer(others)} ranks more, none of them further behind` : ""].filter(Boolean).join(" · ")), table, list);
}

/** What the time went to. */
function timeCard({ kinds, spent, goodput }) {
  const total = Object.values(spent).reduce((a, b) => a + b, 0);
  if (!total) return null;
  const parts = kinds.map((kind, i) => [kind, spent[kind] ?? 0, i]).filter(([, seconds]) => seconds / total >= 0.0005);
  return card("Where the time went",
    h("p", { class: "note" }, `Goodput ${format.share(goodput)} of ${format.duration(total)}`),
    h("div", { class: "stack", "aria-hidden": "true" }, parts.map(([, seconds, i]) => h("span", { class: `series-${i}`, style: { flexGrow: String(seconds) } }))),
    h("ul", { class: "shares" }, parts.map(([kind, seconds, i]) => h("li", {}, h("i", { class: `dot series-${i}`, "aria-hidden": "true" }), kind, h("b", {}, format.share(seconds / total)), h("small", {}, format.duration(seconds))))));
}

function checkpointsCard({ checkpoints, tier }) {
  if (!checkpoints.length) return null;
  const verified = (one) => (one.set_aside ? badge("damaged, renamed") : one.digests ? "digests" : "no digests");
  const rows = [...checkpoints].reverse().slice(0, 12).map((one) => ({
    mark: one.set_aside ? "bad" : "",
    cells: [one.name, format.time(one.saved), tier, verified(one)],
  }));
  return card("Checkpoints", plainTable("Checkpoints", ["Step", "Saved", "Kept", "Verified by"], rows));
}

/** The fields in which runs differ: a column a run. */
function differences(configs) {
  const names = [...new Set(configs.flatMap((config) => Object.keys(config)))].sort();
  const text = (value) => (value === undefined ? NONE : typeof value === "object" ? JSON.stringify(value) : String(value));
  return names.map((name) => [name, ...configs.map((config) => text(config[name]))]).filter(([, ...values]) => values.some((value) => value !== values[0]));
}
