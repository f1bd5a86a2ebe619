/** Where are the weights? Which machine holds which version, what went over which link, and the digests. */

import { el, fill, notice, table } from "./dom.js";
import { bytesText, durationText, numberText, printable, timeText } from "./format.js";
import { load, query } from "./load.js";
import { chosenRun, runChoice } from "./runs.js";

const MAX_VERSIONS = 200;

/** @type {import("./runs.js").View} */
export const weightsView = { id: "weights", question: "Where are the weights?", show: showWeights };

/**
 * @param {HTMLElement} root
 * @param {import("./runs.js").Page} page
 */
function showWeights(root, page) {
  /** @type {any} */
  let drawn = null;

  async function update() {
    const answer = await load(query("/api/weights", { run: chosenRun(page).index }));
    if (answer === drawn) return;
    drawn = answer;
    const versions = [...answer.versions].sort((a, b) => b.version - a.version);
    fill(
      root,
      el("div", { class: "controls" }, runChoice(page)),
      machineTable(answer.machines, versions[0]),
      linkTable(answer.links),
      versionTable(versions),
    );
  }

  return { update, close: () => {} };
}

/**
 * @param {any[]} machines
 * @param {any} newest
 */
function machineTable(machines, newest) {
  if (!machines.length) return notice("No machine has reported which weights it holds.");
  const behind = (/** @type {any} */ machine) => {
    const count = newest ? newest.version - machine.version : 0;
    return count > 0
      ? el("span", { class: "badge bad" }, `${numberText(count)} behind`)
      : el("span", { class: "badge good" }, "newest");
  };
  const rows = machines.map((machine) => [
    printable(machine.name),
    numberText(machine.version),
    behind(machine),
    timeText(machine.since_s),
  ]);
  return el(
    "section",
    {},
    el("h2", {}, "Version by machine"),
    table(["Machine", "Version", "", "Since"], rows, { numbers: [1] }),
  );
}

/** @param {any[]} links */
function linkTable(links) {
  if (!links.length) return null;
  const rows = links.map((link) => [printable(link.from), printable(link.to), bytesText(link.bytes)]);
  return el("section", {}, el("h2", {}, "Sent over links"), table(["From", "To", "Bytes"], rows, { numbers: [2] }));
}

/** @param {any[]} versions newest first */
function versionTable(versions) {
  if (!versions.length) return null;
  const before = (/** @type {number} */ place) => {
    const [now, last] = [versions[place].published_s, versions[place + 1]?.published_s];
    return now && last ? durationText(now - last) : "-";
  };
  const rows = versions
    .slice(0, MAX_VERSIONS)
    .map((version, place) => [
      numberText(version.version),
      timeText(version.published_s),
      before(place),
      bytesText(version.bytes),
      el("code", { class: "digest", title: version.digest ?? "" }, printable(version.digest ?? "-")),
    ]);
  const rest = versions.length - rows.length;
  return el(
    "section",
    {},
    el("h2", {}, "Published versions"),
    table(["Version", "Published", "After", "Bytes", "Digest"], rows, { numbers: [0, 2, 3] }),
    rest > 0 && el("p", { class: "muted" }, `and ${numberText(rest)} earlier ones`),
  );
}
