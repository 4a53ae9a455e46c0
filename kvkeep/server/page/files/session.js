// One session: its strip, its text, its spans.

import { get } from "./api.js";
import { Change, selectionBar, sessionButtons } from "./actions.js";
import { bytes, fill, h, number, sessionLink, showStatus, title } from "./dom.js";
import { debounce, onOperation, rate } from "./live.js";
import { reuseText } from "./misses.js";
import { stateText } from "./sessions.js";
import { strip } from "./strip.js";
import { fetchPieces, redraw, Selection, tokenElements } from "./tokens.js";

const SHOWN = 2048; // tokens of the text at a time

export async function session(container, { signal, edits, parts }) {
  const name = parts[1];
  const path = `/v1/sessions/${name}/memory`;
  let memory = await get(path);
  let isDrawn = false; // whether what is drawn shows `memory`
  /** @type {number | null} */
  let stableRevision = null; // a revision in which the selected tokens still have the same numbers
  let [lastRequest, lastApplied] = [0, 0]; // numbers of requests for the memory
  /** @type {number | null} */
  let first = null; // first token of the text that is shown; null for the end of the text
  const facts = h("p");
  const text = h("div", { class: "text", tabindex: "0", role: "region", "aria-label": "Text" });
  const paging = h("div", { class: "actions" });

  const reload = async () => {
    const request = ++lastRequest;
    try {
      const latest = await get(path);
      if (signal.aborted || request < lastApplied) return;
      lastApplied = request;
      const unchanged = latest.revision === memory.revision && isDrawn;
      memory = latest;
      if (unchanged) fill(facts, factLine(memory)); // tokens under the pointer stay in place
      else await draw();
    } catch (error) {
      if (!signal.aborted) showStatus(error.message, true);
    }
  };
  const markStable = (revision) => {
    stableRevision = revision;
  };
  const view = { reload, markStable, pendingChanges: 0 };
  const newChange = edits ? () => new Change(name, memory.revision, view) : null;
  const selection = new Selection(() => {
    selectionControls.update();
    markSelected(selection);
  }, signal);
  const textOf = async (start, end) => (await fetchPieces(name, start, end)).map((piece) => piece.text).join("");
  const selectSpan = (label) => {
    const span = memory.spans[label];
    if (span) selection.set(span.start, span.end, memory.revision, label);
  };
  const selectionControls = selectionBar(selection, newChange, () => memory, textOf, selectSpan);
  const firstShown = () => (first === null ? Math.max(0, memory.tokens - SHOWN) : first);
  const selectToken = async (token) => {
    const { revision } = memory;
    if (token < firstShown() || token >= firstShown() + SHOWN) {
      first = Math.max(0, token - SHOWN / 2);
      await redrawText();
    }
    selection.set(token, token + 1, revision);
    text.querySelector(`[data-at="${token}"]`)?.scrollIntoView({ block: "nearest" });
  };
  const tokenStrip = strip(name, selectToken);

  async function drawText() {
    const [start, drawnMemory, drawnFirst] = [firstShown(), memory, first];
    const end = Math.min(drawnMemory.tokens, start + SHOWN);
    const tokens = await fetchPieces(name, start, end);
    if (drawnMemory.revision !== memory.revision || drawnFirst !== first) return; // outdated by a later call
    redraw(text, tokenElements(tokens, drawnMemory));
    const pageButton = (label, page) => h("button", { onclick: () => showFrom(page) }, label);
    fill(
      paging,
      start > 0 ? pageButton("Earlier", Math.max(0, start - SHOWN)) : null,
      end < drawnMemory.tokens ? pageButton("Later", end) : null,
    );
    markSelected(selection);
  }
  const showFrom = (start) => {
    first = start + SHOWN >= memory.tokens ? null : start;
    return redrawText();
  };
  const redrawText = () => drawText().catch((error) => signal.aborted || showStatus(error.message, true));

  async function draw() {
    fill(facts, factLine(memory));
    tokenStrip.draw(memory);
    selectionControls.updateSpans();
    if (selection.follow(memory, stableRevision)) {
      showStatus("The session has changed; the selection was cleared.");
    }
    selectionControls.update();
    isDrawn = true;
    await drawText();
  }

  const reloadSoon = debounce(() => {
    if (view.pendingChanges) reloadSoon(); // the operation may be this page's own change
    else reload();
  });
  onOperation((operation) => {
    if (operation && operation.session !== name) return;
    // Revisions may restart: after a restart of the server, or with a new session of this name.
    if (!operation || operation.what === "delete") {
      [isDrawn, stableRevision] = [false, null];
      selection.clear();
    }
    reloadSoon();
  }, signal);
  const memoryView = h("section", { class: "memory", "aria-label": "Memory" }, h("h2", {}, "Text"), text, paging);
  const chatLink = h("a", { class: "button", href: `#/chat/${name}` }, "Chat");
  const buttons = h("div", { class: "actions" }, chatLink, edits ? sessionButtons(newChange, () => memory) : null);
  fill(
    container,
    title(name, path, buttons),
    facts,
    tokenStrip.element,
    selectionControls.element,
    memoryView,
  );
  await draw();
  text.scrollTop = text.scrollHeight;
}

function factLine(memory) {
  const budget = memory.max_kv_size ? ` of ${number(memory.max_kv_size)}` : "";
  const shared = memory.bytes_shared ? `, ${bytes(memory.bytes_shared)} shared` : "";
  const tokensPerSecond = rate(memory.name);
  return [
    `${number(memory.tokens)} tokens in ${number(memory.cells)}${budget} cells, ${memory.policy}. `,
    `${bytes(memory.bytes)}${shared}. `,
    overwrittenParts(memory),
    memory.parent ? ["Forked from ", sessionLink(memory.parent), ". "] : "",
    memory.last_prompt ? `Last prompt: ${reuseText(memory.last_prompt)}. ` : "",
    tokensPerSecond ? `${tokensPerSecond.toFixed(1)} tokens/s. ` : "",
    `${stateText(memory)}. `.replace(/^./, (letter) => letter.toUpperCase()),
    h("a", { href: `#/sessions/${memory.name}/heads` }, "Cells by head"),
  ].flat();
}

// Returns what local windows, states and checkpoints take, and what a rewind costs; "" without any.
function overwrittenParts(memory) {
  const { cells, ...others } = memory.bytes_by_part;
  const parts = Object.entries(others).filter(([, size]) => size);
  if (!parts.length) return "";
  const sizes = parts.map(([part, size]) => `${bytes(size)} of ${part}`).join(", ");
  const ends = memory.checkpoints.map(number).join(", ");
  const evaluated = memory.rewind_evaluates;
  return [
    `${bytes(cells)} of cells, ${sizes}. `,
    ends ? `Checkpoints after ${ends} tokens. ` : "",
    evaluated === null ? "" : `A rewind of one token evaluates ${number(evaluated)} again. `,
  ].join("");
}

function markSelected(selection) {
  for (const element of document.querySelectorAll("[data-at]")) {
    const at = Number(element.getAttribute("data-at"));
    element.classList.toggle("selected", at >= selection.start && at < selection.end);
  }
}
