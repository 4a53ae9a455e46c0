// The lint rules of the web UI's JavaScript, and of what builds and tests it. Run from the repository's root.

import js from "@eslint/js";
import globals from "globals";

const RULES = {
  complexity: ["error", 15],
  curly: ["error", "multi-line"],
  eqeqeq: "error",
  "max-lines": ["error", 300],
  "max-lines-per-function": ["error", { max: 90, skipBlankLines: true, skipComments: true }],
  "no-console": "error",
  "no-eval": "error",
  "no-implied-eval": "error",
  "no-shadow": "error",
  "no-throw-literal": "error",
  "no-unused-vars": ["error", { argsIgnorePattern: "^_", varsIgnorePattern: "^_" }],
  "no-use-before-define": ["error", { functions: false, classes: false, variables: false }],
  "no-var": "error",
  "object-shorthand": "error",
  "prefer-const": ["error", { destructuring: "all" }],
  "prefer-template": "error",
};

export default [
  { ignores: ["**/vendor/**", "**/node_modules/**"] },
  js.configs.recommended,
  { rules: RULES, languageOptions: { globals: globals.browser } },
  { files: ["tests/**", "tools/**"], languageOptions: { globals: globals.node } },
];
