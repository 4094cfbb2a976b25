// @ts-check
// Where the focus goes when what had it leaves the page or is switched off. A browser then forgets the place, and a reader
// with keys or a screen reader would begin at the top of the page again.

import { state } from "./store.js";

/** What had the focus last, and everything around it, innermost first; empty where the reader let go of it.
 * @type {HTMLElement[]} */
let held = [];
let wanted = "";

export function watchFocus() {
  document.addEventListener("focusin", (event) => {
    held = [];
    for (let at = /** @type {HTMLElement | null} */ (event.target); at; at = at.parentElement) held.push(at);
  });
  document.addEventListener("focusout", (event) => {
    const left = /** @type {HTMLElement} */ (event.target);
    // A click beside all controls is the reader's own; so is another window.
    queueMicrotask(() => {
      if (left === held[0] && !isGone(left)) held = [];
    });
  });
}

/** What is to have the focus as soon as it is drawn: a selector. @param {string} selector */
export function focusNext(selector) {
  wanted = selector;
}

/** After each drawing: what was asked for, or a place for a focus that was lost: what is left around it, else the message that
 * is read, else the view. */
export function keepFocus() {
  const next = wanted ? /** @type {HTMLElement | null} */ (document.querySelector(wanted)) : null;
  wanted = "";
  if (next) return next.focus();
  if (!held.length || !isGone(held[0]) || ![document.body, held[0]].includes(/** @type {any} */ (document.activeElement))) return;
  const around = held.slice(1).find((element) => element.isConnected && element.hasAttribute("tabindex"));
  const read = document.querySelector(`[data-message="${CSS.escape(state.tree.cursor ?? "")}"]`);
  const place = around && !around.matches(".thread") ? around : read ?? around ?? document.querySelector("main > section");
  held = [];
  /** @type {HTMLElement | null} */ (place)?.focus({ preventScroll: true });
}

/** @param {HTMLElement} element */
function isGone(element) {
  return !element.isConnected || /** @type {any} */ (element).disabled === true;
}
