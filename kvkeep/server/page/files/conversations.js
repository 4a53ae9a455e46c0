// The list of conversations at the left: search, open, rename, delete.

import { ApiError, messageOf, NOT_LOADED } from "./api.js";
import { keptOf, titleOf, titleParts } from "./chat_settings.js";
import { fill, h, isComposing, markCurrent, showStatus } from "./dom.js";
import { debounce, isLive, onOperation } from "./live.js";
import { fetchSessions, onSessions } from "./session_list.js";
import { isUndoCopy, isUndoName } from "./undo.js";

const RELOAD_EVERY = 3000; // milliseconds: generations are logged when they end

/** @typedef {SessionEntry} Entry */
/** @typedef {Entry & {date?: string}} DatedEntry  date: to tell it from others of its title. */

/**
 * Fills the list and keeps it current.
 * @param {HTMLElement} container @param {boolean} edits
 */
export function conversations(container, edits) {
  const search = h("input", { type: "search", id: "search", placeholder: "Search titles (Ctrl+K)", "aria-label": "Search titles of conversations" });
  const list = h("ul", { class: "conversation-list" });
  const others = h("ul", { class: "conversation-list" });
  const otherPart = h("details", { class: "others", hidden: true }, h("summary", {}, "Prompts of other clients"), others);
  const hint = h("p", { class: "hint" });
  /** @type {Entry[]} */
  let entries = [];
  let latest = ""; // what the server said

  const draw = () => {
    const query = folded(search.value.trim());
    const shown = withDates(entries).filter((entry) => !isUndoCopy(entry, entries) && folded(`${titleOf(entry)} ${entry.name}`).includes(query));
    const named = nested(shown.filter((entry) => entry.named));
    const unnamed = shown.filter((entry) => !entry.named);
    const focused = document.activeElement?.closest("li")?.querySelector("a")?.getAttribute("href");
    fill(list, named.map(([entry, depth]) => item(entry, depth, edits, reload)));
    fill(others, unnamed.map((entry) => item(entry, 0, false, reload)));
    otherPart.hidden = !unnamed.length;
    hint.textContent = named.length ? "" : !latest ? "Loading..." : query ? "No title has these words." : "No conversations yet.";
    if (focused) [...container.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
    markLinks();
  };
  const show = (/** @type {Entry[]} */ data) => {
    const unchanged = JSON.stringify(data) === latest;
    entries = data.map(withParent);
    latest = JSON.stringify(data);
    if (!unchanged) draw();
  };
  const reload = async () => {
    try {
      await fetchSessions();
    } catch (error) {
      if (!(error instanceof ApiError)) return; // the connection's state is shown elsewhere
      showStatus(messageOf(error), true);
    }
  };
  let shownHash = ""; // whose entry is in view
  const markLinks = () => {
    markCurrent(container.querySelectorAll("a"));
    const current = location.hash === shownHash ? null : container.querySelector("a[aria-current]");
    current?.scrollIntoView({ block: "nearest" });
    if (current) shownHash = location.hash;
    const inspected = /^#\/sessions\/([^/]+)/.exec(location.hash)?.[1];
    for (const link of list.querySelectorAll("a")) if (link.dataset.name === inspected) link.setAttribute("aria-current", "true");
  };
  search.addEventListener("input", draw);
  search.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const first = list.querySelector("a");
    if (isComposing(event)) return;
    if (event.key === "Escape") leave(event);
    if (event.key === "Enter" && first) location.hash = first.getAttribute("href") || "";
  });
  /** @type {HTMLElement | null} */
  let opener = null; // what had the focus
  const leave = (/** @type {Event} */ event) => {
    event.stopPropagation(); // an answer goes on
    document.body.classList.remove("menu-open");
    if (opener) (opener.isConnected ? opener : document.getElementById("words"))?.focus({ preventScroll: true });
    opener = null;
  };
  search.addEventListener("blur", () => (opener = null));
  document.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key === "k") {
      event.preventDefault();
      document.body.classList.add("menu-open");
      const focused = /** @type {HTMLElement} */ (document.activeElement);
      search.focus();
      if (focused !== search) opener = focused;
    }
  });
  window.addEventListener("hashchange", markLinks);
  document.addEventListener("conversations", () => reload().then(draw)); // a title may have changed
  setInterval(() => document.hidden || !isLive() || reload(), RELOAD_EVERY);
  const always = new AbortController().signal;
  onOperation(debounce(reload), always);
  onSessions(show, always);
  fill(container, search, h("div", { class: "conversation-lists" }, list, hint, otherPart));
  draw();
  reload();
}

/**
 * Returns a text for a search: in lower case, without accents.
 * @param {string} text
 */
export const folded = (text) => text.normalize("NFD").replace(/\p{M}/gu, "").toLowerCase();

const DATE = /** @type {const} */ ({ month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

/**
 * Returns entries with a date for those whose title another one has, too.
 * @param {Entry[]} entries @returns {DatedEntry[]}
 */
export function withDates(entries) {
  const titles = entries.filter(({ name }) => !isUndoName(name)).map(titleOf);
  const isTwice = (/** @type {string} */ title) => titles.indexOf(title) !== titles.lastIndexOf(title);
  return entries.map((entry) => ({ ...entry, date: isTwice(titleOf(entry)) ? new Date(entry.created * 1000).toLocaleString("en-US", DATE) : "" }));
}

// After an undo, a branch is a fork of what was kept for it: this browser knows of what it was one.
/** @param {Entry} entry @returns {Entry} */
export const withParent = (entry) => (entry.parent && isUndoName(entry.parent) ? { ...entry, parent: keptOf(entry.name).branchOf || null } : entry);

/**
 * Returns the conversation that a branch left, or that another one was begun from; null if that is not there, or there was none.
 * @param {Entry[]} entries all sessions @param {string} name
 * @returns {import("./chat_frame.js").Origin | null}
 */
export function originOf(entries, name) {
  const own = entries.find((entry) => entry.name === name);
  const parent = own && withParent(own).parent;
  const origin = own && entries.find((entry) => entry.name === (parent || keptOf(name).begunFrom) && entry.name !== name);
  return origin ? { kind: parent ? "Branch" : "New conversation", name: origin.name, title: titleOf(origin) } : null;
}

export const conversationsChanged = () => document.dispatchEvent(new CustomEvent("conversations"));

/**
 * Returns entries with their depths: branches follow what they were forked from.
 * @param {Entry[]} entries @returns {[Entry, number][]}
 */
export function nested(entries) {
  const names = new Set(entries.map(({ name }) => name));
  /** @type {Map<string, Entry[]>} */
  const branches = new Map();
  for (const entry of entries) {
    const parent = entry.parent && names.has(entry.parent) && entry.parent !== entry.name ? entry.parent : "";
    branches.set(parent, [...(branches.get(parent) || []), entry]);
  }
  /** @type {[Entry, number][]} */
  const result = [];
  const placed = new Set();
  /** @param {Entry} entry @param {number} depth */
  const place = (entry, depth) => {
    if (placed.has(entry.name)) return;
    placed.add(entry.name);
    result.push([entry, depth]);
    for (const branch of branches.get(entry.name) || []) place(branch, depth + 1);
  };
  for (const entry of branches.get("") || []) place(entry, 0);
  for (const entry of entries) place(entry, 0); // of parents in a circle
  return result;
}

// Its buttons are hidden until its link has the focus, so a dialog cannot give the focus back to them.
/** @param {string} name */
export const focusItem = (name) => /** @type {HTMLElement[]} */ ([...document.querySelectorAll("#conversations a")]).find((link) => link.dataset.name === name)?.focus();

/** @type {Record<string, string>} */
const SIGNS = { Rename: "✎", Delete: "×" };

/** @param {DatedEntry} entry @param {number} depth @param {boolean} edits @param {() => Promise<void>} reload */
function item(entry, depth, edits, reload) {
  const { name } = entry;
  const title = titleOf(entry);
  const state = [entry.date ? h("small", {}, ` ${entry.date}`) : null, entry.busy ? h("small", { class: "working" }, " working") : null];
  const toMessage = () => location.hash === `#/chat/${name}` && document.getElementById("words")?.focus(); // the view stays
  const link = h("a", { href: `#/chat/${name}`, title: title === name ? name : `${title}\n${name}`, "data-name": name, onclick: toMessage }, titleParts(title), state);
  /** @param {string} label @param {() => void} run */
  const button = (label, run) => h("button", { class: "small", title: label, "aria-label": `${label} ${title}`, onclick: run }, SIGNS[label]);
  /** @param {"rename" | "remove"} which */
  const ask = (which) => async () => {
    const dialogs = await import("./conversation_dialogs.js").catch(() => null);
    return dialogs ? dialogs[which](entry, title, reload) : showStatus(NOT_LOADED, true);
  };
  const buttons = edits ? h("span", { class: "item-buttons" }, button("Rename", ask("rename")), button("Delete", ask("remove"))) : null;
  const indent = { paddingLeft: `${Math.min(depth, 4) * 14}px` };
  return h("li", { style: indent }, depth ? h("span", { "aria-label": "branch" }, "↳ ") : null, link, buttons);
}
