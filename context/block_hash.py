"""Names a KV block together with its whole prefix: the engine's own block hash.

digest_0 = SHA-256(32 zero bytes ‖ tokens as little-endian int64), digest_i = SHA-256(digest_{i-1} ‖ tokens_i); the hash
is the first 8 bytes of the digest, little-endian unsigned, mod (2^63 - 1), plus 1.  So it is never 0 (no parent) nor
-1 (unregistered), and the full digest is chained, never the short hash (spec: context core, section 3).
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ROOT_DIGEST = bytes(32)
_MODULUS = 2**63 - 1


class BlockHash(NamedTuple):
    """A block's digest (32 bytes, what its children chain from) and its short hash (1 <= hash < 2^63)."""

    digest: bytes
    hash: int


def hash_block(parent_digest: bytes, tokens: NDArray[np.int64]) -> BlockHash:
    """Hash one complete block under its parent's digest (`ROOT_DIGEST` for the first)."""
    digest = hashlib.sha256(parent_digest + tokens.astype("<i8", copy=False).tobytes()).digest()
    return BlockHash(digest, int.from_bytes(digest[:8], "little") % _MODULUS + 1)


def hash_blocks(tokens: NDArray[np.int64], block_size: int) -> list[BlockHash]:
    """Hash the complete blocks of a prompt; the tail that fills no block has no hash."""
    hashes: list[BlockHash] = []
    digest = ROOT_DIGEST
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = hash_block(digest, tokens[start : start + block_size])
        hashes.append(block)
        digest = block.digest
    return hashes
