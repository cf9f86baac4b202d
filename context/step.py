"""Prepares a step for the device: pads the batch, stages the active rows at [0, A), fills the attention metadata."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from context.attention import AttentionMetadata
from context.batch_dimensions import InferenceBatchDimensions, pad_dimensions
from context.batch_state import BatchState
from context.config import ContextSizes
from context.request_table import RequestTable
from context.staging import Field, StagingBuffer
from context.token_table import TokenTable, token_fields

_PADDING_METADATA = {"temperature": 1, "top_k": 0, "top_p": 0}


class StepPreparation:
    """Owns the staging buffer, the padded dimensions and the metadata of the current step."""

    def __init__(
        self,
        requests: RequestTable,
        state: BatchState,
        sizes: ContextSizes,
        block_size: int,
        dummy_block: int,
        device: torch.device,
    ) -> None:
        self._requests = requests
        self._state = state
        self._sizes = sizes
        self._dummy_block = dummy_block
        rows, int32 = sizes.max_requests, torch.int32
        self.staging = StagingBuffer(
            [
                *token_fields(sizes.max_tokens),
                Field("active_request_last_token_idxs", torch.int64, (rows,)),
                Field("query_lengths", int32, (rows,)),
                Field("kv_lengths", int32, (rows,)),
                Field("cu_query_lengths", int32, (rows + 1,)),
                Field("cu_kv_lengths", int32, (rows + 1,)),
                Field("block_table", int32, (rows, sizes.max_kv_block_count)),
                *(Field(f"metadata/{label}", t.dtype, t.shape) for label, t in requests.metadata.items()),
            ],
            device,
        )
        self.tokens = TokenTable(self.staging, block_size, dummy_block)
        self._last_idxs: NDArray[np.int64] = self.staging.numpy("active_request_last_token_idxs")
        self._query: NDArray[np.int32] = self.staging.numpy("query_lengths")
        self._kv: NDArray[np.int32] = self.staging.numpy("kv_lengths")
        self._cu_query: NDArray[np.int32] = self.staging.numpy("cu_query_lengths")
        self._cu_kv: NDArray[np.int32] = self.staging.numpy("cu_kv_lengths")
        self._blocks: NDArray[np.int32] = self.staging.numpy("block_table")
        self._labels = {label: self.staging.numpy(f"metadata/{label}") for label in requests.metadata}
        self.forget()

    def forget(self) -> None:
        """Go back to an empty step."""
        self.real = self.padded = InferenceBatchDimensions(0, 0, 0)
        self.metadata = self._build_metadata()

    def prepare(self, rounded_tokens: int, rounded_requests: int) -> None:
        """Stage the current rows and tokens, and copy them to the device in one copy."""
        state = self._state
        self.real = InferenceBatchDimensions(
            state.active_token_count, state.num_prefill_requests, state.num_decode_requests
        )
        self.padded = pad_dimensions(
            self.real,
            max_tokens=self._sizes.max_tokens,
            max_requests=self._sizes.max_requests,
            rounded_tokens=rounded_tokens,
            rounded_requests=rounded_requests,
        )
        self.tokens.pad(self.real.token_count, self.padded.token_count)
        self.build_active_slices(state.active_request_count)
        self.pad_active_slices()
        self.staging.transfer()
        self.metadata = self._build_metadata()

    def build_active_slices(self, batch_size: int) -> None:
        """Copy the request fields of rows [P, P + batch_size) to [0, batch_size)."""
        requests, start = self._requests, self._state.paused_request_count
        rows = slice(start, start + batch_size)
        query = requests.query_lengths[rows]
        self._query[:batch_size] = query
        np.add(requests.kv_offsets[rows], query, out=self._kv[:batch_size])
        self._cu_query[0] = self._cu_kv[0] = 0
        np.cumsum(query, out=self._cu_query[1 : batch_size + 1])
        np.cumsum(self._kv[:batch_size], out=self._cu_kv[1 : batch_size + 1])
        np.subtract(self._cu_query[1 : batch_size + 1], 1, out=self._last_idxs[:batch_size], casting="unsafe")
        table = requests.block_table[rows]
        self._blocks[:batch_size] = np.where(table < 0, self._dummy_block, table)
        for label, column in self._labels.items():
            column[:batch_size] = requests.metadata_column(label)[rows]

    def pad_active_slices(self) -> None:
        """Padding rows: no tokens, dummy blocks, neutral sampling, cumulative lengths repeat the last."""
        start, end = self.real.req_count, self.padded.req_count
        if start >= end:
            return
        self._query[start:end] = 0
        self._kv[start:end] = 0
        self._cu_query[start + 1 : end + 1] = self._cu_query[start]
        self._cu_kv[start + 1 : end + 1] = self._cu_kv[start]
        self._last_idxs[start:end] = 0
        self._blocks[start:end] = self._dummy_block
        for label, column in self._labels.items():
            column[start:end] = _PADDING_METADATA.get(label, 0)

    def _build_metadata(self) -> AttentionMetadata:
        real, padded, device = self.real, self.padded, self.staging.device
        count = real.req_count
        query, kv = self._query[:count], self._kv[:count]
        return AttentionMetadata(
            query_lengths=device["query_lengths"][: padded.req_count],
            cu_query_lengths=device["cu_query_lengths"][: padded.req_count + 1],
            kv_lengths=device["kv_lengths"][: padded.req_count],
            cu_kv_lengths=device["cu_kv_lengths"][: padded.req_count + 1],
            block_table=device["block_table"][: padded.req_count],
            max_seqlen_q=int(query.max()) if count else 0,
            max_seqlen_k=int(kv.max()) if count else 0,
            num_decode=real.decode_req_count,
            num_prefill=real.prefill_req_count,
            padded_requests=padded.req_count,
            padded_tokens=padded.token_count,
            real_token_count=real.token_count,
            query_lengths_list=query.tolist(),
            kv_lengths_list=kv.tolist(),
        )
