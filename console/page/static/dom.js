/** Builds elements. Text becomes text nodes only, so nothing that comes from data is ever parsed as HTML. */

/**
 * @typedef {Node | string | number | null | undefined | false} Child
 */

/**
 * One element. `onclick` and the like are listeners, everything else is an attribute; null, undefined and false leave it out.
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {any} the element; `any`, since its type follows from `tag`
 */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

const FOCUSABLE = "a[href], button, input, select, summary, [tabindex]";

/**
 * Replaces what `parent` holds. The keyboard's focus stays where it was, counted in things that can have it, and so does what
 * is being typed there.
 * @param {Element} parent
 * @param {...(Child | Child[])} children
 */
export function fill(parent, ...children) {
  const before = document.activeElement;
  const place = before ? Array.from(parent.querySelectorAll(FOCUSABLE)).indexOf(before) : -1;
  const typed = before instanceof HTMLInputElement && before.type === "search" ? before : null;
  const caret = typed ? [typed.selectionStart, typed.selectionEnd] : [];
  parent.replaceChildren();
  append(parent, children);
  const again = place < 0 ? undefined : /** @type {HTMLElement} */ (parent.querySelectorAll(FOCUSABLE)[place]);
  again?.focus({ preventScroll: true });
  if (!typed || !(again instanceof HTMLInputElement)) return;
  again.value = typed.value;
  again.setSelectionRange(caret[0], caret[1]);
}

/**
 * @param {Element} parent
 * @param {(Child | Child[])[]} children
 */
function append(parent, children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/**
 * A labelled select.
 * @param {string} label
 * @param {[string, string][]} options value and text of each
 * @param {string} value
 * @param {(value: string) => void} onChange
 */
export function choice(label, options, value, onChange) {
  const select = el(
    "select",
    { onchange: (/** @type {any} */ event) => onChange(event.target.value) },
    options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)),
  );
  return el("label", { class: "field" }, el("span", {}, label), select);
}

/**
 * A table that scrolls by itself where the page is narrow.
 * @param {string[]} head
 * @param {Child[][]} rows
 * @param {{ numbers?: number[], label?: string }} [options] indices of the columns that hold numbers
 */
export function table(head, rows, { numbers = [], label = "" } = {}) {
  const kind = (/** @type {number} */ column) => (numbers.includes(column) ? "number" : null);
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": label || head.join(", ") },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          head.map((text, column) => el("th", { scope: "col", class: kind(column) }, text)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((row) =>
          el(
            "tr",
            {},
            row.map((cell, column) => el("td", { class: kind(column) }, cell)),
          ),
        ),
      ),
    ),
  );
}

/**
 * Something the view says about itself: that there is nothing, or what went wrong.
 * @param {string} text
 * @param {"note" | "error"} [kind]
 */
export function notice(text, kind = "note") {
  return el("p", { class: `notice ${kind}`, role: kind === "error" ? "alert" : null }, text);
}

/**
 * Calls `work` once `wait_ms` have passed without another call.
 * @param {number} wait_ms
 * @param {(value: string) => void} work
 */
export function debounced(wait_ms, work) {
  let timer = 0;
  return (/** @type {string} */ value) => {
    clearTimeout(timer);
    timer = window.setTimeout(() => work(value), wait_ms);
  };
}
