// What the server's JSON has, as far as the web UI reads it; see docs/serving.md.

/** Tokens of one standing. */
interface Run {
  standing: string;
  start: number;
  count: number;
}

interface Span {
  start: number;
  end: number;
  remembered?: number;
}

/** What of a prompt was reused. */
interface Reuse {
  prompt_tokens: number;
  reused: number;
  moved?: number;
  reread?: number;
}

/** A session in a list. Fields of its cells are missing while it is on disk. */
interface SessionEntry {
  name: string;
  title: string | null;
  revision: number;
  saved_revision: number | null;
  busy: boolean;
  in_memory: boolean;
  resident: boolean;
  named: boolean;
  parent: string | null;
  created: number;
  tokens: number;
  cells: number;
  max_kv_size: number | null;
  bytes: number;
}

/** A session, as /v1/sessions/NAME/memory has it. */
interface Memory {
  name: string;
  title: string | null;
  created: number;
  revision: number;
  saved_revision: number | null;
  tokens: number;
  cells: number;
  max_kv_size: number | null;
  bytes: number;
  cell_bytes: number;
  bytes_shared: number;
  bytes_by_part: Record<string, number>;
  parent: string | null;
  busy: boolean;
  resident: boolean;
  policy: string;
  checkpoints: number[];
  residual_cells: number;
  heads: number;
  rewind_evaluates: number | null;
  pin_room: number | null;
  rewind_room: number;
  removable: string[];
  highest_ratio: number | null;
  last_prompt: Reuse | null;
  last_answer: LastAnswer | null;
  runs: Run[];
  spans: Record<string, Span>;
}

/** A token with its text; `at` is its number, which the web UI adds. */
interface Piece {
  id: number;
  text: string;
  at: number;
}

interface Operation {
  session: string;
  what: string;
  when: number;
  tokens: number;
  seconds: number;
  nbytes: number;
  revision: number;
  parent: string | null;
}

/** A prompt that was reused in part or not at all; `number` is missing in what /v1/prefix/explain returns. */
interface Miss extends Reuse {
  number?: number;
  created?: number;
  session: string | null;
  reason: string;
  differs_at: number | null;
  not_in_place?: string;
  common_text?: string;
  prompt_text?: string;
  nearest_text?: string;
}

interface PrefixPin {
  id: string;
  session: string;
  tokens: number;
  prompt_cache_key: string | null;
  expires_in: number;
}

interface SnapshotEntry {
  rounded: string | null;
  name: string;
  session: string | null;
  bytes: number;
}

/** What an answer took. held: cells of the session before it. ended: why. */
interface LastAnswer {
  held: number;
  read: number;
  generated: number;
  per_second: number;
  ended: string;
}

/** What the server says about itself to this page. */
interface PageSettings {
  model: string;
  edits: boolean;
  policy?: string;
  max_kv_size?: number | null;
  budgets?: Record<string, number>;
  sampling?: Record<string, number>;
}

/** What a view gets beside its container. parts: of its URL. */
interface View {
  signal: AbortSignal;
  edits: boolean;
  parts: string[];
  settings: PageSettings;
}
