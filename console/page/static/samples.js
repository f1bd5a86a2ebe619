/** What does it say? The samples of a step, sorted and searched, and one of them in full. */

import { choice, debounced, el, fill, notice } from "./dom.js";
import { numberText, printable } from "./format.js";
import { load, query } from "./load.js";
import { askWhileReading } from "./polling.js";
import { addressOf, changeRoute, readRoute } from "./route.js";
import { chosenRun, runChoice } from "./runs.js";
import { sampleDetail } from "./sample.js";

const PAGE_SIZE = 50;
const SEARCH_AFTER_MS = 300;
const SORTS = /** @type {[string, string][]} */ ([
  ["best", "best score"],
  ["worst", "worst score"],
  ["longest", "longest"],
  ["changed", "prompts whose score changed most"],
  ["order", "as trained"],
]);

/** @type {import("./runs.js").View} */
export const samplesView = { id: "samples", question: "What does it say?", show: showSamples };

/**
 * @param {HTMLElement} root
 * @param {import("./runs.js").Page} page
 */
function showSamples(root, page) {
  const controls = el("div", { class: "controls" });
  const list = el("section", { class: "sample-list", "aria-label": "Samples of the step" });
  const detail = el("section", { class: "sample-detail", "aria-label": "The chosen sample" });
  fill(root, controls, el("div", { class: "panes" }, list, detail));
  let listedFor = "";
  /** @type {any} */
  let listed = null;
  const one = sampleDetail(detail, page);

  async function update() {
    const { parameters } = readRoute();
    const run = chosenRun(page);
    const { step, sort = "best", search, offset } = parameters;
    const answer = await load(query("/api/samples", { run: run.index, step, sort, search, offset, limit: PAGE_SIZE }));
    const state = JSON.stringify([run.index, step, sort, search, offset, parameters.key]);
    if (answer !== listed || state !== listedFor) {
      drawSampleControls(controls, page, answer, parameters);
      drawList(list, answer, parameters);
      listed = answer;
      listedFor = state;
    }
    askWhileReading(root, answer, update);
    root.classList.toggle("has-key", Boolean(parameters.key));
    await one.update(parameters.at, parameters.key);
  }

  return { update, close: () => {} };
}

/**
 * @param {Element} root
 * @param {import("./runs.js").Page} page
 * @param {any} answer
 * @param {Record<string, string>} parameters
 */
function drawSampleControls(root, page, answer, parameters) {
  const search = debounced(SEARCH_AFTER_MS, (text) => changeRoute({ search: text, offset: null }));
  fill(
    root,
    runChoice(page),
    stepChooser(answer),
    choice("Sort", SORTS, parameters.sort ?? "best", (sort) => changeRoute({ sort, offset: null })),
    el(
      "label",
      { class: "field grow" },
      el("span", {}, "Search"),
      el("input", {
        type: "search",
        value: parameters.search ?? "",
        placeholder: "in prompts and completions",
        maxlength: 200,
        oninput: (/** @type {any} */ event) => search(event.target.value),
      }),
    ),
  );
}

/**
 * The step: typed, or by one to either side; "newest" follows the run.
 * @param {any} answer
 */
function stepChooser(answer) {
  if (!answer.steps_with_samples) return null;
  const [first, last] = answer.steps_with_samples;
  /** @type {number[] | undefined} */
  const steps = answer.steps;
  const before = steps ? steps.findLast((each) => each < answer.step) : answer.step - 1;
  const after = steps ? steps.find((each) => each > answer.step) : answer.step + 1;
  const go = (/** @type {number | null} */ step) =>
    changeRoute({
      step: step === null ? null : Math.max(first, Math.min(last, step)),
      offset: null,
      key: null,
      at: null,
    });
  const button = (
    /** @type {string} */ text,
    /** @type {string} */ label,
    /** @type {number | null} */ step,
    /** @type {boolean} */ isOff,
  ) => el("button", { type: "button", "aria-label": label, disabled: isOff, onclick: () => go(step) }, text);
  return el(
    "div",
    { class: "field" },
    el("label", { for: "step" }, `Step, ${first} to ${last}`),
    el(
      "div",
      { class: "joined" },
      button("‹", "Step before", before ?? first, answer.step <= first),
      el("input", {
        id: "step",
        type: "number",
        min: first,
        max: last,
        value: answer.step,
        onchange: (/** @type {any} */ event) => go(Number(event.target.value)),
      }),
      button("›", "Step after", after ?? last, answer.step >= last),
      button("newest", "Newest step", null, !readRoute().parameters.step),
    ),
  );
}

/**
 * @param {Element} root
 * @param {any} answer
 * @param {Record<string, string>} parameters
 */
function drawList(root, answer, parameters) {
  if (!answer.samples.length) {
    fill(root, notice(emptyText(answer, parameters)));
    return;
  }
  const offset = Number(parameters.offset ?? 0);
  const last = offset + answer.samples.length;
  const turn = (/** @type {string} */ text, /** @type {number} */ to, /** @type {boolean} */ isOff) =>
    el("button", { type: "button", disabled: isOff, onclick: () => changeRoute({ offset: to || null }) }, text);
  fill(
    root,
    el("p", { class: "muted" }, `${offset + 1} to ${last} of ${answer.total.toLocaleString("en-US")}`),
    answer.indexed < 1 && el("p", { class: "muted" }, readText(answer)),
    answer.is_cut &&
      el("p", { class: "muted" }, "The step has more samples than are listed: only its first ones are here."),
    el(
      "ol",
      {},
      answer.samples.map((/** @type {any} */ sample) => el("li", {}, row(sample, parameters))),
    ),
    answer.total > answer.samples.length &&
      el(
        "div",
        { class: "joined" },
        turn("Before", Math.max(0, offset - PAGE_SIZE), offset === 0),
        turn("Next", last, last >= answer.total),
      ),
  );
}

/**
 * @param {any} answer
 * @param {Record<string, string>} parameters
 */
function emptyText(answer, parameters) {
  // What was not found yet may be in what is not read yet.
  if (answer.indexed < 1) return readText(answer);
  if (parameters.search) return `No sample of step ${answer.step} holds "${parameters.search}".`;
  if (!answer.steps_with_samples) {
    return "No samples of this run are kept: `record: true` keeps all, `page.groups_per_step` a few of each step.";
  }
  return `Step ${answer.step} has no samples here.`;
}

/** @param {any} answer */
function readText(answer) {
  return `The recording is being read: ${Math.floor(100 * answer.indexed)} %.`;
}

/**
 * @param {any} sample
 * @param {Record<string, string>} parameters
 */
function row(sample, parameters) {
  const facts = [
    `${numberText(sample.tokens)} tokens${sample.finish_reason === "length" ? ", cut off" : ""}`,
    sample.staleness ? `${numberText(sample.staleness)} stale` : "fresh",
    typeof sample.change === "number" && `its prompt ${sample.change < 0 ? "" : "+"}${numberText(sample.change)}`,
  ];
  return el(
    "a",
    {
      class: "row",
      href: addressOf("samples", { ...parameters, key: sample.key, at: sample.step, against: null, token: null }),
      "aria-current": sample.key === parameters.key ? "true" : null,
    },
    el(
      "span",
      { class: `score ${sample.status === "ok" ? "" : "bad"}` },
      sample.status === "ok" ? numberText(sample.score) : sample.status,
    ),
    el(
      "span",
      { class: "muted facts" },
      facts.filter(Boolean).join(", "),
      el("span", { class: "key" }, printable(sample.key)),
    ),
    el("span", { class: "prompt line" }, printable(sample.prompt)),
    el("span", { class: "completion line" }, printable(sample.completion)),
  );
}
