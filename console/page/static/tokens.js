/** A completion token by token, coloured by what training made of each; hovering and arrow keys tell its numbers. */

import { choice, el, fill } from "./dom.js";
import { numberText, printable } from "./format.js";
import { changeRoute } from "./route.js";

/**
 * @typedef {object} Token
 * @property {string | null} text null without a tokenizer
 * @property {number} id
 * @property {number | null} logprob nats, of the engine that sampled it
 * @property {number | null} trainer_logprob
 * @property {number | null} advantage
 * @property {number | null} version
 * @property {number | null} staleness
 * @property {number | boolean | null} mask whether it is trained on
 */

const COLOURS = /** @type {[string, string][]} */ ([
  ["advantage", "advantage"],
  ["gap", "log-prob gap, trainer less engine"],
  ["logprob", "log-prob of the engine"],
  ["version", "policy version"],
  ["staleness", "staleness"],
  ["plain", "nothing"],
]);
const NO_GAPS = "log-probs of the trainer: there are none where all advantages are zero, nor where none were kept";
const FIRST_TOKENS = 6000;
const NUM_SHADES = 4;

/** What a colour is computed from. @type {Record<string, (token: Token) => number | null>} */
const VALUES = {
  advantage: (token) => token.advantage ?? null,
  gap: (token) =>
    typeof token.trainer_logprob === "number" && typeof token.logprob === "number"
      ? token.trainer_logprob - token.logprob
      : null,
  logprob: (token) => token.logprob ?? null,
  version: (token) => token.version ?? null,
  staleness: (token) => token.staleness ?? null,
  plain: () => null,
};

export class TokenText {
  constructor() {
    /** @type {Token[]} */
    this.tokens = [];
    this.at = -1;
    this.controls = el("div", { class: "controls" });
    this.text = el("div", {
      class: "tokens",
      tabindex: 0,
      role: "group",
      "aria-label": "Tokens of the completion; arrow keys read them one by one",
      onmouseover: (/** @type {any} */ event) => this.point(Number(event.target.dataset.index ?? -1)),
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.walk(event),
    });
    this.facts = el("p", { class: "facts muted", "aria-live": "polite" });
    this.element = el("div", {}, this.controls, this.text, this.facts);
  }

  /**
   * @param {Token[]} tokens
   * @param {string} colour
   */
  draw(tokens, colour) {
    if (tokens !== this.tokens) this.at = -1;
    this.tokens = tokens;
    this.element.hidden = !tokens.length;
    const shade = shades(tokens, VALUES[colour] ?? VALUES.plain, colour);
    this.shade = shade.classOf;
    const offered = COLOURS.filter(
      ([key]) => key === "plain" || key === colour || tokens.some((token) => VALUES[key](token) !== null),
    );
    fill(
      this.controls,
      choice("Coloured by", offered, colour, (value) => changeRoute({ colour: value })),
      el("span", { class: "muted hint" }, shade.meaning),
    );
    this.show(FIRST_TOKENS);
    this.point(this.at);
  }

  /**
   * Puts the first `count` tokens into the page, and a button for more.
   * @param {number} count
   */
  show(count) {
    const spans = this.tokens.slice(0, count).map((token, index) =>
      el(
        "span",
        {
          "data-index": index,
          class: [this.shade?.(token), token.mask === 0 || token.mask === false ? "given" : ""].join(" "),
        },
        tokenText(token),
      ),
    );
    const rest = this.tokens.length - count;
    const more =
      rest > 0 &&
      el(
        "button",
        { type: "button", onclick: () => this.show(this.tokens.length) },
        `Show ${rest.toLocaleString("en-US")} more tokens`,
      );
    fill(this.text, spans, more);
  }

  /** @param {number} index of a token; less than 0 for none */
  point(index) {
    this.text.querySelector(".pointed")?.classList.remove("pointed");
    this.at = index;
    const token = this.tokens[index];
    if (!token) {
      fill(
        this.facts,
        this.tokens.length
          ? `${this.tokens.length.toLocaleString("en-US")} tokens. Point at one, or use the arrow keys.`
          : "",
      );
      return;
    }
    this.text.querySelector(`[data-index="${index}"]`)?.classList.add("pointed");
    const facts = [
      `token ${index + 1}`,
      `id ${token.id}`,
      `log-prob ${numberText(token.logprob)}`,
      typeof token.trainer_logprob === "number" &&
        `trainer ${numberText(token.trainer_logprob)}, gap ${numberText(VALUES.gap(token))}`,
      typeof token.advantage === "number" && `advantage ${numberText(token.advantage)}`,
      typeof token.version === "number" && `version ${token.version}`,
      typeof token.staleness === "number" && `${token.staleness} stale`,
      (token.mask === 0 || token.mask === false) && "given, not trained on",
    ];
    fill(this.facts, el("code", {}, JSON.stringify(tokenText(token))), " ", facts.filter(Boolean).join(", "));
  }

  /** @param {KeyboardEvent} event */
  walk(event) {
    const steps = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -10,
      ArrowDown: 10,
      Home: -this.tokens.length,
      End: this.tokens.length,
    }[event.key];
    if (steps === undefined) return;
    event.preventDefault();
    const last = Math.min(this.tokens.length, this.text.childElementCount) - 1;
    this.point(Math.max(0, Math.min(last, this.at + steps)));
    this.text.querySelector(".pointed")?.scrollIntoView({ block: "nearest" });
  }
}

/** @param {Token} token @returns {string} its id where no tokenizer is at hand */
function tokenText(token) {
  return token.text === null ? `[${token.id}]` : printable(token.text);
}

/**
 * The class of each token's colour: signed values by sign and size, versions in turn.
 * @param {Token[]} tokens
 * @param {(token: Token) => number | null} valueOf
 * @param {string} colour
 */
function shades(tokens, valueOf, colour) {
  const values = /** @type {number[]} */ (
    tokens.map(valueOf).filter((value) => value !== null && Number.isFinite(value))
  );
  if (!values.length)
    return {
      classOf: () => "",
      meaning: colour === "plain" ? "" : `This sample has no ${colour === "gap" ? NO_GAPS : colour}.`,
    };
  const least = values.reduce((a, b) => Math.min(a, b));
  const most = values.reduce((a, b) => Math.max(a, b));
  const meaning = least === most ? `everywhere ${numberText(least)}` : `${numberText(least)} to ${numberText(most)}`;
  // Advantages are shown on the scale of 1, so that a weak one looks weak.
  const size = Math.max(Math.abs(least), Math.abs(most), colour === "advantage" ? 1 : 0) || 1;
  const classOf = (/** @type {Token} */ token) => {
    const value = valueOf(token);
    if (value === null || !Number.isFinite(value)) return "";
    if (colour === "version") return `turn-${(value - least) % NUM_SHADES}`;
    if (value === 0) return "";
    return `${value > 0 ? "up" : "down"}-${Math.min(NUM_SHADES, Math.ceil((Math.abs(value) / size) * NUM_SHADES))}`;
  };
  const mean = values.reduce((sum, value) => sum + Math.abs(value), 0) / values.length;
  const average = colour === "gap" ? `, mean size ${numberText(mean)}` : "";
  const scale = colour === "version" ? ", in turn" : "; above 0 blue, below orange";
  return { classOf, meaning: `${meaning}${average}${scale}` };
}
