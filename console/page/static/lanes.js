/** Lanes on a canvas: one row a process, spans over time; moved and zoomed by mouse, touch and keys. */

import { themeColours } from "./charts.js";
import { el } from "./dom.js";
import { durationText, timeText } from "./format.js";
import { AXIS_PX, ROW_PX, THIN_FROM_PX, hasSamplesBeside, paintAxis, paintLane } from "./lane_paint.js";

/**
 * @typedef {{ name: string, kind: string, spans: any[][] }} Lane spans: [start_s, end_s, kind, label, sample key or null]
 * @typedef {{ from: number, to: number, begin: number, end: number, sample: string | null }} Range Unix seconds; the part shown, and the whole run
 * @typedef {{ lane: string, span: any[], row: number, place: number }} Pointed
 */

const MIN_RANGE_S = 1e-4;
const FONT = "11px system-ui, sans-serif";

export class LaneCanvas {
  /**
   * @param {{ onRange: (from: number, to: number) => void, onPoint: (pointed: Pointed | null) => void }} events
   */
  constructor(events) {
    this.events = events;
    /** @type {Lane[]} */
    this.lanes = [];
    /** @type {Range} */
    this.range = { from: 0, to: 1, begin: 0, end: 1, sample: null };
    /** @type {Pointed | null} */
    this.pointed = null;
    this.canvas = el("canvas", {
      class: "lanes",
      tabindex: 0,
      role: "img",
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.onKey(event),
      onwheel: (/** @type {WheelEvent} */ event) => this.onWheel(event),
    });
    this.element = el("div", { class: "lane-box" }, this.canvas);
    this.resize = new ResizeObserver(() => this.paint());
    this.resize.observe(this.element);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.repaint = () => this.paint();
    this.scheme.addEventListener("change", this.repaint);
    this.listenForDrag();
  }

  /**
   * @param {Lane[]} lanes
   * @param {Range} range
   */
  draw(lanes, range) {
    this.lanes = lanes;
    this.range = range;
    this.pointed = this.pointed && found(lanes, this.pointed);
    this.events.onPoint(this.pointed);
    this.paint();
  }

  close() {
    this.resize.disconnect();
    this.scheme.removeEventListener("change", this.repaint);
  }

  /** @param {number} share of what is shown; less than 0 is earlier */
  pan(share) {
    const { from, to } = this.range;
    this.move(from + (to - from) * share, to + (to - from) * share);
  }

  /**
   * @param {number} factor of the time shown; less than 1 shows less
   * @param {number} [around] Unix seconds that stay in place; the middle unless given
   */
  zoom(factor, around = (this.range.from + this.range.to) / 2) {
    const { from, to } = this.range;
    this.move(around - (around - from) * factor, around + (to - around) * factor);
  }

  /**
   * Shows another part, never beyond the run nor below a tenth of a millisecond.
   * @param {number} from
   * @param {number} to
   */
  move(from, to) {
    const { begin, end } = this.range;
    const length = Math.min(Math.max(to - from, MIN_RANGE_S), Math.max(end - begin, MIN_RANGE_S));
    const start = Math.min(Math.max(from, begin), end - length);
    this.range = { ...this.range, from: start, to: start + length };
    this.paint();
    this.events.onRange(start, start + length);
  }

  get gutter() {
    return Math.min(150, this.element.clientWidth * 0.3);
  }

  /** @param {number} seconds @returns {number} pixels from the left */
  place(seconds) {
    const { from, to } = this.range;
    return this.gutter + ((seconds - from) / (to - from)) * (this.element.clientWidth - this.gutter);
  }

  /** @param {number} x pixels from the left @returns {number} Unix seconds */
  time(x) {
    const { from, to } = this.range;
    return from + ((x - this.gutter) / (this.element.clientWidth - this.gutter)) * (to - from);
  }

  paint() {
    const width = this.element.clientWidth;
    const height = AXIS_PX + this.lanes.length * ROW_PX;
    if (!width) return;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    const pen = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"));
    pen.scale(scale, scale);
    pen.font = FONT;
    pen.textBaseline = "middle";
    const colours = themeColours();
    paintAxis(pen, this, width, height, colours);
    this.lanes.forEach((lane, row) => paintLane(pen, this, lane, row, width, colours));
    const { from, to } = this.range;
    this.canvas.setAttribute(
      "aria-label",
      `${this.lanes.length} lanes, ${durationText(to - from)} from ${timeText(from)}. Arrow keys move, plus and minus zoom, brackets go from span to span.`,
    );
  }

  /** @param {Pointed | null} pointed */
  point(pointed) {
    if (pointed?.span === this.pointed?.span) return;
    this.pointed = pointed;
    this.paint();
    this.events.onPoint(pointed);
  }

  /**
   * The span below a place of the canvas.
   * @param {number} x
   * @param {number} y
   * @returns {Pointed | null}
   */
  spanAt(x, y) {
    const row = Math.floor((y - AXIS_PX) / ROW_PX);
    const lane = this.lanes[row];
    if (!lane || x < this.gutter) return null;
    const isLow = (y - AXIS_PX) % ROW_PX >= THIN_FROM_PX;
    const isMixed = hasSamplesBeside(lane);
    // Last drawn is on top; a pixel to each side, since short spans are drawn as wide as that.
    const isHit = (/** @type {any[]} */ span) => this.place(span[0]) - 1 <= x && x <= this.place(span[1]) + 1;
    const thin = isMixed && isLow ? lane.spans.findLastIndex((span) => span[4] && isHit(span)) : -1;
    const place = thin < 0 ? lane.spans.findLastIndex((span) => !(isMixed && span[4]) && isHit(span)) : thin;
    return place < 0 ? null : { lane: lane.name, span: lane.spans[place], row, place };
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    const work = {
      ArrowLeft: () => this.pan(-0.2),
      ArrowRight: () => this.pan(0.2),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.move(this.range.begin, this.range.end),
      "[": () => this.step(-1, 0),
      "]": () => this.step(1, 0),
      ArrowUp: () => this.step(0, -1),
      ArrowDown: () => this.step(0, 1),
    }[event.key];
    if (!work || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    work();
  }

  /**
   * Points at the next span of the lane, or at the nearest in time of another lane.
   * @param {number} spans
   * @param {number} rows
   */
  step(spans, rows) {
    const row = Math.max(
      0,
      Math.min(this.lanes.length - 1, (this.pointed?.row ?? (rows < 0 ? this.lanes.length : -rows)) + rows),
    );
    const lane = this.lanes[row];
    if (!lane?.spans.length) return;
    const time = this.pointed ? this.pointed.span[0] : this.range.from;
    const near = lane.spans.findIndex((span) => span[1] >= time);
    const place = rows
      ? near < 0
        ? lane.spans.length - 1
        : near
      : Math.max(0, Math.min(lane.spans.length - 1, (this.pointed?.place ?? -spans) + spans));
    const span = lane.spans[place];
    if (span[1] < this.range.from || span[0] > this.range.to)
      this.pan((span[0] - (this.range.from + this.range.to) / 2) / (this.range.to - this.range.from));
    this.point({ lane: lane.name, span, row, place });
  }

  /** @param {WheelEvent} event */
  onWheel(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY / 300), this.time(event.offsetX));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan((event.deltaX || event.deltaY) / 800);
    }
  }

  listenForDrag() {
    /** @type {{ x: number, from: number, to: number } | null} */
    let drag = null;
    this.canvas.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => {
      drag = { x: event.offsetX, from: this.range.from, to: this.range.to };
      this.canvas.setPointerCapture(event.pointerId);
      this.point(this.spanAt(event.offsetX, event.offsetY));
    });
    this.canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
      if (!drag) {
        this.point(this.spanAt(event.offsetX, event.offsetY) ?? this.pointed);
        return;
      }
      if (Math.abs(event.offsetX - drag.x) < 3) return;
      const seconds = ((event.offsetX - drag.x) / (this.element.clientWidth - this.gutter)) * (drag.to - drag.from);
      this.move(drag.from - seconds, drag.to - seconds);
    });
    for (const name of ["pointerup", "pointercancel"]) this.canvas.addEventListener(name, () => (drag = null));
  }
}

/**
 * The same span among newer answers.
 * @param {Lane[]} lanes
 * @param {Pointed} pointed
 * @returns {Pointed | null}
 */
function found(lanes, pointed) {
  const row = lanes.findIndex((lane) => lane.name === pointed.lane);
  const isSame = (/** @type {any[]} */ span) => span[0] === pointed.span[0] && span[2] === pointed.span[2];
  const place = row < 0 ? -1 : lanes[row].spans.findIndex(isSame);
  return place < 0 ? null : { lane: pointed.lane, span: lanes[row].spans[place], row, place };
}
