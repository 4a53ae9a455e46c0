// Names of sessions and snapshots, as the server allows them.

const ALLOWED = /^[A-Za-z0-9_-][A-Za-z0-9._-]*$/;
const EXAMPLE = "my-notes";

/** Returns a name that is like a text and allowed. @param {string} text */
function allowedName(text) {
  const plain = text.normalize("NFKD").replace(/\p{M}/gu, "");
  return plain.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[.-]+|-+$/g, "") || EXAMPLE;
}

/**
 * Returns why a name is not allowed, and one that is; "" if it is, or is empty.
 * @param {string} name
 */
export const nameProblem = (name) => (!name || ALLOWED.test(name) ? "" : `Only letters from A to Z, digits, “-”, “_” and “.”, no spaces, no “.” at the beginning. Allowed is “${allowedName(name)}”.`);

/** What a dialog's field for a name has. */
export const NAME = { maxlength: "100", problem: nameProblem };
