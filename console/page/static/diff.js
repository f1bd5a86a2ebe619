/**
 * The difference of two texts by the greedy algorithm of E. W. Myers, "An O(ND) Difference Algorithm and Its Variations"
 * (Algorithmica 1, 1986), on words or lines. Beyond MAX_EDITS edits the rest counts as replaced, so that time stays bounded.
 */

/** @typedef {{ kind: "same" | "removed" | "added", text: string }} Part */

const MAX_EDITS = 600;

/**
 * @param {string} before
 * @param {string} after
 * @returns {Part[]}
 */
export function diffWords(before, after) {
  const words = (/** @type {string} */ text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s]/gu) ?? [];
  return joined(edits(words(before), words(after)));
}

/**
 * @param {string} before
 * @param {string} after
 * @returns {Part[]}
 */
export function diffLines(before, after) {
  const lines = (/** @type {string} */ text) => text.match(/[^\n]*\n|[^\n]+$/g) ?? [];
  return joined(edits(lines(before), lines(after)));
}

/**
 * @param {string[]} a
 * @param {string[]} b
 * @returns {Part[]} one part a piece
 */
function edits(a, b) {
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const middle = shortestEdit(a.slice(start, a.length - end), b.slice(start, b.length - end));
  return [...a.slice(0, start).map(same), ...middle, ...a.slice(a.length - end).map(same)];
}

/** @param {string} text @returns {Part} */
function same(text) {
  return { kind: "same", text };
}

/**
 * @param {string[]} a
 * @param {string[]} b
 * @returns {Part[]}
 */
function shortestEdit(a, b) {
  /** Furthest place in `a` on each diagonal, by the number of edits. @type {Map<number, number>[]} */
  const trace = [];
  const furthest = new Map([[1, 0]]);
  for (let count = 0; count <= Math.min(a.length + b.length, MAX_EDITS); count += 1) {
    trace.push(new Map(furthest));
    for (let diagonal = -count; diagonal <= count; diagonal += 2) {
      let x = startOf(furthest, diagonal, count);
      while (x < a.length && x - diagonal < b.length && a[x] === b[x - diagonal]) x += 1;
      furthest.set(diagonal, x);
      if (x >= a.length && x - diagonal >= b.length) return walkBack(trace, a, b);
    }
  }
  return [
    ...a.map((text) => /** @type {Part} */ ({ kind: "removed", text })),
    ...b.map((text) => /** @type {Part} */ ({ kind: "added", text })),
  ];
}

/**
 * @param {Map<number, number>} furthest
 * @param {number} diagonal
 * @param {number} count
 */
function startOf(furthest, diagonal, count) {
  const below = furthest.get(diagonal - 1) ?? -1;
  const above = furthest.get(diagonal + 1) ?? -1;
  return diagonal === -count || (diagonal !== count && below < above) ? above : below + 1;
}

/**
 * @param {Map<number, number>[]} trace
 * @param {string[]} a
 * @param {string[]} b
 * @returns {Part[]}
 */
function walkBack(trace, a, b) {
  /** @type {Part[]} */
  const parts = [];
  let x = a.length;
  let y = b.length;
  for (let count = trace.length - 1; count >= 0; count -= 1) {
    const diagonal = x - y;
    const furthest = trace[count];
    const isAdded =
      diagonal === -count ||
      (diagonal !== count && (furthest.get(diagonal - 1) ?? -1) < (furthest.get(diagonal + 1) ?? -1));
    const from = isAdded ? diagonal + 1 : diagonal - 1;
    const fromX = count === 0 ? 0 : /** @type {number} */ (furthest.get(from));
    const fromY = count === 0 ? 0 : fromX - from;
    while (x > fromX && y > fromY && x > 0 && y > 0 && a[x - 1] === b[y - 1]) {
      parts.push(same(a[x - 1]));
      x -= 1;
      y -= 1;
    }
    if (count === 0) break;
    parts.push(isAdded ? { kind: "added", text: b[y - 1] } : { kind: "removed", text: a[x - 1] });
    x = fromX;
    y = fromY;
  }
  return parts.reverse();
}

/**
 * Neighbours of one kind as one part.
 * @param {Part[]} parts
 * @returns {Part[]}
 */
function joined(parts) {
  /** @type {Part[]} */
  const result = [];
  for (const part of parts) {
    const last = result.at(-1);
    if (last && last.kind === part.kind) last.text += part.text;
    else result.push({ ...part });
  }
  return result;
}
