// @ts-check
// The tree beside the text: a line for each message, drawn as a graph, walked with the arrow keys.

import { goTo, isRunning } from "./answers.js";
import { classes, html, useEffect, useRef } from "./dom.js";
import { changed, state } from "./store.js";
import { percent, visible } from "./tokens.js";
import { layOut, pathTo, removeBranch, siblingsOf, walk } from "./tree.js";

/** @typedef {import("./types").Message} Message */

const ROW = 30;
const LANE = 16;
const LEFT = 14;

/** @param {Message} message */
export function labelOf(message) {
  if (message.role === "tool") return `result: ${message.text}`;
  if (message.role === "user") return message.recording ? `recording: ${message.recording}` : message.text || "(an image)";
  if (message.status === "failed") return "failed";
  if (message.calls?.length && !message.text) return `calls ${message.calls.map((called) => called.name).join(", ")}`;
  return message.text.trim() || message.preview || (message.status === "running" ? "…" : "(empty)");
}

/** What is special about an answer: the token that it branched with, or its score.
 * @param {Message} message */
function badgeOf(message) {
  if (message.branchOf && message.branchAt !== null && message.branchAt !== undefined) {
    const token = message.tokens?.[message.branchAt];
    if (token?.forced) return `@${message.branchAt + 1} ${visible(token.text)} ${percent(token.logprob)}`;
    return message.branchAt ? `@${message.branchAt + 1}` : "retry";
  }
  if (message.group) return message.score !== null && message.score !== undefined ? `score ${message.score.toFixed(2)}` : `n ${(message.choice ?? 0) + 1}`;
  return "";
}

export function Outline() {
  const { tree } = state;
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const placed = layOut(tree);
  const path = new Set(pathTo(tree, tree.cursor).map((message) => message.id));
  const selected = state.tree.cursor;
  useEffect(() => {
    box.current?.querySelector(".row.here")?.scrollIntoView({ block: "nearest" });
  }, [selected, placed.length]);
  const lanes = placed.reduce((most, item) => Math.max(most, item.lane), 0) + 1;
  const width = LEFT + lanes * LANE;
  const x = (/** @type {number} */ lane) => LEFT + lane * LANE;
  const y = (/** @type {number} */ row) => row * ROW + ROW / 2;
  if (!placed.length) return html`<p class="muted padded">The tree of the conversation grows here.</p>`;
  return html`<div
    class="outline"
    ref=${box}
    role="tree"
    tabindex="0"
    aria-label="Conversation tree"
    aria-activedescendant=${selected ? `row-${selected}` : undefined}
    onKeyDown=${keys}
  >
    <svg width=${width} height=${placed.length * ROW} aria-hidden="true">
      ${placed.filter((item) => item.parentRow >= 0).map((item) => html`<path
        key=${item.message.id}
        class=${classes("edge", path.has(item.message.id) && "on")}
        d=${edge(x(item.parentLane), y(item.parentRow), x(item.lane), y(item.row))}
      />`)}
      ${placed.map((item) => dot(item, x(item.lane), y(item.row), path.has(item.message.id)))}
    </svg>
    <div class="rows">
      ${placed.map(({ message, lane }) => {
        const badge = badgeOf(message);
        const siblings = siblingsOf(tree, message);
        return html`<div
          key=${message.id}
          id=${`row-${message.id}`}
          class=${classes("row", message.role, path.has(message.id) && "on", message.id === selected && "here", message.id === state.marked && "marked")}
          role="treeitem"
          aria-level=${pathTo(tree, message.id).length}
          aria-posinset=${siblings.indexOf(message.id) + 1}
          aria-setsize=${siblings.length}
          aria-selected=${message.id === selected}
          style=${{ paddingLeft: `${LEFT + (lane + 1) * LANE - 4}px` }}
          onClick=${() => choose(message.id)}
        >
          <span class="visually-hidden">${message.role === "user" ? "You: " : message.role === "tool" ? "Tool: " : "Answer: "}</span>
          ${badge && html`<span class="badge">${badge}</span>`}
          <span class="label">${labelOf(message).slice(0, 120)}</span>
        </div>`;
      })}
    </div>
  </div>`;
}

/** @param {{message: Message}} item @param {number} cx @param {number} cy @param {boolean} on */
function dot({ message }, cx, cy, on) {
  const name = classes("dot", message.role, message.status, on && "on");
  if (message.role === "assistant") return html`<circle key=${message.id} class=${name} cx=${cx} cy=${cy} r="5" />`;
  return html`<rect key=${message.id} class=${name} x=${cx - 4} y=${cy - 4} width="8" height="8" rx="1.5" />`;
}

/** Down in the parent's lane, then to the side. */
function edge(/** @type {number} */ x1, /** @type {number} */ y1, /** @type {number} */ x2, /** @type {number} */ y2) {
  if (x1 === x2) return `M${x1} ${y1}V${y2}`;
  return `M${x1} ${y1}V${y2 - 10}Q${x1} ${y2} ${x1 + 10} ${y2}H${x2}`;
}

/** A row is selected: the thread ends there, and the next message goes below it. @param {string} id */
function choose(id) {
  state.tree.cursor = id;
  state.touched = null;
  changed();
  setTimeout(() => document.querySelector(`[data-message="${CSS.escape(id)}"]`)?.scrollIntoView({ block: "nearest" }), 40);
}

/** @param {KeyboardEvent} event */
function keys(event) {
  const here = state.tree.cursor;
  if (!here || event.ctrlKey || event.metaKey || event.altKey) return;
  const directions = /** @type {Record<string, "up" | "down" | "left" | "right">} */ ({
    ArrowUp: "up",
    ArrowDown: "down",
    ArrowLeft: "left",
    ArrowRight: "right",
  });
  if (event.key in directions) choose(walk(state.tree, here, directions[event.key]));
  else if (event.key === "Home") choose(pathTo(state.tree, here)[0].id);
  else if (event.key === "End") goTo(here);
  else if (event.key === "Delete" && !isRunning()) {
    removeBranch(state.tree, here);
    changed();
  } else return;
  event.preventDefault();
  event.stopPropagation();
}
