// @ts-check
// The conversation as a tree of messages: no message is ever overwritten. Editing, retrying and branching add children.
// Pure data: nothing here draws or sends.

/** @typedef {import("./types").Tree} Tree */
/** @typedef {import("./types").Message} Message */

const FORMAT = "ratoon.conversation";
const MAX_MESSAGES = 20000;

let counter = 0;

export function newId() {
  counter += 1;
  return `m${Date.now().toString(36)}-${counter}`;
}

/** @returns {Tree} */
export function emptyTree() {
  return { messages: {}, roots: [], cursor: null };
}

/** @param {Tree} tree
 * @param {Partial<Message> & {role: Message["role"], parent: string | null}} fields
 * @returns {Message} */
export function addMessage(tree, fields) {
  const message = /** @type {Message} */ ({ id: newId(), children: [], text: "", version: 0, ...fields });
  tree.messages[message.id] = message;
  siblingsOf(tree, message).push(message.id);
  return message;
}

/** The list that a message stands in, and that its alternatives stand in.
 * @param {Tree} tree @param {Message} message */
export function siblingsOf(tree, message) {
  return message.parent ? tree.messages[message.parent].children : tree.roots;
}

/** Messages from the root to this one.
 * @param {Tree} tree @param {string | null} id
 * @returns {Message[]} */
export function pathTo(tree, id) {
  const path = [];
  for (let at = id ? tree.messages[id] : undefined; at; at = at.parent ? tree.messages[at.parent] : undefined) {
    path.push(at);
  }
  return path.reverse();
}

/** The newest message below this one: where a reader who chooses a branch wants to be.
 * @param {Tree} tree @param {string} id */
export function leafOf(tree, id) {
  let message = tree.messages[id];
  while (message.children.length) message = tree.messages[message.children[message.children.length - 1]];
  return message.id;
}

/** Removes a message and all below it.
 * @param {Tree} tree @param {string} id */
export function removeBranch(tree, id) {
  const message = tree.messages[id];
  const siblings = siblingsOf(tree, message);
  const onPath = pathTo(tree, tree.cursor).some((other) => other.id === id);
  const place = siblings.indexOf(id);
  siblings.splice(place, 1);
  const waiting = [id];
  while (waiting.length) {
    const gone = /** @type {string} */ (waiting.pop());
    waiting.push(...tree.messages[gone].children);
    delete tree.messages[gone];
  }
  if (onPath) {
    const next = siblings[Math.min(place, siblings.length - 1)];
    tree.cursor = next ? leafOf(tree, next) : message.parent;
  }
}

/** The message that a key of the tree leads to.
 * @param {Tree} tree @param {string} id @param {"up" | "down" | "left" | "right"} direction
 * @returns {string} */
export function walk(tree, id, direction) {
  const message = tree.messages[id];
  if (direction === "up") return message.parent ?? id;
  if (direction === "down") {
    const onPath = pathTo(tree, tree.cursor).map((other) => other.id);
    return message.children.find((child) => onPath.includes(child)) ?? message.children[message.children.length - 1] ?? id;
  }
  const siblings = siblingsOf(tree, message);
  return siblings[siblings.indexOf(id) + (direction === "left" ? -1 : 1)] ?? id;
}

/** @typedef {{message: Message, row: number, lane: number, parentRow: number, parentLane: number}} Placed */

/** Rows and lanes for a drawing of the tree. The first child goes on in its parent's lane, below all others, so that
 * lines never cross: a lane to the right has ended where its parent's goes on.
 * @param {Tree} tree
 * @returns {Placed[]} */
export function layOut(tree) {
  /** @type {Placed[]} */
  const placed = [];
  /** @type {{id: string, lane: number, parentRow: number, parentLane: number}[]} */
  const waiting = tree.roots.map((id) => ({ id, lane: 0, parentRow: -1, parentLane: 0 })).reverse();
  while (waiting.length) {
    const next = /** @type {{id: string, lane: number, parentRow: number, parentLane: number}} */ (waiting.pop());
    const message = tree.messages[next.id];
    const row = placed.length;
    placed.push({ message, row, lane: next.lane, parentRow: next.parentRow, parentLane: next.parentLane });
    message.children.forEach((id, index) => {
      waiting.push({ id, lane: next.lane + (index ? 1 : 0), parentRow: row, parentLane: next.lane });
    });
  }
  return placed;
}

/** @param {Tree} tree */
export function writeTree(tree) {
  const messages = Object.values(tree.messages).map(({ version, preview, waiting, ...message }) => message);
  return { format: FORMAT, version: 1, cursor: tree.cursor, roots: tree.roots, messages };
}

/** A tree from a file of a stranger: every field is checked, and what is not expected is an error or left out.
 * @param {any} data
 * @returns {Tree} */
export function readTree(data) {
  if (!data || data.format !== FORMAT || data.version !== 1 || !Array.isArray(data.messages)) {
    throw new Error(`This is no conversation: expected an object with format "${FORMAT}", version 1 and messages`);
  }
  if (data.messages.length > MAX_MESSAGES) throw new Error(`It has more than ${MAX_MESSAGES} messages`);
  const tree = emptyTree();
  for (const item of data.messages) {
    const message = readMessage(item);
    if (Object.hasOwn(tree.messages, message.id)) throw new Error(`Two messages have the id ${message.id}`);
    tree.messages[message.id] = message;
  }
  for (const message of Object.values(tree.messages)) {
    if (message.parent !== null && !Object.hasOwn(tree.messages, message.parent)) {
      throw new Error(`The parent of ${message.id} is missing: ${message.parent}`);
    }
    siblingsOf(tree, message).push(message.id);
  }
  let reached = 0;
  const waiting = [...tree.roots];
  while (waiting.length) {
    reached += 1;
    waiting.push(...tree.messages[/** @type {string} */ (waiting.pop())].children);
  }
  if (reached !== data.messages.length) throw new Error("Its messages are no tree: some are their own ancestors");
  const cursor = data.cursor;
  tree.cursor = typeof cursor === "string" && Object.hasOwn(tree.messages, cursor) ? cursor : null;
  if (tree.cursor === null && tree.roots.length) tree.cursor = leafOf(tree, tree.roots[0]);
  return tree;
}

/** @param {any} item
 * @returns {Message} */
function readMessage(item) {
  const isName = (/** @type {any} */ value) => typeof value === "string" && /^[\w.:-]{1,200}$/.test(value);
  if (!item || !isName(item.id) || item.id === "__proto__" || !["user", "assistant", "tool"].includes(item.role)) {
    throw new Error("A message needs an id of letters and digits, and a role: user, assistant or tool");
  }
  /** @type {any} */
  const message = { id: item.id, role: item.role, children: [], version: 0, parent: isName(item.parent) ? item.parent : null };
  for (const name of ["text", "system", "callId", "requestId", "reasoning", "finish", "group", "branchOf", "recording", "language"]) {
    if (typeof item[name] === "string") message[name] = item[name];
  }
  for (const name of ["choice", "score", "cumulative", "branchAt", "seconds", "firstSeconds", "duration"]) {
    if (Number.isFinite(item[name])) message[name] = item[name];
  }
  message.text ??= "";
  if (item.role === "assistant") {
    message.status = ["done", "failed"].includes(item.status) ? item.status : "stopped";
    message.tokens = (Array.isArray(item.tokens) ? item.tokens : []).map(readToken);
    message.promptIds = (Array.isArray(item.promptIds) ? item.promptIds : []).filter(Number.isInteger);
    message.calls = (Array.isArray(item.calls) ? item.calls : []).map((/** @type {any} */ call) => ({
      id: String(call?.id ?? ""),
      name: String(call?.name ?? ""),
      arguments: String(call?.arguments ?? ""),
    }));
    if (item.error && typeof item.error.message === "string") message.error = { message: item.error.message };
    if (item.continuation && Number.isFinite(item.continuation.inherited)) {
      message.continuation = {
        inherited: item.continuation.inherited,
        computed: Number(item.continuation.computed) || 0,
        source: String(item.continuation.source ?? ""),
        fallback: item.continuation.fallback === true,
      };
    }
    if (item.usage && Number.isFinite(item.usage.prompt)) {
      message.usage = {
        prompt: item.usage.prompt,
        completion: Number(item.usage.completion) || 0,
        cached: Number(item.usage.cached) || 0,
      };
    }
    if (item.sent && typeof item.sent.path === "string" && item.sent.path.startsWith("/v1/")) {
      message.sent = { path: item.sent.path, body: Object(item.sent.body), ...(typeof item.sent.file === "string" ? { file: item.sent.file } : {}) };
    }
    if (Array.isArray(item.segments)) message.segments = item.segments.map(readSegment);
  }
  if (Array.isArray(item.attachments)) {
    message.attachments = item.attachments
      .filter((/** @type {any} */ part) => /^data:image\/(png|jpeg|webp|gif|bmp);base64,/.test(String(part?.url)))
      .map((/** @type {any} */ part) => ({ kind: "image", name: String(part.name ?? ""), url: part.url }));
  }
  return message;
}

/** @param {any} item
 * @returns {import("./types").Segment} */
export function readSegment(item) {
  return { start: Number(item?.start) || 0, end: Number(item?.end) || 0, text: String(item?.text ?? "") };
}

/** @param {any} item
 * @returns {import("./types").Token} */
function readToken(item) {
  const number = (/** @type {any} */ value) => (Number.isFinite(value) ? value : null);
  return {
    text: String(item?.text ?? ""),
    bytes: Array.isArray(item?.bytes) ? item.bytes.filter(Number.isInteger) : null,
    id: number(item?.id),
    logprob: number(item?.logprob),
    top: (Array.isArray(item?.top) ? item.top : []).map((/** @type {any} */ other) => ({
      text: String(other?.text ?? ""),
      id: number(other?.id),
      logprob: Number(other?.logprob) || 0,
    })),
    ...(item?.forced === true ? { forced: true } : {}),
  };
}
