// @ts-check
// What the page knows of the engines: a snapshot, and the changes that follow it. Pure data; engine.js draws it.

/** @typedef {import("./types").EngineMap} EngineMap */
/** @typedef {import("./types").EngineRequest} EngineRequest */
/** @typedef {import("./types").Lease} Lease */
/** @typedef {import("./types").Step} Step */

export const FREE = 0;
export const CACHED = 1;
export const IN_USE = 2;
export const LEASED = 3;
export const NULL_BLOCK = 4;
const MAX_STEPS = 500;
const MAX_RATES = 240;

/** @typedef {{time: number, engines: Map<number, EngineMap>, requests: Map<string, EngineRequest>, leases: Map<string, Lease>,
 *   steps: Step[], stepsGone: number, rates: Record<string, number | null>, history: Record<string, number | null>[]}} World */

/** @returns {World} */
export function emptyWorld() {
  return { time: 0, engines: new Map(), requests: new Map(), leases: new Map(), steps: [], stepsGone: 0, rates: {}, history: [] };
}

/** @param {World} world @param {string} event @param {any} data @param {number} now seconds, by the page's own clock
 * @returns {World} */
export function apply(world, event, data, now) {
  if (event === "snapshot") world = emptyWorld();
  else if (event !== "delta") return world;
  world.time = data.time ?? world.time;
  for (const index of data.engines_gone ?? []) world.engines.delete(index);
  for (const change of data.engines ?? []) world.engines.set(change.index, changedEngine(world.engines.get(change.index), change));
  for (const key of data.requests_gone ?? []) world.requests.delete(key);
  for (const request of data.requests ?? []) world.requests.set(request.key, { ...request, seen: now });
  for (const key of data.leases_gone ?? []) world.leases.delete(key);
  for (const lease of data.leases ?? []) world.leases.set(lease.key, { ...lease, seen: now });
  if (data.steps?.length) {
    const steps = [...world.steps, ...data.steps];
    world.steps = steps.slice(-MAX_STEPS);
    world.stepsGone += steps.length - world.steps.length;
  }
  if (data.rates) {
    world.rates = { ...world.rates, ...data.rates };
    world.history = [...world.history, world.rates].slice(-MAX_RATES);
  }
  return world;
}

/** @param {EngineMap | undefined} old @param {any} change
 * @returns {EngineMap} */
function changedEngine(old, change) {
  const { blocks, ...fields } = change;
  const engine = /** @type {EngineMap} */ ({ ...(old ?? { blocks: new Uint8Array(0) }), ...fields });
  if (typeof blocks === "string") {
    engine.blocks = Uint8Array.from(atob(blocks), (char) => char.charCodeAt(0));
  } else if (blocks) {
    for (const [id, code] of Object.entries(blocks)) engine.blocks[Number(id)] = Number(code);
  }
  return engine;
}

/** Which request or lease holds each block of an engine: an index into `owners`, or -1.
 * @param {World} world @param {EngineMap} engine */
export function ownership(world, engine) {
  const owner = new Int32Array(engine.blocks.length).fill(-1);
  /** @type {(EngineRequest | Lease)[]} */
  const owners = [];
  for (const holder of [...world.leases.values(), ...world.requests.values()]) {
    if (holder.engine !== engine.index) continue;
    owners.push(holder);
    for (const [first, last] of holder.blocks ?? []) owner.fill(owners.length - 1, first, last + 1);
  }
  return { owner, owners };
}

/** How many blocks are in each state. @param {EngineMap} engine */
export function census(engine) {
  const counts = [0, 0, 0, 0, 0];
  for (const code of engine.blocks) counts[code] = (counts[code] ?? 0) + 1;
  return counts;
}

/** A hue for a key: a request and its lease have the same colour in the field and in the list. @param {string} key */
export function hueOf(key) {
  let hash = 2166136261;
  for (let at = 0; at < key.length; at += 1) hash = Math.imul(hash ^ key.charCodeAt(at), 16777619);
  return ((hash >>> 0) * 0.618034) % 360;
}
