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
        tile("Price of an hour", answer.dollars_per_hour),
        tile("A million trained tokens", answer.dollars_per_million_tokens),
      ),
      siteTable(answer.sites ?? [], answer.is_planned),
      planTable(answer.plan, answer.measured ?? {}),
      purchaseTable(answer.purchases ?? []),
      adviceList(answer.advice ?? []),
    );
  }

  return { update, close: () => {} };
}

/**
 * @param {string} title
 * @param {number | null} dollars
 */
function tile(title, dollars) {
  return dollars !== null && el("div", {}, el("dt", {}, title), el("dd", {}, dollarsText(dollars)));
}

/**
 * @param {any[]} sites
 * @param {boolean} isPlanned whether they are those of a problem, which states the prices
 */
function siteTable(sites, isPlanned) {
  if (!sites.length) return notice("Which GPUs this run has is not recorded.");
  const rows = sites.map((site) => [
    printable(site.site),
    gpusText(site.gpus),
    typeof site.dollars_per_hour === "number" ? dollarsText(site.dollars_per_hour) : noPrice(site, isPlanned),
  ]);
  return el(
    "section",
    {},
    el("h2", {}, "GPUs by site"),
    table(["Site", "GPUs", "An hour"], rows, { numbers: [2] }),
    !isPlanned && el("p", { class: "muted" }, "Of the machine that started the run; others are not counted."),
  );
}

/**
 * @param {any} site
 * @param {boolean} isPlanned
 */
function noPrice(site, isPlanned) {
  const key = isPlanned ? "price_per_gpu_hour of the problem" : (site.missing_prices ?? []).map(printable).join(", ");
  return `no price known: set ${key}`;
}

/** @param {Record<string, number>} counts by type */
function gpusText(counts) {
  const parts = Object.entries(counts ?? {}).map(([type, count]) => `${count} × ${printable(type)}`);
  return parts.join(", ") || "none";
}

/** @param {any[]} purchases what one more machine would bring by the plan, best first */
function purchaseTable(purchases) {
  if (!purchases.length) return null;
  const rows = purchases.map((each) => [
    gpusText(each.gpus),
    printable(each.site),
    `+${numberText(each.gain * 100)} %`,
    dollarsText(each.dollars_per_hour),
    dollarsText(each.dollars_per_million_tokens),
  ]);
  const head = ["One more machine with", "Site", "Samples a second", "An hour", "A million tokens then"];
  return el(
    "section",
    {},
    el("h2", {}, "What one more machine would bring"),
    table(head, rows, { numbers: [2, 3, 4] }),
    el("p", { class: "muted" }, "By the plan's cost model; dollars of the whole run at the measured rate and that gain."),
  );
}

/**
 * @param {Record<string, any> | null} plan `expected_NAME` stands beside the measured `NAME`
 * @param {Record<string, any>} measured `over` says in which time
 */
function planTable(plan, measured) {
  const { over, ...found } = measured;
  const { explanation, ...rest } = plan ?? {};
  const planned = Object.fromEntries(
    Object.entries(rest).map(([name, value]) => [name.replace(/^expected_/, ""), value]),
  );
  const names = [...new Set([...Object.keys(planned), ...Object.keys(found)])];
  const ratio = (/** @type {any} */ expected, /** @type {any} */ value) =>
    typeof expected === "number" && typeof value === "number" && expected ? `${numberText(value / expected)} ×` : "-";
  const rows = names.map((name) => {
    const cells = [printable(name.replaceAll("_", " ")), valueText(found[name])];
    return plan ? [...cells, valueText(planned[name]), ratio(planned[name], found[name])] : cells;
  });
  const title = `${plan ? "The plan against what was measured" : "Measured"}${over ? ` over ${printable(over)}` : ""}`;
  const head = ["", "Measured", ...(plan ? ["Planned", "Of the plan"] : [])];
  return [
    names.length > 0 && el("section", {}, el("h2", {}, title), table(head, rows, { numbers: [1, 2, 3], label: title })),
    explanation && el("details", {}, el("summary", {}, "Why this plan"), el("pre", {}, printable(explanation))),
  ];
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
