// Markdown as elements: parsed by marked, cleaned by DOMPurify, coloured by highlight.js.

import { fill, h } from "./dom.js";
import { marked } from "./vendor/marked.js";
import "./vendor/purify.js";

const LANGUAGES = new Set(["bash", "cpp", "css", "diff", "go", "java", "javascript", "json", "python", "rust", "sql", "xml", "yaml"]);
/** @type {Record<string, string>} */
const ALIASES = { sh: "bash", shell: "bash", c: "cpp", "c++": "cpp", js: "javascript", ts: "javascript", typescript: "javascript", py: "python", html: "xml", yml: "yaml", rs: "rust" };
const CLEAN = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "class", "start", "align"],
  RETURN_DOM_FRAGMENT: true,
};

/** @param {string} text */
const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

// HTML is shown as it was written, apart from line breaks and small print; an image by its text and its URL.
marked.use({
  tokenizer: {
    html() {},
    /** @this {any} @param {string} source */
    tag(source) {
      const text = /^<(?:br ?\/?|\/?su[bp])>/i.exec(source)?.[0];
      if (text) return { type: "html", raw: text, text, inLink: false, inRawBlock: false, block: false };
      const raw = this.rules.inline.tag.exec(source)?.[0]; // one text, in which no URL becomes a link
      return raw ? { type: "text", raw, text: raw, escaped: false } : undefined;
    },
  },
  renderer: {
    image: (/** @type {{href: string, text: string}} */ { href, text }) => `${escaped(text)} (<a href="${escaped(href)}">${escaped(href)}</a>)`,
  },
});

// A line that begins with a hundred quotes or lists: to parse thousands takes seconds, and fails in the end.
const TOO_DEEP = /^(?:[ \t]*(?:>|(?:[-+*]|\d{1,9}[.)])[ \t])){100}/m;

/** @type {any} */
const purify = /** @type {any} */ (globalThis).DOMPurify;

/**
 * Creates the elements of a text. final: whether the text is complete, so that its code is coloured.
 * @param {string} text @param {boolean} [final]
 * @returns {HTMLElement}
 */
export function markdown(text, final = true) {
  const element = h("div", { class: "markdown" });
  fill(element, parsed(text));
  for (const link of element.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const heading of element.querySelectorAll("h1, h2, h3, h4, h5, h6")) lowerHeading(heading);
  for (const block of element.querySelectorAll("pre")) addCopy(block, final);
  for (const table of element.querySelectorAll("table")) {
    const frame = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  return element;
}

// A text that nests deeper than the browser's stack stays as it is.
/** @param {string} text @returns {Node} */
function parsed(text) {
  try {
    const html = TOO_DEEP.test(text) ? null : marked.parse(text, { async: false, gfm: true, breaks: true });
    if (html !== null) return purify.sanitize(html, CLEAN); // no images: they would be loaded from other hosts
  } catch {
    // as of one that is too deep
  }
  return h("div", { class: "plain" }, text);
}

// An answer's headings are below those of the page.
/** @param {Element} heading */
function lowerHeading(heading) {
  const level = Math.min(6, Number(heading.tagName[1]) + 2);
  heading.replaceWith(h(`h${level}`, {}, ...heading.childNodes));
}

/** @param {HTMLElement} block @param {boolean} final */
function addCopy(block, final) {
  const code = block.querySelector("code");
  const text = block.textContent || "";
  const language = /language-(\S+)/.exec(code?.className || "")?.[1]?.toLowerCase() || "";
  const frame = h("div", { class: "code" });
  block.replaceWith(frame);
  block.tabIndex = 0;
  block.setAttribute("role", "region");
  block.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  frame.append(h("div", { class: "code-bar" }, h("span", {}, language), copyButton(() => text, "Copy code")), block);
  if (code && final) colour(code, ALIASES[language] || language).catch(() => {}); // without the server it stays as it is
}

/** @param {HTMLElement} code @param {string} language */
async function colour(code, language) {
  if (!LANGUAGES.has(language)) return;
  const [{ default: highlight }, { default: grammar }] = await Promise.all([
    import("./vendor/highlight.js"),
    import(`./vendor/highlight-${language}.js`),
  ]);
  /** @type {any} */ (highlight).registerLanguage(language, grammar);
  const { value } = /** @type {any} */ (highlight).highlight(code.textContent || "", { language });
  const options = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };
  code.replaceChildren(purify.sanitize(value, options));
}

/**
 * Creates a button that copies a text.
 * @param {() => string} text @param {string} label
 */
export function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button", class: "small" }, label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Copy failed";
    }
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}
