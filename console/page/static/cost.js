/** What does it cost? GPUs and prices by site, the plan against what was measured, and what one more machine would bring. */

import { el, fill, notice, table } from "./dom.js";
import { dollarsText, numberText, printable, valueText } from "./format.js";
import { load, query } from "./load.js";
import { chosenRun, runChoice } from "./runs.js";

/** @type {import("./runs.js").View} */
export const costView = { id: "cost", question: "What does it cost?", show: showCost };

/**
 * @param {HTMLElement} root
 * @param {import("./runs.js").Page} page
 */
function showCost(root, page) {
  /** @type {any} */
  let drawn = null;

  async function update() {
    const answer = await load(query("/api/cost", { run: chosenRun(page).index }));
    if (answer === drawn) return;
    drawn = answer;
    fill(
      root,
      el("div", { class: "controls" }, runChoice(page)),
      el(
        "dl",
        { class: "tiles" },
        tile("Price of an hour", dollarsText(answer.dollars_per_hour)),
        tile("A million trained tokens", dollarsText(answer.dollars_per_million_tokens)),
      ),
      siteTable(answer.sites ?? []),
      planTable(answer.plan, answer.measured ?? {}),
      adviceList(answer.advice ?? []),
    );
  }

  return { update, close: () => {} };
}

/**
 * @param {string} title
 * @param {string} value
 */
function tile(title, value) {
  return el("div", {}, el("dt", {}, title), el("dd", {}, value));
}

/** @param {any[]} sites */
function siteTable(sites) {
  if (!sites.length)
    return notice("No GPUs are known of this run: it computes on CPUs, or ended without saying what it had.");
  const gpus = (/** @type {Record<string, number>} */ counts) =>
    Object.entries(counts ?? {})
      .map(([type, count]) => `${count} × ${printable(type)}`)
      .join(", ");
  const rows = sites.map((site) => [printable(site.site), gpus(site.gpus), dollarsText(site.dollars_per_hour)]);
  return el("section", {}, el("h2", {}, "GPUs by site"), table(["Site", "GPUs", "An hour"], rows, { numbers: [2] }));
}

/**
 * @param {Record<string, any> | null} plan
 * @param {Record<string, any>} measured
 */
function planTable(plan, measured) {
  const names = [...new Set([...Object.keys(plan ?? {}), ...Object.keys(measured)])];
  if (!names.length) return null;
  const ratio = (/** @type {any} */ planned, /** @type {any} */ found) =>
    typeof planned === "number" && typeof found === "number" && planned ? `${numberText(found / planned)} ×` : "-";
  const rows = names.map((name) => [
    printable(name.replaceAll("_", " ")),
    valueText(plan?.[name]),
    valueText(measured[name]),
    ratio(plan?.[name], measured[name]),
  ]);
  const title = plan ? "The plan against what was measured" : "Measured; this run follows no plan";
  return el(
    "section",
    {},
    el("h2", {}, title),
    table(["", "Planned", "Measured", "Of the plan"], rows, { numbers: [1, 2, 3], label: title }),
  );
}

/** @param {string[]} advice */
function adviceList(advice) {
  if (!advice.length) return null;
  return el(
    "section",
    {},
    el("h2", {}, "Advice"),
    el(
      "ul",
      { class: "advice" },
      advice.map((sentence) => el("li", {}, printable(sentence))),
    ),
  );
}
