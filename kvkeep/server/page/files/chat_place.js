// The place of a reader in a conversation and the message that is not sent yet: shown again when the conversation is opened again.

/**
 * @typedef {object} Place
 * @property {string | undefined} label  of the first turn in view
 * @property {number} above  from the top of the view to that turn, in pixels: below 0 if it begins out of view
 * @property {Map<string | undefined, number>} heights  of all turns
 */
/** @typedef {{selected: string | null, place: Place | null}} LeftView  place: null at the end of the conversation. */

/** @type {Map<string, LeftView>} */
const leftViews = new Map(); // by session, as long as the page is open

/** @param {string} name @param {LeftView} view */
export const keepView = (name, view) => leftViews.set(name, view);

/** @param {string} name @returns {LeftView} */
export const keptView = (name) => leftViews.get(name) || { selected: null, place: null };

/** @typedef {{text: string, files: {name: string, text: string}[], chosen?: import("./chat_settings.js").Chosen}} Draft  chosen: for a conversation that has not begun. */

const DRAFTS = "kvkeep drafts";

/** @type {Map<string | null, Draft> | null} */
let drafts = null; // by session, null for one that has not begun

/** Returns the drafts of this page, at first those of before it was loaded again. */
function allDrafts() {
  try {
    drafts ??= new Map(JSON.parse(sessionStorage.getItem(DRAFTS) || "[]"));
  } catch {
    drafts = new Map();
  }
  return drafts;
}

/** @param {string | null} name @param {Draft} draft */
export function keepDraft(name, draft) {
  allDrafts().set(name, draft);
}

/** Returns the draft of a conversation, which is not kept any longer. @param {string | null} name @returns {Draft} */
export function takeDraft(name) {
  const draft = allDrafts().get(name) || { text: "", files: [] };
  allDrafts().delete(name);
  return draft;
}

/** @typedef {{name: string | null, chosen: Draft["chosen"], frame: {box: {draft: Draft}}}} OpenView  A chat that is shown. */

/** @type {OpenView | null} */
let openView = null;

/** @param {OpenView} view */
const draftOf = ({ name, chosen, frame }) => ({ ...frame.box.draft, ...(name === null ? { chosen } : {}) });

/** @param {OpenView} view */
export const openedView = (view) => (openView = view);

/** Keeps the draft of a chat that is left. @param {OpenView} view */
export function closedView(view) {
  openView = null;
  keepDraft(view.name, draftOf(view));
}

/**
 * Puts a message that was not sent before the draft of its conversation, in the view that shows it if there is one.
 * @param {string | null} name @param {Draft} message
 */
export function returnDraft(name, message) {
  if (openView?.name === name) openView.frame.box.draft = joinedDraft(message, openView.frame.box.draft);
  else {
    const kept = takeDraft(name); // with the settings of a new chat
    keepDraft(name, { ...kept, ...message, ...joinedDraft(message, kept) });
  }
}

/** Events after which the page may not come back. */
const LEAVING = ["beforeunload", "pagehide", "visibilitychange"];

/** Has drafts stored before the page is left; the browser asks if there is too much of them. */
export function storeOnLeaving() {
  for (const leaving of LEAVING) window.addEventListener(leaving, (event) => storeDrafts() || event.preventDefault());
}

/** Stores the drafts for this tab's next page. Returns whether there was room for all of them; texts come before files. */
export function storeDrafts() {
  const all = new Map(allDrafts());
  if (openView) all.set(openView.name, draftOf(openView));
  const written = [...all].filter(([, { text, files }]) => text.trim() || files.length);
  const withoutFiles = written.map(([name, { text }]) => [name, { text, files: [] }]);
  for (const kept of [written, withoutFiles]) {
    try {
      sessionStorage.setItem(DRAFTS, JSON.stringify(kept));
      return kept === written;
    } catch {
      // More than a browser stores.
    }
  }
  return false;
}

/**
 * Returns a message that was not sent, before what was written since then.
 * @param {string} message @param {string} draft
 */
export const beforeDraft = (message, draft) => (draft.trim() ? `${message}\n\n${draft}` : message);

/**
 * Returns two drafts as one.
 * @param {Draft} first @param {Draft} second
 */
export const joinedDraft = (first, second) => ({
  text: first.text.trim() ? beforeDraft(first.text, second.text) : second.text,
  files: [...first.files, ...second.files],
});

/** @param {HTMLElement} log @returns {HTMLElement[]} */
const turnsIn = (log) => [...log.querySelectorAll(".turn[data-turn]")].map((turn) => /** @type {HTMLElement} */ (turn));

/**
 * Returns where a log is scrolled to; null if it has no turns.
 * @param {HTMLElement} log @returns {Place | null}
 */
export function placeOf(log) {
  const [turns, top] = [turnsIn(log), log.scrollTop];
  const shown = turns.find((turn) => turn.offsetTop + turn.offsetHeight > top + log.offsetTop) || turns.at(-1);
  if (!shown) return null;
  return { label: shown.dataset.turn, above: shown.offsetTop - top, heights: new Map(turns.map((turn) => [turn.dataset.turn, turn.offsetHeight])) };
}

/**
 * Gives turns that are to be drawn the heights of before: those out of view would get estimated ones.
 * @param {HTMLElement[]} turns @param {Place} place
 */
export function reserveHeights(turns, { heights }) {
  for (const turn of turns) {
    const height = heights.get(turn.dataset.turn);
    if (height) turn.style.containIntrinsicSize = `auto ${height}px`;
  }
}

/**
 * Scrolls a log to a place, if its turn is still there.
 * @param {HTMLElement} log @param {Place} place
 */
export function scrollToPlace(log, { label, above }) {
  const same = turnsIn(log).find((turn) => turn.dataset.turn === label);
  if (same) log.scrollTop = same.offsetTop - above;
}
