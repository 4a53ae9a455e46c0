// The tokens of a session, with their texts.

import { get } from "./api.js";

const MAX_PIECES = 4096; // tokens that one request returns

/**
 * Fetches tokens `start ... end - 1`, each with its text and its number `at`. Null if the session has another revision by then.
 * @param {{name: string, revision: number}} memory @param {number} start @param {number} end @returns {Promise<Piece[] | null>}
 */
export async function fetchPieces({ name, revision }, start, end) {
  /** @type {Piece[]} */
  const pieces = [];
  for (let first = start; first < end; first += MAX_PIECES) {
    const last = Math.min(end, first + MAX_PIECES);
    const part = await get(`/v1/sessions/${name}/text?start=${first}&end=${last}`);
    if (part.revision !== revision) return null;
    pieces.push(...part.pieces);
  }
  return pieces.map((piece, index) => ({ ...piece, at: start + index }));
}
