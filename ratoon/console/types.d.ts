// The shapes that the console's modules share. Only the type checker reads this file.

/** A token that could have stood in the place of another one. */
export interface Alternative {
  text: string;
  id: number | null;
  logprob: number;
}

export interface Token {
  text: string;
  bytes?: number[] | null;
  id: number | null;
  logprob: number | null;
  top: Alternative[];
  /** The reader chose this token; the model did not. */
  forced?: boolean;
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

/** A part of a transcript, with its time in the recording. */
export interface Segment {
  start: number;
  end: number;
  text: string;
}

export interface Attachment {
  kind: "image";
  name: string;
  url: string;
}

/** What an answer began with, as the server tells it. */
export interface Inheritance {
  inherited: number;
  computed: number;
  source: string;
  fallback: boolean;
}

/** One message of the tree. */
export interface Message {
  id: string;
  parent: string | null;
  children: string[];
  role: "user" | "assistant" | "tool";
  text: string;
  version: number;
  // of a user's message
  attachments?: Attachment[];
  system?: string;
  recording?: string;
  // of the result of a tool
  callId?: string;
  // of an answer
  requestId?: string;
  choice?: number;
  status?: "running" | "done" | "stopped" | "failed";
  reasoning?: string;
  tokens?: Token[];
  promptIds?: number[];
  calls?: ToolCall[];
  preview?: string;
  waiting?: string; // for its model, in the words of the server
  finish?: string | null;
  error?: { message: string; param?: string | null; status?: number } | null;
  usage?: { prompt: number; completion: number; cached: number } | null;
  continuation?: Inheritance | null;
  score?: number | null;
  cumulative?: number | null;
  group?: string | null;
  branchOf?: string | null;
  branchAt?: number | null;
  sent?: Sent;
  // of a transcript
  segments?: Segment[];
  language?: string;
  duration?: number;
  seconds?: number | null;
  firstSeconds?: number | null;
}

/** A request as it was sent: JSON, or with a file, a form. */
export interface Sent {
  path: string;
  body: Record<string, unknown>;
  file?: string;
}

export interface Tree {
  messages: Record<string, Message>;
  roots: string[];
  cursor: string | null;
}

export interface Tool {
  name: string;
  description: string;
  parameters: string;
  canned: string;
}

export interface Settings {
  system: string;
  fields: Record<string, string>;
  beams: boolean;
  format: string;
  formatText: string;
  tools: Tool[];
  toolChoice: string;
  alternatives: number;
  retain: number;
  keys: boolean; // whether single letters are commands
}

export interface Config {
  version: string;
  needs_key: boolean;
  needs_admin_key: boolean;
  admin: boolean;
  models: string[];
}

/** What the map knows of one engine. */
export interface EngineMap {
  index: number;
  model: string;
  state: string;
  pid: number | null;
  num_restarts: number;
  detail: string;
  paused: boolean;
  asleep: boolean;
  block_size: number;
  num_blocks: number;
  blocks: Uint8Array;
  host_blocks: { total: number; used: number } | null;
}

export interface EngineRequest {
  key: string; // of its engine, owner and id
  id: string;
  engine: number;
  owner: string;
  state: string;
  kind: string;
  age: number;
  prompt_tokens: number;
  output_tokens: number;
  blocks: [number, number][];
  seen?: number;
}

export interface Lease {
  key: string;
  id: string;
  engine: number;
  owner: string;
  seconds_left: number;
  place: string; // "device", or "host" or "files", where it has moved
  tokens: number;
  blocks: [number, number][];
  seen?: number;
}

export type Step = [number, number, number, number, number, number, string];
