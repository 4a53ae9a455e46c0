// Which view a URL shows; what all of them have around them.

import { get, Refused, setKey } from "./api.js";
import { asked, fill, h, tell } from "./dom.js";
import { follow } from "./live.js";
import { heads } from "./heads.js";
import { missed } from "./missed.js";
import { operations } from "./operations.js";
import { session } from "./session.js";
import { sessions } from "./sessions.js";
import { tree } from "./tree.js";

const VIEWS = [
  [/^#?\/?$/, sessions],
  [/^#\/tree$/, tree],
  [/^#\/operations$/, operations],
  [/^#\/missed(?:\/(\d+))?$/, missed],
  [/^#\/sessions\/([^/]+)\/heads$/, heads],
  [/^#\/sessions\/([^/]+)$/, session],
];

const content = document.getElementById("content");
let leaving = new AbortController();
let settings = { edits: false, model: "" };

async function show(focus) {
  const hash = location.hash;
  if (hash && !hash.startsWith("#/")) return; // a place in this view
  leaving.abort();
  for (const dialog of document.querySelectorAll("dialog")) dialog.close(); // it asks about another view
  leaving = new AbortController();
  const { signal } = leaving;
  tell("");
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.getAttribute("href") === (hash || "#/");
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const [pattern, view] = VIEWS.find(([each]) => each.test(hash)) || VIEWS[0];
  const place = h("div");
  fill(content, place);
  try {
    await view(place, { signal, edits: settings.edits, parts: pattern.exec(hash) || [] });
  } catch (error) {
    if (signal.aborted) return;
    if (error instanceof Refused && error.status === 401) return letIn();
    fill(place, h("h1", {}, "That cannot be shown"), h("p", {}, error.message));
  }
  if (signal.aborted) return;
  if (focus) content.focus({ preventScroll: true });
}

async function letIn() {
  const given = await asked("This server asks for a key", [{ name: "key", label: "Key", kind: "password", required: true }], "Go on");
  if (given) {
    setKey(given.key);
    location.reload();
  }
}

async function begin() {
  try {
    settings = await get("/v1/page");
  } catch (error) {
    if (error instanceof Refused && error.status === 401) return letIn();
    tell(error.message, true);
  }
  const state = h("span", { class: "state" });
  fill(document.getElementById("about"), `${settings.model}${settings.edits ? "" : ", read only"} `, state);
  window.addEventListener("hashchange", () => show(true));
  follow((now) => {
    state.textContent = now;
  });
  await show(false);
}

begin();
