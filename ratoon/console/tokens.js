// @ts-check
// The text of an answer in which every token can be touched: coloured by its probability, with its alternatives in a
// card beside it, from which the answer branches.

import { branch, bytesOf, goTo } from "./answers.js";
import { Component, classes, html, useEffect, useLayoutEffect, useRef } from "./dom.js";
import { focusNext } from "./focus.js";
import { renderMarkdown } from "./markdown.js";
import { announce, changed, state } from "./store.js";
import { siblingsOf } from "./tree.js";

/** @typedef {import("./types").Message} Message */
/** @typedef {import("./types").Token} Token */

/** Where each token's text ends in the text that all of them make, counted in characters of JavaScript.
 * @param {Token[]} tokens */
export function ends(tokens) {
  const decoder = new TextDecoder();
  let text = "";
  const places = tokens.map((token) => (text += decoder.decode(bytesOf(token), { stream: true })).length);
  return { places, text };
}

/** The text of each token. A character of several tokens is the last one's. @param {Token[]} tokens */
export function textsOf(tokens) {
  const { places, text } = ends(tokens);
  return places.map((end, index) => text.slice(index ? places[index - 1] : 0, end));
}

/** Ten steps from unlikely to certain; the colours are in the style sheet.
 * @param {number | null} logprob */
export function heat(logprob) {
  return logprob === null ? "" : `p${Math.min(9, Math.floor(Math.exp(logprob) * 10))}`;
}

/** @param {number | null} logprob */
export function percent(logprob) {
  if (logprob === null) return "–";
  const share = Math.exp(logprob) * 100;
  return share >= 99.95 ? "100 %" : share >= 10 ? `${share.toFixed(1)} %` : share >= 0.01 ? `${share.toFixed(2)} %` : "< 0.01 %";
}

/** A token's text with what can't be seen made visible. @param {string} text */
export function visible(text) {
  return text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍") || "∅";
}

/** A token's text for a screen reader, which says nothing for a space that stands alone. @param {string} text */
export function spoken(text) {
  const names = /** @type {Record<string, string>} */ ({ "\n": "line break", "\t": "tab", " ": "space" });
  return text.trim() || [...text].map((sign) => names[sign] ?? sign).join(" ") || "nothing";
}

/** Copies text, and says so. @param {string} text */
export function copyText(text) {
  navigator.clipboard.writeText(text).then(
    () => announce("Copied", true),
    () => announce("The browser did not allow copying", true),
  );
}

/** Reasoning that a completion has as plain text: the chat endpoint takes it out itself.
 * @param {string} text */
export function splitReasoning(text) {
  const match = /^\s*<think>([\s\S]*?)(<\/think>\s*|$)/.exec(text);
  return match ? { from: text.indexOf("<think>") + 7, to: text.indexOf("<think>") + 7 + match[1].length, rest: match[0].length } : null;
}

/** @extends {Component} */
export class AnswerText extends /** @type {any} */ (Component) {
  /** Drawing a long answer is the page's largest work: it is done only where something in it changed. */
  shouldComponentUpdate(/** @type {any} */ next) {
    const old = /** @type {any} */ (this).props;
    return ["message", "version", "coloured", "rendered", "touched", "forks"].some((name) => old[name] !== next[name]);
  }

  render() {
    const { message, coloured, rendered, touched, forks } = /** @type {any} */ (this).props;
    /** @type {Token[]} */
    const tokens = message.tokens ?? [];
    const { places, text: raw } = ends(tokens);
    const forked = new Set(String(forks).split(",").filter(Boolean).map(Number));
    /** The text that is shown may be a part of what the tokens make: reasoning and calls are taken out of it. */
    const leafAt = (/** @type {string} */ shown) => {
      const shift = tokens.length ? raw.indexOf(shown) : -1;
      return (/** @type {number} */ start, /** @type {number} */ end) => {
        if (shift < 0) return shown.slice(start, end);
        const spans = [];
        let index = firstAfter(places, start + shift);
        for (let at = start; at < end && index < tokens.length; index += 1) {
          const stop = Math.min(end, places[index] - shift);
          if (stop <= at) continue;
          const token = tokens[index];
          spans.push(
            html`<span
              class=${classes("token", coloured && heat(token.logprob), token.forced && "forced", forked.has(index) && "fork", touched === index && "touched")}
              data-token=${index}
              >${shown.slice(at, stop)}</span
            >`,
          );
          at = stop;
        }
        return spans;
      };
    };
    const split = message.reasoning ? null : splitReasoning(message.text);
    const reasoning = message.reasoning || (split && message.text.slice(split.from, split.to));
    const shown = split ? message.text.slice(split.rest) : message.text;
    const body = (/** @type {string} */ text) =>
      rendered ? renderMarkdown(text, leafAt(text), copyText) : html`<div class="verbatim">${leafAt(text)(0, text.length)}</div>`;
    return html`<div
      class=${classes("answer-text", coloured && "coloured")}
      tabindex="0"
      role="group"
      aria-label="Answer"
      aria-describedby="token-keys"
      onMouseOver=${(/** @type {MouseEvent} */ event) => hover(message, event)}
      onMouseOut=${() => leave()}
      onClick=${(/** @type {MouseEvent} */ event) => pin(message, event)}
      onKeyDown=${(/** @type {KeyboardEvent} */ event) => walkTokens(message, event)}
    >
      ${reasoning && html`<details class="reasoning"><summary>Reasoning</summary>${body(reasoning)}</details>`}
      ${body(shown)}
      ${message.status === "running" && message.preview && html`<p class="preview">${message.preview}</p>`}
    </div>`;
  }
}

/** The first token that ends behind this place. @param {number[]} places @param {number} place */
function firstAfter(places, place) {
  let low = 0;
  let high = places.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle] > place) high = middle;
    else low = middle + 1;
  }
  return low;
}

let waiting = 0;

/** @param {Message} message @param {MouseEvent} event */
function hover(message, event) {
  const index = tokenAt(event);
  if (index === null || state.touched?.pinned) return;
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    state.touched = { id: message.id, index, pinned: false };
    changed();
  }, 120);
}

export function leave() {
  clearTimeout(waiting);
  if (!state.touched || state.touched.pinned) return;
  waiting = setTimeout(() => {
    state.touched = null;
    changed();
  }, 250);
}

/** @param {Message} message @param {MouseEvent} event */
function pin(message, event) {
  const index = tokenAt(event);
  if (index === null || String(getSelection())) return;
  clearTimeout(waiting);
  state.touched = { id: message.id, index, pinned: true };
  changed();
}

/** @param {Event} event */
function tokenAt(event) {
  const span = /** @type {HTMLElement} */ (event.target).closest?.("[data-token]");
  return span ? Number(/** @type {HTMLElement} */ (span).dataset.token) : null;
}

/** @param {Message} message @param {KeyboardEvent} event */
function walkTokens(message, event) {
  if (event.altKey || event.ctrlKey || event.metaKey || !message.tokens?.length) return;
  const here = state.touched?.id === message.id ? state.touched.index : -1;
  const last = message.tokens.length - 1;
  /** @type {Record<string, number>} */
  const moves = { ArrowLeft: Math.max(0, here - 1), ArrowRight: Math.min(last, here + 1), Home: 0, End: last };
  if (event.key in moves) {
    const index = moves[event.key];
    state.touched = { id: message.id, index, pinned: true };
    const token = message.tokens[index];
    announce(`${spoken(token.text)}, ${percent(token.logprob)}`);
  } else if (event.key === "Enter" && here >= 0) {
    /** @type {HTMLElement | null} */ (document.querySelector(".card button.alternative:not([disabled])"))?.focus();
  } else if (event.key === "i" && here >= 0) {
    inspect(message.id, here);
  } else return;
  event.preventDefault();
  event.stopPropagation();
}

/** Opens the view of a token's hidden states. @param {string} id @param {number} index */
export function inspect(id, index) {
  state.inspected = { id, index };
  state.panel = "lens";
  focusNext("aside .lens");
  state.touched = null;
  changed();
}

/** Places at which other answers branch off this one, as text, so that views can compare it.
 * @param {Message} message */
export function forksOf(message) {
  const others = siblingsOf(state.tree, message).map((id) => state.tree.messages[id]);
  return others.filter((other) => other.branchOf === message.id && other.branchAt !== null).map((other) => other.branchAt).join(",");
}

/** The card beside the token that is touched. */
export function TokenCard() {
  const card = useRef(/** @type {HTMLElement | null} */ (null));
  const touched = state.touched;
  const message = touched && state.tree.messages[touched.id];
  const token = message && message.tokens?.[touched.index];
  useLayoutEffect(() => {
    if (card.current && touched) place(card.current, touched);
  });
  useEffect(() => {
    const outside = (/** @type {MouseEvent} */ event) => {
      const target = /** @type {HTMLElement} */ (event.target);
      if (!state.touched?.pinned || target.closest(".card") || target.closest("[data-token]")) return;
      state.touched = null;
      changed();
    };
    document.addEventListener("mousedown", outside);
    return () => document.removeEventListener("mousedown", outside);
  }, []);
  if (!touched || !message || !token) return null;
  const isOwn = (/** @type {import("./types").Alternative} */ other) => other.id === token.id && other.text === token.text;
  const others = token.top.some(isOwn)
    ? token.top
    : [{ text: token.text, id: token.id, logprob: token.logprob ?? -Infinity }, ...token.top];
  const branches = siblingsOf(state.tree, message)
    .map((id) => state.tree.messages[id])
    .filter((other) => other.branchOf === message.id && other.branchAt === touched.index);
  return html`<section
    class="card"
    ref=${card}
    role="dialog"
    aria-label=${`Token ${touched.index + 1}: ${spoken(token.text)}`}
    onMouseOver=${() => clearTimeout(waiting)}
    onMouseOut=${() => leave()}
    onKeyDown=${(/** @type {KeyboardEvent} */ event) => cardKeys(event, message)}
  >
    <div class="about">
      <code>${visible(token.text)}</code>
      <span>token ${touched.index + 1} of ${message.tokens?.length}${token.id === null ? "" : `, id ${token.id}`}${token.forced ? ", chosen by you" : ""}</span>
    </div>
    ${token.logprob === null
      ? html`<p class="muted">Its probability was not asked for.</p>`
      : html`<ul>
          ${others.map((other) => {
            const own = isOwn(other);
            return html`<li>
              <button
                type="button"
                class=${classes("alternative", own && "own")}
                disabled=${own || other.id === null || message.status === "running" || !message.requestId}
                title=${own ? "This is the token that stands here" : "Branch here with this token"}
                onClick=${() => take(message, touched.index, other)}
              >
                <span class="bar" style=${{ width: `${Math.max(1, Math.exp(other.logprob) * 100)}%` }}></span>
                <code>${visible(other.text)}</code><span class="share">${percent(other.logprob)}</span>
              </button>
            </li>`;
          })}
        </ul>`}
    ${branches.length > 0 &&
    html`<p class="muted">Branches from here:</p>
      <ul>
        ${branches.map((other) => html`<li><button type="button" class="alternative" onClick=${() => goTo(other.id)}>
          <code>${visible(other.tokens?.[touched.index]?.text ?? "")}</code><span class="share">go there</span></button></li>`)}
      </ul>`}
    <div class="more">
      <button type="button" class="quiet" disabled=${!message.requestId || message.status === "running"} onClick=${() => inspect(message.id, touched.index)}>Look inside</button>
      <button type="button" class="quiet" disabled=${!message.requestId || message.status === "running"} onClick=${() => take(message, touched.index, null)}>Draw again from here</button>
    </div>
  </section>`;
}

/** @param {Message} message @param {number} index @param {import("./types").Alternative | null} other */
function take(message, index, other) {
  state.touched = null;
  branch(message, index, other);
  focusNext(`[data-message="${CSS.escape(state.tree.cursor ?? "")}"] .answer-text`);
}

/** @param {KeyboardEvent} event @param {Message} message */
function cardKeys(event, message) {
  const buttons = [.../** @type {HTMLElement} */ (event.currentTarget).querySelectorAll("button:not([disabled])")];
  const here = buttons.indexOf(/** @type {Element} */ (document.activeElement));
  if (event.key === "Escape") {
    state.touched = null;
    changed();
    focusAnswer(message.id);
  } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    const step = event.key === "ArrowDown" ? 1 : -1;
    /** @type {HTMLElement} */ (buttons[(here + step + buttons.length) % buttons.length])?.focus();
  } else return;
  event.preventDefault();
  event.stopPropagation();
}

/** @param {string} id */
export function focusAnswer(id) {
  /** @type {HTMLElement | null} */ (document.querySelector(`[data-message="${CSS.escape(id)}"] .answer-text`))?.focus();
}

/** @param {HTMLElement} card @param {{id: string, index: number}} touched */
function place(card, touched) {
  const span = document.querySelector(`[data-message="${CSS.escape(touched.id)}"] [data-token="${touched.index}"]`);
  if (!span) {
    card.hidden = true;
    return;
  }
  card.hidden = false;
  const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = card;
  const below = box.bottom + 6 + height < innerHeight;
  card.style.left = `${Math.max(6, Math.min(innerWidth - width - 6, box.left - 8))}px`;
  card.style.top = `${Math.max(6, below ? box.bottom + 4 : box.top - height - 4)}px`;
}
