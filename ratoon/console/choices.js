// @ts-check
// Several answers of one request as the tree that they are: what they begin with in common is written once.

import { goTo } from "./answers.js";
import { classes, html } from "./dom.js";
import { focusNext } from "./focus.js";
import { state } from "./store.js";
import { heat, percent, textsOf } from "./tokens.js";

/** @typedef {import("./types").Message} Message */
/** @typedef {import("./types").Token} Token */
/** @typedef {{tokens: Token[], leaves: Message[], children: Branch[]}} Branch */

/** Answers grouped by their tokens. A branch has the tokens that all answers below it have, and at most one leaf that
 * ends with them.
 * @param {{message: Message, tokens: Token[]}[]} answers
 * @returns {Branch} */
export function sharedTree(answers) {
  let length = 0;
  const shortest = Math.min(...answers.map((item) => item.tokens.length));
  const same = (/** @type {number} */ at) => answers.every((item) => item.tokens[at].id === answers[0].tokens[at].id && item.tokens[at].id !== null);
  while (length < shortest && same(length)) length += 1;
  if (answers.length === 1) length = answers[0].tokens.length;
  const tokens = answers[0].tokens.slice(0, length);
  const rest = answers.map((item) => ({ message: item.message, tokens: item.tokens.slice(length) }));
  const leaves = rest.filter((item) => !item.tokens.length).map((item) => item.message);
  /** @type {Map<unknown, typeof rest>} */
  const groups = new Map();
  for (const item of rest.filter((other) => other.tokens.length)) {
    const first = item.tokens[0].id ?? item.message.id;
    groups.set(first, [...(groups.get(first) ?? []), item]);
  }
  return { tokens, leaves, children: [...groups.values()].map(sharedTree) };
}

/** @param {{ids: string[], here: string}} props */
export function Choices({ ids, here }) {
  const answers = ids.map((id) => state.tree.messages[id]).map((message) => ({ message, tokens: message.tokens ?? [] }));
  if (answers.some((item) => !item.tokens.length)) return null;
  const searched = answers.some((item) => Number.isFinite(item.message.score));
  return html`<section class="choices" aria-label=${`${ids.length} answers as a tree`}>
    <p class="about">${ids.length} ${searched ? "beams" : "answers"}; what they share is written once</p>
    <ul class="shared">${drawn(sharedTree(answers), here)}</ul>
  </section>`;
}

/** @param {Branch} branch @param {string} here
 * @returns {any} */
function drawn(branch, here) {
  return html`<li class=${classes(branch.leaves.length && !branch.children.length && "leaf", holds(branch, here) && "on")}>
    ${branch.tokens.length > 0 && html`<span class="run">${pieces(branch.tokens)}</span>`}
    ${branch.leaves.map((message) => html`<button type="button" class=${classes("leaf", message.id === here && "here")} aria-current=${message.id === here} onClick=${() => (focusNext(`[data-message="${CSS.escape(message.id)}"] .choices .here`), goTo(message.id))}>
      ${(message.choice ?? 0) + 1}${Number.isFinite(message.score) ? ` · score ${Number(message.score).toFixed(3)}` : ""} · ${total(message)}
    </button>`)}
    ${branch.children.length > 0 && html`<ul>${branch.children.map((child) => drawn(child, here))}</ul>`}
  </li>`;
}

/** @param {Branch} branch @param {string} id
 * @returns {boolean} */
function holds(branch, id) {
  return branch.leaves.some((message) => message.id === id) || branch.children.some((child) => holds(child, id));
}

/** @param {Token[]} tokens */
function pieces(tokens) {
  const texts = textsOf(tokens);
  return tokens.map((token, index) => html`<span class=${classes("token", state.coloured && heat(token.logprob))} title=${percent(token.logprob)}>${texts[index]}</span>`);
}

/** The log-probability of the whole answer. @param {Message} message */
function total(message) {
  const sum = message.cumulative ?? (message.tokens ?? []).reduce((all, token) => all + (token.logprob ?? 0), 0);
  return `log p ${sum.toFixed(2)}`;
}
