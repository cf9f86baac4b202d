"""How much of a prompt chunk the cache already holds; decides, and changes nothing."""

from __future__ import annotations

from typing import NamedTuple

from context.block_allocator import KVBlockAllocator
from context.request import DynamicInferenceRequest


class PrefixMatch(NamedTuple):
    """What one chunk of a prompt finds in the cache and still needs (counts of blocks and tokens)."""

    matched_block_ids: list[int]
    num_blocks_from_pool: int
    already_allocated_blocks: int
    overall_required_blocks: int
    prefix_skip_tokens: int
    effective_prefill_chunk_length: int


def find_kv_match(
    allocator: KVBlockAllocator, hashes: list[int], start_block: int, end_block: int
) -> tuple[list[int], int]:
    """Return the cached blocks of hashes[start_block:end_block] and the last one's hash (0 if none).

    Scans from the deepest block: a cached block's ancestors are cached as well.
    """
    end_block = min(end_block, len(hashes))
    lookup = allocator.kv_hash_to_block_id
    depth = end_block
    while depth > start_block and hashes[depth - 1] not in lookup:
        depth -= 1
    matched = [lookup[block_hash] for block_hash in hashes[start_block:depth]]
    return matched, hashes[depth - 1] if matched else 0


def compute_prefix_match(
    allocator: KVBlockAllocator, request: DynamicInferenceRequest, chunk_length: int, block_size: int
) -> PrefixMatch:
    """Match one chunk of a prompt against the cache (spec: context core, section 5).

    The last token is always recomputed, and a chunk of two tokens or more keeps at least two, since a prefill of one
    token would look like decode to the kernels.
    """
    finished = request.finished_chunk_token_count
    already = -(-finished // block_size)
    required = -(-(finished + chunk_length) // block_size)
    matched: list[int] = []
    if allocator.enable_prefix_caching and request.precomputed_block_hashes:
        matched, _ = find_kv_match(allocator, request.precomputed_block_hashes, already, required)
    skip = 0
    if matched and finished % block_size == 0:
        skip = min(len(matched) * block_size, chunk_length - 1)
        if chunk_length - skip < 2 <= chunk_length:
            skip = (chunk_length - 2) // block_size * block_size
    return PrefixMatch(matched, max(0, required - already - len(matched)), already, required, skip, chunk_length - skip)
