"""A naive bounded memory with edits: raw keys in a list, all rotated again at each token.

It shares no code with `kvkeep.cache`. A cell's position is its index among the cells that a query
sees, and the query's position is that of the last of them. Local layers have a list of their own,
of the newest cells that fit in their window.
"""

import copy
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.network import Network
from kvkeep.models.spec import cells


@dataclass(eq=False)
class Token:
    """A token. keys, values: for each layer `[kv_heads, head_dim]`, the keys unrotated."""

    id: int
    pinned: bool = False
    held: bool = True
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Refused(Exception):
    """The memory refuses the call."""


class DenseMemory:
    """A reference for sessions of policies `sliding`, `shift` and, if not bounded, `full`.

    discard: cells that are evicted at once when the window is full; 0 for half of the window.
    bounded: whether cells are ever evicted.
    """

    def __init__(
        self, decoder: Decoder, max_kv_size: int, keep: int = 0, discard: int = 1, bounded=True
    ):
        self.decoder, self.spec = decoder, decoder.spec
        self.network = Network(decoder.spec, decoder.tensors)
        self.max_kv_size, self.keep, self.discard, self.bounded = (
            max_kv_size,
            keep,
            discard,
            bounded,
        )
        self.tokens: list[Token] = []
        self.hidden: Tensor | None = None
        self._seen: list[Token] = []
        self.near: list[Token] = []  # what local layers hold
        self.near_size = min(self.spec.window, max_kv_size)
        self.near_spare = (
            min(cells.UNDO_TOKENS, max_kv_size - self.near_size) if self.near_size else 0
        )

    # Contents

    @property
    def held(self) -> list[Token]:
        return [token for token in self.tokens if token.held]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def free(self, held: list[Token]) -> list[Token]:
        """Return the tokens that may be evicted, oldest first."""
        return [t for rank, t in enumerate(held) if rank >= self.keep and not t.pinned]

    def window(self, keep: int | None = None, held: list[Token] | None = None) -> int:
        """Return how many tokens fit that are neither kept nor pinned."""
        keep = self.keep if keep is None else keep
        pinned = sum(t.pinned for t in (self.held if held is None else held)[keep:])
        return self.max_kv_size - keep - pinned

    @torch.inference_mode()
    def logits(self) -> Tensor:
        return self.decoder.logits(self.hidden)[0]

    def copy(self) -> "DenseMemory":
        copied = copy.copy(self)
        copies = {id(t): replace(t, keys=t.keys[:], values=t.values[:]) for t in self.tokens}
        copied.tokens = [copies[id(t)] for t in self.tokens]
        copied.near = [copies.get(id(t), t) for t in self.near]
        return copied

    # Calls

    def feed(self, ids: list[int]) -> None:
        if not self.bounded and len(self.held) + len(ids) > self.max_kv_size:
            raise Refused
        for each in ids:
            token = Token(each)
            self.tokens.append(token)
            if self.bounded:
                self._forget_when_full()
            self._show_local_layers(token)
            self.hidden = self._evaluate(token, self.held)

    def rewind(self, count: int) -> None:
        if count == len(self.tokens):  # then no token before them needs to be held
            self.tokens, self.near = [], []
            self.evaluate_last()
        else:
            self._take_back(count)

    def _take_back(self, count: int) -> None:
        total, held = len(self.tokens), self._held_at_the_end()
        if count > (total if held == total else held - 1):
            raise Refused
        if count:
            del self.tokens[total - count :]
            del self.near[-count:]
            self.evaluate_last()

    def set_keep(self, keep: int) -> None:
        self._require_window(keep, self.held)
        self.keep = keep

    def set_discard(self, discard: int) -> None:
        if discard > self.window():
            raise Refused
        self.discard = discard

    def pin(self, start: int, end: int) -> None:
        chosen = self.tokens[start:end]
        if not all(t.held and not t.pinned for t in chosen):
            raise Refused
        self._try_pinned(chosen, True)

    def unpin(self, start: int, end: int) -> None:
        chosen = [t for t in self.tokens[start:end] if t.pinned]
        if not chosen:
            raise Refused
        self._try_pinned(chosen, False)

    def edit(self, start: int, end: int, ids: list[int], suffix: bool) -> None:
        if start == end and not ids:
            raise Refused
        if not (suffix or ids or any(t.held for t in self.tokens[start:end])):
            del self.tokens[start:end]  # evicted already: only the list of tokens changes
            return
        keep, pinned = self._never_forgotten(start, end, ids)
        if end == len(self.tokens) or suffix:
            self._edit_anew(start, end, ids, keep, pinned)
        else:
            self._edit_in_place(start, end, ids, keep, pinned)

    # Implementation

    def _never_forgotten(self, start: int, end: int, ids: list[int]) -> tuple[int, bool]:
        """Return `keep` after an edit, and whether the new tokens are pinned.

        Tokens that replace kept or pinned ones, or are inserted between two of them, are so too.
        """
        if start == end:
            around = self.tokens[start - 1 : start + 1] if 0 < start < len(self.tokens) else []
            inside_kept = start < len(self.tokens)
        else:
            around, inside_kept = self.tokens[start:end], True
        rank = sum(t.held for t in self.tokens[:start])
        inside_kept = inside_kept and rank + max(1, end - start) <= self.keep
        growth = max(0, len(ids) - (end - start)) if inside_kept and self.bounded else 0
        return self.keep + growth, bool(around) and all(t.pinned for t in around)

    def _edit_anew(self, start: int, end: int, ids: list[int], keep: int, pinned: bool) -> None:
        following = [(each, pinned) for each in ids]
        following += [(t.id, t.pinned) for t in self.tokens[end:]]
        if not self.bounded:
            if len(self.held) + len(ids) - (end - start) > self.max_kv_size:
                raise Refused
            keep = self.keep
        self._take_back(len(self.tokens) - start)
        if self.bounded:
            self.set_keep(keep)
        run: list[int] = []
        for index, (each, pin) in enumerate(following):
            run.append(each)
            if index + 1 == len(following) or following[index + 1][1] != pin:
                self.feed(run)
                if pin:
                    self.pin(len(self.tokens) - len(run), len(self.tokens))
                run = []

    def _edit_in_place(self, start: int, end: int, ids: list[int], keep: int, pinned: bool) -> None:
        # All removed tokens must be held, or one of the neighbours of an insertion.
        removed = self.tokens[start:end]
        around = self.tokens[max(0, start - 1) : start + 1]
        if not (all(t.held for t in removed) if removed else any(t.held for t in around)):
            raise Refused
        held = self.held
        rank = sum(t.held for t in self.tokens[:start])
        new = [Token(each, pinned) for each in ids]
        after = [*held[:rank], *new, *held[rank + len(removed) :]]
        excess = max(0, len(after) - self.max_kv_size)
        stays = pinned or rank + len(new) <= keep
        sooner = self.free(held[:rank]) if self.bounded else []
        if self.bounded and stays:
            self._require_window(keep, after)
        elif excess > len(sooner):
            raise Refused
        for token in sooner[:excess]:
            token.held = False
        following, near = len(self.tokens) - end, self.near
        self.tokens[start:end] = []
        if new:
            self.near = self._read_again(self.tokens[:start], 2 * self.near_size)
        for offset, token in enumerate(new):
            self.tokens.insert(start + offset, token)
            self._show_local_layers(token)
            self._evaluate(token, [t for t in self.tokens[: start + offset + 1] if t.held])
        self.keep = keep
        for token in self.free(self.held)[: excess - len(sooner[:excess])]:
            token.held = False
        self.near = near[max(0, len(near) - following) :]
        self.evaluate_last(2 * self.near_size)

    def evaluate_last(self, most: int | None = None) -> None:
        self.hidden = None
        if self.tokens:
            last = self.tokens[-1]
            last.keys, last.values = [], []
            del self.near[-1:]
            before = self.tokens[:-1]
            if len(self.near) < min(self.near_size - 1, len(before)):
                self.near = self._read_again(before, len(before) if most is None else most)
            self._show_local_layers(last)
            self.hidden = self._evaluate(last, self.held)

    def _show_local_layers(self, token: Token) -> None:
        held = self.near_size + self.near_spare
        self.near = [*self.near, token][-held:] if held else []

    def _read_again(self, tokens: list[Token], most: int) -> list[Token]:
        """Return what local layers hold after the last of these tokens are evaluated again.

        That is as many of the last tokens as are held without a gap, at most `most`. The local
        layers start empty.
        """
        if not self.near_size:
            return []
        kept, count = self.near, 0
        while count < min(most, len(tokens)) and tokens[-1 - count].held:
            count += 1
        before = [t for t in tokens[: len(tokens) - count] if t.held]
        self.near, again = [], list[Token]()
        for token in tokens[len(tokens) - count :]:
            again.append(Token(token.id))
            self._show_local_layers(again[-1])
            self._evaluate(again[-1], [*before, *again])
        self.near, found = kept, self.near
        return found

    def _forget_when_full(self) -> None:
        held = self.held
        if len(self.free(held)) > self.window():
            count = self.discard or max(1, self.window() // 2)
            for token in self.free(held)[:count]:
                token.held = False

    def _try_pinned(self, chosen: list[Token], pinned: bool) -> None:
        for token in chosen:
            token.pinned = pinned
        try:
            self._require_window(self.keep, self.held)
        except Refused:
            for token in chosen:
                token.pinned = not pinned
            raise

    def _require_window(self, keep: int, held: list[Token]) -> None:
        window = self.window(keep, held)
        if self.bounded and window < max(1, self.discard):
            raise Refused

    def _held_at_the_end(self) -> int:
        count = 0
        for token in reversed(self.tokens):
            if not token.held:
                break
            count += 1
        return count

    # The forward

    @torch.inference_mode()
    def _evaluate(self, token: Token, seen: list[Token]) -> Tensor:
        """Return the hidden state of a token that sees these tokens, itself last."""
        self._seen = seen
        return self.network.forward(torch.tensor([token.id]), self)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        group, source = self.spec.group_of(layer), self.spec.kv_source(layer)
        seen = self._seen if group.window is None else self.near[-self.near_size :]
        if k is not None and v is not None:
            seen[-1].keys.append(k[0])
            seen[-1].values.append(v[0])
        n, groups = len(seen), self.spec.heads // group.kv_heads
        frequencies = group.rope.inverse_frequencies
        if layer in self.spec.unrotated_layers:
            frequencies = (0.0,) * len(frequencies)
        turn = partial(self.rotated, frequencies)
        keys = turn(torch.stack([t.keys[source] for t in seen]), range(n))
        values = torch.stack([t.values[source] for t in seen]).repeat_interleave(groups, 1)
        query = turn(q, [n - 1])[0]
        scores = torch.einsum("hd,nhd->hn", query, keys.repeat_interleave(groups, 1))
        scores = scores * group.softmax_scale
        weights = scores.float().softmax(-1).to(q.dtype)
        return torch.einsum("hn,nhd->hd", weights, values).reshape(1, -1)

    def rotated(
        self, frequencies: tuple[float, ...], x: Tensor, positions: range | list[int]
    ) -> Tensor:
        """Rotate `x: [n, heads, head_dim]` as complex numbers in float64."""
        half = x.shape[-1] // 2
        pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
        column = torch.tensor(positions, dtype=torch.float64)[:, None]
        angles = column * torch.tensor(frequencies, dtype=torch.float64)
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((pairs.real, pairs.imag), -1).to(x.dtype)
