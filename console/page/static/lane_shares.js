/** What share of the time in view each kind of process spent on what. */

import { fill, table } from "./dom.js";
import { KIND_NAMES } from "./lane_kinds.js";

/**
 * Seconds by kind; what several spans cover at once, as many samples do, counts once.
 * @param {any[][]} spans sorted by start
 * @param {number} from
 * @param {number} to
 */
function covered(spans, from, to) {
  /** @type {Map<string, number>} */
  const seconds = new Map();
  /** @type {Map<string, number>} */
  const reached = new Map();
  for (const [start, end, kind] of spans) {
    // What a process has in hand is not what it does.
    if (kind === "leased") continue;
    const begin = Math.max(start, from, reached.get(kind) ?? from);
    const stop = Math.min(end, to);
    if (stop <= begin) continue;
    seconds.set(kind, (seconds.get(kind) ?? 0) + stop - begin);
    reached.set(kind, stop);
  }
  return seconds;
}

/**
 * Shares of the time in view, by kind of process.
 * @param {Element} root
 * @param {any} answer
 */
export function drawShares(root, answer) {
  /** @type {Map<string, { lanes: number, seconds: Map<string, number> }>} */
  const groups = new Map();
  // What a broker traces are lives of samples, not work of its own.
  for (const lane of answer.lanes.filter((/** @type {any} */ each) => each.kind !== "broker")) {
    const group = groups.get(lane.kind) ?? { lanes: 0, seconds: new Map() };
    group.lanes += 1;
    for (const [kind, seconds] of covered(lane.spans, answer.from, answer.to)) {
      group.seconds.set(kind, (group.seconds.get(kind) ?? 0) + seconds);
    }
    groups.set(lane.kind, group);
  }
  const kinds = [...new Set([...groups.values()].flatMap((group) => [...group.seconds.keys()]))].sort();
  if (!kinds.length) {
    fill(root);
    return;
  }
  const whole = answer.to - answer.from;
  const share = (/** @type {number | undefined} */ seconds, /** @type {number} */ lanes) =>
    seconds ? `${((100 * seconds) / (whole * lanes)).toFixed(1)} %` : "-";
  const rows = [...groups].map(([kind, group]) => [
    `${group.lanes} × ${kind}`,
    ...kinds.map((each) => share(group.seconds.get(each), group.lanes)),
  ]);
  fill(
    root,
    table(["Share of the time in view", ...kinds.map((kind) => KIND_NAMES[kind] ?? kind)], rows, {
      numbers: kinds.map((_, place) => place + 1),
    }),
  );
}
