// One change of a session by the inspector, for the revision that is shown.

import { send } from "./api.js";
import { showStatus } from "./dom.js";
import { CHANGED, changeError, changeHeaders, isUnchanged } from "./session_change.js";
import { dropIfUnchanged, keepUndo } from "./undo_copies.js";

/**
 * @typedef {object} ChangedView
 * @property {() => Promise<void>} reload  loads the session again
 * @property {(kept: string, revision: number) => Promise<void>} onKept  called after a change to a revision, with the fork of before
 * @property {(revision: number) => void} markStable  called with a revision in which tokens have the same numbers as before
 * @property {Memory} memory  that it shows
 * @property {number} pendingChanges  changes in progress
 */

/** @typedef {{undo?: string, renumbers?: boolean}} ChangeOptions  undo: what Undo calls the change; renumbers: whether tokens have other numbers afterwards. */

// However long its dialog stays open, it is refused once the session is at another revision, or another one.
export class Change {
  /** @param {ChangedView} view */
  constructor(view) {
    this.shown = view.memory;
    this.name = this.shown.name;
    this.revision = this.shown.revision;
    this.view = view;
    /** @type {string | null} */
    this.kept = null; // the fork for its undo
    this.problem = ""; // why it failed
  }

  /**
   * @param {string} action @param {any} body @param {string | ((result: any) => string)} message @param {ChangeOptions} [options]
   */
  post(action, body, message, options) {
    return this.send("POST", `/v1/sessions/${this.name}/${action}`, body, message, options);
  }

  /**
   * Sends the change and shows a message, or what `message` returns for the result.
   * Returns null if the change failed.
   * @param {string} method @param {string} path @param {any} body @param {string | ((result: any) => string)} message @param {ChangeOptions} [options]
   */
  async send(method, path, body, message, { undo, renumbers = false } = {}) {
    this.view.pendingChanges += 1;
    try {
      if (!isUnchanged(this.shown, this.view.memory)) throw new Error(CHANGED);
      if (undo) this.kept = await keepUndo(this.name, this.revision, undo);
      const result = await send(method, path, body, { headers: changeHeaders(this.revision) });
      if (!renumbers) this.keepNumbers(result.revision);
      await this.view.reload();
      if (this.kept) await this.view.onKept(this.kept, result.revision);
      showStatus(typeof message === "function" ? message(result) : message);
      return result;
    } catch (error) {
      await this.fail(error);
      return null;
    } finally {
      this.view.pendingChanges -= 1;
    }
  }

  /**
   * Notes that this change kept tokens' numbers. A later revision includes changes by others too.
   * @param {number} revision
   */
  keepNumbers(revision) {
    if (revision === this.revision + 1) this.view.markStable(revision);
  }

  /** @param {unknown} error */
  async fail(error) {
    await this.view.reload();
    if (this.kept) await dropIfUnchanged(this.kept, this.name, this.revision).catch(() => {});
    this.problem = changeError(error);
    showStatus(this.problem, true);
  }
}
