/** Is it learning? Charts of the runs' metrics, side by side, and what changed from the first steps to the last. */

import { LineChart } from "./charts.js";
import { choice, el, fill, notice } from "./dom.js";
import { diffLines } from "./diff.js";
import { numberText, printable } from "./format.js";
import { chartsOf, linesOf, neededNames } from "./learning_charts.js";
import { load, query } from "./load.js";
import { changeRoute, readRoute } from "./route.js";
import { comparedChoice, comparedRuns } from "./runs.js";

const X_TITLES = { step: "step", tokens: "tokens trained", hours: "hours" };
const SMOOTHINGS = /** @type {[string, string][]} */ ([
  ["0", "none"],
  ["5", "5 points"],
  ["20", "20 points"],
]);

/** Rows of the table above the charts: title and metric. @type {[string, string][]} */
const SUMMARY = [
  ["Reward", "reward/mean"],
  ["Held-out accuracy, sampled", "eval/sampled_accuracy"],
  ["Held-out accuracy, greedy", "eval/greedy_accuracy"],
  ["Completion length", "length/mean"],
  ["Entropy", "loss/entropy"],
  ["Samples a second", "throughput/samples_per_second"],
];

/** @type {import("./runs.js").View} */
export const learningView = { id: "learning", question: "Is it learning?", show: showLearning };

/**
 * @param {HTMLElement} root
 * @param {import("./runs.js").Page} page
 */
function showLearning(root, page) {
  const controls = el("div", { class: "controls" });
  const summary = el("div", {});
  const grid = el("div", { class: "charts" });
  const configs = el("div", {});
  fill(root, controls, summary, grid, configs);
  /** @type {Map<string, LineChart>} */
  const charts = new Map();
  let drawnFor = "";
  /** @type {any[]} */
  let drawnOf = [];

  async function update() {
    const { parameters } = readRoute();
    const runs = comparedRuns(page);
    const x = parameters.x in X_TITLES ? parameters.x : "step";
    const more = (parameters.more ?? "").split(",").filter(Boolean);
    const known = await Promise.all(runs.map((run) => load(query("/api/metrics", { run: run.index }))));
    const names = known.map((answer) => answer.names);
    const wanted = chartsOf([...new Set(names.flat())], more);
    const ask = (/** @type {any} */ run, /** @type {number} */ place) =>
      load(
        query("/api/series", {
          run: run.index,
          names: neededNames(wanted, names[place]),
          x,
          points: 600,
          from: parameters.from,
          to: parameters.to,
        }),
      );
    const series = await Promise.all(runs.map(ask));
    const state = JSON.stringify([parameters, runs.map((run) => run.index)]);
    if (state === drawnFor && series.every((answer, place) => answer === drawnOf[place])) return;
    if (state !== drawnFor) drawControls(controls, page, parameters, [...new Set(names.flat())]);
    drawnFor = state;
    drawnOf = series;
    drawSummary(summary, runs, series);
    drawCharts(grid, charts, wanted, runs, series, { x, parameters });
    drawConfigs(configs, runs);
  }

  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const recolour = () => charts.forEach((chart) => chart.redraw());
  scheme.addEventListener("change", recolour);
  return {
    update,
    close: () => {
      scheme.removeEventListener("change", recolour);
      charts.forEach((chart) => chart.close());
    },
  };
}

/**
 * @param {Element} root
 * @param {import("./runs.js").Page} page
 * @param {Record<string, string>} parameters
 * @param {string[]} names
 */
function drawControls(root, page, parameters, names) {
  const axis = choice("Against", Object.entries(X_TITLES), parameters.x ?? "step", (x) =>
    changeRoute({ x, from: null, to: null }),
  );
  const smooth = choice("Smoothing", SMOOTHINGS, parameters.smooth ?? "0", (value) =>
    changeRoute({ smooth: value === "0" ? null : value }),
  );
  const add = (/** @type {any} */ event) => {
    const chosen = new Set((parameters.more ?? "").split(",").filter(Boolean));
    if (!names.includes(event.target.value)) return;
    changeRoute({ more: [...chosen.add(event.target.value)].join(",") });
  };
  const more = el(
    "label",
    { class: "field" },
    el("span", {}, "Another metric"),
    el("input", { id: "more", list: "metric-names", autocomplete: "off", placeholder: "name", onchange: add }),
    el(
      "datalist",
      { id: "metric-names" },
      names.map((name) => el("option", { value: name })),
    ),
  );
  const zoomed =
    parameters.from || parameters.to
      ? el("button", { type: "button", onclick: () => changeRoute({ from: null, to: null }) }, "Show all of the axis")
      : el("span", { class: "muted hint by-mouse" }, "Drag over a chart to zoom");
  fill(root, comparedChoice(page), axis, smooth, more, zoomed);
}

/**
 * @param {Element} root
 * @param {import("./runs.js").Run[]} runs
 * @param {any[]} series
 */
function drawSummary(root, runs, series) {
  const text = (/** @type {any} */ answer, /** @type {string} */ name) => {
    const values = (answer.series[name] ?? []).filter((/** @type {any} */ value) => value !== null);
    if (!values.length) return "-";
    const few = Math.max(1, Math.min(5, Math.floor(values.length / 2)));
    const mean = (/** @type {number[]} */ part) => part.reduce((sum, value) => sum + value, 0) / part.length;
    return `${numberText(mean(values.slice(0, few)))} → ${numberText(mean(values.slice(-few)))}`;
  };
  const facts = (/** @type {any} */ answer) =>
    SUMMARY.map(([title, name]) => [title, text(answer, name)])
      .filter(([, value]) => value !== "-")
      .map(([title, value]) => el("div", {}, el("dt", {}, title), el("dd", {}, value)));
  const line = (/** @type {import("./runs.js").Run} */ run, /** @type {number} */ place) => [
    runs.length > 1 && el("h2", {}, printable(run.run_id)),
    el("dl", { class: "tiles" }, facts(series[place])),
  ];
  const isEmpty = series.every((answer) => !answer.steps);
  fill(root, isEmpty ? notice("No step is done yet. Charts appear with the first one.") : runs.flatMap(line));
}

/**
 * @param {Element} root
 * @param {Map<string, LineChart>} charts those that are there, by title
 * @param {import("./learning_charts.js").ChartSpec[]} wanted
 * @param {import("./runs.js").Run[]} runs
 * @param {any[]} series
 * @param {{ x: string, parameters: Record<string, string> }} how
 */
function drawCharts(root, charts, wanted, runs, series, { x, parameters }) {
  const smooth = Number(parameters.smooth ?? 0);
  const range = { from: Number(parameters.from ?? -Infinity), to: Number(parameters.to ?? Infinity) };
  const titles = new Set();
  for (const spec of wanted) {
    const lines = linesOf(
      spec,
      runs.map((run) => run.run_id),
      series,
      { smooth, range },
    );
    if (!lines.length) continue;
    titles.add(spec.title);
    let chart = charts.get(spec.title);
    if (!chart) {
      const without = (parameters.more ?? "")
        .split(",")
        .filter((name) => name && name !== spec.title)
        .join(",");
      const onRange = (/** @type {number} */ from, /** @type {number} */ to) =>
        changeRoute({ from: from.toPrecision(6), to: to.toPrecision(6) });
      chart = new LineChart(spec.title, spec.unit, {
        onRange,
        onRemove: spec.isExtra ? () => changeRoute({ more: without }) : null,
      });
      charts.set(spec.title, chart);
      root.append(chart.element);
    }
    chart.draw(lines, X_TITLES[/** @type {keyof typeof X_TITLES} */ (x)]);
  }
  for (const [title, chart] of charts) {
    if (titles.has(title)) continue;
    chart.close();
    chart.element.remove();
    charts.delete(title);
  }
}

/**
 * The configuration of one run; of two, what distinguishes them.
 * @param {Element} root
 * @param {import("./runs.js").Run[]} runs
 */
function drawConfigs(root, runs) {
  const isOpen = root.querySelector("details")?.open ?? false;
  const whole = (/** @type {import("./runs.js").Run} */ run) =>
    el(
      "details",
      { open: isOpen },
      el("summary", {}, `Configuration of ${printable(run.run_id)}`),
      el("pre", {}, printable(run.config)),
    );
  if (runs.length !== 2) {
    fill(root, runs.map(whole));
    return;
  }
  const parts = diffLines(runs[0].config, runs[1].config).filter((part) => part.kind !== "same");
  const line = (/** @type {{ kind: string, text: string }} */ part) =>
    el(part.kind === "removed" ? "del" : "ins", {}, printable(part.text));
  const content = parts.length
    ? el("pre", { class: "diff" }, parts.map(line))
    : el("p", {}, "None: both are configured alike.");
  const title = `Differences of configuration: ${printable(runs[0].run_id)}, ${printable(runs[1].run_id)}`;
  fill(root, el("details", { open: isOpen }, el("summary", {}, title), content), runs.map(whole));
}
