// @ts-check
// Looking inside: what each layer would have said for a token, and how large its states are. The state that a token was
// chosen from is that of the token before it.

import { call } from "./api.js";
import { classes, html, useEffect, useState } from "./dom.js";
import { modelOf } from "./request.js";
import { announce, changed, state } from "./store.js";
import { focusAnswer, heat, percent, spoken, visible } from "./tokens.js";

/** @typedef {import("./types").Message} Message */
/** @typedef {{token_id: number, token: string, logprob: number}} Said */
/** @typedef {{layers: number[], norms: number[][], lens: Said[][][], computed_tokens: number, cached_tokens: number, source: string | null}} Found */

const COLUMNS = 5;
const TOP = 5;

export function Lens() {
  const inspected = state.inspected;
  const message = inspected ? state.tree.messages[inspected.id] : null;
  const key = inspected ? `${inspected.id}:${inspected.index}` : "";
  const [found, setFound] = useState(/** @type {{key: string, data?: Found, error?: string}} */ ({ key: "" }));
  useEffect(() => {
    if (!inspected || !message) return;
    let stale = false;
    look(message, inspected.index).then(
      (data) => {
        if (stale) return;
        setFound({ key, data });
        announce(`${spoken(message.tokens?.[inspected.index]?.text ?? "")}: ${summary(data, message, inspected.index)}`);
      },
      (error) => stale || setFound({ key, error: error.message }),
    );
    return () => {
      stale = true;
    };
  }, [key]);
  if (!inspected || !message) {
    return html`<p class="muted padded">Touch a token of an answer and choose “Look inside”, or press I on it.</p>`;
  }
  const tokens = message.tokens ?? [];
  const token = tokens[inspected.index];
  const go = (/** @type {number} */ step) => () => {
    state.inspected = { id: inspected.id, index: Math.max(0, Math.min(tokens.length - 1, inspected.index + step)) };
    changed();
  };
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation(); // it would stop an answer
    state.panel = "";
    state.touched = { ...inspected, pinned: true };
    focusAnswer(inspected.id);
    changed();
  };
  return html`<section class="lens" aria-label="Hidden states" tabindex="-1" onKeyDown=${onKeyDown}>
    <div class="walk">
      <button type="button" class="quiet" aria-label="Token before" disabled=${inspected.index === 0} onClick=${go(-1)}>‹</button>
      <code class="big">${visible(token?.text ?? "")}</code>
      <span class="muted">token ${inspected.index + 1}, ${percent(token?.logprob ?? null)}</span>
      <button type="button" class="quiet" aria-label="Token after" disabled=${inspected.index >= tokens.length - 1} onClick=${go(1)}>›</button>
    </div>
    ${found.key !== key && html`<p class="muted">Reading the layers…</p>`}
    ${found.key === key && found.error && html`<p class="error" role="alert">${found.error}</p>`}
    ${found.data && html`<${Picture} data=${found.data} message=${message} index=${inspected.index} />`}
  </section>`;
}

/** Columns end with the token that is looked at. @param {Message} message @param {number} index */
function shownTokens(message, index) {
  const first = Math.max(0, index - COLUMNS + 1);
  return (message.tokens ?? []).slice(first, index + 1).map((token, at) => ({ token, index: first + at }));
}

/** @param {Message} message @param {number} index
 * @returns {Promise<Found>} */
async function look(message, index) {
  const before = (message.promptIds?.length ?? 0) - 1;
  if (before < 0) throw new Error("The number of tokens before this answer is not known");
  const positions = shownTokens(message, index).map((item) => before + item.index);
  const model = modelOf(message) || state.model;
  const json = {
    ...(model ? { model } : {}),
    original_request_id: message.requestId,
    ...(message.choice ? { choice: message.choice } : {}),
    positions,
    layers: "all",
    lens: TOP,
  };
  const found = await (await call("/v1/hidden_states", { json })).json();
  if (!found.lens || !found.norms) throw new Error("This server reads hidden states, but has no logit lens");
  return found;
}

/** The picture in one sentence. @param {Found} data @param {Message} message @param {number} index */
function summary(data, message, index) {
  const id = message.tokens?.[index].id;
  const decided = data.lens.findIndex((row) => row[row.length - 1]?.[0]?.token_id === id);
  if (decided < 0) return "No layer puts this token first: it was drawn, or chosen by you.";
  return `Layer ${data.layers[decided]} of ${data.layers[data.layers.length - 1]} is the first to put this token first.`;
}

/** @param {{data: Found, message: Message, index: number}} props */
function Picture({ data, message, index }) {
  const columns = shownTokens(message, index);
  const last = columns.length - 1;
  if (data.lens[0]?.length !== columns.length) return null;
  const rows = data.layers.map((layer, at) => ({ layer, norms: data.norms[at], said: data.lens[at] })).reverse();
  const most = Math.max(...data.norms.map((norms) => Math.log1p(norms[last])));
  const own = columns[last].token;
  return html`<figure class="layers">
    <figcaption>
      ${summary(data, message, index)}
      <span class="muted"> ${data.computed_tokens} tokens computed for this, ${data.cached_tokens} inherited.</span>
    </figcaption>
    <${Profile} data=${data} last=${last} own=${own.id} />
    <div class="table" tabindex="0" role="region" aria-label="What each layer would have said"><table>
      <thead><tr><th scope="col">layer</th>${columns.map((item, at) => html`<th scope="col" class=${classes(at === last && "own")}><code>${visible(item.token.text)}</code></th>`)}<th scope="col" class="norm">norm</th></tr></thead>
      <tbody>
        ${rows.map((row) => html`<tr key=${row.layer}>
          <th scope="row">${row.layer}</th>
          ${row.said.map((said, at) => html`<td
            class=${classes("cell", heat(said[0].logprob), said[0].token_id === columns[at].token.id && "right", at === last && "own")}
            title=${said.map((entry) => `${visible(entry.token)} ${percent(entry.logprob)}`).join("\n")}
            ><code>${visible(said[0].token).slice(0, 10)}</code></td>`)}
          <td class="norm" title=${`The length of the state: ${row.norms[last].toFixed(2)}`}><span class="bar" style=${{ width: `${(Math.log1p(row.norms[last]) / most) * 100}%` }}></span><span>${row.norms[last].toPrecision(3)}</span></td>
        </tr>`)}
      </tbody>
    </table></div>
  </figure>`;
}

/** The token's probability, and the share of the layer's own favourite, through the layers.
 * @param {{data: Found, last: number, own: number | null}} props */
function Profile({ data, last, own }) {
  const width = 320;
  const height = 70;
  const layers = data.lens.length - 1;
  const x = (/** @type {number} */ at) => 4 + (at / Math.max(1, layers)) * (width - 8);
  const y = (/** @type {number} */ share) => height - 12 - share * (height - 18);
  const line = (/** @type {(said: Said[]) => number} */ share) =>
    data.lens.map((row, at) => `${at ? "L" : "M"}${x(at).toFixed(1)} ${y(share(row[last])).toFixed(1)}`).join("");
  const shareOf = (/** @type {Said[]} */ said) => Math.exp(said.find((entry) => entry.token_id === own)?.logprob ?? -Infinity);
  // Five layers in words stand for the line.
  const told = [0, 1, 2, 3, 4].map((part) => Math.round((part * layers) / 4)).map((at) => `layer ${data.layers[at]}: ${percent(Math.log(shareOf(data.lens[at][last])))}`);
  return html`<svg class="profile" viewBox=${`0 0 ${width} ${height}`} role="img" aria-label=${`The probability of this token through the layers. ${told.join(", ")}`}>
    <line class="axis" x1="4" x2=${width - 4} y1=${y(0)} y2=${y(0)} />
    <line class="axis" x1="4" x2=${width - 4} y1=${y(1)} y2=${y(1)} />
    <path class="favourite" d=${line((said) => Math.exp(said[0].logprob))} />
    <path class="own" d=${line(shareOf)} />
    <text x="4" y=${height - 2}>embeddings</text><text x=${width - 4} y=${height - 2} text-anchor="end">last layer</text>
    <text x=${width / 2} y=${height - 2} text-anchor="middle">this token · each layer's favourite (thin)</text>
  </svg>`;
}
