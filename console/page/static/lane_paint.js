/** Paints lanes and their axis; `lanes.js` says where. */

import { durationText, printable } from "./format.js";
import { kindColour } from "./lane_kinds.js";

/** @typedef {ReturnType<typeof import("./charts.js").themeColours>} Colours */

export const ROW_PX = 20;
export const AXIS_PX = 22;
export const THIN_FROM_PX = 13;

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {import("./lanes.js").LaneCanvas} owner
 * @param {number} width
 * @param {number} height
 * @param {Colours} colours
 */
export function paintAxis(pen, owner, width, height, colours) {
  const { from, to, begin } = owner.range;
  const tick = roundTick((to - from) / Math.max(2, (width - owner.gutter) / 110));
  pen.fillStyle = colours.muted;
  pen.strokeStyle = colours.grid;
  pen.textAlign = "left";
  const first = Math.ceil((from - begin) / tick) * tick;
  for (let at = first; at <= to - begin; at += tick) {
    const x = Math.round(owner.place(begin + at)) + 0.5;
    pen.beginPath();
    pen.moveTo(x, AXIS_PX - 4);
    pen.lineTo(x, height);
    pen.stroke();
    if (x + 40 < width) pen.fillText(durationText(at), x + 3, AXIS_PX / 2);
  }
  pen.fillText("since the start", 2, AXIS_PX / 2);
}

/**
 * The next round number of seconds: 1, 2 or 5 times a power of ten, or parts of an hour.
 * @param {number} seconds
 */
function roundTick(seconds) {
  const long = [60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400, 604800];
  if (seconds > 30) return long.find((each) => each >= seconds) ?? Math.ceil(seconds / 604800) * 604800;
  const power = 10 ** Math.floor(Math.log10(seconds));
  const round = [1, 2, 5, 10].find((each) => each * power >= seconds) ?? 10;
  return round * power;
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {import("./lanes.js").LaneCanvas} owner
 * @param {import("./lanes.js").Lane} lane
 * @param {number} row
 * @param {number} width
 * @param {Colours} colours
 */
export function paintLane(pen, owner, lane, row, width, colours) {
  const top = AXIS_PX + row * ROW_PX;
  const { sample } = owner.range;
  pen.save();
  pen.beginPath();
  pen.rect(owner.gutter, top, width - owner.gutter, ROW_PX);
  pen.clip();
  const isMixed = hasSamplesBeside(lane);
  for (const span of lane.spans) {
    const left = owner.place(span[0]);
    const right = owner.place(span[1]);
    if (right < owner.gutter || left > width) continue;
    const isLit = span === owner.pointed?.span || (sample !== null && span[4] === sample);
    pen.globalAlpha = sample !== null && !isLit ? 0.35 : 1;
    const isThin = isMixed && Boolean(span[4]);
    const [y, height] = isThin ? [top + THIN_FROM_PX, ROW_PX - 2 - THIN_FROM_PX] : [top + 2, ROW_PX - 4];
    pen.fillStyle = isThin ? colours.text : kindColours(span[2]);
    if (isThin && !isLit) pen.globalAlpha *= 0.45;
    // A gap before the next one, where there is room, keeps neighbours apart.
    pen.fillRect(left, y, Math.max(1, right - left > 3 ? right - left - 1 : right - left), height);
    if (isLit) {
      pen.strokeStyle = colours.text;
      pen.strokeRect(left + 0.5, y + 0.5, Math.max(1, right - left - 1), height - 1);
    }
  }
  pen.restore();
  pen.fillStyle = colours.text;
  pen.textAlign = "left";
  pen.fillText(fitted(pen, printable(lane.name), owner.gutter - 8), 2, top + ROW_PX / 2);
}

/**
 * Whether single samples are drawn as thin bars, since the lane also holds what its process did as a whole.
 * @param {import("./lanes.js").Lane} lane
 */
export function hasSamplesBeside(lane) {
  return lane.spans.some((span) => span[4]) && lane.spans.some((span) => !span[4]);
}

/** Colours of one painting, since asking the style for each of 4,000 spans is slow. @type {Map<string, string>} */
const colourOfKind = new Map();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => colourOfKind.clear());

/** @param {string} kind */
function kindColours(kind) {
  const known = colourOfKind.get(kind);
  if (known) return known;
  const colour = kindColour(kind);
  colourOfKind.set(kind, colour);
  return colour;
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {string} text
 * @param {number} width pixels
 */
function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let short = text;
  while (short.length > 1 && pen.measureText(`${short}…`).width > width) short = short.slice(0, -1);
  return `${short}…`;
}
