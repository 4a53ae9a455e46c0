// The entry point: routes URL hashes to views.

import { ApiError, BROKEN_OFF, get, isReceiving, keyProblem, messageOf, NO_ANSWER, NOT_LOADED, setKey } from "./api.js";
import { byId, fill, h, markCurrent, showStatus, statusText } from "./dom.js";
import { chat } from "./chat.js";
import { storeDrafts, storeOnLeaving } from "./chat_place.js";
import { conversations } from "./conversations.js";
import { followOperations, KEY_REFUSED } from "./live.js";
import { undoByKey } from "./undo_button.js";

/** @typedef {(container: any, view: View) => Promise<void>} ShowView */

// Views by their URLs. Those of the inspector are loaded once they are asked for.
/** @type {[RegExp, () => ShowView | Promise<ShowView>][]} */
const VIEWS = [
  [/^#?\/?$/, () => chat],
  [/^#\/chat\/([^/]+)$/, () => chat],
  [/^#\/sessions$/, async () => (await import("./sessions.js")).sessions],
  [/^#\/tree$/, async () => (await import("./tree.js")).tree],
  [/^#\/operations$/, async () => (await import("./operations.js")).operations],
  [/^#\/missed(?:\/(\d+))?$/, async () => (await import("./misses.js")).misses],
  [/^#\/sessions\/([^/]+)\/heads(?:\/(\d+)\/(\d+))?$/, async () => (await import("./heads.js")).heads],
  [/^#\/sessions\/([^/]+)(?:\/at\/(\d+))?$/, async () => (await import("./session.js")).session],
];

const content = byId("content");
let currentView = new AbortController(); // aborted when the view is left
let hasFailedModule = false;
let isUnanswered = false; // whether the view could not be shown, as the server did not answer
let isRefused = false; // whether the server refused the API key: nothing is tried again
/** @type {PageSettings} */
let settings = { edits: false, model: "" };
const RETRY_EVERY = 1000; // milliseconds

/** @param {boolean} focus whether the content gets it */
async function showView(focus) {
  const hash = location.hash;
  if (hash && !hash.startsWith("#/")) return; // an anchor inside the current view
  currentView.abort();
  isUnanswered = false;
  for (const dialog of document.querySelectorAll("dialog")) dialog.close("left"); // of the view that is left
  currentView = new AbortController();
  const { signal } = currentView;
  showStatus("");
  document.body.classList.remove("menu-open");
  markCurrent(document.querySelectorAll("nav a"));
  const [pattern, load] = VIEWS.find(([candidate]) => candidate.test(hash)) || VIEWS[0];
  document.body.append(byId("status")); // a chat has it above its message box
  const loaded = load();
  const isChat = loaded === chat;
  const container = containerOf(isChat);
  fill(content, container);
  try {
    document.body.classList.toggle("chatting", isChat);
    const view = await withStyles(loaded, isChat);
    if (signal.aborted) return;
    await view(container, { signal, edits: settings.edits, parts: pattern.exec(hash) || [], settings });
  } catch (error) {
    if (signal.aborted) return;
    if (error instanceof ApiError && error.status === 401) return askForKey();
    showFailure(container, error);
  }
  if (signal.aborted) return;
  byId("skip").textContent = messageBox() ? "Skip to the message box" : "Skip to content";
  if (focus && !isChat) content.focus({ preventScroll: true });
}

/** @type {Promise<unknown> | null} */
let styles = null; // of the inspector, once it was opened

/** Waits for a view and for its styles. @param {ShowView | Promise<ShowView>} loaded @param {boolean} isChat which has its own from the beginning */
async function withStyles(loaded, isChat) {
  const load = () => new Promise((resolve, reject) => document.head.append(h("link", { rel: "stylesheet", href: "/page/inspector.css", onload: resolve, onerror: reject })));
  try {
    const [view] = await Promise.all([loaded, isChat ? null : (styles ??= load())]);
    return view;
  } catch {
    hasFailedModule = true;
    throw new Error(NO_ANSWER);
  }
}

/** @param {HTMLElement} container @param {unknown} error */
function showFailure(container, error) {
  document.body.append(byId("status"));
  document.body.classList.remove("chatting"); // a chat has no margins
  isUnanswered = !(error instanceof ApiError) || error.status >= 500;
  fill(container, h("h1", {}, "Error"), h("p", {}, messageOf(error)), isUnanswered ? h("button", { onclick: tryAgain }, "Try again") : null);
}

// Shows a view again that could not be shown. Browsers need a new page for a module that could not be loaded.
function tryAgain() {
  if (hasFailedModule) {
    storeDrafts();
    location.reload();
  } else showView(true);
}

// Tries again when the link to a view that could not be shown is clicked: the URL stays the same.
/** @param {Event} event */
function onClick(event) {
  const link = /** @type {HTMLElement} */ (event.target).closest("a");
  if (isUnanswered && link && link.getAttribute("href") === (location.hash || "#/")) tryAgain();
}

// Shows whether the server's operations are followed. A view that could not be shown is shown anew once they are again.
/** @param {HTMLElement} connection @param {string} state */
function showConnection(connection, state) {
  const [gone, isLive] = [byId("gone"), state === "live"];
  const isBack = isLive && !gone.hidden;
  connection.textContent = state;
  isRefused = state === KEY_REFUSED;
  if (isRefused) askForKey();
  explainGone();
  gone.hidden = isLive;
  if (isBack && [NO_ANSWER, BROKEN_OFF].includes(statusText() || "")) showStatus("");
  if (isBack && isUnanswered) tryAgain();
}

const GONE = "The server does not answer: trying again. What you see may be outdated.";
const CLOSING = "The server may be shutting down or restarting; the answer still arrives.";

const NEEDS_KEY = "The server refuses this page's API key: load the page again to enter another one.";

const explainGone = () => (byId("gone").textContent = isRefused ? NEEDS_KEY : isReceiving() ? CLOSING : GONE);

// A chat draws itself before it asks the server.
/** @param {boolean} isChat */
const containerOf = (isChat) => h("div", {}, isChat ? null : h("p", { class: "hint" }, "Loading..."));

const messageBox = () => document.getElementById("words");

async function askForKey() {
  const fields = [{ name: "key", label: "API key", kind: "password", required: true, problem: keyProblem }];
  const loaded = await import("./dialog.js").catch(() => null);
  if (!loaded) return showStatus(NOT_LOADED, true);
  const values = await loaded.promptDialog("API key required", fields, "Continue");
  if (values) {
    setKey(values.key);
    location.reload();
  }
}

// Loads what the server says about itself, however long it takes to answer. Returns false if it wants an API key.
async function loadSettings() {
  for (;;) {
    try {
      settings = await get("/v1/page");
      return true;
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) return false;
      showStatus(`${messageOf(error)} Trying again.`, true);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_EVERY));
  }
}

async function start() {
  if (!(await loadSettings())) return askForKey();
  const connection = h("span", { class: "state" });
  fill(byId("about"), `${settings.model}${settings.edits ? "" : ", read-only"} `, connection);
  window.addEventListener("hashchange", () => showView(true));
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the URL stays that of the view
    (messageBox() || content).focus();
  });
  byId("menu").addEventListener("click", () => document.body.classList.toggle("menu-open"));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") document.body.classList.remove("menu-open");
  });
  document.addEventListener("keydown", undoByKey);
  storeOnLeaving();
  document.addEventListener("click", onClick);
  document.addEventListener("streams", explainGone);
  followOperations((state) => showConnection(connection, state));
  conversations(byId("conversations"), settings.edits);
  await showView(false);
}

start();
