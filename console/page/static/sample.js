/** One sample in full: prompt, turns, score, tokens, what happened to it, and how other versions answered. */

import { choice, el, fill, notice, table } from "./dom.js";
import { diffWords } from "./diff.js";
import { durationText, numberText, printable, timeText, valueText } from "./format.js";
import { load, query } from "./load.js";
import { addressOf, changeRoute, readRoute } from "./route.js";
import { chosenRun } from "./runs.js";
import { TokenText } from "./tokens.js";

/**
 * Keeps `root` showing the chosen sample.
 * @param {HTMLElement} root
 * @param {import("./runs.js").Page} page
 */
export function sampleDetail(root, page) {
  /** @type {any} */
  let drawn = null;
  let drawnFor = "";
  const tokens = new TokenText();

  /**
   * @param {string | undefined} step
   * @param {string | undefined} key
   */
  async function update(step, key) {
    if (!key) {
      fill(root, notice("Choose a sample to read it in full."));
      drawn = null;
      return;
    }
    const { parameters } = readRoute();
    const run = chosenRun(page).index;
    const sample = await load(query("/api/sample", { run, step, key, offset: parameters.token }));
    const against = parameters.against ? await otherAnswer(run, parameters.against) : null;
    step = step ?? sample.step;
    const state = JSON.stringify([parameters.against, parameters.colour, parameters.token]);
    if (sample === drawn && state === drawnFor) return;
    if (sample !== drawn) root.scrollTop = 0;
    tokens.draw(withAdvantage(sample), parameters.colour ?? "advantage");
    fill(root, ...sections(sample, { step, against, tokens, parameters, run }));
    drawn = sample;
    drawnFor = state;
  }
  return { update };
}

/**
 * The tokens; where training gave them no advantages of their own, with the one that their sample has in its group.
 * @param {any} sample
 * @returns {import("./tokens.js").Token[]}
 */
function withAdvantage(sample) {
  const tokens = sample.tokens ?? [];
  const ofGroup = sample.group_advantage;
  if (typeof ofGroup !== "number") return tokens;
  return tokens.map((/** @type {any} */ token) =>
    token.mask === 0 ? token : { ...token, advantage: token.advantage ?? ofGroup },
  );
}

/**
 * @param {number} run
 * @param {string} against "STEP:KEY"
 */
async function otherAnswer(run, against) {
  const [step, ...key] = against.split(":");
  return load(query("/api/sample", { run, step, key: key.join(":") }));
}

/**
 * @param {any} sample
 * @param {{ step: string | undefined, against: any, tokens: TokenText, parameters: Record<string, string>, run: number }} how
 */
function sections(sample, { step, against, tokens, parameters, run }) {
  const back = addressOf("samples", { ...parameters, key: null, at: null, against: null, token: null });
  return [
    el("a", { class: "back", href: back }, "‹ all samples"),
    el("h2", {}, printable(sample.key), step && el("small", {}, ` step ${step}`)),
    scoreSection(sample.score ?? {}, sample.group_advantage),
    section("Prompt", messages(sample.prompt ?? [])),
    sample.answer && section("Reference answer", el("pre", { class: "text" }, printable(sample.answer))),
    section(
      "Completion",
      tokens.element,
      moreTokens(sample, parameters),
      !sample.tokens?.length && el("pre", { class: "text" }, printable(sample.completion)),
    ),
    sample.turns?.length > 1 && section("Turns", turnList(sample.turns)),
    comparison(sample, against, parameters),
    section("Its life", life(sample, run, step)),
  ];
}

/**
 * Links to the parts of a completion that is too long for one answer.
 * @param {any} sample
 * @param {Record<string, string>} parameters
 */
function moreTokens(sample, parameters) {
  const [begin, count] = [sample.token_offset ?? 0, sample.tokens?.length ?? 0];
  const total = sample.num_tokens ?? count;
  if (count >= total) return null;
  const link = (/** @type {string} */ text, /** @type {number} */ from) =>
    el("a", { href: addressOf("samples", { ...parameters, token: from || null }) }, text);
  return el(
    "p",
    { class: "muted" },
    `Tokens ${begin + 1} to ${begin + count} of ${numberText(total)}. `,
    begin > 0 && link("from the first", 0),
    " ",
    begin + count < total && link("the next ones", begin + count),
  );
}

/**
 * @param {string} title
 * @param {...any} content
 */
function section(title, ...content) {
  return el("section", {}, el("h3", {}, title), ...content);
}

/**
 * @param {any} score
 * @param {number | null | undefined} ofGroup the score less the mean of the sample's group
 */
function scoreSection(score, ofGroup) {
  const components = Object.entries(score.components ?? {});
  const details = Object.entries(score.details ?? {});
  const rows = [...components, ...details].map(([name, value]) => [printable(name), valueText(value)]);
  const isOk = score.status === "ok";
  return el(
    "div",
    { class: "verdict" },
    el("span", { class: `score ${isOk ? "" : "bad"}` }, isOk ? numberText(score.value) : valueText(score.status)),
    el(
      "span",
      { class: "muted" },
      [
        score.model && `by ${printable(score.model)}`,
        typeof ofGroup === "number" && `${ofGroup < 0 ? "" : "+"}${numberText(ofGroup)} in its group`,
        score.message && printable(score.message),
      ]
        .filter(Boolean)
        .join(", "),
    ),
    rows.length > 0 && table(["Part of the score", "Value"], rows, { numbers: details.length ? [] : [1] }),
  );
}

/** @param {any[]} prompt */
function messages(prompt) {
  return prompt.map((message) =>
    el(
      "div",
      { class: "message" },
      el("span", { class: "role" }, printable(message.role)),
      el("pre", { class: "text" }, printable(message.content)),
    ),
  );
}

/** @param {any[]} turns */
function turnList(turns) {
  const turn = (/** @type {any} */ each, /** @type {number} */ index) =>
    el(
      "li",
      { class: "message" },
      el(
        "span",
        { class: "role" },
        `${index + 1}. ${printable(each.role)}`,
        typeof each.reward === "number" && el("span", { class: "score small" }, numberText(each.reward)),
      ),
      el("pre", { class: "text" }, printable(each.text)),
    );
  return el("ol", { class: "turns" }, turns.map(turn));
}

/**
 * How another version answered the same prompt: a choice, and the difference.
 * @param {any} sample
 * @param {any} against
 * @param {Record<string, string>} parameters
 */
function comparison(sample, against, parameters) {
  const others = sample.same_prompt ?? [];
  if (!others.length) return null;
  const options = /** @type {[string, string][]} */ ([
    ["", "choose ..."],
    ...others.map((/** @type {any} */ other) => [
      `${other.step}:${other.key}`,
      `version ${other.version}, step ${other.step}, ${printable(other.key)}`,
    ]),
  ]);
  const select = choice("Compare with", options, parameters.against ?? "", (value) =>
    changeRoute({ against: value || null }),
  );
  const part = (/** @type {{ kind: string, text: string }} */ each) =>
    each.kind === "same" ? printable(each.text) : el(each.kind === "removed" ? "del" : "ins", {}, printable(each.text));
  const scores =
    against &&
    `Score ${scoreText(against)} there, ${scoreText(sample)} here. Struck through: only there. Underlined: only here.`;
  const content =
    against &&
    el("pre", { class: "text diff" }, diffWords(against.completion ?? "", sample.completion ?? "").map(part));
  return section("The same prompt at other versions", select, scores && el("p", { class: "muted" }, scores), content);
}

/** @param {any} sample */
function scoreText(sample) {
  return sample.score?.status === "ok" ? numberText(sample.score.value) : valueText(sample.score?.status);
}

const STAGES = /** @type {[string, string, string][]} */ ([
  ["submit_s", "lease_s", "waited for a generator"],
  ["lease_s", "finish_s", "was generated"],
  ["finish_s", "score_s", "was scored"],
  ["score_s", "trained_s", "waited for training"],
]);

/**
 * @param {any} sample
 * @param {number} run
 * @param {string | undefined} step
 */
function life(sample, run, step) {
  const times = sample.times ?? {};
  const known = Object.values(times).filter((value) => typeof value === "number");
  const rows = STAGES.filter(([from, to]) => times[from] && times[to]).map(([from, to, what]) => [
    what,
    durationText(times[to] - times[from]),
    timeText(times[from]),
  ]);
  const place = [
    sample.generator_id && `generated by ${printable(sample.generator_id)}`,
    sample.num_leases > 1 && `in ${sample.num_leases} leases`,
  ]
    .filter(Boolean)
    .join(", ");
  const span = known.length > 1 ? Math.max(...known) - Math.min(...known) : 0;
  const link = addressOf("time", {
    run,
    sample: sample.key,
    at: step,
    from: Math.min(...known) - span * 0.1,
    to: Math.max(...known) + span * 0.1,
  });
  return [
    rows.length > 0 && table(["It", "for", "since"], rows, { numbers: [1] }),
    el("p", { class: "muted" }, place),
    span > 0 && el("a", { href: link }, "Show it among the lanes"),
  ];
}
