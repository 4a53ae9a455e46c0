// The message box: text, attached files, and buttons to send and to stop.

import { beforeDraft } from "./chat_place.js";
import { h, fill, isComposing, showStatus } from "./dom.js";
import { withFiles } from "./message_parts.js";

const MAX_FILE_BYTES = 2_000_000;

/** Returns a file's text; null if it has none in UTF-8, or is gone. @param {File} file */
async function textOf(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

/**
 * Creates the files that are attached to a message, as a list of chips and a picker.
 * @param {() => void} onChange
 */
function attachments(onChange) {
  /** @type {{name: string, text: string}[]} */
  let files = [];
  const picker = h("input", { type: "file", multiple: true, hidden: true, "aria-label": "Files to attach" });
  const chips = h("ul", { class: "chips", hidden: true, "aria-label": "Attached files" });
  /** @param {{name: string, text: string}[]} chosen */
  const show = (chosen) => {
    files = chosen;
    chips.hidden = !files.length;
    fill(chips, files.map((file) => h("li", {}, file.name, removeButton(file))));
  };
  /** @param {{name: string, text: string}} file */
  const removeButton = (file) => {
    const remove = () => {
      show(files.filter((other) => other !== file));
      onChange();
    };
    return h("button", { type: "button", class: "small", "aria-label": `Remove ${file.name}`, onclick: remove }, "×");
  };
  /** @param {Iterable<File>} chosen */
  const add = async (chosen) => {
    const added = [];
    for (const file of chosen) {
      const text = file.size > MAX_FILE_BYTES ? null : await textOf(file);
      if (text !== null) added.push({ name: file.name, text });
      else if (file.size > MAX_FILE_BYTES) showStatus(`${file.name} is larger than 2 MB: attach a part of it.`, true);
      else showStatus(`${file.name} is not a text file that can be read: attach text in UTF-8, such as code or Markdown.`, true);
    }
    show([...files, ...added]);
    onChange();
  };
  picker.addEventListener("change", () => add(picker.files || []).then(() => (picker.value = "")));
  return { picker, chips, add, show, files: () => files };
}

/**
 * Returns the function of `watchSize`, which is loaded once there is a text. Without the server there is no warning.
 * @param {() => import("./message_size.js").Room} room @param {(warning: string) => void} show
 * @returns {(text: string) => void}
 */
function sizeMeter(room, show) {
  /** @type {Promise<(text: string) => void> | null} */
  let loading = null;
  return (text) => {
    if (text.trim()) loading ??= import("./message_size.js").then(({ watchSize }) => watchSize(room, show));
    loading?.then((measure) => measure(text)).catch(() => {});
  };
}

/**
 * Creates the message box.
 * @param {(text: string, typed: string) => void} onSend  typed: without the files, if there is more @param {() => void} onStop @param {() => void} onSettings
 * @param {() => import("./message_size.js").Room} room
 */
export function composer(onSend, onStop, onSettings, room) {
  const input = h("textarea", { id: "words", rows: "1", placeholder: "Write a message (/)", title: "Enter sends, Shift+Enter starts a line" });
  const warning = h("p", { class: "size-warning", role: "status" });
  const measure = sizeMeter(room, (text) => (warning.textContent = text));
  const measureAll = () => measure(withFiles(input.value, attached.files()));
  const onFiles = () => {
    input.focus();
    measureAll();
  };
  const attached = attachments(onFiles);
  const sendButton = h("button", { class: "main" }, "Send");
  const stopButton = h("button", { type: "button", hidden: true, onclick: onStop }, "Stop");
  const settingsButton = h("button", { type: "button", onclick: onSettings }, "Settings");
  let busy = ""; // why nothing can be sent

  const resize = () => {
    input.style.height = "auto";
    input.style.height = `${Math.min(input.scrollHeight + 2, 220)}px`;
  };
  const send = () => {
    const files = attached.files();
    if (!input.value.trim() && !files.length) return;
    if (busy) return showStatus(busy, false, true);
    const typed = input.value;
    const text = withFiles(typed, files);
    input.value = "";
    attached.show([]);
    resize();
    measureAll();
    input.focus(); // the button that was clicked is disabled
    onSend(text, typed.trim() ? typed : text);
  };
  for (const update of [resize, measureAll]) input.addEventListener("input", update);
  input.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter" && !event.shiftKey && !isComposing(event)) {
      event.preventDefault();
      send();
    }
  });
  const submit = (/** @type {Event} */ event) => (event.preventDefault(), send());
  const form = h(
    "form",
    { class: "composer", onsubmit: submit },
    h("label", { for: "words", class: "sr" }, "Message"),
    attached.chips,
    input,
    warning,
    attached.picker,
    h(
      "div",
      { class: "actions" },
      h("button", { type: "button", onclick: () => attached.picker.click() }, "Attach"),
      settingsButton,
      h("span", { class: "spring" }),
      stopButton,
      sendButton,
    ),
  );
  const onDrag = (/** @type {DragEvent} */ event) => {
    if (!event.dataTransfer?.types.includes("Files")) return; // text goes where it is dropped
    event.preventDefault();
    if (event.type === "drop") attached.add(event.dataTransfer.files);
  };
  for (const kind of ["dragover", "drop"]) form.addEventListener(kind, onDrag);

  return {
    element: form,
    focus: () => input.focus({ preventScroll: true }),
    measure: measureAll,
    /** @param {string} reason "" if a message can be sent */
    setBusy(reason) {
      busy = reason;
      sendButton.disabled = Boolean(reason);
      settingsButton.disabled = Boolean(reason); // it changes the conversation, too
    },
    /** @param {boolean} value whether an answer is generated */
    setStoppable(value) {
      stopButton.hidden = !value;
      sendButton.hidden = value;
    },
    get draft() {
      return { text: input.value, files: attached.files() };
    },
    set draft({ text, files }) {
      input.value = text;
      attached.show(files);
      resize();
      measureAll();
    },
    /** Puts a message back that was not sent. @param {string} text */
    restore(text) {
      this.draft = { ...this.draft, text: beforeDraft(text, input.value) };
    },
  };
}
