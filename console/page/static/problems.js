/** What is wrong? Each problem with its place in the log and the page of the docs that explains it. */

import { choice, debounced, el, fill, notice } from "./dom.js";
import { durationText, numberText, printable, timeText } from "./format.js";
import { load, query } from "./load.js";
import { changeRoute, readRoute } from "./route.js";
import { chosenRun, runChoice } from "./runs.js";

/** @type {import("./runs.js").View} */
export const problemsView = { id: "problems", question: "What is wrong?", show: showProblems };

/**
 * @param {HTMLElement} root
 * @param {import("./runs.js").Page} page
 */
function showProblems(root, page) {
  const controls = el("div", { class: "controls" });
  const list = el("div", { class: "problems-list" });
  fill(root, controls, list);
  /** @type {any} */
  let drawn = null;
  let drawnFor = "";

  async function update() {
    const { parameters } = readRoute();
    const run = chosenRun(page);
    const answer = await load(query("/api/problems", { run: run.index }));
    const state = JSON.stringify([run.index, parameters.state, parameters.text]);
    if (answer === drawn && state === drawnFor) return;
    drawn = answer;
    drawnFor = state;
    drawProblemControls(controls, page, answer, parameters);
    const shown = chosenProblems(answer.problems, parameters);
    const none = answer.problems.length ? "No problem is as chosen." : "Nothing is wrong, as far as this run tells.";
    fill(list, shown.length ? el("ul", {}, shown.map(problemItem)) : notice(none));
  }

  return { update, close: () => {} };
}

/**
 * @param {Element} root
 * @param {import("./runs.js").Page} page
 * @param {any} answer
 * @param {Record<string, string>} parameters
 */
function drawProblemControls(root, page, answer, parameters) {
  const count = (/** @type {string} */ state) =>
    answer.problems.filter((/** @type {any} */ problem) => problem.state === state).length;
  const states = /** @type {[string, string][]} */ ([
    ["", `all (${answer.problems.length})`],
    ["now", `now (${count("now")})`],
    ["past", `past (${count("past")})`],
  ]);
  const search = debounced(200, (text) => changeRoute({ text }));
  fill(
    root,
    runChoice(page),
    choice("When", states, parameters.state ?? "", (state) => changeRoute({ state })),
    el(
      "label",
      { class: "field grow" },
      el("span", {}, "Search"),
      el("input", {
        type: "search",
        value: parameters.text ?? "",
        placeholder: "in what happened and in log lines",
        oninput: (/** @type {any} */ event) => search(event.target.value),
      }),
    ),
  );
}

/**
 * @param {any[]} problems
 * @param {Record<string, string>} parameters
 */
function chosenProblems(problems, parameters) {
  const text = (parameters.text ?? "").toLowerCase();
  return problems
    .filter((problem) => !parameters.state || problem.state === parameters.state)
    .filter((problem) => `${problem.what}\n${problem.source}\n${problem.line ?? ""}`.toLowerCase().includes(text));
}

/** @param {any} problem */
function problemItem(problem) {
  const now_s = Date.now() / 1000;
  const since = problem.since_s
    ? `since ${timeText(problem.since_s)}${problem.state === "now" ? `, ${durationText(Math.max(0, now_s - problem.since_s))}` : ""}`
    : null;
  const facts = [
    since,
    problem.count > 1 && `${numberText(problem.count)} times`,
    problem.source && `from ${printable(problem.source)}`,
  ];
  return el(
    "li",
    { class: `problem ${problem.state}` },
    el(
      "p",
      { class: "what" },
      el("span", { class: `badge ${problem.state === "now" ? "bad" : "calm"}` }, problem.state),
      " ",
      printable(problem.what),
    ),
    el("p", { class: "muted" }, facts.filter(Boolean).join(", ")),
    problem.line && el("pre", { class: "log" }, printable(problem.line)),
    problem.docs && el("p", { class: "muted" }, "Explained in ", el("code", {}, printable(problem.docs))),
  );
}
