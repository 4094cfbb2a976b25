// @ts-check
// The live map of the engines: blocks, steps, rates, requests and leases.

import { ApiError, call, events } from "./api.js";
import { classes, html, useEffect, useRef, useState } from "./dom.js";
import { announce, changed, state } from "./store.js";
import { apply, CACHED, census, emptyWorld, FREE, hueOf, IN_USE, LEASED, NULL_BLOCK, ownership } from "./map.js";

/** @typedef {import("./map.js").World} World */
/** @typedef {import("./types").EngineMap} EngineMap */

let world = emptyWorld();
/** @type {"off" | "connecting" | "open" | "refused" | "lost"} */
let connection = "off";
let problem = "";

/** Reads the stream until the signal says stop. A stream that breaks is opened again, later each time.
 * @param {AbortSignal} signal */
async function follow(signal) {
  for (let attempt = 0; !signal.aborted; attempt += 1) {
    try {
      connection = "connecting";
      changed();
      const response = await call("/v1/engine/events?interval=0.25", { signal, admin: true });
      for await (const { event, data } of events(response)) {
        world = apply(world, event, JSON.parse(data), performance.now() / 1000);
        connection = "open";
        attempt = 0;
        changed();
      }
      connection = "lost";
    } catch (error) {
      if (signal.aborted) break;
      problem = /** @type {Error} */ (error).message;
      if (error instanceof ApiError && error.status < 500) {
        connection = "refused";
        changed();
        return;
      }
      connection = "lost";
    }
    changed();
    await new Promise((resolve) => setTimeout(resolve, Math.min(10000, 500 * 2 ** attempt)));
  }
  connection = "off";
}

export function Engine() {
  const [attempt, setAttempt] = useState(0);
  useEffect(() => {
    const controller = new AbortController();
    follow(controller.signal);
    return () => controller.abort();
  }, [attempt, state.key, state.adminKey]);
  // A first event may name an engine whose blocks come with the next one.
  const engines = [...world.engines.values()].filter((engine) => engine.blocks.length).sort((a, b) => a.index - b.index);
  if (connection === "refused") {
    return html`<section class="engine padded" aria-label="Engine" tabindex="-1">
      <p class="error" role="alert">${problem}</p>
      <${AdminKey} open=${() => setAttempt(attempt + 1)} />
    </section>`;
  }
  return html`<section class="engine" aria-label="Engine" tabindex="-1">
    ${connection !== "open" && html`<p class="notice-line" role="status">${connection === "lost" ? `The stream ended (${problem || "closed by the server"}); it is opened again.` : "Opening the stream of events…"}</p>`}
    <${Rates} />
    <div class="engines">${engines.map((engine) => html`<${EngineBlocks} key=${engine.index} engine=${engine} />`)}</div>
    <${Steps} />
    <${Requests} />
    <${Leases} />
    ${state.config?.needs_admin_key && html`<details class="admin"><summary>Admin key</summary><${AdminKey} open=${() => setAttempt(attempt + 1)} /></details>`}
  </section>`;
}

/** An API key sees its own requests; an admin key sees all. @param {{open: () => void}} props */
function AdminKey({ open }) {
  return html`<form onSubmit=${(/** @type {any} */ event) => {
    event.preventDefault();
    state.adminKey = String(new FormData(event.target).get("admin") ?? "").trim();
    open();
  }}>
    <div class="line">
      <label class="inline">Admin key <input name="admin" type="password" autocomplete="off" /></label>
      <button type="submit">Show the requests of all keys</button>
    </div>
    <p class="hint">It is kept in memory until the page is closed, and sent to this server only.</p>
  </form>`;
}

/** @param {number | null | undefined} value */
function asShare(value) {
  return value === null || value === undefined ? "–" : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;
}

/** @param {number | null | undefined} value */
function asCount(value) {
  return value === null || value === undefined ? "–" : value >= 100 ? Math.round(value).toLocaleString("en") : String(Math.round(value * 10) / 10);
}

/** @param {number | null | undefined} bytes */
function asBytes(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const unit = bytes >= 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
  return `${(bytes / Number(unit[0])).toFixed(unit[1] === "GiB" ? 1 : 0)} ${unit[1]}`;
}

const TILES = /** @type {[string, string, (value: any) => string][]} */ ([
  ["output_tokens_per_s", "tokens written / s", asCount],
  ["prompt_tokens_per_s", "prompt tokens / s", asCount],
  ["prefix_hit_rate", "prefix hits", asShare],
  ["draft_acceptance", "drafts accepted", asShare],
  ["kv_usage", "KV cache in use", asShare],
  ["memory_bytes", "memory", asBytes],
  ["num_running", "running", asCount],
  ["num_waiting", "waiting", asCount],
]);

function Rates() {
  return html`<dl class="tiles">
    ${TILES.map(([name, label, format]) => html`<div class="tile" key=${name}>
      <dt>${label}</dt><dd>${format(world.rates[name])}</dd>
      <${Spark} values=${world.history.map((rates) => rates[name] ?? 0)} />
    </div>`)}
  </dl>`;
}

/** @param {{values: number[]}} props */
function Spark({ values }) {
  if (values.length < 2) return html`<svg class="spark" viewBox="0 0 100 18" aria-hidden="true"></svg>`;
  const most = Math.max(...values, 1e-9);
  const points = values.map((value, at) => `${((at / (values.length - 1)) * 100).toFixed(1)},${(17 - (value / most) * 16).toFixed(1)}`).join(" ");
  return html`<svg class="spark" viewBox="0 0 100 18" preserveAspectRatio="none" aria-hidden="true"><polyline points=${points} /></svg>`;
}

/** The colours of the style sheet, for canvases. */
function colours() {
  const style = getComputedStyle(document.documentElement);
  const value = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
  return { free: value("--free"), cached: value("--cached"), used: value("--used"), leased: value("--leased"), none: value("--null"), text: value("--muted"), ink: value("--ink"), line: value("--line"), accent: value("--accent"), dark: value("--dark") === "1" };
}

/** A picture of places (blocks, steps), and the place that is looked at, or -1: the one under the pointer, else the one that
 * was marked with keys. The marked one is remembered by its number since the stream began (`gone` numbers have left the
 * picture), so that the mark moves with a step. A screen reader is told the text of the marked one.
 * @param {{label: string, count: number, gone?: number, row: () => number, text: (at: number) => string,
 *   find: (event: MouseEvent) => number, draw: (canvas: HTMLCanvasElement, over: number) => void}} options
 * @returns {[number, any]} */
function usePlaces({ label, count, gone = 0, row, text, find, draw }) {
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const name = useRef("");
  const [pointed, point] = useState(-1);
  const [number, mark] = useState(-1);
  const inside = (/** @type {number} */ at) => (at >= 0 && at < count ? at : -1);
  const marked = number < 0 ? -1 : inside(number - gone);
  const over = inside(pointed) >= 0 ? pointed : marked;
  // The counts in the label change all the time; while it has the focus a reader would say each change.
  if (!canvas.current || document.activeElement !== canvas.current) name.current = label;
  useEffect(() => {
    if (canvas.current) draw(canvas.current, over);
  });
  const onKey = (/** @type {KeyboardEvent} */ event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    /** @type {Record<string, number>} */
    const next = {
      ArrowLeft: marked < 0 ? count - 1 : marked - 1,
      ArrowRight: marked + 1,
      ArrowUp: marked < 0 ? count - 1 : marked - row(),
      ArrowDown: marked < 0 ? 0 : marked + row(),
      Home: 0,
      End: count - 1,
    };
    if (event.key === "Escape" && marked >= 0) {
      event.stopPropagation(); // it would stop an answer
      mark(-1);
    } else if (Object.hasOwn(next, event.key)) {
      event.preventDefault();
      if (inside(next[event.key]) >= 0) mark(gone + next[event.key]);
    }
  };
  const picture = html`<canvas
      ref=${canvas}
      tabindex="0"
      role="application"
      aria-label=${`${name.current}. Arrow keys, Home and End mark one, Escape lets go.`}
      onKeyDown=${onKey}
      onBlur=${() => mark(-1)}
      onMouseMove=${(/** @type {MouseEvent} */ event) => point(find(event))}
      onMouseLeave=${() => point(-1)}
    ></canvas>
    <span class="visually-hidden" aria-live="polite">${marked >= 0 ? text(marked) : ""}</span>`;
  return [over, picture];
}

/** @param {{engine: EngineMap}} props */
function EngineBlocks({ engine }) {
  const counts = census(engine);
  const { owner, owners } = ownership(world, engine);
  const layout = useRef({ columns: 1, cell: 10 });
  const names = { [FREE]: "free", [CACHED]: "free, cached", [IN_USE]: "in use", [LEASED]: "leased", [NULL_BLOCK]: "the null block" };
  const total = `${engine.num_blocks} blocks of ${engine.block_size} tokens`;
  const text = (/** @type {number} */ id) => `block ${id}: ${names[engine.blocks[id]] ?? ""}${owner[id] >= 0 ? `, ${owners[owner[id]].id}` : ""}`;
  const [over, picture] = usePlaces({
    label: `Engine ${engine.index}, ${total}: ${counts[IN_USE]} in use, ${counts[LEASED]} leased, ${counts[CACHED]} cached, ${counts[FREE]} free`,
    count: engine.blocks.length,
    row: () => layout.current.columns,
    text,
    find: ({ offsetX, offsetY }) => {
      const { columns, cell } = layout.current;
      const column = Math.floor(offsetX / cell);
      return column < columns ? Math.floor(offsetY / cell) * columns + column : -1;
    },
    draw: (canvas, at) => {
      layout.current = drawBlocks(canvas, engine, owner, owners, at);
    },
  });
  return html`<article class="blocks">
    <header>
      <h2>Engine ${engine.index}</h2>
      ${engine.model && html`<strong class="model">${engine.model}</strong>`}
      <span class=${classes("state", engine.state === "ok" && "ok")}>${engine.state}${engine.paused ? ", paused" : ""}${engine.asleep ? ", asleep" : ""}</span>
      <span class="muted">${engine.pid ? `pid ${engine.pid}` : ""}${engine.num_restarts ? `, ${engine.num_restarts} restarts` : ", no restart"}${engine.detail ? `, ${engine.detail}` : ""}</span>
      ${engine.host_blocks && html`<span class="chip">host ${engine.host_blocks.used} of ${engine.host_blocks.total}</span>`}
    </header>
    ${picture}
    ${engine.host_blocks && html`<div class="host" role="img" aria-label=${`${engine.host_blocks.used} of ${engine.host_blocks.total} blocks on the host`}><span style=${{ width: `${(engine.host_blocks.used / Math.max(1, engine.host_blocks.total)) * 100}%` }}></span></div>`}
    <p class="legend">
      <span class="entry"><span class="key used"></span>${counts[IN_USE]} in use (a colour for each request)</span>
      <span class="entry"><span class="key leased"></span>${counts[LEASED]} leased</span>
      <span class="entry"><span class="key cached"></span>${counts[CACHED]} cached</span>
      <span class="entry"><span class="key free"></span>${counts[FREE]} free</span>
      <span class="over">${over >= 0 ? text(over) : total}</span>
    </p>
  </article>`;
}

/** @param {HTMLCanvasElement} canvas @param {EngineMap} engine @param {Int32Array} owner @param {any[]} owners @param {number} over */
function drawBlocks(canvas, engine, owner, owners, over) {
  const width = canvas.clientWidth;
  const count = engine.blocks.length;
  // The largest cells with which the field stays within about 260 pixels of height.
  let cell = 14;
  while (cell > 3 && Math.ceil(count / Math.floor(width / cell)) * cell > 260) cell -= 1;
  const columns = Math.max(1, Math.floor(width / cell));
  const height = Math.min(4000, Math.ceil(count / columns) * cell);
  const context = sized(canvas, width, height);
  const palette = colours();
  const plain = [palette.free, palette.cached, palette.used, palette.leased, palette.none];
  const gap = cell > 5 ? 1 : cell > 3 ? 0.5 : 0;
  for (let id = 0; id < count; id += 1) {
    const code = engine.blocks[id];
    const holder = owner[id] >= 0 ? owners[owner[id]] : null;
    let colour = plain[code] ?? palette.free;
    if (holder && code === IN_USE) colour = `hsl(${hueOf(holder.key)} 62% ${palette.dark ? 58 : 48}%)`;
    const x = (id % columns) * cell;
    const y = Math.floor(id / columns) * cell;
    context.fillStyle = colour;
    context.fillRect(x, y, cell - gap, cell - gap);
    if (code === LEASED && cell > 5) {
      context.fillStyle = holder ? `hsl(${hueOf(holder.key)} 62% ${palette.dark ? 70 : 38}%)` : palette.text;
      context.fillRect(x, y + cell - gap - 2, cell - gap, 2);
    }
  }
  if (over >= 0) {
    // A frame around the block, wide enough to be seen around the smallest ones, and not cut off at a side.
    const side = Math.max(8, cell - gap) + 2;
    const within = (/** @type {number} */ at, /** @type {number} */ size) => Math.min(Math.max(1, at * cell - 1), size - side - 1);
    context.strokeStyle = palette.ink;
    context.lineWidth = 2;
    context.strokeRect(within(over % columns, width), within(Math.floor(over / columns), height), side, side);
  }
  return { columns, cell };
}

/** A canvas with as many pixels as the screen has. @param {HTMLCanvasElement} canvas @param {number} width @param {number} height */
function sized(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** The last steps: tokens as bars, those of prompts above those decoded; milliseconds as a line; what was waited for below. */
function Steps() {
  const steps = world.steps;
  const text = (/** @type {number} */ at) => {
    const [, , milliseconds, prompt, decoded, requests, waited] = steps[at];
    return `${prompt} prompt + ${decoded} decoded tokens of ${requests} requests in ${milliseconds.toFixed(1)} ms${waited ? `, waited for ${waited}` : ""}`;
  };
  const newest = steps.length ? `newest: ${text(steps.length - 1)}` : "none yet";
  const [over, picture] = usePlaces({
    label: `Tokens and milliseconds of the last ${steps.length} steps, ${newest}`,
    count: steps.length,
    gone: world.stepsGone,
    row: () => 10,
    text,
    find: (event) => Math.min(steps.length - 1, Math.floor((event.offsetX / Math.max(1, /** @type {HTMLElement} */ (event.target).clientWidth)) * Math.max(steps.length, 100))),
    draw: (canvas, at) => drawSteps(canvas, steps, at),
  });
  return html`<article class="steps">
    <header><h2>Last ${steps.length} steps</h2>
      <span class="muted">${over >= 0 ? `step: ${text(over)}` : newest}</span>
    </header>
    ${picture}
    <p class="legend">
      <span class="entry"><span class="key prompt"></span>prompt tokens</span>
      <span class="entry"><span class="key decoded"></span>decoded tokens</span>
      <span class="entry"><span class="key time"></span>milliseconds</span>
      <span class="entry"><span class="key waited"></span>waited (grey: for the device)</span>
    </p>
  </article>`;
}

/** @param {HTMLCanvasElement} canvas @param {import("./types").Step[]} steps @param {number} over */
function drawSteps(canvas, steps, over) {
  const width = canvas.clientWidth;
  const height = 120;
  const context = sized(canvas, width, height);
  const palette = colours();
  const places = Math.max(steps.length, 100);
  const wide = width / places;
  // Prompts have hundreds of tokens in a step and answers a few: roots make both visible.
  const most = Math.sqrt(Math.max(1, ...steps.map((step) => step[3] + step[4])));
  const slowest = Math.max(1, ...steps.map((step) => step[2]));
  const floor = height - 8;
  const scale = (/** @type {number} */ tokens) => (Math.sqrt(tokens) / most) * (floor - 6);
  context.fillStyle = palette.line;
  context.fillRect(0, floor, width, 1);
  steps.forEach((step, at) => {
    const x = at * wide;
    const bar = Math.max(1, wide - (wide > 3 ? 1 : 0));
    const all = scale(step[3] + step[4]);
    const decoded = scale(step[4]);
    context.globalAlpha = over < 0 || over === at ? 1 : 0.55;
    context.fillStyle = palette.leased;
    context.fillRect(x, floor - all, bar, all - Math.min(all, decoded));
    context.fillStyle = palette.accent;
    context.fillRect(x, floor - decoded, bar, decoded);
    if (step[6]) {
      context.fillStyle = step[6] === "device" ? palette.none : palette.used; // a step that waits for the device is the usual one
      context.fillRect(x, floor + 3, bar, 4);
    }
  });
  context.globalAlpha = 1;
  context.strokeStyle = palette.text;
  context.lineWidth = 1;
  context.beginPath();
  steps.forEach((step, at) => {
    const y = floor - (step[2] / slowest) * (floor - 6);
    if (at) context.lineTo(at * wide + wide / 2, y);
    else context.moveTo(wide / 2, y);
  });
  context.stroke();
  if (over >= 0) {
    context.fillStyle = palette.ink;
    context.fillRect(over * wide + Math.max(1, wide) / 2 - 0.5, 0, 1, height);
  }
}

/** @param {number} seconds */
function asTime(seconds) {
  return seconds >= 90 ? `${(seconds / 60).toFixed(1)} min` : `${seconds.toFixed(1)} s`;
}

/** @param {[number, number][]} ranges */
function countBlocks(ranges) {
  return (ranges ?? []).reduce((sum, [first, last]) => sum + last - first + 1, 0);
}

function Requests() {
  const now = performance.now() / 1000;
  const rows = [...world.requests.values()].sort((a, b) => b.age - a.age);
  return html`<article>
    <header><h2>Requests</h2><span class="muted">${rows.filter((row) => row.state === "running").length} running, ${rows.filter((row) => row.state !== "running").length} waiting</span></header>
    <div class="table" tabindex="0" role="region" aria-label="Requests"><table>
      <thead><tr><th scope="col"><span class="visually-hidden">colour</span></th><th scope="col">id</th><th scope="col">owner</th><th scope="col">kind</th><th scope="col">state</th><th scope="col">age</th><th scope="col">prompt</th><th scope="col">written</th><th scope="col">blocks</th><th scope="col"><span class="visually-hidden">action</span></th></tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.key}>
        <td><span class="key" style=${{ background: `hsl(${hueOf(row.key)} 62% 50%)` }}></span></td>
        <td><code>${row.id}</code></td><td>${row.owner || "–"}</td><td>${row.kind}</td><td>${row.state}</td>
        <td>${asTime(row.age + now - (row.seen ?? now))}</td><td>${row.prompt_tokens}</td><td>${row.output_tokens}</td><td>${countBlocks(row.blocks)}</td>
        <td><button type="button" class="quiet danger" aria-label=${`Abort ${row.id}`} onClick=${() => remove(`/v1/engine/requests/${encodeURIComponent(row.id)}`, "Aborted")}>Abort</button></td>
      </tr>`)}</tbody>
    </table></div>
    ${rows.length === 0 && html`<p class="muted">No request is in the engine.</p>`}
  </article>`;
}

function Leases() {
  const now = performance.now() / 1000;
  const rows = [...world.leases.values()].sort((a, b) => a.seconds_left - b.seconds_left);
  return html`<article>
    <header><h2>Leases</h2><span class="muted">${rows.length} finished answers keep their memory</span></header>
    <div class="table" tabindex="0" role="region" aria-label="Leases"><table>
      <thead><tr><th scope="col"><span class="visually-hidden">colour</span></th><th scope="col">root</th><th scope="col">owner</th><th scope="col">time left</th><th scope="col">tokens</th><th scope="col">place</th><th scope="col">blocks</th><th scope="col"><span class="visually-hidden">action</span></th></tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.key}>
        <td><span class="key" style=${{ background: `hsl(${hueOf(row.key)} 62% 50%)` }}></span></td>
        <td><code>${row.id}</code></td><td>${row.owner || "–"}</td><td>${asTime(Math.max(0, row.seconds_left - now + (row.seen ?? now)))}</td><td>${row.tokens}</td><td>${row.place}</td><td>${countBlocks(row.blocks)}</td>
        <td><button type="button" class="quiet danger" aria-label=${`Drop ${row.id}`} onClick=${() => remove(`/v1/engine/leases/${encodeURIComponent(row.id)}`, "Dropped")}>Drop</button></td>
      </tr>`)}</tbody>
    </table></div>
    ${rows.length === 0 && html`<p class="muted">None.</p>`}
  </article>`;
}

/** @param {string} path @param {string} done */
async function remove(path, done) {
  try {
    await call(path, { method: "DELETE", admin: true });
    announce(done, true);
  } catch (error) {
    announce(/** @type {Error} */ (error).message, true);
  }
}
