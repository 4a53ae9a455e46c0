// Elements, numbers and times, as every view uses them.

import { get, hasKey, messageOf } from "./api.js";

/**
 * Creates an element. Attributes that begin with "on" are event listeners.
 * @param {string} tag @param {Record<string, any>} [attributes] @param {any[]} children
 * @returns {any} an element of the type that the tag has
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name in element && typeof value !== "string") /** @type {any} */ (element)[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...present(children));
  return element;
}

/** Replaces the children of an element. @param {Element} element @param {any[]} children */
export function fill(element, ...children) {
  element.replaceChildren(...present(children));
}

/** Whether a key belongs to the composition of a character; Safari ends that before the key that accepts it. @param {KeyboardEvent} event */
export const isComposing = (event) => event.isComposing || event.keyCode === 229;

// Returns what has the focus: a link by where it leads, as a list that is drawn again has others.
export const focusNow = () => document.activeElement?.getAttribute("href") || document.activeElement;

/** @param {any[]} children @returns {any[]} */
const present = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined);

/**
 * Returns the element of the page that has an id.
 * @param {string} id @returns {HTMLElement}
 */
export const byId = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

const SHOWN_FOR = 10_000; // milliseconds: a message that is no error
let statusTimer = 0;

/**
 * Shows a message. One that lasts, such as an error, stays until the next message, others for ten seconds.
 * @param {string} text
 */
export function showStatus(text, isError = false, lasts = isError) {
  const status = byId("status");
  clearTimeout(statusTimer);
  status.textContent = text;
  status.className = isError ? "error" : "";
  if (text && !lasts) statusTimer = window.setTimeout(() => (status.textContent = ""), SHOWN_FOR);
}

/** Returns the message that is shown. */
export const statusText = () => byId("status").textContent;

/** Returns the message that is shown, which a dialog is to say instead. */
export function takeStatus() {
  const text = statusText() || "";
  showStatus("");
  return text;
}

/** Marks those of some links that lead to where the page is. @param {Iterable<Element>} links */
export function markCurrent(links) {
  for (const link of links) {
    if (link.getAttribute("href") === (location.hash || "#/")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

/** @param {number} value */
export const number = (value) => value.toLocaleString("en-US");

/** @param {number} count */
export function bytes(count) {
  const units = ["bytes", "kB", "MB", "GB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

/** @param {number} seconds since 1970 */
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();

/** @param {string} name @param {string} [text] by default its name */
export const sessionLink = (name, text = name) => h("a", { href: `#/sessions/${name}`, title: name }, text);

// A link to the view's data as JSON. With an API key the page has to fetch it: a link sends none.
/** @param {string} path */
export function jsonLink(path) {
  const open = async (/** @type {Event} */ event) => {
    if (!hasKey()) return;
    event.preventDefault();
    const data = await get(path).catch((error) => showStatus(messageOf(error), true));
    if (data) window.open(URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" })));
  };
  return h("a", { class: "json-link", href: path, target: "_blank", rel: "noopener", title: "What is shown here, as JSON", onclick: open }, "JSON");
}

/** @param {string} text @param {string | null} path of its JSON @param {any[]} children */
export function title(text, path, ...children) {
  document.title = `${text} - kvkeep`;
  return h("div", { class: "title" }, h("h1", {}, text), path ? jsonLink(path) : null, ...children);
}
