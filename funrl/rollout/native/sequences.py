"""Running sequences: their tokens, log-probabilities and noise, in arrays with one row per slot.

Sampled tokens stay on the device until `poll` reads all of them at once, so an iteration need not wait for the one
before.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np
import torch
from torch import Tensor

from funrl.rollout.kept_tokens import kept_before, unpack_ids
from funrl.rollout.load_digest import LoadDigest, digests_before
from funrl.rollout.native.device.host_copy import HostCopy, PendingTokens, device_copy
from funrl.rollout.native.device.slot_noise import NOISE_STEPS, SlotNoise
from funrl.rollout.native.passes import Backend
from funrl.rollout.native.prompt_lookup import PromptLookup
from funrl.rollout.native.sequence import RunningSequence
from funrl.rollout.requests import Completion, Finish, Request, logits_error
from funrl.rollout.sampling_parameters import Sampling

STOPS = 4  # columns for stop tokens at first
NO_HOLDER = -1  # serial of a free slot


class RunningSequences:
    """All unfinished sequences; those with a slot are being computed.

    Attributes:
      by_number: unfinished sequences by the number of their request.
      decode: token ids -> text; None: there are no stop strings.
      routes: (pages, tokens) -> the experts of a sequence's first tokens; None: they are not recorded.
      records_kept: whether the tokens that truncated sampling could take are recorded.
      ended: called with each sequence that has ended by itself; None: nothing is.
      decoded: tokens sampled and kept since construction.
      drafted, accepted: drafted tokens, and those of them that were sampled.
      lengths: [slots] tokens of each sequence, including tokens not polled yet.
      serials: [slots] number of the assignment that holds each slot, never used twice; `NO_HOLDER`: the slot is free.
      needs_sync: whether the next sampling needs all tokens on the host, for a repetition penalty.
      damaged: whether a sequence without finite logits may have left NaN in the cache.
      any_at_limit: whether a sequence has reached its limit since the last poll.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, decode: Callable[[list[int]], str] | None, slots: int = 0
    ):
        """Begin without sequences.

        Args:
          slots: initial number of slots; `last` stays the same tensor while there are no more.
        """
        self.by_number: dict[int, RunningSequence] = {}
        self.routes: Callable[[Sequence[int], int], Tensor] | None = None
        self.records_kept = False
        self.ended: Callable[[RunningSequence], None] | None = None
        self.decode = decode
        self.decoded = 0
        self._device = device
        self.drafted = self.accepted = 0
        self.lengths = np.zeros(0, dtype=np.int64)
        self._by_slot: list[RunningSequence | None] = []
        self._free: list[int] = []
        self._ended: list[Completion] = []
        self._released: list[RunningSequence] = []
        self._pending: list[PendingTokens] = []
        self._sampling_groups: dict[Sampling, int] = {}
        self._prompts, self._limits, self._group = (self.lengths.copy() for _ in range(3))
        self._stops = np.full((0, STOPS), -1, dtype=np.int64)
        self._has_strings = np.zeros(0, dtype=bool)
        self._strings: list[tuple[str, ...]] = []
        self._tokens = np.zeros((0, 0), dtype=np.int64)
        self._logps = np.zeros((2, 0, 0), dtype=np.float64 if dtype == torch.float64 else np.float32)
        self._last = torch.zeros(0, dtype=torch.int64, device=device)
        self._noise = SlotNoise(device)
        self.serials = self.lengths.copy()
        self._assignments = 0
        self.needs_sync = self.any_at_limit = self.damaged = self._owns = False
        if slots:
            self._add_slots(slots)

    @property
    def count(self) -> int:
        """Requests that are unfinished, or whose completion has not been returned yet."""
        return len(self.by_number) + len(self._ended)

    def begin(
        self, request: Request, version: int | None, adapter: int = -1, digest: LoadDigest | None = None
    ) -> RunningSequence:
        """Register a request, which waits for a slot.

        Args:
          request: as it was submitted.
          version: of its adapter, or of the base.
          adapter: number of its adapter in the backend.
          digest: of the weights that complete it; None: it is not recorded.
        """
        begun = request.begun
        prompt = np.asarray(request.prompt, dtype=np.int64)
        if not self.by_number:
            self._sampling_groups.clear()
        if begun is None:
            sequence = RunningSequence(request, prompt, np.zeros((2, 0), self._logps.dtype), [(0, version or 0)])
        else:
            text = np.concatenate([prompt, begun.tokens.numpy()])
            logps = torch.stack([begun.sampling_logp, begun.raw_logp]).numpy().astype(self._logps.dtype)
            changes = np.flatnonzero(np.diff(begun.versions.numpy(), prepend=-2)).tolist()
            versions = [(start, int(begun.versions[start])) for start in changes]
            sequence = RunningSequence(request, text, logps, [*versions, (len(begun.tokens), version or 0)])
        if self.records_kept:
            sequence.kept = [] if begun is None else kept_before(begun)
        if digest is not None:
            before = [] if begun is None else digests_before(begun)
            sequence.digests = [*before, (len(sequence.text) - len(prompt), digest)]
        sequence.known_before = request.computed
        sequence.adapter = adapter
        self._owns |= request.owned is not None
        self.by_number[request.number] = sequence
        return sequence

    def all(self) -> list[RunningSequence]:
        """All unfinished sequences."""
        return list(self.by_number.values())

    def of_version(self, version: int, adapter: int = -1, digest: LoadDigest | None = None) -> None:
        """Attribute further tokens of an adapter, or of the base alone, to this version and digest of the weights."""
        for sequence in (x for x in self.by_number.values() if x.adapter == adapter):
            length = len(sequence.text) if sequence.slot < 0 else int(self.lengths[sequence.slot])
            new_tokens = length - len(sequence.request.prompt)
            earlier = [pair for pair in sequence.versions if pair[0] < new_tokens]
            sequence.versions = [*earlier, (new_tokens, version)]
            if digest is not None:
                sequence.digests = [*(pair for pair in sequence.digests if pair[0] < new_tokens), (new_tokens, digest)]

    def assign_slot(self, sequence: RunningSequence) -> None:
        """Assign a slot to a sequence and fill the slot's rows."""
        if not self._free:
            self._add_slots()
        slot = sequence.slot = self._free.pop()
        request = sequence.request
        length = len(sequence.text)
        self._widen(sequence.limit, sequence.limit - len(request.prompt))
        self._assignments += 1
        self._by_slot[slot] = sequence
        self.serials[slot] = self._assignments
        self._tokens[slot, :length] = sequence.text
        self._logps[:, slot, : sequence.logps.shape[1]] = sequence.logps
        self.lengths[slot] = length
        self._prompts[slot] = len(request.prompt)
        self._limits[slot] = sequence.limit
        self._noise.begin(slot, request.seed)
        self._last[slot] = int(sequence.text[-1])
        self._group[slot] = self._sampling_groups.setdefault(request.sampling.per_token, len(self._sampling_groups))
        self._strings[slot] = request.sampling.stop_strings
        self._has_strings[slot] = bool(request.sampling.stop_strings)
        self._stop_at(slot, request.sampling.stop)

    def release_slot(self, sequence: RunningSequence) -> None:
        """Save a sequence's tokens and free its slot. All its tokens have been polled."""
        slot = sequence.slot
        length = self.lengths[sequence.slot]
        sequence.text = self._tokens[slot, :length].copy()
        sequence.logps = self._logps[:, slot, : length - len(sequence.request.prompt)].copy()
        if sequence.kept is not None:
            del sequence.kept[length - len(sequence.request.prompt) :]
        self._by_slot[slot] = None
        self.serials[slot] = NO_HOLDER
        sequence.slot = -1
        self._free.append(slot)

    def holder(self, slot: int) -> RunningSequence | None:
        """The sequence that holds a slot; None: the slot is free."""
        return self._by_slot[slot]

    def owners_of(self, slots: np.ndarray) -> list[Request | None] | None:
        """Requests of some slots, None where a prompt owns no values; None: none has owned any."""
        held = [self._by_slot[slot] for slot in slots.tolist()] if self._owns else []
        return [x.request if x is not None and x.request.owned is not None else None for x in held] or None

    def left(self, slots: np.ndarray) -> np.ndarray:
        """Number of tokens that the sequence of each slot lacks of its limit."""
        return self._limits[slots] - self.lengths[slots]

    def full(self, slots: np.ndarray) -> np.ndarray:
        """True for slots whose sequence has reached its limit of tokens."""
        return self.left(slots) <= 0

    def sampling_groups_of(self, slots: np.ndarray) -> tuple[tuple[int, Sampling], ...]:
        """The sampling groups of some slots: (number, parameters) pairs."""
        samplings = list(self._sampling_groups)
        return tuple((group, samplings[group]) for group in np.unique(self._group[slots]).tolist())

    def device_columns_of(self, slots: np.ndarray, adapters: np.ndarray, cells: np.ndarray | None) -> np.ndarray:
        """Columns of `decode_state` for some slots, with their adapters and cells."""
        cells = np.zeros_like(slots) if cells is None else cells
        rows = (self.lengths, self._prompts, self._limits, self._noise.seeds, self._group, np.zeros_like(self.lengths))
        return np.concatenate([np.stack([x[slots] for x in rows]), adapters[None], cells[None], self._stops[slots].T])

    @property
    def stop_columns(self) -> int:
        """Stop tokens that a slot has room for."""
        return self._stops.shape[1]

    @property
    def last(self) -> Tensor:
        """The last token of each slot, on the device."""
        return self._last

    def tokens_at(self, slot: int, begin: int, count: int) -> np.ndarray:
        """Some polled tokens of a slot, and its draft after them."""
        return self._tokens[slot, begin : begin + count]

    def last_tokens(self, slots: np.ndarray) -> Tensor:
        """The last token of each of some slots, on the device."""
        return self._last[device_copy(slots, self._device)]

    def text_of(self, sequence: RunningSequence, count: int) -> list[int]:
        """The first tokens of a sequence that has a slot."""
        return self._tokens[sequence.slot, :count].tolist()

    def read(self, sequence: RunningSequence, begin: int) -> list[int]:
        """Tokens of a sequence's completion that have been polled, from the `begin`-th on."""
        first = len(sequence.request.prompt) + begin
        slot = sequence.slot
        if slot < 0:
            return sequence.text[first:].tolist()
        serial = self.serials[slot]
        unread = sum(int(((s.slots == slot) & (s.serials == serial)).sum()) for s in self._pending)
        return self._tokens[slot, first : int(self.lengths[slot]) - unread].tolist()

    def draft(self, sequence: RunningSequence, most: int) -> int:
        """Append a draft of the next tokens to a sequence; returns its length. All tokens have been polled."""
        slot = sequence.slot
        length = int(self.lengths[sequence.slot])
        steps = (length - len(sequence.request.prompt)) % NOISE_STEPS
        most = min(most, sequence.limit - length - 1, NOISE_STEPS - 1 - steps)  # a slot's noise covers one block
        if sequence.lookup is None:
            sequence.lookup = PromptLookup()
        sequence.lookup.extend(self._tokens[slot, sequence.lookup.length : length].tolist())
        tokens = sequence.lookup.draft(most)
        self._tokens[slot, length : length + len(tokens)] = tokens
        self.drafted += len(tokens)
        return len(tokens)

    def sample(
        self,
        backend: Backend,
        output_M: Tensor,
        slots: Sequence[int] | np.ndarray,
        sources: Sequence[int] | np.ndarray,
        ahead: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Sample one token for each of some slots, or also one after each token of a slot's draft.

        Args:
          output_M: output of the backend.
          sources: [R] its row for each token to sample.
          ahead: [R] draft tokens before each token to sample, ascending, those of a slot next to each other. Tokens
            sampled after a rejected draft token are dropped. None: there are no drafts.
        """
        if not len(slots):
            return
        slots_R = np.asarray(slots, dtype=np.int64)
        ahead_R = np.zeros_like(slots_R) if ahead is None else np.asarray(ahead, dtype=np.int64)
        lengths_R = self.lengths[slots_R] + ahead_R
        source_R = device_copy(np.asarray(sources, dtype=np.int64), self._device)
        noise_R = self._noise.at(slots_R, lengths_R - self._prompts[slots_R])
        samplings = list(self._sampling_groups)
        groups = [0] if len(samplings) == 1 else np.unique(self._group[slots_R]).tolist()
        parts = []
        order = []
        for group in groups:
            rows = index = slice(None)
            if len(groups) > 1:
                rows = np.flatnonzero(self._group[slots_R] == group)
                index = device_copy(rows, self._device)
            sampling = samplings[group]
            noise = None if sampling.greedy else noise_R[index]
            seen = self._seen(sampling, slots_R[rows], lengths_R[rows], backend)
            token_R, sampling_R, raw_R = backend.sample(output_M, source_R[index], noise, sampling, seen)
            if not self.records_kept:
                parts.append((token_R, sampling_R, raw_R))
            elif sampling.truncated:
                sampling_R, bits_RB = backend.keep(output_M, source_R[index], token_R, sampling)
                parts.append((token_R, sampling_R, raw_R, bits_RB))
            else:
                bits_RB = torch.zeros(len(token_R), -(-backend.vocab // 8), dtype=torch.uint8, device=self._device)
                parts.append((token_R, sampling_R, raw_R, bits_RB))
            order.append(index)
        if len(groups) == 1:
            sampled = parts[0]
        else:
            back = torch.argsort(torch.cat(order))
            sampled = tuple(torch.cat(x)[back] for x in zip(*parts, strict=True))
        if ahead is None:
            self._append(slots_R, sampled)
        else:
            self._append_accepted(slots_R, ahead_R, sampled)
        self.any_at_limit |= bool(self.full(slots_R).any())
        self.needs_sync |= any(samplings[group].repetition_penalty != 1 for group in groups)

    def append(self, slots: np.ndarray, copy: HostCopy) -> None:
        """Append one token per slot; the device buffer already holds it."""
        self._pending.append(PendingTokens(slots, self.serials[slots], self.lengths[slots], copy=copy))
        self.lengths[slots] += 1

    def _append(self, slots_R: np.ndarray, sampled: tuple[Tensor, ...]) -> None:
        """Append one token per slot."""
        self._last.index_copy_(0, device_copy(slots_R, self._device), sampled[0])
        self.append(slots_R, HostCopy(sampled))

    def _append_accepted(self, slots_R: np.ndarray, ahead_R: np.ndarray, sampled: tuple[Tensor, ...]) -> None:
        """Append the sampled tokens up to and including the first that differs from the draft."""
        drafted_R = self._tokens[slots_R, self.lengths[slots_R] + ahead_R]
        equal_R = sampled[0].cpu().numpy() == drafted_R
        kept_R = ahead_R == 0
        for level in range(1, int(ahead_R.max()) + 1):
            rows = np.flatnonzero(ahead_R == level)
            kept_R[rows] = kept_R[rows - 1] & equal_R[rows - 1]
        for begin in np.flatnonzero((ahead_R == 0) & (np.append(ahead_R[1:], 0) == 1)).tolist():
            end = begin + 1
            while end < len(ahead_R) and ahead_R[end]:
                end += 1
            lookup = self._running(slots_R[begin]).lookup
            accepted = int(kept_R[begin + 1 : end].sum())
            if lookup is not None:
                lookup.settle(end - begin - 1, accepted)
            self.accepted += accepted
        for level in range(int(ahead_R.max()) + 1):
            rows = np.flatnonzero(kept_R & (ahead_R == level))
            index = device_copy(rows, self._device)
            self._append(slots_R[rows], tuple(x[index] for x in sampled))

    def poll(self, keep: int = 0) -> None:
        """Read the sampled tokens; `take_released` and `take_ended` then return what has ended.

        Args:
          keep: latest iterations that are left to the next poll.

        Raises:
          LogitsError: a log-probability is not finite. Its sequence has ended, and all others are read.
        """
        read = max(0, len(self._pending) - keep)
        pending = self._pending[:read]
        later = self._pending[read:]
        self._pending = later
        failed: list[tuple[int, int]] = []
        self.needs_sync = False
        self.any_at_limit = False
        for slots, serials, positions, copy in pending:
            token_R, sampling_R, raw_R, *bits = (x[: len(slots)] for x in copy.arrays())
            alive = serials == self.serials[slots]
            bad = np.flatnonzero(alive & ~np.isfinite(raw_R))
            if len(bad):
                failed += [self._fail(int(slots[i]), int(positions[i])) for i in bad]
                alive = serials == self.serials[slots]
            if not alive.all():
                slots, positions, token_R, sampling_R, raw_R, *bits = (
                    x[alive] for x in (slots, positions, token_R, sampling_R, raw_R, *bits)
                )
            self._tokens[slots, positions] = token_R
            new = positions - self._prompts[slots]
            self._logps[0, slots, new] = sampling_R
            self._logps[1, slots, new] = raw_R
            for bits_RB in bits:
                self._record_kept(slots, bits_RB)
            self.decoded += len(slots)
            self._end_some(slots, positions, token_R)
        if failed:
            raise logits_error(failed)

    def _record_kept(self, slots: np.ndarray, bits_RB: np.ndarray) -> None:
        for slot, ids in zip(slots.tolist(), unpack_ids(bits_RB), strict=True):
            kept = self._running(slot).kept
            if kept is not None:
                kept.append(ids)

    def take_released(self) -> list[RunningSequence]:
        """Sequences that ended since the last call; they still hold pages."""
        released, self._released = self._released, []
        return released

    def take_ended(self) -> list[Completion]:
        """Completions finished since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def finish(self, sequence: RunningSequence, finish: Finish) -> Completion:
        """End a sequence, all of whose tokens have been polled."""
        if sequence.slot >= 0:
            self.release_slot(sequence)
        computed = len(sequence.text) - 1
        routes = None if self.routes is None else self.routes(sequence.pages, computed)
        del self.by_number[sequence.request.number]
        self._released.append(sequence)
        return sequence.completion(finish, routes)

    def take_ended_of(self, numbers: Container[int]) -> list[Completion]:
        """Completions of some requests that are finished and were not returned yet."""
        completions = [completion for completion in self._ended if completion.number in numbers]
        self._ended = [completion for completion in self._ended if completion.number not in numbers]
        return completions

    def _end_some(self, slots: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> None:
        """End the sequences whose new token is their last one."""
        stopped = (self._stops[slots] == tokens[:, None]).any(1)
        full = positions + 1 >= self._limits[slots]
        strings = self._has_strings[slots]
        for i in np.flatnonzero(stopped | full | strings).tolist():
            slot = int(slots[i])
            length = int(positions[i]) + 1
            if stopped[i]:
                self._end(slot, length, "stop")
            elif strings[i] and self._ends_by_string(slot, length - 1):
                self._end(slot, length, "string")
            elif full[i]:
                self._end(slot, length, None)

    def _running(self, slot: int) -> RunningSequence:
        """The sequence of a slot. Raises: KeyError, the slot is free."""
        sequence = self._by_slot[slot]
        if sequence is None:
            raise KeyError(f"slot {slot} is free")
        return sequence

    def _end(self, slot: int, length: int, finish: Finish | None) -> None:
        sequence = self._running(slot)
        sequence.overrun = finish == "string" and bool(self.lengths[slot] > length)
        self.lengths[slot] = length
        if finish is None:
            complete = length - self._prompts[slot] >= sequence.request.sampling.max_new_tokens
            finish = "length" if complete else "paused"
        sequence.computed = True
        completion = self.finish(sequence, finish)
        if self.ended is not None:
            self.ended(sequence)
        self._ended.append(completion)

    def _ends_by_string(self, slot: int, position: int) -> bool:
        strings = self._strings[slot]
        if self.decode is None:
            raise ValueError("stop strings need a tokenizer")
        # A token is at least one byte, a character at most four: no string needs more tokens than these.
        begin = max(int(self._prompts[slot]), position + 1 - 4 * max(map(len, strings)) - 4)
        text = self.decode(self._tokens[slot, begin : position + 1].tolist())
        return any(string in text for string in strings)

    def _seen(self, sampling: Sampling, slots: np.ndarray, lengths: np.ndarray, backend: Backend) -> Tensor | None:
        """Mask [R, V] of the tokens that each sequence contains; None: no penalty reads it."""
        if sampling.repetition_penalty == 1:
            return None
        seen = torch.zeros(len(slots), backend.vocab, dtype=torch.bool)
        for row, slot, length in zip(seen, slots, lengths, strict=True):
            row[torch.from_numpy(self._tokens[slot, :length])] = True
        return seen.to(self._device)

    def _fail(self, slot: int, position: int) -> tuple[int, int]:
        """End the sequence of a slot, whose token at a position has no logits; returns them as in `logits_error`."""
        sequence = self._running(slot)
        self.damaged = True
        self.lengths[slot] = position
        self.finish(sequence, "cancelled")
        return sequence.request.number, position - len(sequence.request.prompt)

    def _add_slots(self, more: int = 0) -> None:
        """Add slots: `more`, or as many as there are."""
        old = len(self._by_slot)
        more = more or max(8, old)
        self._by_slot += [None] * more
        self._strings += [()] * more
        for name in ("lengths", "serials", "_prompts", "_limits", "_group", "_has_strings"):
            x = getattr(self, name)
            setattr(self, name, np.concatenate([x, np.zeros(more, dtype=x.dtype)]))
        self.serials[old:] = NO_HOLDER
        self._stops = np.pad(self._stops, ((0, more), (0, 0)), constant_values=-1)
        self._tokens = np.pad(self._tokens, ((0, more), (0, 0)))
        self._logps = np.pad(self._logps, ((0, 0), (0, more), (0, 0)))
        self._last = torch.cat([self._last, self._last.new_zeros(more)])
        self._noise.more(more)
        self._free = list(range(old + more - 1, old - 1, -1))

    def _stop_at(self, slot: int, stop: Sequence[int]) -> None:
        """Set the stop tokens of a slot."""
        lacking = len(stop) - self._stops.shape[1]
        if lacking > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, max(lacking, self._stops.shape[1]))), constant_values=-1)
        self._stops[slot] = -1
        self._stops[slot, : len(stop)] = stop

    def _widen(self, tokens: int, new_tokens: int) -> None:
        """Widen the arrays for sequences of `tokens` tokens, `new_tokens` of them new."""
        if tokens > self._tokens.shape[1]:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, max(tokens, 2 * self._tokens.shape[1]))))
        if new_tokens > self._logps.shape[2]:
            self._logps = np.pad(self._logps, ((0, 0), (0, 0), (0, max(new_tokens, 2 * self._logps.shape[2]))))
