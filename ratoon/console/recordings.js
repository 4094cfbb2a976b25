// @ts-check
// Recordings: the files themselves, which stay in memory, a player for each, and the segments of a transcript.

import { html } from "./dom.js";
import { state } from "./store.js";

/** @typedef {import("./types").Message} Message */
/** @typedef {import("./types").Segment} Segment */

/** Files by the message that they belong to. They are written nowhere: after a reload a recording has to be given again.
 * @type {Map<string, {file: File, url: string}>} */
const kept = new Map();

/** @param {string} id @param {File} file */
export function keepRecording(id, file) {
  kept.set(id, { file, url: URL.createObjectURL(file) });
}

/** @param {string} id */
export function recordingOf(id) {
  return kept.get(id)?.file ?? null;
}

/** What a model reads: null where the server does not say it, as of a model that is not loaded.
 * @param {string} model
 * @returns {string[] | null} */
export function modalitiesOf(model) {
  return state.modalities[model] ?? null;
}

/** The model that a recording goes to: the chosen one, unless it is known that it hears nothing and another one does. */
export function listener() {
  const reads = modalitiesOf(state.model);
  if (!reads || reads.includes("audio")) return state.model;
  return state.models.find((name) => modalitiesOf(name)?.includes("audio")) ?? state.model;
}

/** @param {{message: Message}} props */
export function Player({ message }) {
  const held = kept.get(message.id);
  if (!held) return html`<p class="muted">${message.recording} (the recording itself is no longer in this page)</p>`;
  return html`<figure class="recording">
    <audio controls preload="metadata" src=${held.url} data-recording=${message.id} aria-label=${`Recording ${message.recording}`}></audio>
    <figcaption class="muted">${message.recording}</figcaption>
  </figure>`;
}

/** The segments of a transcript; a click plays the recording from there. @param {{message: Message}} props */
export function Segments({ message }) {
  const segments = message.segments ?? [];
  const playable = kept.has(message.parent ?? "");
  const about = [`${segments.length} ${segments.length === 1 ? "segment" : "segments"}`];
  if (message.language) about.push(message.language);
  if (message.duration) about.push(`${message.duration.toFixed(1)} s`);
  return html`<details class="segments" open>
    <summary>${about.join(", ")}</summary>
    <ol>${segments.map((segment) => html`<li>
      <button type="button" class="quiet" disabled=${!playable} aria-label=${`Play ${asClock(segment.start)} – ${asClock(segment.end)}`} onClick=${() => play(message.parent, segment)}>${asClock(segment.start)} – ${asClock(segment.end)}</button>
      <span>${segment.text.trim()}</span>
    </li>`)}</ol>
  </details>`;
}

/** @param {string | null} id @param {Segment} segment */
function play(id, segment) {
  const player = /** @type {HTMLAudioElement | null} */ (document.querySelector(`audio[data-recording="${CSS.escape(id ?? "")}"]`));
  if (!player) return;
  player.currentTime = segment.start;
  player.play().catch(() => {}); // a browser that has no such codec shows that in the player
}

/** Minutes, seconds and tenths. @param {number} seconds */
export function asClock(seconds) {
  const tenths = Math.round(seconds * 10);
  const minutes = Math.floor(tenths / 600);
  const rest = ((tenths % 600) / 10).toFixed(1).padStart(4, "0");
  return `${minutes}:${rest}`;
}
