// The message box: text, attached files, and buttons to send and to stop.

import { h, fill, showStatus } from "./dom.js";
import { withFiles } from "./message_parts.js";

const MAX_FILE_BYTES = 2_000_000;

/**
 * Creates the message box.
 * @param {(text: string) => void} onSend @param {() => void} onStop @param {() => void} onSettings
 */
export function composer(onSend, onStop, onSettings) {
  /** @type {{name: string, text: string}[]} */
  let files = [];
  const input = h("textarea", { id: "words", rows: "1", placeholder: "Write a message", title: "Enter sends, Shift+Enter starts a line" });
  const picker = h("input", { type: "file", multiple: true, hidden: true, "aria-label": "Files to attach" });
  const chips = h("ul", { class: "chips", hidden: true, "aria-label": "Attached files" });
  const sendButton = h("button", { class: "main" }, "Send");
  const stopButton = h("button", { type: "button", hidden: true, onclick: onStop }, "Stop");
  let busy = false;

  const resize = () => {
    input.style.height = "auto";
    input.style.height = `${Math.min(input.scrollHeight + 2, 220)}px`;
  };
  const drawChips = () => {
    chips.hidden = !files.length;
    fill(chips, files.map((file) => h("li", {}, file.name, removeButton(file))));
  };
  /** @param {{name: string, text: string}} file */
  const removeButton = (file) => {
    const remove = () => {
      files = files.filter((other) => other !== file);
      drawChips();
      input.focus();
    };
    return h("button", { type: "button", class: "small", "aria-label": `Remove ${file.name}`, onclick: remove }, "×");
  };
  /** @param {Iterable<File>} chosen */
  const attach = async (chosen) => {
    for (const file of chosen) {
      const text = file.size <= MAX_FILE_BYTES ? await file.text() : "";
      if (file.size > MAX_FILE_BYTES) showStatus(`${file.name} is larger than 2 MB: attach a part of it.`, true);
      else if (text.includes("\0")) showStatus(`${file.name} is not a text file: attach text, such as code or Markdown.`, true);
      else files.push({ name: file.name, text });
    }
    drawChips();
    input.focus();
  };
  const send = () => {
    if (busy || (!input.value.trim() && !files.length)) return;
    const text = withFiles(input.value, files);
    [input.value, files] = ["", []];
    drawChips();
    resize();
    onSend(text);
  };
  input.addEventListener("input", resize);
  input.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  picker.addEventListener("change", () => attach(picker.files || []).then(() => (picker.value = "")));
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    send();
  };
  const form = h(
    "form",
    { class: "composer", onsubmit: submit },
    h("label", { for: "words", class: "sr" }, "Message"),
    chips,
    input,
    picker,
    h(
      "div",
      { class: "actions" },
      h("button", { type: "button", onclick: () => picker.click() }, "Attach"),
      h("button", { type: "button", onclick: onSettings }, "Settings"),
      h("span", { class: "spring" }),
      stopButton,
      sendButton,
    ),
  );
  form.addEventListener("dragover", (/** @type {Event} */ event) => event.preventDefault());
  form.addEventListener("drop", (/** @type {DragEvent} */ event) => {
    event.preventDefault();
    attach(event.dataTransfer?.files || []);
  });

  return {
    element: form,
    focus: () => input.focus({ preventScroll: true }),
    /** @param {boolean} value */
    setBusy(value) {
      busy = value;
      sendButton.disabled = value;
    },
    /** @param {boolean} value whether an answer is generated */
    setStoppable(value) {
      stopButton.hidden = !value;
    },
    /** Puts a message back that was not sent. @param {string} text */
    restore(text) {
      if (!input.value) input.value = text;
      resize();
    },
  };
}
