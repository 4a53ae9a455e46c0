// The memory beside the chat: budget, what the last answer reused, and what can be done with a turn.

import { get, messageOf, NOT_LOADED } from "./api.js";
import { bytes, fill, h, jsonLink, showStatus } from "./dom.js";
import { answerText, branchText, canPin, cellsToPin, compressedText, compressText, fixedText, heldText, instead, irreplaceableText, isPinnable, nameOf, noWayBackText, pinText, removeText, replaceText, RESERVED_HINT, sizeText, unpinText } from "./memory_text.js";
import { wordsLink } from "./message.js";
import { isPrompt, reuseText } from "./reuse.js";
import { legend } from "./turn_strip.js";
import { canGoBackTo, canRemove, pinnable, rangesOf, sharesOf, turnTitle, withoutEnd } from "./turns.js";

/** @typedef {import("./turns.js").Turn} Turn */
/**
 * @typedef {object} Actions  What the panel asks of the chat.
 * @property {(operation: string, path: string, bodies: any[], message: import("./memory_text.js").ChangeMessage, shown?: Memory) => Promise<boolean>} change  whether it was done. bodies: of one request each. shown: what they are for, by default what is shown when it begins
 * @property {(part: import("./turns.js").Part) => {memory: Memory, part: import("./turns.js").Part} | null} now  where a part is now, if it is still what it was
 * @property {(at: number) => void} branch
 */

/**
 * Creates the panel. actions: null if changes are not allowed.
 * @param {Actions | null} actions
 */
export function memoryPanel(actions) {
  const heading = h("h2", {}, "Memory");
  const budget = h("div", {}, h("p", { class: "hint" }, "Nothing yet. Here is what the model still holds, once something was said."));
  const answer = h("div");
  const turnPart = h("div", { class: "turn-card", tabindex: "-1" });
  const compressPart = h("div");
  let shownAnswer = ""; // what was said of it
  let pressed = -1; // the number of the turn's button that was pressed last
  const buttons = () => /** @type {HTMLElement[]} */ ([...turnPart.querySelectorAll("button")]);
  turnPart.addEventListener("click", (/** @type {Event} */ event) => (pressed = buttons().indexOf(/** @type {HTMLElement} */ (event.target))));
  const element = h("aside", { class: "memory-panel", "aria-label": "Memory", tabindex: "0" }, heading, budget, answer, turnPart, compressPart);
  let compressedFor = ""; // the policy whose control is drawn
  let updateCost = () => {};
  let fitRatio = () => {}; // to one that is possible
  /** @type {Memory | null} */
  let latest = null;

  return {
    element,
    turnPart,
    openCompress() {
      compressPart.querySelector("details")?.setAttribute("open", "");
      fitRatio();
    },
    /** Gives the focus to what was pressed last, or to the button in its place. @param {FocusOptions} [options] */
    focus(options) {
      if (!element.contains(document.activeElement)) (buttons()[pressed] || element).focus(options);
    },
    /** @param {Memory} memory */
    drawBudget: (memory) => fill(budget, budgetElements(memory)),
    /** @param {Memory} memory @param {Turn[]} turns @param {string | null} selected */
    draw(memory, turns, selected) {
      latest = memory;
      fill(heading, "Memory ", jsonLink(`/v1/sessions/${memory.name}/memory`));
      fill(budget, budgetElements(memory));
      const sentence = answerSentence(memory);
      if (sentence !== shownAnswer) fill(answer, h("p", {}, sentence), isPrompt(memory) ? whyButton(memory, answer) : null);
      shownAnswer = sentence; // an explanation stays while the answer does
      const turn = turns.find(({ label }) => label === selected);
      fill(turnPart, turn ? turnElements(memory, turn, actions) : h("p", { class: "hint" }, "Select a turn in the strip or by its Memory button to pin, remove or replace it."));
      if (actions && compressedFor !== memory.policy) {
        compressedFor = memory.policy;
        const control = compressControl(() => /** @type {Memory} */ (latest), actions);
        fill(compressPart, control.elements);
        [updateCost, fitRatio] = [control.update, control.fit];
      }
      updateCost();
    },
  };
}

const NEARLY_FULL = 0.95; // of the budget

/** @param {Memory} memory */
function budgetElements(memory) {
  const most = memory.max_kv_size;
  return [
    most ? h("meter", { min: "0", max: String(most), high: String(NEARLY_FULL * most), optimum: "0", value: String(memory.cells), "aria-label": "Cells in use" }) : null,
    h("p", { title: RESERVED_HINT }, sizeText(memory, bytes)),
    legend(memory),
  ];
}

/** @param {Memory} memory */
function answerSentence(memory) {
  if (memory.last_prompt && isPrompt(memory)) return `Of the last prompt, ${reuseText(memory.last_prompt)}.`;
  return memory.last_answer ? answerText(memory.last_answer) : "";
}

// A button that shows the two texts at which the last prompt of a session left its memory.
/** @param {Memory} memory @param {HTMLElement} container */
function whyButton(memory, container) {
  const notLoaded = () => {
    throw new Error(NOT_LOADED);
  };
  const show = async () => {
    const [{ data }, texts] = await Promise.all([get("/v1/prefix/misses"), import("./miss_text.js").catch(notLoaded)]);
    const miss = texts.missOf(data, memory);
    const text = miss ? texts.missElements(miss) : h("p", {}, "The rest was new, or the prompt is no longer among the last that are listed.");
    const explanation = h("div", { tabindex: "-1" }, text);
    container.append(explanation);
    explanation.focus({ preventScroll: true });
    button.remove();
  };
  const button = h("button", { class: "small", onclick: () => show().catch((error) => showStatus(messageOf(error), true)) }, "Why not more?");
  return button;
}

/** @param {Memory} memory @param {Turn} turn @param {Actions | null} actions */
function turnElements(memory, turn, actions) {
  const title = turnTitle(turn);
  const what = turn.label === "opening" ? h("p", { class: "hint" }, "What the chat template writes before the first message, such as the model's own system prompt.") : null;
  const words = withoutEnd(sharesOf(memory, turn.start, turn.end)).some(({ standing }) => standing === "forgotten") ? wordsLink(memory, turn) : null;
  const heading = [h("h3", {}, title), what, h("p", {}, heldText(memory, turn), words ? [" ", words] : null)];
  if (!actions) return heading;
  const { start, end } = turn;
  const isHeld = (/** @type {import("./turns.js").Part} */ part) => !rangesOf(memory, part.start, part.end, (standing) => standing === "forgotten").length;
  const held = rangesOf(memory, start, end, (standing) => standing !== "forgotten");
  const lost = rangesOf(memory, start, end, (standing) => standing === "forgotten");
  const lastFirst = [...held, ...lost].sort((a, b) => b.start - a.start); // the numbers of those before stay
  const remove = () => actions.change("remove", "edit", lastFirst.map((range) => ({ op: "delete", ...range })), `${title} was removed from memory and from this chat.`);
  const replaceable = turn.parts.filter((part) => isHeld(part) && canRemove(memory, part));
  const canBranch = canGoBackTo(memory, end);
  const isRemovable = canRemove(memory, turn);
  const impossible = [
    !held.length ? "Nothing of it is in memory any more, so it cannot be pinned or replaced." : "",
    ...(held.length ? turn.parts.filter((part) => !replaceable.includes(part)).map((part) => irreplaceableText(memory, part)) : []),
    isRemovable ? "" : `It cannot be removed: ${fixedText(memory, turn)}.`,
    canBranch ? "" : `No branch can begin here, as ${noWayBackText(memory, end)}. Edit asks a message anew.`,
  ];
  return [
    heading,
    pinnable(turn).map((range) => pinAction(memory, turn, range, actions)),
    isRemovable ? action("Remove", removeText(memory, turn, bytes), remove) : null,
    replaceable.map((part, index) => action(`Replace ${nameOf(part.role)}`, replaceText(memory, part, !index), () => replace(memory, part, actions))),
    canBranch ? action("Branch here", branchText(memory, bytes), () => actions.branch(end)) : null,
    impossible.filter(Boolean).map((text) => h("p", { class: "hint" }, text)),
  ];
}

/**
 * Creates what pins or unpins a part of a turn; null if none of it can be pinned.
 * @param {Memory} memory @param {Turn} turn @param {{name: string, start: number, end: number}} range @param {Actions} actions
 */
function pinAction(memory, turn, { name, start, end }, actions) {
  const subject = name ? `The ${nameOf(name)} of ${turn.label}` : turnTitle(turn);
  const label = (/** @type {string} */ verb) => (name ? `${verb} ${nameOf(name)}` : verb);
  if (rangesOf(memory, start, end, (standing) => standing === "pinned").length) {
    const unpin = () => actions.change("unpin", "unpin", [{ start, end }], `${subject} is no longer pinned.`);
    return action(label("Unpin"), unpinText(memory), unpin);
  }
  const ranges = rangesOf(memory, start, end, isPinnable);
  if (!ranges.length) return sharesOf(memory, start, end).some(({ standing }) => standing === "compressed") ? h("p", { class: "hint" }, `${label("Pin")}: not possible, as it is compressed.`) : null;
  const text = pinText(memory, { start, end });
  if (!canPin(memory, cellsToPin(memory, { start, end }))) return h("p", { class: "hint" }, `${label("Pin")}: ${text}`);
  return action(label("Pin"), text, () => actions.change("pin", "pin", ranges, `${subject} is pinned. Unpin takes it back at any time.`));
}

/** @param {string} label @param {string} cost @param {() => void} run */
const action = (label, cost, run) => h("div", { class: "memory-action" }, h("button", { onclick: run }, label), cost ? h("p", {}, cost) : null);

/** @param {Memory} memory @param {import("./turns.js").Part} part @param {Actions} actions */
async function replace(memory, part, actions) {
  const dialog = await import("./replace_dialog.js").catch(() => null);
  return dialog ? dialog.replaceText(memory, part, actions) : showStatus(NOT_LOADED, true);
}

// Creates the control that compresses the whole memory, or says what the policy has instead.
/** @param {() => Memory} memory @param {Actions} actions */
function compressControl(memory, actions) {
  const other = instead(memory().policy);
  if (other) return { elements: [h("p", { class: "hint" }, other)], update: () => {}, fit: () => {} };
  const slider = h("input", { type: "range", id: "ratio", min: "1.5", max: "16", step: "0.5", value: "4" });
  const cost = h("p", { role: "status" });
  const update = () => {
    const ratio = Number(slider.value);
    cost.textContent = `${slider.value} to 1: ${compressText(memory(), ratio, bytes)}`;
    button.disabled = ratio > (memory().highest_ratio || 0);
  };
  slider.addEventListener("input", update);
  const run = () => {
    showStatus("Compressing...");
    actions.change("compress", "compress", [{ ratio: Number(slider.value) }], compressedText);
  };
  const button = h("button", { onclick: run }, "Compress");
  const parts = [h("label", { for: "ratio" }, "Ratio"), slider, cost, button];
  const fit = () => {
    const highest = memory().highest_ratio;
    if (highest && Number(slider.value) > highest) slider.value = String(highest);
    update();
  };
  const onToggle = (/** @type {Event} */ event) => {
    fit();
    /** @type {HTMLElement} */ (event.target).scrollIntoView({ block: "nearest" });
  };
  return { elements: [h("details", { class: "compress", ontoggle: onToggle }, h("summary", {}, "Compress the whole memory"), parts)], update, fit };
}
