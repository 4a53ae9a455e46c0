// Undo, as the chat and the inspector offer it: what was said since the change is kept in a branch, if that is agreed to.

import { get, send } from "./api.js";
import { forkConversation } from "./branches.js";
import { keep, keptOf } from "./chat_settings.js";
import { promptDialog } from "./dialog.js";
import { h } from "./dom.js";
import { dropOpenNotes, signatureOf } from "./message_note.js";
import { fetchPieces } from "./pieces.js";
import { CHANGED, changeError, changeHeaders } from "./session_change.js";
import { turnsOf, turnsSince, turnText } from "./turns.js";
import { MOST, stepsAmong, wordOf } from "./undo.js";
import { deleteCopies } from "./undo_copies.js";

/** @typedef {import("./turns.js").Turn} Turn */
/** @typedef {import("./undo.js").Step} Step */

const TAIL = 64; // tokens
const EDITS = ["delete", "edit", "insert", "rewind"]; // of any tokens, which need not be whole messages
const ANYTHING = "Anything said";

/**
 * Returns what tells whether a text has gone on: its length, and its end.
 * @param {Memory} memory
 */
async function endOf(memory) {
  const { tokens } = memory;
  const pieces = await fetchPieces(memory, Math.max(0, tokens - TAIL), tokens);
  return `${tokens} ${signatureOf({ text: textsOf(pieces).join("") })}`;
}

// Returns the texts of pieces. Throws an error if the session has changed while they were fetched.
/** @param {Piece[] | null} pieces */
export function textsOf(pieces) {
  if (!pieces) throw new Error(CHANGED);
  return pieces.map(({ text }) => text);
}

/**
 * Notes how a text ends after a change by an edit of any tokens: by its turns alone, one cannot tell whether it has gone on since.
 * @param {Memory} memory after the change @param {string} kept the fork of before
 */
export async function noteEnd(memory, kept) {
  if (!EDITS.some((operation) => kept.endsWith(`.${operation}`))) return;
  const edits = Object.entries(keptOf(memory.name).edits || {}).slice(1 - MOST);
  keep(memory.name, { edits: { ...Object.fromEntries(edits), [kept]: await endOf(memory) } });
}

/**
 * Returns in words what was said after a change; "" for nothing.
 * @param {Memory} memory @param {Step} step @param {() => Promise<Turn[]>} turns of the session now
 */
async function saidSince(memory, step, turns) {
  if (EDITS.includes(step.operation)) return keptOf(memory.name).edits?.[step.name] === (await endOf(memory)) ? "" : ANYTHING;
  const [now, earlier] = await Promise.all([turns(), turnsOfSession(await get(`/v1/sessions/${step.name}/memory`))]);
  const isAsRegenerated = () => now.some((turn) => signatureOf({ text: turnText(turn) }) === keptOf(memory.name).regenerated);
  const allowsChange = step.operation === "replace" || (step.operation === "regenerate" && isAsRegenerated()); // not if it was gone on with
  return sinceText(turnsSince(now, earlier, allowsChange), earlier, step.operation === "regenerate");
}

/**
 * Returns what was said since an earlier state of a conversation, in words; "" for nothing.
 * @param {Turn[]} turns that are new, or went on @param {Turn[]} earlier
 * @param {boolean} isRegenerated whether the earlier state has another answer, in place of which one was generated that went on
 */
export function sinceText(turns, earlier, isRegenerated = false) {
  const isContinued = (/** @type {Turn} */ { parts: [asked, answer] }) =>
    answer && earlier.some(({ parts: [question, begun] }) => begun && question.text === asked.text && (isRegenerated || answer.text.startsWith(begun.text)));
  const continued = turns.filter(isContinued).length;
  const added = turns.length - continued;
  const texts = [continued ? "the continued answer" : "", added === 1 ? "the turn" : added ? `the ${added} turns` : ""];
  return texts.filter(Boolean).join(" and ").replace(/^t/, "T");
}

/** @param {Memory} memory */
export const turnsOfSession = async (memory) => turnsOf(memory, textsOf(await fetchPieces(memory, 0, memory.tokens)));

/**
 * Undoes a change. Returns a message, or null if it was cancelled, or what was said since could not be kept.
 * @param {Memory} memory of the revision that is shown @param {Step} step @param {() => Promise<Turn[]>} turns of the session now
 */
export async function undoChange(memory, step, turns) {
  let later;
  try {
    later = await saidSince(memory, step, turns);
    if (later) {
      const text = `This takes the conversation back to before that change. ${later} since then will be kept in a branch.`;
      if (!(await promptDialog(`Undo ${wordOf(step.operation)}?`, [], "Undo", h("p", {}, text)))) return null;
      if (!(await forkConversation(memory, null, ""))) return null;
    }
    await undo(memory, step);
  } catch (error) {
    return { text: changeError(error), isError: true };
  }
  const { [step.name]: _, ...edits } = keptOf(memory.name).edits || {}; // the next fork may have the name
  keep(memory.name, { edits });
  dropOpenNotes(memory.name);
  return { text: `Undone: ${wordOf(step.operation)}.${later ? ` ${later} since then: see the newest branch of this conversation.` : ""}`, isError: false };
}

/**
 * Reverts a session to a kept fork, and drops that and those of later changes.
 * @param {Memory} memory of the revision that is shown @param {Step} step
 */
async function undo({ name, revision }, step) {
  const { data } = await get("/v1/sessions");
  await send("POST", `/v1/sessions/${name}/revert`, { to: step.name }, { headers: changeHeaders(revision) });
  await deleteCopies(stepsAmong(data, name).filter(({ number }) => number >= step.number));
}
