/** How numbers, times and foreign text are written. */

/**
 * About four significant digits; "-" where there is none.
 * @param {number | null | undefined} value
 */
export function numberText(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e15)) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return value.toLocaleString("en-US", { maximumSignificantDigits: size >= 1000 ? 6 : 4 });
}

/**
 * A duration in at most two units.
 * @param {number | null | undefined} seconds
 */
export function durationText(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "-";
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${numberText(seconds * 1e6)} µs`;
  if (size < 1) return `${numberText(seconds * 1e3)} ms`;
  if (size < 60) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds);
  if (size < 3600) return twoUnits(whole, 60, "min", "s");
  const minutes = Math.round(seconds / 60);
  if (size < 86400) return twoUnits(minutes, 60, "h", "min");
  const hours = Math.round(seconds / 3600);
  return twoUnits(hours, 24, "d", "h");
}

/**
 * @param {number} small
 * @param {number} each how many of the small unit the large one has
 * @param {string} largeName
 * @param {string} smallName
 */
function twoUnits(small, each, largeName, smallName) {
  const rest = Math.abs(small % each);
  return `${Math.trunc(small / each)} ${largeName}${rest ? ` ${rest} ${smallName}` : ""}`;
}

/**
 * The viewer's local date and time.
 * @param {number | null | undefined} seconds Unix time
 */
export function timeText(seconds) {
  if (!seconds || !Number.isFinite(seconds)) return "-";
  const at = new Date(seconds * 1000);
  const two = (/** @type {number} */ part) => String(part).padStart(2, "0");
  const date = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${date} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/**
 * @param {number | null | undefined} bytes
 */
export function bytesText(bytes) {
  if (bytes === null || bytes === undefined || !Number.isFinite(bytes)) return "-";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let size = bytes;
  let unit = 0;
  for (; Math.abs(size) >= 1000 && unit < units.length - 1; unit += 1) size /= 1000;
  return `${Number(size.toPrecision(3))} ${units[unit]}`;
}

/**
 * @param {number | null | undefined} dollars
 */
export function dollarsText(dollars) {
  if (dollars === null || dollars === undefined || !Number.isFinite(dollars)) return "-";
  return `$${dollars.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: Math.abs(dollars) < 1 ? 4 : 2 })}`;
}

/**
 * Any value of JSON in one line.
 * @param {any} value
 * @returns {string}
 */
export function valueText(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value === "number") return numberText(value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "string") return printable(value);
  if (Array.isArray(value)) return value.map(valueText).join(", ");
  return Object.entries(value)
    .map(([key, part]) => `${printable(key)} ${valueText(part)}`)
    .join(", ");
}

// Control characters except tab and line feed, and those that change the direction or the visibility of what follows.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

/**
 * Foreign text as it is, except that characters which cannot be seen, or which reorder the page, are shown by their code.
 * @param {string | null | undefined} text
 */
export function printable(text) {
  const code = (/** @type {string} */ character) => character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
  return (text ?? "").replace(UNSEEN, (character) => `[U+${code(character)}]`);
}
