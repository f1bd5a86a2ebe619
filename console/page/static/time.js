/** Where does time go? A lane for each process, the critical path in a sentence, and shares of what is in view. */

import { choice, debounced, el, fill, notice, table } from "./dom.js";
import { durationText, printable, timeText, valueText } from "./format.js";
import { KIND_NAMES, kindColour } from "./lane_kinds.js";
import { drawShares } from "./lane_shares.js";
import { LaneCanvas } from "./lanes.js";
import { load, query } from "./load.js";
import { askWhileReading } from "./polling.js";
import { addressOf, changeRoute, noteInRoute, readRoute } from "./route.js";
import { chosenRun, runChoice } from "./runs.js";

const ASK_AFTER_MS = 250;
const WINDOWS = /** @type {[string, string][]} */ ([
  ["", "all"],
  ["3600", "last hour"],
  ["300", "last 5 minutes"],
  ["60", "last minute"],
  ["10", "last 10 s"],
]);

/** The choice that stands for a part of the run chosen by other means. */
const SHOWN = "shown";

/** @type {import("./runs.js").View} */
export const timeView = { id: "time", question: "Where does time go?", show: showTime };

/**
 * @param {HTMLElement} root
 * @param {import("./runs.js").Page} page
 */
function showTime(root, page) {
  const controls = el("div", { class: "controls" });
  const sentence = el("p", { class: "sentence" });
  const facts = el("p", { class: "facts muted", "aria-live": "polite" });
  const note = el("p", { class: "muted" });
  const legend = el("div", { class: "legend" });
  const shares = el("div", {});
  let timer = 0;
  const lanes = new LaneCanvas({
    onRange: (from, to) => {
      noteInRoute({ from: from.toFixed(4), to: to.toFixed(4) });
      clearTimeout(timer);
      timer = window.setTimeout(() => void update().catch(() => {}), ASK_AFTER_MS);
    },
    onPoint: (span) => drawFacts(facts, page, span),
  });
  const events = el("div", {});
  fill(root, controls, sentence, lanes.element, note, legend, facts, events, shares);
  /** @type {any} */
  let drawn = null;
  let drawnFor = "";

  async function update() {
    const { parameters } = readRoute();
    const run = chosenRun(page).index;
    const { from, to, sample, at } = parameters;
    const whole = await load(query("/api/lanes", { run, from, to }));
    askWhileReading(root, whole, update);
    const life = sample ? await lifeOf(run, sample, at) : null;
    const state = JSON.stringify([run, from, to, sample, parameters.lanes]);
    if (whole === drawn && state === drawnFor) return;
    drawn = whole;
    const answer = {
      ...whole,
      lanes: whole.lanes.filter((/** @type {any} */ lane) => isWanted(lane, parameters.lanes)),
    };
    drawnFor = state;
    drawTimeControls(controls, page, answer, life, lanes);
    fill(sentence, answer.sentence ? printable(answer.sentence) : "");
    sentence.hidden = !answer.sentence;
    fill(
      note,
      [
        answer.note && printable(answer.note),
        answer.indexed < 1 && `traces read so far: ${Math.floor(100 * answer.indexed)} %`,
      ]
        .filter(Boolean)
        .join("; "),
    );
    lanes.element.hidden = !answer.lanes.length;
    lanes.draw([...(life?.lanes ?? []), ...answer.lanes], {
      from: Number(from ?? answer.from),
      to: Number(to ?? answer.to),
      begin: answer.begin,
      end: answer.end,
      sample: sample ?? null,
    });
    drawKinds(legend, answer);
    drawEvents(events, life);
    drawShares(shares, answer);
  }

  return {
    update,
    close: () => {
      clearTimeout(timer);
      lanes.close();
    },
  };
}

/**
 * @param {any} lane
 * @param {string | undefined} text
 */
function isWanted(lane, text) {
  return !text || `${lane.name} ${lane.kind}`.toLowerCase().includes(text.toLowerCase());
}

/**
 * The life of one sample as lanes: by the times that its recording holds, and as it was traced.
 * @param {number} run
 * @param {string} key
 * @param {string | undefined} step
 * @returns {Promise<{ lanes: any[], events: any[] }>}
 */
async function lifeOf(run, key, step) {
  const [traced, sample] = await Promise.all([
    load(query("/api/lanes", { run, sample: key })).catch(() => null),
    load(query("/api/sample", { run, step, key })).catch(() => null),
  ]);
  if (!traced?.lanes.length && !sample) throw new Error(`Sample ${key} is neither recorded nor traced.`);
  const { submit_s, lease_s, finish_s, score_s, trained_s } = sample?.times ?? {};
  const stages = [
    [submit_s, lease_s, "queued", "waits for a generator"],
    [lease_s, finish_s, "leased", "is with a generator"],
    [finish_s, score_s, "scoring", "is scored"],
    [score_s, trained_s, "waiting", "waits for training"],
  ];
  const spans = stages.filter(([from, to]) => from && to && to >= from).map((stage) => [...stage, key]);
  const recorded = spans.length ? [{ name: `sample ${key}`, kind: "sample", spans }] : [];
  const named = (/** @type {any} */ lane) => ({ ...lane, name: `its ${lane.name}` });
  return { lanes: [...recorded, ...(traced?.lanes ?? []).map(named)], events: traced?.events ?? [] };
}

const MAX_EVENTS = 200;

/**
 * What happened to the sample: its chunks with their versions, its moves.
 * @param {Element} root
 * @param {{ lanes: any[], events: any[] } | null} life
 */
function drawEvents(root, life) {
  const events = life?.events.slice(0, MAX_EVENTS) ?? [];
  if (!life || !events.length) {
    fill(root);
    return;
  }
  const start_s = Math.min(...life.lanes.flatMap((lane) => lane.spans.map((/** @type {any} */ span) => span[0])));
  const rows = events.map(([at_s, name, attributes]) => [
    durationText(at_s - start_s),
    printable(name),
    valueText(attributes),
  ]);
  fill(root, table(["After", "Event of the sample", ""], rows, { numbers: [0] }));
}

/**
 * From when to when it was, with some room.
 * @param {{ lanes: any[] }} life
 */
function rangeOf(life) {
  const spans = life.lanes.flatMap((lane) => lane.spans);
  const [from, to] = [Math.min(...spans.map((span) => span[0])), Math.max(...spans.map((span) => span[1]))];
  const margin = (to - from) * 0.05 || 1;
  return { from: (from - margin).toFixed(4), to: (to + margin).toFixed(4) };
}

/**
 * @param {Element} root
 * @param {import("./runs.js").Page} page
 * @param {any} answer
 * @param {{ lanes: any[] } | null} life of the chosen sample
 * @param {LaneCanvas} lanes
 */
function drawTimeControls(root, page, answer, life, lanes) {
  const { parameters } = readRoute();
  const seconds = Number(parameters.to ?? answer.to) - Number(parameters.from ?? answer.from);
  const show = (/** @type {string} */ length) => {
    if (length !== SHOWN)
      changeRoute(length ? { from: answer.end - Number(length), to: answer.end } : { from: null, to: null });
  };
  const filter = debounced(200, (text) => changeRoute({ lanes: text }));
  const button = (/** @type {string} */ text, /** @type {string} */ label, /** @type {() => void} */ work) =>
    el("button", { type: "button", "aria-label": label, onclick: work }, text);
  const isAll = !parameters.from && !parameters.to;
  const shown = /** @type {[string, string][]} */ (isAll ? WINDOWS : [[SHOWN, durationText(seconds)], ...WINDOWS]);
  fill(
    root,
    runChoice(page),
    choice("Shown", shown, isAll ? "" : SHOWN, show),
    el(
      "div",
      { class: "joined" },
      button("‹", "Earlier", () => lanes.pan(-0.3)),
      button("−", "Zoom out", () => lanes.zoom(2)),
      button("+", "Zoom in", () => lanes.zoom(0.5)),
      button("›", "Later", () => lanes.pan(0.3)),
    ),
    el(
      "label",
      { class: "field" },
      el("span", {}, "Lanes"),
      el("input", {
        type: "search",
        placeholder: "part of a name",
        value: parameters.lanes ?? "",
        oninput: (/** @type {any} */ event) => filter(event.target.value),
      }),
    ),
    parameters.sample &&
      el(
        "button",
        { type: "button", onclick: () => changeRoute({ sample: null, at: null }) },
        `Without sample ${printable(parameters.sample)}`,
      ),
    life?.lanes.length && el("button", { type: "button", onclick: () => changeRoute(rangeOf(life)) }, "Zoom to its life"),
    el(
      "span",
      { class: "muted hint" },
      "Drag to move, Ctrl and wheel to zoom; by keys: arrows, + and −, Tab to the lanes first",
    ),
    answer.merged && el("span", { class: "muted hint" }, "Short spans are drawn together: zoom in for single ones."),
    !answer.lanes.length &&
      notice(
        parameters.lanes
          ? "No lane has this in its name."
          : "No times are recorded yet. Lanes appear with the first step.",
      ),
  );
}

/**
 * @param {Element} root
 * @param {any} answer
 */
function drawKinds(root, answer) {
  const kinds = new Set(
    answer.lanes.flatMap((/** @type {any} */ lane) => lane.spans.map((/** @type {any} */ span) => span[2])),
  );
  const mark = (/** @type {string} */ kind) => {
    const box = el("i", {});
    box.style.backgroundColor = kindColour(kind);
    return el("span", { class: "mark" }, box, KIND_NAMES[kind] ?? kind);
  };
  fill(root, [...kinds].sort().map(mark));
}

/**
 * What the span that is pointed at is.
 * @param {Element} root
 * @param {import("./runs.js").Page} page
 * @param {{ lane: string, span: any[] } | null} pointed
 */
function drawFacts(root, page, pointed) {
  if (!pointed) {
    fill(root, "Point at a span to read it.");
    return;
  }
  const [from, to, kind, label, key] = pointed.span;
  const run = chosenRun(page).index;
  const margin = (to - from) * 0.1;
  fill(
    root,
    el("strong", {}, printable(pointed.lane)),
    ` ${KIND_NAMES[kind] ?? kind}${label && label !== kind ? `, ${printable(label)}` : ""}: ${durationText(to - from)} from ${timeText(from)} `,
    el(
      "button",
      {
        type: "button",
        class: "quiet",
        onclick: () => changeRoute({ from: (from - margin).toFixed(4), to: (to + margin).toFixed(4) }),
      },
      "zoom to it",
    ),
    key && ` sample ${printable(key)}: `,
    key &&
      el(
        "button",
        { type: "button", class: "quiet", onclick: () => changeRoute({ sample: key, at: null }) },
        "its life",
      ),
    key && el("a", { href: addressOf("samples", { run, key }) }, "read it"),
  );
}
