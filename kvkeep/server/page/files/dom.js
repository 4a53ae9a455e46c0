// Elements, numbers and times, as every view writes them.

import { get, hasKey } from "./api.js";

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

export function tell(text, isError = false) {
  const told = document.getElementById("told");
  told.textContent = text;
  told.className = isError ? "error" : "";
}

export const number = (value) => value.toLocaleString("en-US");

export function bytes(count) {
  const units = ["bytes", "kB", "MB", "GB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();

export const sessionLink = (name) => h("a", { href: `#/sessions/${name}` }, name);

// The same as JSON. Where a key is asked for, a link alone would not be let in.
function twin(path) {
  const opened = async (event) => {
    if (!hasKey()) return;
    event.preventDefault();
    const text = JSON.stringify(await get(path), null, 1);
    window.open(URL.createObjectURL(new Blob([text], { type: "application/json" })));
  };
  return h("a", { class: "twin", href: path, target: "_blank", rel: "noopener", onclick: opened }, "JSON");
}

export function title(text, path, ...more) {
  document.title = `${text} - kvkeep`;
  return h("div", { class: "title" }, h("h1", {}, text), path ? twin(path) : null, ...more);
}

// A dialog with fields; gives their values, or null where it was left.
export function asked(heading, fields, action) {
  return new Promise((resolve) => {
    const inputs = fields.map(field);
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", {}, heading),
      inputs.map(([label]) => label),
      h(
        "div",
        { class: "actions" },
        h("button", { value: "done", class: "main" }, action),
        h("button", { value: "", formnovalidate: "" }, "Cancel"),
      ),
    );
    const dialog = h("dialog", { "aria-label": heading }, form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      const values = Object.fromEntries(inputs.map(([, name, value]) => [name, value()]));
      resolve(dialog.returnValue === "done" ? values : null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

// One field of a dialog: its label, its name, and what gives its value.
function field({ name, label, kind = "text", value = "", choices, ...more }) {
  let input;
  if (choices) {
    input = h("select", { name }, choices.map((each) => h("option", { value: each }, each || "as the server")));
  } else if (kind === "textarea") {
    input = h("textarea", { name, rows: "4", ...more });
  } else {
    input = h("input", { name, type: kind, ...more });
  }
  if (kind === "checkbox") {
    return [h("label", { class: "check" }, input, ` ${label}`), name, () => input.checked];
  }
  input.value = value;
  const read = () => (kind === "number" ? (input.value === "" ? null : Number(input.value)) : input.value);
  return [h("label", {}, label, input), name, read];
}
