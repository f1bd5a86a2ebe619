/** The page: its views, the address that chooses among them, and asking again while a run goes on. */

import { costView } from "./cost.js";
import { el, fill, notice } from "./dom.js";
import { isEmbedded } from "./embedded.js";
import { learningView } from "./learning.js";
import { load, query } from "./load.js";
import { startPolling } from "./polling.js";
import { problemsView } from "./problems.js";
import { addressOf, readRoute } from "./route.js";
import { chosenRun, drawRuns } from "./runs.js";
import { samplesView } from "./samples.js";
import { timeView } from "./time.js";
import { weightsView } from "./weights.js";

/** @type {import("./runs.js").View[]} */
const VIEWS = [learningView, samplesView, timeView, problemsView, costView, weightsView];

const header = /** @type {HTMLElement} */ (document.getElementById("runs"));
const nav = /** @type {HTMLElement} */ (document.getElementById("views"));
const main = /** @type {HTMLElement} */ (document.getElementById("content"));
const trouble = el("div", {});

/** @type {import("./runs.js").Page} */
const page = { runs: [], live: false };
/** @type {{ view: import("./runs.js").View, shown: import("./runs.js").Shown } | null} */
let current = null;

/** One link a view, the shown one marked. */
function drawNav() {
  const { view, parameters } = readRoute();
  const kept = { run: parameters.run, runs: parameters.runs };
  const link = (/** @type {import("./runs.js").View} */ each) =>
    el(
      "a",
      { href: addressOf(each.id, kept), "aria-current": each.id === view ? "page" : null, id: `view-${each.id}` },
      each.question,
    );
  fill(nav, VIEWS.map(link));
  drawNumProblems();
}

let numProblems = 0;

function drawNumProblems() {
  const link = document.getElementById("view-problems");
  link?.querySelector(".count")?.remove();
  if (link && numProblems) link.append(el("span", { class: "count", "aria-label": `${numProblems} now` }, numProblems));
}

/** Counts what is wrong now, for the mark at the view's link. */
async function countProblems() {
  const answer = await load(query("/api/problems", { run: chosenRun(page).index })).catch(() => null);
  numProblems = answer ? answer.problems.filter((/** @type {any} */ problem) => problem.state === "now").length : 0;
  drawNumProblems();
}

/** Shows the view that the address names, or brings it up to date if it is there already. */
async function follow() {
  const wanted = VIEWS.find((view) => view.id === readRoute().view) ?? VIEWS[0];
  drawNav();
  if (current?.view !== wanted) {
    current?.shown.close();
    const root = el("div", { class: `view ${wanted.id}` });
    fill(main, trouble, root);
    document.title = `${wanted.question} Penstock ${page.runs.map((run) => run.run_id).join(", ")}`;
    current = { view: wanted, shown: wanted.show(root, page) };
  }
  try {
    await current.shown.update();
    fill(trouble);
  } catch (error) {
    fill(trouble, notice(error instanceof Error ? error.message : String(error), "error"));
  }
}

let isFollowing = false;
let mustFollowAgain = false;

/** `follow`, one at a time: answers of an earlier address never overwrite those of a later one. */
async function followInTurn() {
  mustFollowAgain = true;
  if (isFollowing) return;
  isFollowing = true;
  try {
    while (mustFollowAgain) {
      mustFollowAgain = false;
      await follow();
    }
  } finally {
    isFollowing = false;
  }
}

/** Reads the runs; whether anything is new. */
async function readRuns() {
  const answer = await load("/api/runs");
  const isNew = answer.runs !== page.runs;
  page.runs = answer.runs;
  page.live = answer.live;
  if (isNew) drawRuns(header, page);
  return isNew;
}

/** One turn of polling. */
async function askAgain() {
  try {
    const isNew = await readRuns();
    await Promise.all([followInTurn(), countProblems()]);
    return isNew;
  } catch (error) {
    fill(trouble, notice(error instanceof Error ? error.message : String(error), "error"));
    return false;
  }
}

async function start() {
  drawNav();
  fill(main, trouble);
  try {
    await readRuns();
  } catch (error) {
    fill(header);
    fill(trouble, notice(error instanceof Error ? error.message : String(error), "error"));
    return;
  }
  window.addEventListener("hashchange", () => void followInTurn());
  await followInTurn();
  document.documentElement.dataset.ready = "yes";
  performance.mark("drawn");
  void countProblems();
  if (!isEmbedded() && (page.live || page.runs.some((run) => run.state === "running"))) startPolling(askAgain);
}

void start();
