/** The only place that asks for data: from the page's own origin, or from inside report.html. */

import { embeddedAnswer, isEmbedded } from "./embedded.js";

const MAX_KEPT_CHARACTERS = 4_000_000;

/** Newest answers by path, so that an answer that did not change keeps its identity. @type {Map<string, {text: string, value: any}>} */
const kept = new Map();

/**
 * The answer to `path`; the same object as last time if nothing changed. Throws an Error with a sentence for the reader.
 * @param {string} path for example "/api/series?run=0"
 * @returns {Promise<any>}
 */
export async function load(path) {
  if (isEmbedded()) return embeddedAnswer(path);
  const response = await fetch(path, { headers: { Accept: "application/json" } }).catch(() => {
    throw new Error("The server of this page does not answer. Has `penstock view`, or the run, ended?");
  });
  const text = await response.text();
  if (!response.ok) throw new Error(refusal(response.status, text));
  const before = kept.get(path);
  kept.delete(path);
  const entry = before && before.text === text ? before : { text, value: JSON.parse(text) };
  kept.set(path, entry);
  forgetOldest(path);
  return entry.value;
}

/**
 * Drops answers, the oldest first, until what is kept is small; never the one of `newest`.
 * @param {string} newest
 */
function forgetOldest(newest) {
  let size = 0;
  for (const { text } of kept.values()) size += text.length;
  for (const [path, { text }] of kept) {
    if (size <= MAX_KEPT_CHARACTERS || path === newest) return;
    kept.delete(path);
    size -= text.length;
  }
}

/**
 * A path with its parameters, in their order; null and undefined are left out.
 * @param {string} path
 * @param {Record<string, any>} parameters
 */
export function query(path, parameters) {
  const parts = Object.entries(parameters)
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => `${name}=${encodeURIComponent(String(value))}`);
  return parts.length ? `${path}?${parts.join("&")}` : path;
}

/**
 * @param {number} status
 * @param {string} text
 */
function refusal(status, text) {
  if (status === 401)
    return "This page's link is no longer valid. Open the link that `penstock view` or `penstock run` printed.";
  try {
    const error = JSON.parse(text).error;
    if (typeof error === "string" && error) return error;
  } catch {
    // Not JSON: the status says what there is to say.
  }
  return `The server answered with status ${status}.`;
}
