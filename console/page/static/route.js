/** What is shown stands in the address, behind `#`, so that every view can be bookmarked, shared and left by "back". */

/**
 * @typedef {{ view: string, parameters: Record<string, string> }} Route
 */

const FIRST_VIEW = "learning";

/** @returns {Route} */
export function readRoute() {
  const [view, text = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: view || FIRST_VIEW, parameters: Object.fromEntries(new URLSearchParams(text)) };
}

/**
 * The address of a view, for a link.
 * @param {string} view
 * @param {Record<string, any>} [parameters] empty ones are left out
 */
export function addressOf(view, parameters = {}) {
  const kept = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

/**
 * Changes parameters of the shown view; views hear of it as of a click on a link.
 * @param {Record<string, any>} changes
 */
export function changeRoute(changes) {
  const route = readRoute();
  location.hash = addressOf(route.view, { ...route.parameters, ...changes });
}

/**
 * Notes parameters in the address without telling anybody, for what changes many times a second.
 * @param {Record<string, any>} changes
 */
export function noteInRoute(changes) {
  const route = readRoute();
  history.replaceState(null, "", addressOf(route.view, { ...route.parameters, ...changes }));
}
