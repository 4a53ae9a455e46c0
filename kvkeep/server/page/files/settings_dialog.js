// The dialog of a conversation's settings: loaded once it is asked for.

import { longestAnswer } from "./chat_settings.js";
import { promptDialog } from "./dialog.js";
import { h } from "./dom.js";

/** @typedef {import("./chat_settings.js").Sampling} Sampling */
/** @typedef {import("./chat_settings.js").SessionSettings} SessionSettings */

/** @type {Record<string, string>} */
export const POLICIES = {
  sliding: "forgets the oldest text, token by token",
  shift: "forgets the oldest text, a part of it at once",
  archive: "compresses older text by itself",
  self_extend: "blurs distances to older text, refuses what does not fit",
  full: "forgets nothing, refuses what does not fit",
};
export const POLICY_TEXTS = Object.fromEntries(Object.entries(POLICIES).map(([name, effect]) => [name, `${name}: ${effect}`]));

const KEPT_HERE = "Temperature, top-p, repetition penalty and longest answer are kept in this browser. An empty field takes the value that it shows in grey, or the server's.";

/** @typedef {{policy?: string, max_kv_size?: number | null, budgets?: Record<string, number>, [sampling: string]: any}} Defaults  Of the server. */

/**
 * Returns what the server's own policy and budget are called in Settings.
 * @param {Defaults} defaults
 */
export const defaultTexts = ({ policy, max_kv_size }) => ({
  policy: policy ? `server default: ${policy}` : "server default",
  budget: max_kv_size === undefined ? "server default" : max_kv_size === null ? "server default: no limit" : `server default: ${max_kv_size}`,
});

const LEAST_BUDGET = 32; // cells: archive, which divides them, has no room below

/**
 * Returns the budgets that a new conversation can have.
 * @param {Defaults} defaults @param {string} policy "" for the server's
 */
export function budgetRange({ budgets = {}, policy: own = "" }, policy) {
  const most = budgets[policy || own];
  return { min: LEAST_BUDGET, max: most, label: `Memory budget, in cells: ${most ? `${LEAST_BUDGET} to ${most.toLocaleString("en-US")}` : `at least ${LEAST_BUDGET}`}` };
}

// Keeps what the dialog says of budgets and answers true while a policy and a budget are chosen.
/** @param {Defaults} defaults @param {Event} event */
function updateLimits(defaults, { target }) {
  const form = /** @type {HTMLFormElement} */ (/** @type {HTMLInputElement} */ (target).form);
  const { policy, max_kv_size: budget, max_tokens: longest } = /** @type {any} */ (form.elements);
  const { max, label } = budgetRange(defaults, policy.value);
  budget.max = max ?? "";
  budget.labels[0].firstChild.data = label;
  longest.placeholder = String(longestAnswer({ max_kv_size: budget.value ? Number(budget.value) : (defaults.max_kv_size ?? null) }));
}

/**
 * Asks for a conversation's settings. Resolves to them, or to null if it was cancelled.
 * @param {object} current
 * @param {Sampling} current.sampling @param {Defaults} current.defaults
 * @param {string} current.system @param {string} current.systemHint @param {boolean} current.isSystemEditable
 * @param {SessionSettings | null} current.session null for a session that exists
 * @param {string} [current.failure] why the system prompt was refused
 */
export async function askSettings({ sampling, defaults, system, systemHint, isSystemEditable, session, failure }) {
  /** @param {string} name */
  const placeholder = (name) => (defaults[name] === undefined ? "server default" : `${defaults[name]}`);
  const fields = [
    { name: "system", label: `System prompt (${systemHint})`, kind: "textarea", value: system, disabled: !isSystemEditable },
    number("temperature", "Temperature: 0 always takes the likeliest token", 0, 2, 0.05),
    number("top_p", "Top-p: sample among the likeliest tokens of this probability", 0, 1, 0.01),
    number("repeat_penalty", "Repetition penalty: above 1, fewer repetitions", 0.5, 2, 0.01),
    number("max_tokens", "Longest answer, in tokens", 1, 100000, 1),
    ...(session ? sessionFields(session, defaults) : []),
  ];
  /** @param {string} name @param {string} label @param {number} min @param {number} max @param {number} step */
  function number(name, label, min, max, step) {
    const value = sampling[/** @type {keyof Sampling} */ (name)] ?? "";
    return { name, label, kind: "number", value, min: String(min), max: String(max), step: step === 1 ? "1" : "any", placeholder: placeholder(name) };
  }
  const values = await promptDialog("Conversation settings", fields, "Apply", h("p", { class: "hint" }, KEPT_HERE), failure ? h("p", { class: "failure" }, failure) : null);
  if (!values) return null;
  const { system: text, policy, max_kv_size, ...numbers } = values;
  const chosen = Object.fromEntries(Object.entries(numbers).filter(([, value]) => value !== null));
  const memory = { ...(policy ? { policy } : {}), ...(max_kv_size ? { max_kv_size } : {}) };
  return { system: String(text), sampling: /** @type {Sampling} */ (chosen), session: memory };
}

/** @param {SessionSettings} session @param {Defaults} defaults */
function sessionFields({ policy = "", max_kv_size }, defaults) {
  const [texts, { min, max, label }] = [defaultTexts(defaults), budgetRange(defaults, policy)];
  const oninput = (/** @type {Event} */ event) => updateLimits(defaults, event);
  return [
    { name: "policy", label: "Memory policy: what is evicted once the budget is full", choices: ["", ...Object.keys(POLICIES)], texts: { "": texts.policy, ...POLICY_TEXTS }, value: policy, oninput },
    { name: "max_kv_size", label, kind: "number", value: max_kv_size ?? "", min: String(min), max: max && String(max), step: "1", placeholder: texts.budget, oninput },
  ];
}
