// @ts-check
// Two branches side by side, with their differences marked.

import { html } from "./dom.js";
import { changed, state } from "./store.js";
import { textsOf } from "./tokens.js";
import { pathTo } from "./tree.js";
import { labelOf } from "./outline.js";

/** @typedef {import("./types").Message} Message */
/** @typedef {{text: string, same: boolean}} Run */

const MAX_COMPARED = 1500; // units of each side; behind them all counts as different

/** The longest common subsequence of two lists, as runs of each side.
 * @param {string[]} left @param {string[]} right
 * @returns {[Run[], Run[]]} */
export function difference(left, right) {
  let begin = 0;
  while (begin < left.length && begin < right.length && left[begin] === right[begin]) begin += 1;
  let end = 0;
  while (end < left.length - begin && end < right.length - begin && left[left.length - 1 - end] === right[right.length - 1 - end]) end += 1;
  const a = left.slice(begin, Math.min(left.length - end, begin + MAX_COMPARED));
  const b = right.slice(begin, Math.min(right.length - end, begin + MAX_COMPARED));
  // lengths[i][j]: of the common subsequence of a[i:] and b[j:]
  const width = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      lengths[i * width + j] =
        a[i] === b[j] ? lengths[(i + 1) * width + j + 1] + 1 : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  /** @type {[Run[], Run[]]} */
  const sides = [[], []];
  const add = (/** @type {number} */ side, /** @type {string} */ text, /** @type {boolean} */ same) => {
    const last = sides[side][sides[side].length - 1];
    if (last?.same === same) last.text += text;
    else sides[side].push({ text, same });
  };
  for (const text of left.slice(0, begin)) (add(0, text, true), add(1, text, true));
  for (let i = 0, j = 0; i < a.length || j < b.length; ) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      add(0, a[i++], true);
      add(1, b[j++], true);
    } else if (j >= b.length || (i < a.length && lengths[(i + 1) * width + j] >= lengths[i * width + j + 1])) add(0, a[i++], false);
    else add(1, b[j++], false);
  }
  for (const text of left.slice(begin + a.length, left.length - end)) add(0, text, false);
  for (const text of right.slice(begin + b.length, right.length - end)) add(1, text, false);
  for (const text of left.slice(left.length - end)) (add(0, text, true), add(1, text, true));
  return sides;
}

/** What is compared: tokens where both have them, else words.
 * @param {Message} message @param {boolean} byToken */
function units(message, byToken) {
  if (byToken) {
    // A token that ends the answer is not part of its text.
    let left = message.text.length;
    const texts = textsOf(message.tokens ?? []).map((text) => text.slice(0, Math.max(0, (left -= text.length) + text.length)));
    if (texts.join("") === message.text) return texts.filter(Boolean);
  }
  return message.text.match(/\s+|\w+|[^\s\w]/gu) ?? [];
}

export function Compare() {
  const { tree } = state;
  const answers = Object.values(tree.messages).filter((message) => message.role === "assistant" && message.text);
  // Without a mark: the last answer of the branch that has other versions, and the one that it branched off.
  const read = [...pathTo(tree, tree.cursor)].reverse().filter((message) => message.role === "assistant");
  const marked = state.marked ? tree.messages[state.marked] : null;
  const versions = (/** @type {Message} */ message) => answers.filter((other) => other.parent === message.parent && other.id !== message.id);
  const here = (marked && read[0]) || read.find((message) => versions(message).length) || read[0];
  const other = marked ?? (here && (versions(here).find((message) => message.id === here.branchOf) ?? versions(here)[0])) ?? answers.find((message) => message.id !== here?.id);
  if (!here || answers.length < 2) {
    return html`<section class="compare padded" aria-label="Compare" tabindex="-1"><p class="muted">There are no two answers yet. Retry one, or branch at a token; then mark one of them.</p></section>`;
  }
  const left = other ?? here;
  const byToken = Boolean(left.tokens?.length && here.tokens?.length);
  const sides = difference(units(left, byToken), units(here, byToken));
  const share = sides[1].filter((run) => run.same).reduce((sum, run) => sum + run.text.length, 0);
  const all = Math.max(1, sides[0].reduce((sum, run) => sum + run.text.length, 0), sides[1].reduce((sum, run) => sum + run.text.length, 0));
  const choose = (/** @type {(id: string) => void} */ set) => (/** @type {any} */ event) => {
    set(event.target.value);
    changed();
  };
  const picker = (/** @type {string} */ label, /** @type {Message} */ value, /** @type {(id: string) => void} */ set) => html`<label class="picker">${label}
    <select value=${value.id} onChange=${choose(set)}>
      ${answers.map((message) => html`<option value=${message.id} selected=${message.id === value.id}>${pathTo(tree, message.id).length / 2}. ${labelOf(message).slice(0, 60)}</option>`)}
    </select></label>`;
  return html`<section class="compare" aria-label="Compare" tabindex="-1">
    <p class="summary" role="status">${Math.round((share / all) * 100)} % in common, compared by ${byToken ? "tokens" : "words"}</p>
    <div class="sides">
      ${[
        { name: "Left", message: left, runs: sides[0], mark: "del", picker: picker("Left", left, (id) => (state.marked = id)) },
        { name: "Right", message: here, runs: sides[1], mark: "ins", picker: picker("Right", here, (id) => (tree.cursor = id)) },
      ].map((side) => html`<article aria-label=${side.name}>
        ${side.picker}
        <p class="muted small">${lineage(side.message)}</p>
        <div class="verbatim">${side.runs.map((run) => (run.same ? html`<span>${run.text}</span>` : side.mark === "del" ? html`<del>${run.text}</del>` : html`<ins>${run.text}</ins>`))}</div>
      </article>`)}
    </div>
  </section>`;
}

/** Where an answer comes from. @param {Message} message */
function lineage(message) {
  const parts = [`${message.usage?.completion ?? message.tokens?.length ?? 0} tokens written`];
  if (message.continuation) parts.push(`${message.continuation.inherited} inherited, ${message.continuation.computed} computed`);
  if (message.branchOf) parts.push(`branched after ${message.branchAt} tokens`);
  return parts.join("; ");
}
