"""Requests in flight: their tokens, log-probabilities and noise, in arrays with one row a seat.

Drawn tokens stay on the device until `look` reads them all at once, so that a pass need not wait for the one before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.rollout.native.backends import Backend
from funrl.rollout.native.host_copy import HostCopy
from funrl.rollout.native.live_request import LiveRequest
from funrl.rollout.native.prompt_lookup import PromptLookup
from funrl.rollout.native.seat_noise import NOISE_STEPS, SeatNoise
from funrl.rollout.requests import Completion, Finish, Request
from funrl.rollout.sampling_parameters import Sampling

STOPS = 4  # columns for stop tokens at first
NO_HOLDER = -1  # serial of a seat that nobody has


class _Drawn(NamedTuple):
    """Draws of one pass.

    Attributes:
      seats: of the draws.
      serials: of who had these seats then.
      at: tokens of each sequence before it.
      found: tokens and log-probabilities, sampling and raw; there may be more of them than seats.
    """

    seats: np.ndarray
    serials: np.ndarray
    at: np.ndarray
    found: HostCopy


class Flights:
    """All requests in flight; those with a seat are being computed.

    Attributes:
      numbers: flights by the number of the request.
      decode: token ids -> text; None: there are no stop strings.
      routes: (pages, tokens) -> the experts of a sequence's first tokens; None: they are not recorded.
      decoded: tokens that were drawn and kept, since it was made.
      drafted, accepted: tokens that drafts had, and those of them that were drawn.
      lengths: [seats] tokens of each sequence, those that were not looked at included.
      serials: [seats] of who has each seat, ever another number; `NO_HOLDER`: nobody.
      must_look: whether the next draw needs all tokens on the host, for a penalty.
      some_full: whether a sequence has ended by its limit and was not looked at.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, decode: Callable[[list[int]], str] | None, seats: int = 0
    ):
        """
        Args:
          seats: to begin with; where there are never more, `last` stays the same tensor.
        """
        self.numbers: dict[int, LiveRequest] = {}
        self.routes: Callable[[Sequence[int], int], Tensor] | None = None
        self.decode, self.decoded, self._device = decode, 0, device
        self.drafted = self.accepted = 0
        self.lengths = np.zeros(0, dtype=np.int64)
        self._seated: list[LiveRequest | None] = []
        self._free: list[int] = []
        self._ended: list[Completion] = []
        self._gone: list[LiveRequest] = []
        self._pending: list[_Drawn] = []
        self._kinds: dict[Sampling, int] = {}
        self._prompts, self._limits, self._kind = (self.lengths.copy() for _ in range(3))
        self._stops = np.full((0, STOPS), -1, dtype=np.int64)
        self._has_strings = np.zeros(0, dtype=bool)
        self._strings: list[tuple[str, ...]] = []
        self._tokens = np.zeros((0, 0), dtype=np.int64)
        self._logps = np.zeros((2, 0, 0), dtype=np.float64 if dtype == torch.float64 else np.float32)
        self._last = torch.zeros(0, dtype=torch.int64, device=device)
        self._noise = SeatNoise(device)
        self.serials, self._seatings = self.lengths.copy(), 0
        self.must_look = self.some_full = False
        if seats:
            self._more_seats(seats)

    @property
    def count(self) -> int:
        """Requests that are not finished, or not told yet."""
        return len(self.numbers) + len(self._ended)

    def begin(self, request: Request, version: int | None) -> LiveRequest:
        """A request that waits for a seat."""
        begun, prompt = request.begun, np.asarray(request.prompt, dtype=np.int64)
        if not self.numbers:
            self._kinds.clear()  # of requests that are gone
        if begun is None:
            flight = LiveRequest(request, prompt, np.zeros((2, 0), self._logps.dtype), [(0, version or 0)])
        else:
            text = np.concatenate([prompt, begun.tokens.numpy()])
            logps = torch.stack([begun.sampling_logp, begun.raw_logp]).numpy().astype(self._logps.dtype)
            changes = np.flatnonzero(np.diff(begun.versions.numpy(), prepend=-2)).tolist()
            versions = [(at, int(begun.versions[at])) for at in changes]
            flight = LiveRequest(request, text, logps, [*versions, (len(begun.tokens), version or 0)])
        self.numbers[request.number] = flight
        return flight

    def all(self) -> list[LiveRequest]:
        """All that are not finished."""
        return list(self.numbers.values())

    def of_version(self, version: int) -> None:
        """Let further tokens be of these weights."""
        for flight in self.numbers.values():
            drawn = len(flight.text) - len(flight.request.prompt)
            flight.versions = [pair for pair in flight.versions if pair[0] < drawn] + [(drawn, version)]

    def seat(self, flight: LiveRequest) -> None:
        """Give a flight a row of the arrays."""
        if not self._free:
            self._more_seats()
        seat = flight.seat = self._free.pop()
        request, length = flight.request, len(flight.text)
        self._wide_enough(flight.limit, flight.limit - len(request.prompt))
        self._seatings += 1
        self._seated[seat], self.serials[seat] = flight, self._seatings
        self._tokens[seat, :length] = flight.text
        self._logps[:, seat, : flight.logps.shape[1]] = flight.logps
        self.lengths[seat], self._prompts[seat], self._limits[seat] = length, len(request.prompt), flight.limit
        self._noise.begin(seat, request.seed)
        self._last[seat] = int(flight.text[-1])
        self._kind[seat] = self._kinds.setdefault(_drawing(request.sampling), len(self._kinds))
        self._strings[seat] = request.sampling.stop_strings
        self._has_strings[seat] = bool(request.sampling.stop_strings)
        self._stop_at(seat, request.sampling.stop)

    def unseat(self, flight: LiveRequest) -> None:
        """Take a flight's row away and keep what it has. All that was drawn has been looked at."""
        seat, length = flight.seat, self.lengths[flight.seat]
        flight.text = self._tokens[seat, :length].copy()
        flight.logps = self._logps[:, seat, : length - len(flight.request.prompt)].copy()
        self._seated[seat], self.serials[seat], flight.seat = None, NO_HOLDER, -1
        self._free.append(seat)

    def holder(self, seat: int) -> LiveRequest | None:
        """The request that has a seat; None: nobody has it."""
        return self._seated[seat]

    def full(self, seats: np.ndarray) -> np.ndarray:
        """True for seats that have as many tokens as they may, whatever these are."""
        return self.lengths[seats] >= self._limits[seats]

    def kinds_of(self, seats: np.ndarray) -> tuple[tuple[int, Sampling], ...]:
        """The ways in which some seats are drawn, and their numbers."""
        kinds = list(self._kinds)
        return tuple((kind, kinds[kind]) for kind in np.unique(self._kind[seats]).tolist())

    def numbers_of(self, seats: np.ndarray) -> np.ndarray:
        """Numbers of some seats that a pass on the device has to know: columns as in `decode_state`."""
        rows = (self.lengths, self._prompts, self._limits, self._noise.seeds, self._kind, np.zeros_like(self.lengths))
        return np.concatenate([np.stack([x[seats] for x in rows]), self._stops[seats].T])

    @property
    def stop_columns(self) -> int:
        """Stop tokens that a seat can have now."""
        return self._stops.shape[1]

    @property
    def last(self) -> Tensor:
        """The token that each seat drew last, on the device."""
        return self._last

    def tokens_at(self, seat: int, begin: int, count: int) -> np.ndarray:
        """Some tokens of a seat, which have been looked at; a draft is behind them."""
        return self._tokens[seat, begin : begin + count]

    def last_tokens(self, seats: np.ndarray) -> Tensor:
        """The token that each seat drew last, on the device."""
        return self._last[torch.from_numpy(seats).to(self._device)]

    def text_of(self, flight: LiveRequest, count: int) -> list[int]:
        """The first tokens of a flight with a seat."""
        return self._tokens[flight.seat, :count].tolist()

    def draft(self, flight: LiveRequest, most: int) -> int:
        """Put tokens behind a flight's text that may be the next ones; how many. All draws have been looked at."""
        seat, length = flight.seat, int(self.lengths[flight.seat])
        steps = (length - len(flight.request.prompt)) % NOISE_STEPS
        most = min(most, flight.limit - length - 1, NOISE_STEPS - 1 - steps)  # the noise of a seat is of one block
        if flight.lookup is None:
            flight.lookup = PromptLookup()
        flight.lookup.extend(self._tokens[seat, flight.lookup.length : length].tolist())
        tokens = flight.lookup.draft(most)
        self._tokens[seat, length : length + len(tokens)] = tokens
        self.drafted += len(tokens)
        return len(tokens)

    def draw(
        self,
        backend: Backend,
        found_M: Tensor,
        seats: Sequence[int] | np.ndarray,
        sources: Sequence[int] | np.ndarray,
        ahead: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Draw one token for each of some seats, or also one behind each token of a seat's draft.

        Args:
          found_M: what the backend computed.
          sources: the row of it of each draw.
          ahead: tokens of the seat's draft before each draw, ascending, where the draws of a seat are neighbours. What
            is drawn behind a token that is not the drawn one is dropped. None: there are no drafts.
        """
        if not len(seats):
            return
        at_R = np.asarray(seats, dtype=np.int64)
        ahead_R = np.zeros_like(at_R) if ahead is None else np.asarray(ahead, dtype=np.int64)
        lengths_R = self.lengths[at_R] + ahead_R
        source_R = torch.tensor(sources, device=self._device)
        noise_R = self._noise.at(at_R, lengths_R - self._prompts[at_R])
        kinds = list(self._kinds)
        used, parts, order = np.unique(self._kind[at_R]), [], []
        for kind in used:  # nearly always there is one
            some, how = np.flatnonzero(self._kind[at_R] == kind), kinds[kind]
            here = torch.from_numpy(some).to(self._device)
            noise_here = None if how.greedy else noise_R[here]
            seen = self._seen(how, at_R[some], lengths_R[some], backend)
            parts.append(backend.draw(found_M, source_R[here], noise_here, how, seen))
            order.append(here)
        if len(used) == 1:
            found = parts[0]
        else:
            back = torch.argsort(torch.cat(order))
            token_R, sampling_R, raw_R = (torch.cat(x)[back] for x in zip(*parts, strict=True))
            found = token_R, sampling_R, raw_R
        if ahead is None:
            self._keep(at_R, found)
        else:
            self._keep_right(at_R, ahead_R, found)
        self.some_full |= bool(self.full(at_R).any())
        self.must_look |= any(kinds[kind].repetition_penalty != 1 for kind in used)

    def keep(self, seats: np.ndarray, found: HostCopy) -> None:
        """Append one token to each of some seats, of whom the last tokens on the device are those already."""
        self._pending.append(_Drawn(seats, self.serials[seats], self.lengths[seats], found))
        self.lengths[seats] += 1

    def _keep(self, at_R: np.ndarray, found: tuple[Tensor, Tensor, Tensor]) -> None:
        """Append one token to each of some seats."""
        self._last.index_copy_(0, torch.from_numpy(at_R).to(self._device), found[0])
        self.keep(at_R, HostCopy(found))

    def _keep_right(self, at_R: np.ndarray, ahead_R: np.ndarray, found: tuple[Tensor, Tensor, Tensor]) -> None:
        """Append what was drawn up to the first token that is not the draft's, that one included."""
        drafted_R = self._tokens[at_R, self.lengths[at_R] + ahead_R]
        right_R, kept_R = found[0].cpu().numpy() == drafted_R, ahead_R == 0
        for level in range(1, int(ahead_R.max()) + 1):
            here = np.flatnonzero(ahead_R == level)
            kept_R[here] = kept_R[here - 1] & right_R[here - 1]
        for begin in np.flatnonzero((ahead_R == 0) & (np.append(ahead_R[1:], 0) == 1)).tolist():
            end = begin + 1
            while end < len(ahead_R) and ahead_R[end]:
                end += 1
            flight, accepted = self._seated[at_R[begin]], int(kept_R[begin + 1 : end].sum())
            assert flight is not None and flight.lookup is not None
            flight.lookup.settle(end - begin - 1, accepted)
            self.accepted += accepted
        for level in range(int(ahead_R.max()) + 1):
            some = np.flatnonzero(kept_R & (ahead_R == level))
            here = torch.from_numpy(some).to(self._device)
            token_R, sampling_R, raw_R = (x[here] for x in found)
            self._keep(at_R[some], (token_R, sampling_R, raw_R))

    def look(self, keep: int = 0) -> None:
        """Read what was drawn; see `gone` and `ended` for what ended by it.

        Args:
          keep: draws that are left to the next look, the latest ones.

        Raises:
          FloatingPointError: a log-probability is not finite.
        """
        read = max(0, len(self._pending) - keep)
        pending, later = self._pending[:read], self._pending[read:]
        self._pending, self.must_look, self.some_full = [], False, False
        for seats, serials, at, found in pending:
            token_R, sampling_R, raw_R = (x[: len(seats)] for x in found.arrays())
            alive = serials == self.serials[seats]
            if not np.isfinite(raw_R[alive]).all():
                bad = int(np.flatnonzero(alive & ~np.isfinite(raw_R))[0])
                self._not_finite(int(seats[bad]), int(at[bad]))
            if not alive.all():
                seats, at, token_R, sampling_R, raw_R = (x[alive] for x in (seats, at, token_R, sampling_R, raw_R))
            self._tokens[seats, at] = token_R
            drawn = at - self._prompts[seats]
            self._logps[0, seats, drawn], self._logps[1, seats, drawn] = sampling_R, raw_R
            self.decoded += len(seats)
            self._end_some(seats, at, token_R)
        self._pending = later

    def gone(self) -> list[LiveRequest]:
        """Flights that ended since the last call and still hold pages or places."""
        gone, self._gone = self._gone, []
        return gone

    def ended(self) -> list[Completion]:
        """Completions that were finished since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def finish(self, flight: LiveRequest, finish: Finish) -> Completion:
        """End a flight, whose draws have been looked at."""
        if flight.seat >= 0:
            self.unseat(flight)
        begin = len(flight.request.prompt)
        starts = [at for at, _ in flight.versions] + [len(flight.text) - begin]
        versions = np.repeat([version for _, version in flight.versions], np.diff(starts))
        with torch.inference_mode(False):  # autograd takes no tensors that are made in it
            sampling_logp, raw_logp = torch.from_numpy(flight.logps)
            done = Completion(
                flight.request.number, torch.from_numpy(flight.text[begin:]), sampling_logp, raw_logp,
                torch.from_numpy(versions.astype(np.int64)), finish,
                None if self.routes is None else self.routes(flight.pages, len(flight.text) - 1).clone(),
            )  # fmt: skip
        del self.numbers[flight.request.number]
        self._gone.append(flight)
        return done

    def take_ended(self, numbers: Container[int]) -> list[Completion]:
        """Those of some completions that were finished and not told yet; they are not told again."""
        taken = [done for done in self._ended if done.number in numbers]
        self._ended = [done for done in self._ended if done.number not in numbers]
        return taken

    def _end_some(self, seats: np.ndarray, at: np.ndarray, tokens: np.ndarray) -> None:
        """End the flights whose new token at the end of a sequence is their last one."""
        stopped = (self._stops[seats] == tokens[:, None]).any(1)
        full, strings = at + 1 >= self._limits[seats], self._has_strings[seats]
        for i in np.flatnonzero(stopped | full | strings).tolist():
            seat, length = int(seats[i]), int(at[i]) + 1
            if stopped[i]:
                self._end(seat, length, "stop")
            elif strings[i] and self._ends_by_string(seat, length - 1):
                self._end(seat, length, "string")
            elif full[i]:
                self._end(seat, length, None)

    def _end(self, seat: int, length: int, finish: Finish | None) -> None:
        flight = self._seated[seat]
        assert flight is not None
        self.lengths[seat] = length
        if finish is None:
            whole = length - self._prompts[seat] >= flight.request.sampling.max_new_tokens
            finish = "length" if whole else "paused"
        flight.computed = True
        self._ended.append(self.finish(flight, finish))

    def _ends_by_string(self, seat: int, at: int) -> bool:
        strings = self._strings[seat]
        assert self.decode is not None
        # A token is at least one byte, a character at most four: no string needs more tokens than these.
        begin = max(int(self._prompts[seat]), at + 1 - 4 * max(map(len, strings)) - 4)
        text = self.decode(self._tokens[seat, begin : at + 1].tolist())
        return any(string in text for string in strings)

    def _seen(self, how: Sampling, seats: np.ndarray, lengths: np.ndarray, backend: Backend) -> Tensor | None:
        """Mask [R, V] of the tokens that each sequence has, where they are penalised."""
        if how.repetition_penalty == 1:
            return None
        seen = torch.zeros(len(seats), backend.vocab, dtype=torch.bool)
        for row, seat, length in zip(seen, seats, lengths, strict=True):
            row[torch.from_numpy(self._tokens[seat, :length])] = True
        return seen.to(self._device)

    def _not_finite(self, seat: int, at: int) -> None:
        flight = self._seated[seat]
        assert flight is not None
        raise FloatingPointError(
            f"the model's logits are not finite at token {at - len(flight.request.prompt)} of completion "
            f"{flight.request.number}: its weights are damaged, or it has diverged, which a lower --lr may prevent"
        )

    def _more_seats(self, more: int = 0) -> None:
        """More seats: so many, or twice as many."""
        old = len(self._seated)
        more = more or max(8, old)
        self._seated += [None] * more
        self._strings += [()] * more
        for name in ("lengths", "serials", "_prompts", "_limits", "_kind", "_has_strings"):
            x = getattr(self, name)
            setattr(self, name, np.concatenate([x, np.zeros(more, dtype=x.dtype)]))
        self.serials[old:] = NO_HOLDER
        self._stops = np.pad(self._stops, ((0, more), (0, 0)), constant_values=-1)
        self._tokens = np.pad(self._tokens, ((0, more), (0, 0)))
        self._logps = np.pad(self._logps, ((0, 0), (0, more), (0, 0)))
        self._last = torch.cat([self._last, self._last.new_zeros(more)])
        self._noise.more(more)
        self._free = list(range(old + more - 1, old - 1, -1))

    def _stop_at(self, seat: int, stop: Sequence[int]) -> None:
        """Note the stop tokens of a seat."""
        lacking = len(stop) - self._stops.shape[1]
        if lacking > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, max(lacking, self._stops.shape[1]))), constant_values=-1)
        self._stops[seat] = -1
        self._stops[seat, : len(stop)] = stop

    def _wide_enough(self, tokens: int, new_tokens: int) -> None:
        """Columns for sequences of so many tokens, of which so many are new."""
        if tokens > self._tokens.shape[1]:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, max(tokens, 2 * self._tokens.shape[1]))))
        if new_tokens > self._logps.shape[2]:
            self._logps = np.pad(self._logps, ((0, 0), (0, 0), (0, max(new_tokens, 2 * self._logps.shape[2]))))


def _drawing(sampling: Sampling) -> Sampling:
    """The part of sampling that a draw depends on."""
    return dataclasses.replace(sampling, max_new_tokens=1, stop=(), stop_strings=(), samples=1)
