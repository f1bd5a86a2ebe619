/** Line charts by Chart.js, with a legend that hides lines, a band from least to most, and keys that walk along the points. */

import { el, fill } from "./dom.js";
import { numberText, printable } from "./format.js";

/**
 * @typedef {object} Line
 * @property {string} name
 * @property {number} colour which colour of the page's eight
 * @property {boolean} isDashed
 * @property {boolean} isSparse whether points are far apart: joined over holes, and marked
 * @property {number[]} x
 * @property {(number | null)[]} y null is a hole
 * @property {(number | null)[] | null} low least value behind each point, where several steps became one
 * @property {(number | null)[] | null} high
 */

const NUM_COLOURS = 8;

/** The page's colours, which follow light and dark. */
export function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
  const lines = Array.from({ length: NUM_COLOURS }, (_, index) => read(`--line-${index + 1}`));
  return { lines, text: read("--text"), muted: read("--muted"), grid: read("--grid"), surface: read("--surface") };
}

export class LineChart {
  /**
   * @param {string} title
   * @param {string} unit
   * @param {{ onRange: (from: number, to: number) => void, onRemove?: (() => void) | null }} events a part of the x axis was chosen
   */
  constructor(title, unit, { onRange, onRemove = null }) {
    this.title = title;
    /** @type {Line[]} */
    this.lines = [];
    /** @type {Set<string>} */
    this.hidden = new Set();
    /** Which point the keys are at. @type {number | null} */
    this.at = null;
    /** @type {any} */
    this.chart = null;
    this.canvas = el("canvas", {
      tabindex: 0,
      role: "img",
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.walk(event),
    });
    this.plot = el("div", { class: "plot" }, this.canvas);
    this.legend = el("div", { class: "legend" });
    const remove =
      onRemove &&
      el("button", { type: "button", class: "quiet", onclick: onRemove, "aria-label": `Remove ${title}` }, "×");
    const caption = el("figcaption", {}, el("span", {}, title), unit && el("small", {}, ` ${unit}`), remove);
    this.element = el("figure", { class: "chart" }, caption, this.plot, this.legend);
    listenForRange(this, onRange);
  }

  /**
   * Shows `lines`, in place of those before.
   * @param {Line[]} lines
   * @param {string} xTitle
   */
  draw(lines, xTitle) {
    this.lines = lines;
    this.xTitle = xTitle;
    this.drawLegend();
    const shown = lines.filter((line) => !this.hidden.has(line.name));
    const colours = themeColours();
    const data = { datasets: shown.flatMap((line) => datasets(line, colours)) };
    if (this.chart) {
      this.chart.data = data;
      this.chart.options = options(xTitle, colours, lines);
      this.chart.update("none");
    } else {
      const Chart = /** @type {any} */ (window).Chart;
      this.chart = new Chart(this.canvas, { type: "line", data, options: options(xTitle, colours, lines) });
    }
    this.canvas.setAttribute(
      "aria-label",
      `${this.title}. ${lines.map(lastWords).join("; ")}. Arrow keys read single points.`,
    );
  }

  /** Draws once more, after light and dark changed or a line was hidden. */
  redraw() {
    this.draw(this.lines, this.xTitle ?? "");
  }

  close() {
    this.chart?.destroy();
    this.chart = null;
  }

  drawLegend() {
    const button = (/** @type {Line} */ line) =>
      el(
        "button",
        {
          type: "button",
          class: `line-${(line.colour % NUM_COLOURS) + 1}${line.isDashed ? " dashed" : ""}`,
          "aria-pressed": !this.hidden.has(line.name) ? "true" : "false",
          onclick: () => {
            if (!this.hidden.delete(line.name)) this.hidden.add(line.name);
            this.redraw();
          },
        },
        printable(line.name),
      );
    fill(this.legend, this.lines.map(button));
  }

  /**
   * Moves the tooltip by arrow keys, Home and End.
   * @param {KeyboardEvent} event
   */
  walk(event) {
    const points = this.chart?.data.datasets.find((/** @type {any} */ set) => !set.isBand)?.data ?? [];
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -points.length, End: points.length }[event.key];
    if (steps === undefined || !points.length) return;
    event.preventDefault();
    /** @type {number} */
    const from = this.at ?? (steps > 0 ? -1 : points.length);
    this.at = Math.max(0, Math.min(points.length - 1, from + steps));
    const active = this.chart.data.datasets
      .map((/** @type {any} */ set, /** @type {number} */ index) => ({
        datasetIndex: index,
        index: this.at,
        isBand: set.isBand,
      }))
      .filter(
        (/** @type {any} */ entry) =>
          !entry.isBand && entry.index < this.chart.data.datasets[entry.datasetIndex].data.length,
      );
    this.chart.tooltip.setActiveElements(active, { x: 0, y: 0 });
    this.chart.update("none");
  }
}

/** @param {Line} line */
function lastWords(line) {
  const last = line.y.findLast((value) => value !== null);
  return `${line.name}: ${numberText(last)} at the end`;
}

/**
 * A line and, where several steps became one point, the band of their values.
 * @param {Line} line
 * @param {ReturnType<typeof themeColours>} colours
 */
function datasets(line, colours) {
  const colour = colours.lines[line.colour % NUM_COLOURS];
  const points = (/** @type {(number | null)[]} */ values) =>
    line.x.map((x, index) => ({ x, y: values[index] ?? NaN }));
  const common = { pointRadius: 0, pointHitRadius: 6, spanGaps: line.isSparse, borderJoinStyle: "round" };
  const main = {
    ...common,
    label: printable(line.name),
    data: points(line.y),
    borderColor: colour,
    backgroundColor: colour,
    borderWidth: 1.6,
    borderDash: line.isDashed ? [5, 3] : [],
    pointRadius: line.isSparse ? 2.5 : loneRadii(line.y),
  };
  const { low, high } = line;
  if (!low || !high || !low.some((value, index) => value !== high[index])) return [main];
  const edge = { ...common, isBand: true, borderWidth: 0, pointHitRadius: 0 };
  return [
    main,
    { ...edge, data: points(low) },
    { ...edge, data: points(high), fill: "-1", backgroundColor: `${colour}2b` },
  ];
}

/**
 * Marks values between holes, which no line would show.
 * @param {(number | null)[]} values
 * @returns {number | number[]}
 */
function loneRadii(values) {
  const isHole = (/** @type {number} */ index) => (values[index] ?? null) === null;
  const radii = values.map((_, index) => (!isHole(index) && isHole(index - 1) && isHole(index + 1) ? 2 : 0));
  return radii.some((radius) => radius > 0) ? radii : 0;
}

/**
 * @param {string} xTitle
 * @param {ReturnType<typeof themeColours>} colours
 * @param {Line[]} lines
 */
function options(xTitle, colours, lines) {
  const first = Math.min(...lines.map((line) => line.x[0] ?? 0));
  const last = Math.max(...lines.map((line) => line.x.at(-1) ?? 0));
  const values = lines.flatMap((line) => line.y.filter((value) => value !== null));
  const least = values.reduce((a, b) => Math.min(a, b), Infinity);
  const most = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const axis = {
    type: "linear",
    grid: { color: colours.grid, drawTicks: false },
    border: { color: colours.grid },
    ticks: {
      color: colours.muted,
      font: { size: 11 },
      padding: 4,
      maxRotation: 0,
      callback: (/** @type {number} */ value) => numberText(value),
    },
  };
  return {
    animation: false,
    parsing: false,
    normalized: true,
    maintainAspectRatio: false,
    interaction: { mode: "nearest", axis: "x", intersect: false },
    scales: {
      x: {
        ...axis,
        // A run begins at 0; a part of it begins where it was cut.
        min: first < last * 0.05 ? 0 : first,
        max: last,
        ticks: { ...axis.ticks, maxTicksLimit: 7 },
        title: { display: true, text: xTitle, color: colours.muted, font: { size: 11 }, padding: 0 },
      },
      // What is never negative begins at 0, unless it stays far above.
      y: {
        ...axis,
        min: least >= -most / 100 && (least < most / 2 || most === 0) ? 0 : undefined,
        suggestedMax: most === least ? most + 1 : undefined,
        ticks: { ...axis.ticks, maxTicksLimit: 6 },
      },
    },
    plugins: {
      legend: { display: false },
      tooltip: {
        animation: false,
        filter: (/** @type {any} */ item) => !item.dataset.isBand,
        callbacks: {
          title: (/** @type {any[]} */ items) => (items.length ? `${xTitle} ${numberText(items[0].parsed.x)}` : ""),
          label: (/** @type {any} */ item) => `${item.dataset.label}: ${numberText(item.parsed.y)}`,
        },
      },
    },
  };
}

/**
 * Dragging over a chart chooses a part of its x axis.
 * @param {LineChart} owner
 * @param {(from: number, to: number) => void} onRange
 */
function listenForRange(owner, onRange) {
  const mark = el("div", { class: "range-mark", hidden: true });
  owner.plot.append(mark);
  /** @type {number | null} */
  let start = null;
  const at = (/** @type {PointerEvent} */ event) => event.clientX - owner.canvas.getBoundingClientRect().left;
  owner.canvas.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => {
    if (event.button !== 0 || event.pointerType !== "mouse") return;
    start = at(event);
    owner.canvas.setPointerCapture(event.pointerId);
  });
  owner.canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
    if (start === null) return;
    mark.hidden = Math.abs(at(event) - start) < 4;
    mark.style.left = `${Math.min(start, at(event))}px`;
    mark.style.width = `${Math.abs(at(event) - start)}px`;
  });
  owner.canvas.addEventListener("pointerup", (/** @type {PointerEvent} */ event) => {
    if (start === null) return;
    const ends = [start, at(event)].sort((a, b) => a - b);
    start = null;
    if (mark.hidden || !owner.chart) return;
    mark.hidden = true;
    const scale = owner.chart.scales.x;
    onRange(scale.getValueForPixel(ends[0]), scale.getValueForPixel(ends[1]));
  });
}
