/** Names and colours of what processes do. */

/** @type {Record<string, string>} */
export const KIND_NAMES = {
  decoding: "decoding",
  leased: "sample leased to a generator",
  updating: "loading weights",
  waiting: "waiting",
  queued: "queued",
  computing: "computing",
  publishing: "publishing weights",
  scoring: "scoring",
  environment: "environment's step",
  step: "step",
};

/** Variables of page.css. @type {Record<string, string>} */
const COLOUR_NAMES = {
  decoding: "--line-1",
  leased: "--line-7",
  updating: "--line-5",
  waiting: "--idle",
  queued: "--idle",
  computing: "--line-3",
  publishing: "--line-2",
  scoring: "--line-6",
  environment: "--line-4",
  step: "--line-7",
};

/**
 * @param {string} kind
 * @returns {string} a colour
 */
export function kindColour(kind) {
  return getComputedStyle(document.documentElement)
    .getPropertyValue(COLOUR_NAMES[kind] ?? "--line-8")
    .trim();
}
