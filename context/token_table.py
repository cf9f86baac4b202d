"""Token-level tensors: the packed input of the next forward, row after row in row order."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from context.staging import Field, StagingBuffer

_EMPTY = {
    "token_to_input_ids": 0,
    "token_to_pos_ids": 0,
    "token_to_block_idx": -1,
    "token_to_local_position_within_kv_block": 0,
    "token_to_request_idx": -1,
    "token_to_position_in_request": 0,
}


def token_fields(max_tokens: int) -> list[Field]:
    """The table's fields in the staging buffer, each of length max_tokens."""
    wide = {"token_to_input_ids", "token_to_pos_ids", "token_to_block_idx"}
    return [Field(name, torch.int64 if name in wide else torch.int32, (max_tokens,)) for name in _EMPTY]


class TokenTable:
    """Owns the token tensors, which live in the staging buffer's host side."""

    def __init__(self, staging: StagingBuffer, block_size: int, dummy_block: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {name: staging.host[name] for name in _EMPTY}
        self._block_size = block_size
        self._dummy_block = dummy_block
        self.input_ids: NDArray[np.int64] = staging.numpy("token_to_input_ids")
        self.pos_ids: NDArray[np.int64] = staging.numpy("token_to_pos_ids")
        self.block_idx: NDArray[np.int64] = staging.numpy("token_to_block_idx")
        self.local_positions: NDArray[np.int32] = staging.numpy("token_to_local_position_within_kv_block")
        self.rows: NDArray[np.int32] = staging.numpy("token_to_request_idx")
        self.positions: NDArray[np.int32] = staging.numpy("token_to_position_in_request")
        self.columns: tuple[NDArray, ...] = (
            self.input_ids,
            self.pos_ids,
            self.block_idx,
            self.local_positions,
            self.rows,
            self.positions,
        )

    def reset(self) -> None:
        for name, empty in _EMPTY.items():
            self.tensors[name].fill_(empty)

    def write_prefill(
        self, start: int, row: int, tokens: NDArray[np.int64], first_position: int, blocks: NDArray[np.int32]
    ) -> None:
        """Write a row's chunk at `start`: tokens for positions first_position ..., in the row's `blocks`."""
        end = start + len(tokens)
        positions = np.arange(first_position, first_position + len(tokens))
        self.input_ids[start:end] = tokens
        self.pos_ids[start:end] = positions
        self.positions[start:end] = positions
        self.rows[start:end] = row
        self.block_idx[start:end] = blocks[positions // self._block_size]
        self.local_positions[start:end] = positions % self._block_size

    def write_decode(
        self,
        first_row: int,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int32],
        blocks: NDArray[np.int32],
    ) -> None:
        """Write one token for each of the rows first_row, first_row + 1, ... from slot 0 on."""
        count = len(tokens)
        self.input_ids[:count] = tokens
        self.pos_ids[:count] = positions
        self.positions[:count] = positions
        self.rows[:count] = np.arange(first_row, first_row + count)
        self.block_idx[:count] = blocks
        self.local_positions[:count] = positions % self._block_size

    def pad(self, count: int, padded: int) -> None:
        """Make slots [count, padded) harmless: their keys and values go to the dummy block."""
        self.input_ids[count:padded] = 0
        self.pos_ids[count:padded] = 0
        self.positions[count:padded] = 0
        self.rows[count:padded] = -1
        self.block_idx[count:padded] = self._dummy_block
        self.local_positions[count:padded] = 0
