/**
 * Answers from inside report.html: `<script type="application/json" id="embedded">` maps paths to answers. What the server
 * would compute from more data (a choice of series, a search) is computed here over what the report holds.
 */

const LEFT_OUT = "is not in this report, which holds at most 5 MB. Open the run's folder: penstock view RUN_DIR";

/** @type {Record<string, any> | null | undefined} */
let answers;

/** Whether this page is a report. */
export function isEmbedded() {
  if (answers === undefined) {
    const script = document.getElementById("embedded");
    answers = script ? JSON.parse(script.textContent || "{}") : null;
  }
  return answers !== null;
}

/**
 * The answer to `path`; throws an Error that says what is left out.
 * @param {string} path
 */
export function embeddedAnswer(path) {
  const held = /** @type {Record<string, any>} */ (answers);
  if (path in held) return held[path];
  const url = new URL(path, "http://report.invalid");
  const run = url.searchParams.get("run") ?? "0";
  if (url.pathname === "/api/series") return heldSeries(held, run, url.searchParams);
  if (url.pathname === "/api/samples") return heldSamples(held, run, url.searchParams);
  if (url.pathname === "/api/sample" && !url.searchParams.has("step")) {
    const end = `&key=${encodeURIComponent(url.searchParams.get("key") ?? "")}`;
    const found = Object.keys(held).findLast(
      (each) => each.startsWith(`/api/sample?run=${run}&`) && each.endsWith(end),
    );
    if (found) return held[found];
  }
  const plain = held[`${url.pathname}?run=${run}`];
  const isOfOne = url.pathname === "/api/sample" || url.searchParams.has("sample");
  if (plain && !isOfOne) return plain;
  throw new Error(`This part of the run ${LEFT_OUT}`);
}

/**
 * @param {Record<string, any>} held
 * @param {string} run
 * @param {URLSearchParams} wanted
 */
function heldSeries(held, run, wanted) {
  const whole = held[`/api/series?run=${run}&x=${wanted.get("x") ?? "step"}`];
  if (!whole) throw new Error(`The course of this run ${LEFT_OUT}`);
  const names = (wanted.get("names") ?? "").split(",").filter(Boolean);
  const part = (/** @type {Record<string, any>} */ from) =>
    Object.fromEntries(names.filter((name) => from?.[name]).map((name) => [name, from[name]]));
  return { x: whole.x, series: part(whole.series), min: part(whole.min), max: part(whole.max), steps: whole.steps };
}

/** Order of samples by the name of a sort. @type {Record<string, (a: any, b: any) => number>} */
const ORDERS = {
  best: (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity),
  worst: (a, b) => (a.score ?? Infinity) - (b.score ?? Infinity),
  longest: (a, b) => b.tokens - a.tokens,
  changed: (a, b) => Math.abs(b.change ?? 0) - Math.abs(a.change ?? 0),
  order: () => 0,
};

/**
 * @param {Record<string, any>} held
 * @param {string} run
 * @param {URLSearchParams} wanted
 */
function heldSamples(held, run, wanted) {
  const step = wanted.get("step");
  const all = held[step === null ? `/api/samples?run=${run}` : `/api/samples?run=${run}&step=${step}`];
  if (!all) throw new Error(`The samples of this step: what you ask for ${LEFT_OUT}`);
  const text = (wanted.get("search") ?? "").toLowerCase();
  const found = all.samples.filter((/** @type {any} */ sample) =>
    `${sample.prompt}\n${sample.completion}`.toLowerCase().includes(text),
  );
  found.sort(ORDERS[wanted.get("sort") ?? "order"] ?? ORDERS.order);
  const offset = Number(wanted.get("offset") ?? 0);
  const limit = Number(wanted.get("limit") ?? 50);
  return { ...all, total: found.length, samples: found.slice(offset, offset + limit) };
}
