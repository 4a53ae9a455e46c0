// Copies the web UI's libraries and their licences from node_modules into the package:
//   cd tools/page && npm ci && npm run vendor

import { copyFileSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

const modules = new URL("node_modules/", import.meta.url);
const vendor = new URL("../../kvkeep/server/page/files/vendor/", import.meta.url);
const LANGUAGES = ["bash", "cpp", "css", "diff", "go", "java", "javascript", "json", "python", "rust", "sql", "xml", "yaml"];

rmSync(vendor, { recursive: true, force: true });
mkdirSync(vendor);
copy("marked/lib/marked.esm.js", "marked.js");
copy("marked/LICENSE", "marked.LICENSE.txt");
copy("dompurify/dist/purify.min.js", "purify.js");
copy("dompurify/LICENSE", "purify.LICENSE.txt");
copy("@highlightjs/cdn-assets/es/core.min.js", "highlight.js");
copy("@highlightjs/cdn-assets/LICENSE", "highlight.LICENSE.txt");
for (const language of LANGUAGES) {
  copy(`@highlightjs/cdn-assets/es/languages/${language}.min.js`, `highlight-${language}.js`);
}

/** @param {string} from @param {string} to */
function copy(from, to) {
  const [source, target] = [new URL(from, modules), new URL(to, vendor)];
  if (!to.endsWith(".js")) return copyFileSync(source, target);
  // Their source maps are not in the package, and their types are not checked.
  const text = readFileSync(source, "utf8").replace(/\n\/\/# sourceMappingURL=.*\s*$/, "\n");
  writeFileSync(fileURLToPath(target), `// @ts-nocheck\n${text}`);
}
