/** Which metrics become which chart, and a chart's lines from the server's series. */

/**
 * @typedef {object} ChartSpec
 * @property {string} title
 * @property {string} unit
 * @property {string[]} names
 * @property {[string, string] | null} share first metric over the second, in place of the metrics themselves
 * @property {boolean} isExtra whether the viewer asked for it
 */

/**
 * The charts that every run gets, as far as it has their metrics: title, unit, metrics; a name that ends in "*" is a prefix.
 * @type {[string, string, string[]][]}
 */
const STANDARD = [
  ["Reward", "mean of a step", ["reward/mean"]],
  ["Components of the reward", "mean", ["component/*"]],
  ["Held-out accuracy", "", ["eval/sampled_accuracy", "eval/greedy_accuracy"]],
  ["Completion length", "tokens", ["length/mean", "length/max"]],
  ["Entropy", "nats a token", ["loss/entropy"]],
  ["KL", "nats a token", ["loss/mismatch_kl", "loss/reference_kl"]],
  ["Clip fraction", "of tokens", ["loss/clip_fraction"]],
  ["Staleness", "versions", ["staleness/mean", "staleness/max"]],
  ["Groups without variance", "of a step's groups", ["step/zero_variance_groups/step/groups"]],
  ["Throughput", "samples/s", ["throughput/samples_per_second"]],
  ["Time of a step", "s", ["time/step_s", "time/train_s", "time/idle_s"]],
  ["Norm of the gradient", "", ["optimizer/grad_norm"]],
];
const MAX_LINES = 8;
const SHARE = /** @type {[string, string]} */ (["step/zero_variance_groups", "step/groups"]);

/**
 * The charts for a run that has the metrics `names`, and one for each of `more`.
 * @param {string[]} names
 * @param {string[]} more
 * @returns {ChartSpec[]}
 */
export function chartsOf(names, more) {
  const has = new Set(names);
  /** @type {ChartSpec[]} */
  const found = [];
  for (const [title, unit, patterns] of STANDARD) {
    if (patterns[0] === SHARE.join("/")) {
      if (SHARE.every((name) => has.has(name))) found.push({ title, unit, names: SHARE, share: SHARE, isExtra: false });
      continue;
    }
    const prefixed = (/** @type {string} */ pattern) =>
      names
        .filter((name) => name.startsWith(pattern.slice(0, -1)))
        .sort(byDepth)
        .slice(0, MAX_LINES);
    const metrics = patterns.flatMap((pattern) =>
      pattern.endsWith("*") ? prefixed(pattern) : has.has(pattern) ? [pattern] : [],
    );
    if (metrics.length) found.push({ title, unit, names: metrics, share: null, isExtra: false });
  }
  for (const name of more) found.push({ title: name, unit: "", names: [name], share: null, isExtra: true });
  return found;
}

/**
 * @param {string} a
 * @param {string} b
 */
function byDepth(a, b) {
  return a.split("/").length - b.split("/").length || a.localeCompare(b);
}

/**
 * The metrics to ask a run for, as the server takes them.
 * @param {ChartSpec[]} charts
 * @param {string[]} names what the run has
 */
export function neededNames(charts, names) {
  const has = new Set(names);
  return [...new Set(charts.flatMap((chart) => chart.names))].filter((name) => has.has(name)).join(",");
}

/**
 * The lines of a chart: runs by colour where there are several, else metrics by colour.
 * @param {ChartSpec} spec
 * @param {string[]} runIds
 * @param {any[]} series one answer a run
 * @param {{ smooth: number, range: { from: number, to: number } }} how
 * @returns {import("./charts.js").Line[]}
 */
export function linesOf(spec, runIds, series, { smooth, range }) {
  const isCompared = series.length > 1;
  const metrics = spec.share ? [spec.title] : spec.names;
  return series.flatMap((answer, run) =>
    metrics.flatMap((name, place) => {
      const values = spec.share ? ratio(answer.series, spec.share) : answer.series[name];
      if (!values || values.every((/** @type {any} */ value) => value === null)) return [];
      const short = metrics.length > 1 || !isCompared ? shortName(name) : "";
      const keep = answer.x.map((/** @type {number} */ x) => x >= range.from && x <= range.to);
      const part = (/** @type {any[] | undefined} */ list) => list?.filter((_, index) => keep[index]) ?? null;
      const isSparse = name.startsWith("eval/");
      const hasBand = metrics.length === 1 && !spec.share && !isSparse;
      return [
        {
          name: isCompared ? [runIds[run], short].filter(Boolean).join(" ") : short,
          colour: isCompared ? run : place,
          isDashed: isCompared && place > 0,
          isSparse,
          x: part(answer.x) ?? [],
          y: smoothed(part(values) ?? [], smooth),
          low: hasBand ? part(answer.min?.[name]) : null,
          high: hasBand ? part(answer.max?.[name]) : null,
        },
      ];
    }),
  );
}

/** @param {string} name */
function shortName(name) {
  return name
    .replace(/^(component|eval|loss|staleness|length|time|reward|optimizer|throughput)\//, "")
    .replaceAll("_", " ");
}

/**
 * @param {Record<string, (number | null)[]>} series
 * @param {[string, string]} names
 */
function ratio(series, [above, below]) {
  return series[above]?.map((value, index) => {
    const divisor = series[below]?.[index];
    return value === null || !divisor ? null : value / divisor;
  });
}

/**
 * The mean of each value and up to `window` - 1 before it; holes stay.
 * @param {(number | null)[]} values
 * @param {number} window
 */
function smoothed(values, window) {
  if (window < 2) return values;
  return values.map((value, index) => {
    if (value === null) return null;
    const part = /** @type {number[]} */ (
      values.slice(Math.max(0, index - window + 1), index + 1).filter((each) => each !== null)
    );
    return part.reduce((sum, each) => sum + each, 0) / part.length;
  });
}
