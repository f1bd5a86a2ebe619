/** What does it cost? GPUs and prices by site, the plan against what was measured, and what one more machine would bring. */

import { el, fill, notice, table } from "./dom.js";
import { dollarsText, numberText, printable } from "./format.js";
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
    `+${percentText(each.gain)}`,
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

/** Rows of the plan against what was measured: a title, the names of both values, how they are written. */
const ROWS = [
  { title: "Tokens a second", measured: "tokens_per_second", planned: "expected_tokens_per_second", text: numberText },
  { title: "At most, by the plan's bound", planned: "bound_tokens_per_second", text: numberText },
  { title: "Samples a second", measured: "samples_per_second", text: numberText },
  {
    title: "A million tokens",
    measured: "cost_per_million_tokens",
    planned: "cost_per_million_tokens",
    text: dollarsText,
  },
  { title: "Generators idle", measured: "generator_idle_ratio", text: percentText },
  { title: "Trainer idle", measured: "trainer_idle_ratio", text: percentText },
];

/**
 * @param {Record<string, any> | null} plan the one followed last
 * @param {Record<string, any>} measured `over` says in which time
 */
function planTable(plan, measured) {
  const rows = ROWS.map(({ title, measured: found, planned, text }) => {
    const [value, expected] = [numberOf(measured, found), numberOf(plan, planned)];
    if (value === null && expected === null) return null;
    const ratio = value !== null && expected ? percentText(value / expected) : "-";
    return plan ? [title, text(value), text(expected), ratio] : [title, text(value)];
  }).filter((row) => row !== null);
  const over = measured.over ? ` over ${printable(measured.over)}` : "";
  const title = `${plan ? "The plan against what was measured" : "Measured"}${over}`;
  const head = ["", "Measured", ...(plan ? ["Planned", "Of plan"] : [])];
  const why = ["Why this plan", plan?.revision && `revision ${plan.revision}`, plan?.solver && `found by ${plan.solver}`];
  return [
    rows.length > 0 && el("section", {}, el("h2", {}, title), table(head, rows, { numbers: [1, 2, 3], label: title })),
    plan?.explanation &&
      el(
        "details",
        {},
        el("summary", {}, printable(why.filter(Boolean).join(", "))),
        el("pre", {}, printable(plan.explanation)),
      ),
  ];
}

/**
 * @param {Record<string, any> | null} values
 * @param {string | undefined} name
 * @returns {number | null}
 */
function numberOf(values, name) {
  const value = name === undefined ? null : values?.[name];
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

/** @param {number | null} share */
function percentText(share) {
  return share === null ? "-" : `${numberText(Number((100 * share).toPrecision(3)))} %`;
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
