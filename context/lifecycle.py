"""What becomes of every row after a forward: finish, pause, resume, evict, advance (spec: context core, section 8)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from context.batch_state import BatchState
from context.block_allocator import KVBlockAllocator
from context.config import ContextSizes, ResumePolicy
from context.registration import BlockRegistrar
from context.request_table import RequestTable
from context.token_table import TokenTable

Rows = NDArray[np.intp]


def _rows(start: int, end: int) -> Rows:
    return np.arange(start, end, dtype=np.intp)


class Lifecycle:
    """Moves rows between the paused, active and finished regions; writes request rows, counters and decode tokens."""

    def __init__(
        self,
        state: BatchState,
        requests: RequestTable,
        tokens: TokenTable,
        allocator: KVBlockAllocator,
        registrar: BlockRegistrar,
        sizes: ContextSizes,
        block_size: int,
        policy: ResumePolicy,
    ) -> None:
        self._state = state
        self._requests = requests
        self._tokens = tokens
        self._allocator = allocator
        self._registrar = registrar
        self._block_size = block_size
        self._policy = policy
        self._active_limit = min(sizes.max_requests, sizes.max_tokens)
        self._next_tokens: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """During an update: the next token of each row in [0, total)."""

    # -- the update ------------------------------------------------------------------------------------------------

    def update(self, mask: NDArray[np.bool_], new_tokens: NDArray[np.int64]) -> dict[str, Any] | None:
        """Apply a step's outcome; `mask[i]` says whether active row i goes on, `new_tokens[i]` is what it sampled."""
        state, requests = self._state, self._requests
        paused, total = state.paused_request_count, state.total_request_count
        hidden = self._hidden_row()
        keep = mask.copy()
        if hidden < 0 and state.chunked_prefill_request_id >= 0:
            keep[requests.ids[paused:total] == state.chunked_prefill_request_id] = True
        requests.in_prefill[paused:total] = 0
        state.num_prefill_requests = 0
        self._registrar.register_generated(requests, _rows(paused, total))
        if not keep.any() and paused == 0 and hidden < 0:
            self.release_rows(_rows(0, total))
            state.total_request_count = 0
            state.active_token_count = 0
            state.paused_tokens = None
            return None
        before = state.paused_tokens if state.paused_tokens is not None else np.zeros(0, dtype=np.int64)
        self._next_tokens = np.concatenate([before, new_tokens])
        active = self._drop_finished(keep)
        newly_paused, active = self._find_blocks(active)
        evicted = self.evict_overflow(active)
        if evicted is not None:
            active = state.active_request_count
            active, newly_paused = self.resume(active, newly_paused)
        evicted = self._keep_something_active(evicted, hidden)
        self._hide_chunk(hidden)
        self._advance()
        return {
            "newly_paused_request_ids": self._as_tensor(newly_paused),
            "evict_request_ids": self._as_tensor(evicted),
        }

    @staticmethod
    def _as_tensor(ids: NDArray[np.int32] | None) -> torch.Tensor | None:
        return None if ids is None else torch.from_numpy(np.asarray(ids, dtype=np.int32).copy())

    def _hidden_row(self) -> int:
        """The row of a chunked request that did not run in this step, or -1.

        A free row keeps the id of who left it, so the place right of the rows says nothing while the request runs.
        """
        total = self._state.total_request_count
        chunked = self._state.chunked_prefill_request_id
        return total if chunked >= 0 and self._requests.find(chunked, total) < 0 else -1

    def _drop_finished(self, keep: NDArray[np.bool_]) -> int:
        """Release finished rows and close the holes with the survivors from the right; return the active count."""
        state = self._state
        start = state.paused_request_count
        finished = np.flatnonzero(~keep)
        survivors = len(keep) - len(finished)
        if len(finished):
            self.release_rows(start + finished)
            holes = finished[finished < survivors]
            fillers = np.flatnonzero(keep)
            fillers = fillers[fillers >= survivors]
            if len(holes):
                self._requests.move(start + fillers, start + holes)
                self._next_tokens[start + holes] = self._next_tokens[start + fillers]
                self._requests.clear_blocks(start + fillers)
            state.total_request_count = start + survivors
            self._next_tokens = self._next_tokens[: start + survivors]
        return survivors

    # -- blocks for the next token ---------------------------------------------------------------------------------

    def _needs_block(self, rows: Rows) -> NDArray[np.bool_]:
        """Rows whose blocks are full, so that the next token has no slot yet."""
        requests = self._requests
        filled = requests.kv_offsets[rows] + requests.query_lengths[rows]
        return requests.block_counts[rows] * self._block_size <= filled

    def _rows_to_pause(self, active: int) -> Rows:
        state = self._state
        rows = _rows(state.paused_request_count, state.paused_request_count + active)
        needing = self._needs_block(rows)
        if state.chunked_prefill_request_id >= 0:
            needing &= self._requests.ids[rows] != state.chunked_prefill_request_id
        return rows[needing]

    def _find_blocks(self, active: int) -> tuple[NDArray[np.int32] | None, int]:
        """Give every row the block it needs, or pause it; return the newly paused ids and the active count."""
        needing = self._rows_to_pause(active)
        if self._policy is ResumePolicy.REFERENCE:
            newly_paused: NDArray[np.int32] | None = None
            if len(needing):
                newly_paused = self._pause(needing)
                active -= len(needing)
            active, newly_paused = self.resume(active, newly_paused)
            return newly_paused, active
        if self._state.paused_request_count:
            active, _ = self.resume(active, None)
            needing = self._rows_to_pause(active)
        served = min(len(needing), self._allocator.get_allocatable_count())
        self._take_blocks(needing[:served])
        unserved = needing[served:]
        if not len(unserved):
            return None, active
        return self._pause(unserved), active - len(unserved)

    def _take_blocks(self, rows: Rows) -> None:
        """Append a fresh block to each row's table; the caller has made sure that there are enough."""
        if not len(rows):
            return
        blocks = self._allocator.allocate_memory_blocks(len(rows))
        assert blocks is not None, f"{len(rows)} blocks were promised and can't be allocated"
        requests = self._requests
        requests.block_table[rows, requests.block_counts[rows]] = blocks
        requests.block_counts[rows] += 1
        requests.last_blocks[rows] = blocks

    def _pause(self, rows: Rows) -> NDArray[np.int32]:
        """Move rows to the right end of the paused region; return their ids.

        FIFO keeps everybody's order; the reference exchanges pairwise, in ascending order.
        """
        state = self._state
        start = state.paused_request_count
        end = start + len(rows)
        if self._policy is ResumePolicy.FIFO:
            others = np.setdiff1d(_rows(start, state.total_request_count), rows, assume_unique=True)
            order = np.concatenate([rows, others])
            self._requests.reorder(start, order - start)
            self._next_tokens[start:] = self._next_tokens[order]
            state.paused_request_count = end
            return self._requests.ids[start:end].copy()
        inside = _rows(start, end)
        displaced = inside[~np.isin(inside, rows)]
        self._swap(displaced, rows[rows >= end])
        state.paused_request_count = end
        return self._requests.ids[start:end].copy()

    def _swap(self, left: Rows, right: Rows) -> None:
        if not len(left):
            return
        self._requests.swap(left, right)
        kept = self._next_tokens[left]
        self._next_tokens[left] = self._next_tokens[right]
        self._next_tokens[right] = kept

    # -- resume ----------------------------------------------------------------------------------------------------

    def resume(self, active: int, newly_paused: NDArray[np.int32] | None) -> tuple[int, NDArray[np.int32] | None]:
        """Resume as many paused rows as compute and blocks permit; return the active count and who is still paused.

        FIFO resumes the longest waiting first; the reference's policy the newest, and cuts its number off the end of
        `newly_paused`, whoever was resumed.
        """
        state = self._state
        paused = state.paused_request_count
        fifo = self._policy is ResumePolicy.FIFO
        order = _rows(0, paused) if fifo else _rows(0, paused)[::-1]
        order = order[: max(0, self._active_limit - active)]
        if not len(order):
            return active, newly_paused
        needs = np.cumsum(self._needs_block(order))
        available = self._allocator.pool_avail
        count = int(np.searchsorted(needs, available, side="right"))
        if count < len(order):
            count = int(np.searchsorted(needs, self._allocator.get_allocatable_count(), side="right"))
        if not count:
            return active, newly_paused
        resumed = self._requests.ids[order[:count]].copy()
        if fifo:
            self._reorder_paused(np.concatenate([_rows(count, paused), _rows(0, count)]))
        rows = _rows(paused - count, paused)
        self._take_blocks(rows[self._needs_block(rows)])
        state.paused_request_count = paused - count
        if newly_paused is not None:
            newly_paused = newly_paused[~np.isin(newly_paused, resumed)] if fifo else newly_paused[:-count]
        return active + count, newly_paused

    def _reorder_paused(self, order: Rows) -> None:
        self._requests.reorder(0, order)
        if len(self._next_tokens) >= len(order):
            self._next_tokens[: len(order)] = self._next_tokens[order]
        elif self._state.paused_tokens is not None:
            self._state.paused_tokens = self._state.paused_tokens[order]

    # -- evict -----------------------------------------------------------------------------------------------------

    def paused_count_within_budget(self) -> int:
        """How many of the left-most paused rows keep within the paused budget (distinct blocks)."""
        limit, seen = self._allocator.paused_limit, set[int]()
        for row in range(self._state.paused_request_count):
            seen.update(self._requests.blocks_of(row).tolist())
            if len(seen) > limit:
                return row
        return self._state.paused_request_count

    def releasable_block_counts(self, start: int, end: int) -> list[int]:
        """Blocks that each suffix of rows [start, end) would make allocatable, for suffix lengths 0, 1, ...

        A shared block counts once every one of its references lies in the suffix.
        """
        counts = [0]
        taken: dict[int, int] = {}
        for row in range(end - 1, start - 1, -1):
            freed = counts[-1]
            for block in self._requests.blocks_of(row).tolist():
                taken[block] = taken.get(block, 0) + 1
                refs = int(self._allocator.block_ref_counts[block]) if self._allocator.enable_prefix_caching else 1
                freed += taken[block] == refs
            counts.append(freed)
        return counts

    def evict_overflow(self, active: int) -> NDArray[np.int32] | None:
        """Evict the shortest suffix of the paused rows beyond the budget that lets the rest of them resume."""
        start, end = self.paused_count_within_budget(), self._state.paused_request_count
        if start == end:
            return None
        needs = np.concatenate([[0], np.cumsum(self._needs_block(_rows(start, end)))])
        releasable = self.releasable_block_counts(start, end)
        allowed = self._active_limit - active
        allocatable = self._allocator.get_allocatable_count()
        for evicted in range(end - start + 1):
            others = end - start - evicted
            if others <= allowed and needs[others] <= allocatable + releasable[evicted]:
                break
        return self._evict(evicted) if evicted else None

    def _evict(self, count: int) -> NDArray[np.int32]:
        """Release the right-most `count` paused rows and exchange them to the right of the active ones."""
        state = self._state
        paused, total = state.paused_request_count, state.total_request_count
        rows = _rows(paused - count, paused)
        ids = self._requests.ids[rows].copy()
        self.release_rows(rows)
        moved = min(count, total - paused)
        self._swap(rows[:moved], _rows(total - moved, total))
        state.paused_request_count = paused - count
        state.total_request_count = total - count
        self._next_tokens = self._next_tokens[: total - count]
        return ids

    def _keep_something_active(self, evicted: NDArray[np.int32] | None, hidden: int) -> NDArray[np.int32] | None:
        """Never leave only paused rows: evict the right-most until another one can go on."""
        state = self._state
        while state.active_request_count == 0 and state.paused_request_count and hidden < 0:
            ids = self._evict(1)
            evicted = ids if evicted is None else np.concatenate([evicted, ids])
            self.resume(0, None)
        return evicted

    def wake_paused(self) -> NDArray[np.int32] | None:
        """With no row active: resume paused rows, evicting the right-most until one can run; return the evicted ids."""
        state = self._state
        assert state.active_request_count == 0, "rows are active; they will free or find blocks themselves"
        if state.paused_tokens is None:
            return None
        self._next_tokens = state.paused_tokens
        self.resume(0, None)
        evicted = self._keep_something_active(None, -1)
        self._advance()
        return evicted

    # -- closing the step ------------------------------------------------------------------------------------------

    def _hide_chunk(self, hidden: int) -> None:
        """Take the chunked row out of the active region, to the place right of it, until its next chunk."""
        state = self._state
        if state.chunked_prefill_request_id < 0:
            return
        if hidden >= 0:
            if hidden != state.total_request_count:
                self._requests.move(
                    np.array([hidden], dtype=np.intp), np.array([state.total_request_count], dtype=np.intp)
                )
                self._requests.clear_blocks(np.array([hidden], dtype=np.intp))
            return
        row = self._requests.find(state.chunked_prefill_request_id, state.total_request_count)
        last = state.total_request_count - 1
        if row != last:
            self._swap(np.array([row], dtype=np.intp), np.array([last], dtype=np.intp))
        state.total_request_count = last
        self._next_tokens = self._next_tokens[:last]

    def _advance(self) -> None:
        """Make every active row decode its next token."""
        state, requests = self._state, self._requests
        paused, total = state.paused_request_count, state.total_request_count
        state.paused_tokens = self._next_tokens[:paused].copy() if paused else None
        active = slice(paused, total)
        requests.kv_offsets[active] += requests.query_lengths[active]
        requests.query_lengths[active] = 1
        requests.last_offsets[active] = (requests.last_offsets[active] + 1) % self._block_size
        tokens, blocks = self._next_tokens[paused:total], requests.last_blocks[active]
        self._tokens.write_decode(paused, tokens, requests.kv_offsets[active], blocks)
        self._registrar.note_tokens(blocks, requests.last_offsets[active], tokens)
        state.active_token_count = total - paused
        self._next_tokens = np.zeros(0, dtype=np.int64)

    def release_rows(self, rows: Rows) -> None:
        """Give back all blocks of some rows and empty their tables."""
        if not len(rows):
            return
        blocks = self._requests.blocks_of_rows(rows)
        self._allocator.release_memory_blocks(blocks[blocks != self._allocator.dummy_block_idx])
        self._requests.clear_blocks(rows)

    def evict_with_tokens(self, active: int, next_tokens: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """`evict_overflow` for a caller that keeps the next tokens itself; they are exchanged in place."""
        self._next_tokens = next_tokens
        try:
            return self.evict_overflow(active)
        finally:
            self._next_tokens = np.zeros(0, dtype=np.int64)
