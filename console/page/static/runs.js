/** Which runs there are and which of them is shown. */

import { choice, el, fill } from "./dom.js";
import { durationText, printable } from "./format.js";
import { changeRoute, readRoute } from "./route.js";

/**
 * @typedef {object} Run
 * @property {number} index
 * @property {string} run_id
 * @property {string} state running, finished, failed, cut short
 * @property {string | null} outcome
 * @property {number} steps
 * @property {number | null} num_steps
 * @property {number | null} started_s
 * @property {number | null} updated_s
 * @property {string} config
 */

/**
 * What all views share; replaced part by part as the run goes on.
 * @typedef {{ runs: Run[], live: boolean }} Page
 */

/**
 * A view of the page: a question and what answers it.
 * @typedef {{ id: string, question: string, show: (root: HTMLElement, page: Page) => Shown }} View
 * @typedef {{ update: () => Promise<void>, close: () => void }} Shown
 */

/**
 * The run of views that show one.
 * @param {Page} page
 */
export function chosenRun(page) {
  const index = Number(readRoute().parameters.run ?? page.runs[0]?.index ?? 0);
  return page.runs.find((run) => run.index === index) ?? page.runs[0];
}

/**
 * The runs that are shown side by side.
 * @param {Page} page
 */
export function comparedRuns(page) {
  const text = readRoute().parameters.runs;
  const wanted = text ? new Set(text.split(",").map(Number)) : null;
  const found = page.runs.filter((run) => !wanted || wanted.has(run.index));
  return found.length ? found : page.runs;
}

/**
 * A select of the run, or nothing if there is but one.
 * @param {Page} page
 */
export function runChoice(page) {
  if (page.runs.length < 2) return null;
  const names = /** @type {[string, string][]} */ (page.runs.map((run) => [String(run.index), printable(run.run_id)]));
  return choice("Run", names, String(chosenRun(page).index), (value) =>
    changeRoute({ run: value, step: null, key: null, from: null, to: null, offset: null }),
  );
}

/**
 * Boxes that choose the runs side by side.
 * @param {Page} page
 */
export function comparedChoice(page) {
  if (page.runs.length < 2) return null;
  const shown = new Set(comparedRuns(page).map((run) => run.index));
  const box = (/** @type {Run} */ run, /** @type {number} */ place) => {
    const change = (/** @type {any} */ event) => {
      if (event.target.checked) shown.add(run.index);
      else shown.delete(run.index);
      changeRoute({ runs: [...shown].sort((a, b) => a - b).join(",") });
    };
    const input = el("input", { type: "checkbox", checked: shown.has(run.index), onchange: change });
    return el("label", { class: `box line-${(place % 8) + 1}` }, input, printable(run.run_id));
  };
  return el("fieldset", { class: "boxes" }, el("legend", {}, "Runs"), page.runs.map(box));
}

/**
 * The line of each run at the top of the page.
 * @param {Element} root
 * @param {Page} page
 */
export function drawRuns(root, page) {
  fill(root, page.runs.map(runLine));
}

/** @param {Run} run */
function runLine(run) {
  const steps = run.num_steps
    ? `step ${run.steps.toLocaleString("en-US")} of ${run.num_steps.toLocaleString("en-US")}`
    : `step ${run.steps.toLocaleString("en-US")}`;
  const lasted = run.started_s && run.updated_s ? durationText(run.updated_s - run.started_s) : null;
  const kind = run.state === "running" ? "good" : run.state === "finished" ? "calm" : "bad";
  const outcome = run.outcome && run.outcome !== run.state ? printable(run.outcome) : null;
  return el(
    "div",
    { class: "run" },
    el("strong", {}, printable(run.run_id)),
    el("span", { class: `badge ${kind}` }, run.state),
    el("span", {}, steps),
    run.num_steps && el("progress", { max: run.num_steps, value: run.steps, "aria-label": "steps done" }),
    lasted && el("span", { class: "muted" }, lasted),
    outcome && el("span", { class: "muted outcome", title: outcome }, outcome),
  );
}
