// A table that sorts by its headings and can be saved as CSV.
import { download, h, fill } from "./dom.js";

/**
 * columns: [{key, label, value(row) -> number|string for sorting and CSV, cell(row) -> node|text,
 *   numeric, plain (not sortable), skip (not in the CSV)}]
 * options: {label, sort: [key, descending], name (file), rowClass(row)}
 */
export class Table {
  constructor(columns, options) {
    this.columns = columns;
    this.options = options;
    this.rows = [];
    [this.sortKey, this.descending] = options.sort || [null, false];
    this.head = h("tr");
    this.body = h("tbody");
    this.element = h(
      "div",
      { class: "scroll" },
      h(
        "table",
        { class: options.class || "", "aria-label": options.label },
        h("thead", {}, this.head),
        this.body,
      ),
    );
    this.drawHead();
  }

  drawHead() {
    fill(
      this.head,
      this.columns.map((column) => {
        const on = this.sortKey === column.key;
        const label = column.plain
          ? h("span", { class: column.hideLabel ? "visually-hidden" : "" }, column.label)
          : h(
              "button",
              { type: "button", class: "sort", on: { click: () => this.sort(column.key) } },
              column.label,
              h(
                "span",
                { class: "arrow", "aria-hidden": "true" },
                on ? (this.descending ? "↓" : "↑") : "",
              ),
            );
        return h(
          "th",
          {
            scope: "col",
            class: column.numeric ? "n" : "",
            "aria-sort": on ? (this.descending ? "descending" : "ascending") : null,
          },
          label,
        );
      }),
    );
  }

  sort(key) {
    const column = this.columns.find((c) => c.key === key);
    this.descending = this.sortKey === key ? !this.descending : !!column.numeric;
    this.sortKey = key;
    this.drawHead();
    this.set(this.rows);
    if (this.options.sorted) this.options.sorted(this.sortKey, this.descending);
    const buttons = [...this.head.querySelectorAll("button.sort")];
    const at = this.columns.filter((c) => !c.plain).findIndex((c) => c.key === key);
    if (buttons[at]) buttons[at].focus();
  }

  ordered() {
    const column = this.columns.find((c) => c.key === this.sortKey);
    if (!column) return this.rows;
    const sign = this.descending ? -1 : 1;
    return [...this.rows].sort((a, b) => sign * compare(column.value(a), column.value(b)));
  }

  set(rows) {
    this.rows = rows;
    fill(
      this.body,
      this.ordered().map((row) =>
        h(
          "tr",
          { class: this.options.rowClass ? this.options.rowClass(row) : null },
          this.columns.map((column) => {
            const content = column.cell ? column.cell(row) : column.value(row);
            const props = {
              class: column.numeric ? "n" : column.class || null,
              "data-label": column.hideLabel ? null : column.label,
            };
            return column.header
              ? h("th", { scope: "row", ...props }, content)
              : h("td", props, content);
          }),
        ),
      ),
    );
  }

  csv() {
    const exported = this.columns.filter((c) => !c.skip);
    const lines = [
      exported.map((c) => c.label),
      ...this.ordered().map((row) => exported.map((c) => c.value(row))),
    ];
    return toCsv(lines);
  }

  button() {
    return h(
      "button",
      {
        type: "button",
        class: "quiet",
        "aria-label": `Save the table ${this.options.label} as CSV`,
        on: {
          click: () => download(`${this.options.name || "table"}.csv`, this.csv(), "text/csv"),
        },
      },
      "CSV",
    );
  }
}

/** Rows of values as CSV. Texts that a spreadsheet would read as formulas get an apostrophe. */
export function toCsv(lines) {
  return lines.map((line) => line.map(quoted).join(",")).join("\r\n") + "\r\n";
}

function quoted(value) {
  if (
    value === null ||
    value === undefined ||
    (typeof value === "number" && !Number.isFinite(value))
  )
    return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function compare(a, b) {
  const emptyA = a === null || a === undefined || a === "",
    emptyB = b === null || b === undefined || b === "";
  if (emptyA || emptyB) return emptyA - emptyB;
  return typeof a === "number" && typeof b === "number"
    ? a - b
    : String(a).localeCompare(String(b), "en", { numeric: true });
}
