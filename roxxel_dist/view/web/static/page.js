"use strict";
// Where the numbers come from, and which view shows them.

const given = JSON.parse(document.getElementById("data").textContent);
const token = new URLSearchParams(location.search).get("token");
const store = { ids: given.ids ?? [], items: new Map(Object.entries(given.items ?? {})) };
const VIEWS = { run: RunView, study: StudyView, job: JobView };
const main = document.getElementById("main");
let view = null, shown = "", source = null, again = 0, waiting = false;

function say(text, kind) {
  const element = document.getElementById("status");
  if (element.textContent !== text) element.textContent = text;
  element.className = kind;
}

/** [the view's name, the ids that it shows in full]. */
function route() {
  const [name = "", ...ids] = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean);
  if (name === "item" && ids.length) return ["item", ids.slice(0, 1)];
  if (name === "compare" && ids.length) return ["compare", ids.slice(0, MOST_COMPARED)];
  return store.ids.length === 1 ? ["item", store.ids] : ["list", []];
}

/** Take in a message: the sections that have changed. */
function take({ ids, items }) {
  store.ids = ids;
  for (const [id, sections] of Object.entries(items)) store.items.set(id, { ...store.items.get(id), ...sections });
  for (const id of store.items.keys()) if (!ids.includes(id)) store.items.delete(id);
  draw();
}

/** Show what is there, once a frame of the screen. */
function draw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    show();
  });
}

function show() {
  const [name, ids] = route();
  const wanted = ids.filter((id) => store.items.has(id));
  const kind = name === "item" ? store.items.get(ids[0])?.head?.kind : name;
  const key = [name, kind, ...ids].join("/");
  if (given.live) connect(ids);
  if (name !== "list" && !wanted.length) {
    if (given.live && !store.ids.length) return;
    view?.close();
    [view, shown] = [null, key];
    main.replaceChildren(h("p", { class: "card" }, "This run or study no longer exists. ", h("a", { href: address() }, "Show all.")));
    return;
  }
  if (key !== shown) {
    view?.close();
    const isFirst = shown === "";
    shown = key;
    const Kind = name === "list" ? ListView : name === "compare" ? CompareView : VIEWS[kind];
    if (!Kind) return;
    view = new Kind((hash) => { location.hash = hash; });
    main.replaceChildren(view.element);
    if (!isFirst) { scrollTo(0, 0); main.focus({ preventScroll: true }); }
  }
  const items = (name === "list" ? store.ids.filter((id) => store.items.has(id)) : wanted).map((id) => [id, store.items.get(id)]);
  view.update(items);
  const title = name === "item" ? items[0][1].head?.name : name === "compare" ? "Compare" : "Runs and studies";
  document.title = `${title} · roxxel-dist`;
  fill(document.getElementById("crumbs"), [name, title, store.ids.length], () => (name === "list" || store.ids.length < 2 ? null : [h("a", { href: address() }, "All"), h("span", { "aria-current": "page" }, title)]));
}

/** Follow the server; `ids` in full, or all in brief. One stream at a time: a browser has few. */
function connect(ids) {
  const url = `events?${new URLSearchParams([["token", token ?? ""], ...ids.map((id) => ["item", id])])}`;
  if (source?.url.endsWith(url) && source.readyState !== EventSource.CLOSED) return;
  if (document.hidden) return;
  source?.close();
  clearTimeout(again);
  source = new EventSource(url);
  source.onmessage = (event) => { say("live", "live"); take(JSON.parse(event.data)); };
  source.onopen = () => say("live", "live");
  source.onerror = () => {
    say("no connection; trying again", "lost");
    if (source.readyState === EventSource.CLOSED) again = setTimeout(() => connect(route()[1]), 3000);
  };
}

document.getElementById("skip").addEventListener("click", () => main.focus());
addEventListener("hashchange", draw);
document.addEventListener("visibilitychange", () => {
  if (!given.live) return;
  if (document.hidden) source?.close();
  else connect(route()[1]);
});
if (!given.live) say(`as of ${format.time(given.made)}`, "still");
else say("connecting", "still");
show();
