"use strict";
// Tables: one that sorts and keeps its rows as they change, and a plain one.

/**
 * A table that a person sorts by its headings. Columns have `name`, `title`, `value(row)` to sort by, and may have
 * `show(row)`, a text or a node, and `numeric`. A row is known by `key(row)`.
 */
class SortedTable {
  constructor({ caption, columns, key, sort, descending = false, mark = () => "" }) {
    Object.assign(this, { columns, key, sort, descending, mark });
    this.rows = [];
    this.elements = new Map();
    this.heads = columns.map((column) => {
      const cell = h("th", { scope: "col", class: column.numeric ? "number" : null });
      if (column.title)
        cell.append(h("button", { type: "button", onclick: () => this.sortBy(column.name) }, column.title, h("span", { class: "arrow", "aria-hidden": "true" })));
      else cell.append(h("span", { class: "hidden" }, column.name));
      return cell;
    });
    this.body = h("tbody");
    this.element = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      h("table", {}, h("caption", { class: "hidden" }, caption), h("thead", {}, h("tr", {}, this.heads)), this.body));
  }

  sortBy(name) {
    this.descending = this.sort === name ? !this.descending : false;
    this.sort = name;
    this.update(this.rows);
    this.onsort?.();
  }

  /** Rows in the order in which they are shown; what has no value is last. */
  sorted(rows) {
    const column = this.columns.find((one) => one.name === this.sort);
    if (!column) return rows;
    const sign = this.descending ? -1 : 1;
    const empty = (value) => value === null || value === undefined || value === "" || Number.isNaN(value);
    return rows.map((row) => [column.value(row), row]).sort(([a], [b]) => {
      if (empty(a) || empty(b)) return empty(a) - empty(b);
      return sign * (isNumber(a) && isNumber(b) ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    }).map(([, row]) => row);
  }

  update(rows) {
    this.rows = rows;
    this.columns.forEach((column, i) => {
      const order = column.name === this.sort ? (this.descending ? "descending" : "ascending") : null;
      if (order) this.heads[i].setAttribute("aria-sort", order);
      else this.heads[i].removeAttribute("aria-sort");
    });
    this.shown = this.sorted(rows);
    const elements = new Map();
    const order = this.shown.map((row) => {
      const key = String(this.key(row));
      const element = this.elements.get(key) ?? h("tr", {}, this.columns.map((column, i) => h(i ? "td" : "th", { scope: i ? null : "row", class: column.numeric ? "number" : null })));
      elements.set(key, element);
      element.className = this.mark(row);
      this.columns.forEach((column, i) => {
        const shown = column.show ? column.show(row) : format.number(column.value(row));
        const cell = element.children[i];
        if (shown instanceof Node) {
          const now = column.keep ? null : shown.outerHTML;
          if (now === null ? !cell.firstChild : cell.shownKey !== now) cell.replaceChildren(shown);
          cell.shownKey = now;
        } else if (cell.textContent !== shown) cell.textContent = shown;
      });
      return element;
    });
    this.elements = elements;
    const same = order.length === this.body.children.length && order.every((element, i) => element === this.body.children[i]);
    if (!same) {
      const focused = document.activeElement;
      this.body.replaceChildren(...order);
      if (this.body.contains(focused)) focused.focus();
    }
  }
}

/** A small table: headings, and rows of texts or nodes; the columns of `numeric` are to the right. */
function plainTable(caption, headings, rows, numeric = []) {
  const side = (i) => (numeric.includes(i) ? "number" : null);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {},
      h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, headings.map((text, i) => h("th", { scope: "col", class: side(i) }, text)))),
      h("tbody", {}, rows.map((row) => h("tr", { class: row.mark ?? null }, (row.cells ?? row).map((cell, i) =>
        h(i ? "td" : "th", { scope: i ? null : "row", class: side(i) }, cell)))))));
}
