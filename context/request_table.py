"""Request-level tensors: one contiguous row a request, paused rows left, active rows behind them, free rows right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

DEFAULT_METADATA: tuple[tuple[str, torch.dtype], ...] = (
    ("temperature", torch.float32),
    ("top_k", torch.int32),
    ("top_p", torch.float32),
    ("termination_id", torch.int32),
    ("return_log_probs", torch.bool),
    ("skip_prompt_log_probs", torch.bool),
    ("top_n_logprobs", torch.int32),
)

_FIELDS: tuple[tuple[str, int], ...] = (
    ("request_ids", -1),
    ("request_query_lengths", 0),
    ("request_in_prefill_status_tensor", -1),
    ("request_output_lengths", 0),
    ("request_kv_length_offsets", 0),
    ("request_kv_block_counts", 0),
    ("request_last_kv_block_id", -1),
    ("request_last_kv_block_offset", 0),
)


class RequestTable:
    """Owns every request-level tensor (length max_requests, int32) and moves whole rows.

    Tensors are public under the reference's names; `ids`, `query_lengths` ... are numpy views of the same memory, by
    which all bookkeeping is done (a torch call costs about ten times a numpy one at these sizes).
    """

    def __init__(
        self,
        max_requests: int,
        max_kv_block_count: int,
        metadata_types: Sequence[tuple[str, torch.dtype]] | None = None,
    ) -> None:
        self.tensors: dict[str, torch.Tensor] = {
            name: torch.full((max_requests,), empty, dtype=torch.int32) for name, empty in _FIELDS
        }
        self.tensors["request_to_kv_block_ids"] = torch.full((max_requests, max_kv_block_count), -1, dtype=torch.int32)
        self.metadata: dict[str, torch.Tensor] = {
            label: torch.zeros(max_requests, dtype=dtype) for label, dtype in metadata_types or DEFAULT_METADATA
        }
        self.hashable: NDArray[np.bool_] = np.zeros(max_requests, dtype=bool)
        """Whether a row's blocks may be named by their tokens."""
        views = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        self.ids: NDArray[np.int32] = views["request_ids"]
        self.query_lengths: NDArray[np.int32] = views["request_query_lengths"]
        self.in_prefill: NDArray[np.int32] = views["request_in_prefill_status_tensor"]
        self.output_lengths: NDArray[np.int32] = views["request_output_lengths"]
        self.kv_offsets: NDArray[np.int32] = views["request_kv_length_offsets"]
        self.block_counts: NDArray[np.int32] = views["request_kv_block_counts"]
        self.last_blocks: NDArray[np.int32] = views["request_last_kv_block_id"]
        self.last_offsets: NDArray[np.int32] = views["request_last_kv_block_offset"]
        self.block_table: NDArray[np.int32] = views["request_to_kv_block_ids"]
        self._metadata_views = {label: tensor.numpy() for label, tensor in self.metadata.items()}
        self._columns: list[NDArray] = [*views.values(), *self._metadata_views.values(), self.hashable]

    def reset(self) -> None:
        """Write the empty values into every row."""
        for name, empty in _FIELDS:
            self.tensors[name].fill_(empty)
        self.block_table.fill(-1)
        for tensor in self.metadata.values():
            tensor.zero_()
        self.hashable.fill(False)

    def set_metadata(self, row: int, values: Mapping[str, object]) -> None:
        """Write a row's metadata; labels that `values` lacks become 0."""
        for label, column in self._metadata_views.items():
            column[row] = values.get(label) or 0

    def metadata_column(self, label: str) -> NDArray:
        return self._metadata_views[label]

    def blocks_of(self, row: int) -> NDArray[np.int32]:
        """A row's blocks, first to last (a view)."""
        return self.block_table[row, : self.block_counts[row]]

    def blocks_of_rows(self, rows: NDArray[np.intp]) -> NDArray[np.int32]:
        """All blocks of some rows, row after row; a shared block once per reference."""
        table = self.block_table[rows]
        return table[table >= 0]

    def move(self, sources: NDArray[np.intp], targets: NDArray[np.intp]) -> None:
        """Copy whole rows; what stood in the targets is lost."""
        for column in self._columns:
            column[targets] = column[sources]

    def swap(self, left: NDArray[np.intp], right: NDArray[np.intp]) -> None:
        """Exchange whole rows pairwise."""
        for column in self._columns:
            kept = column[left]
            column[left] = column[right]
            column[right] = kept

    def reorder(self, start: int, order: NDArray[np.intp]) -> None:
        """Put row `start + order[i]` to `start + i`."""
        for column in self._columns:
            column[start : start + len(order)] = column[start + order]

    def clear_blocks(self, rows: NDArray[np.intp]) -> None:
        self.block_table[rows] = -1

    def find(self, request_id: int, end: int) -> int:
        """Return the row of a request among [0, end), or -1."""
        hits = np.flatnonzero(self.ids[:end] == request_id)
        return int(hits[0]) if len(hits) else -1
