"""A request as the context sees it: prompt, sampling parameters, and the hashes of its prompt blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from context.block_hash import BlockHash, hash_blocks


@dataclass(slots=True)
class SamplingParams:
    """How to sample a request's next tokens; names of the reference.

    temperature 0 or top_k 1 is greedy; top_k 0 and top_p 0 mean no filter; termination_id None: only lengths end it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = False
    num_tokens_to_generate: int | None = None
    num_tokens_total: int | None = None
    termination_id: int | None = None
    top_n_logprobs: int = 0
    stop_words: list[str] | None = None

    def generation_length(self, prompt_length: int) -> int:
        """Return how many tokens to generate after a prompt.

        Raises:
            ValueError: neither or both of num_tokens_to_generate and num_tokens_total are set, or the total is shorter
                than the prompt.
        """
        if (self.num_tokens_to_generate is None) == (self.num_tokens_total is None):
            raise ValueError(
                "SamplingParams needs exactly one of num_tokens_to_generate "
                f"({self.num_tokens_to_generate}) and num_tokens_total ({self.num_tokens_total})"
            )
        if self.num_tokens_to_generate is not None:
            return self.num_tokens_to_generate
        assert self.num_tokens_total is not None
        if self.num_tokens_total < prompt_length:
            raise ValueError(
                f"SamplingParams.num_tokens_total ({self.num_tokens_total}) is below the prompt ({prompt_length})"
            )
        return self.num_tokens_total - prompt_length


@dataclass(slots=True)
class DynamicInferenceRequest:
    """One prompt on its way through the context.

    Args:
        request_id: caller's id, unique among the requests in the context; int32, not negative.
        prompt_tokens: 1-D int64 token ids.
        block_size_tokens: the context's block size; needed for hashing.
        enable_prefix_caching: hash the prompt's complete blocks at construction.
        multimodal: the prompt's tokens do not name its content, so it gets no hashes.
    """

    request_id: int
    prompt_tokens: torch.Tensor
    sampling_params: SamplingParams = field(default_factory=lambda: SamplingParams(num_tokens_to_generate=0))
    block_size_tokens: int | None = None
    enable_prefix_caching: bool = False
    multimodal: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    finished_chunk_token_count: int = 0
    """Prompt tokens of earlier chunks; the engine advances it with `advance_chunk`."""
    num_cached_tokens: int = 0
    """Prompt tokens whose blocks were found in the cache, in whole blocks."""
    num_skipped_tokens: int = 0
    """Prompt tokens that no forward had to compute."""
    precomputed_block_hashes: list[int] = field(init=False, default_factory=list)
    precomputed_block_digests: list[bytes] = field(init=False, default_factory=list)
    prompt: np.ndarray = field(init=False, repr=False)
    """`prompt_tokens` as a numpy view, int64."""

    def __post_init__(self) -> None:
        if not isinstance(self.prompt_tokens, torch.Tensor):
            self.prompt_tokens = torch.as_tensor(self.prompt_tokens, dtype=torch.int64)
        if self.prompt_tokens.dim() != 1 or len(self.prompt_tokens) == 0:
            raise ValueError(
                f"DynamicInferenceRequest.prompt_tokens of request {self.request_id} has shape "
                f"{tuple(self.prompt_tokens.shape)}; it must be 1-D with at least one token"
            )
        self.prompt = self.prompt_tokens.detach().to("cpu", torch.int64).numpy()
        if self.enable_prefix_caching and not self.multimodal:
            if self.block_size_tokens is None:
                raise ValueError(
                    f"DynamicInferenceRequest.block_size_tokens of request {self.request_id} is None; "
                    "prefix caching needs it to hash the prompt"
                )
            blocks = hash_blocks(self.prompt, self.block_size_tokens)
            self.precomputed_block_hashes = [block.hash for block in blocks]
            self.precomputed_block_digests = [block.digest for block in blocks]

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    @property
    def remaining_prompt_length(self) -> int:
        return len(self.prompt) - self.finished_chunk_token_count

    @property
    def remaining_prompt_tokens(self) -> torch.Tensor:
        return self.prompt_tokens[self.finished_chunk_token_count :]

    @property
    def tokens_to_generate(self) -> int:
        return self.sampling_params.generation_length(self.prompt_length)

    @property
    def is_hashable(self) -> bool:
        """Whether blocks of this request may be named by their tokens."""
        return self.enable_prefix_caching and not self.multimodal

    def advance_chunk(self, chunk_length: int) -> None:
        """Note that a chunk of the prompt went into the context."""
        self.finished_chunk_token_count += chunk_length

    def restart(self) -> None:
        """Forget all chunks: the request starts over (after eviction or a failed forward)."""
        self.finished_chunk_token_count = 0
        self.num_cached_tokens = 0
        self.num_skipped_tokens = 0


def compute_block_hashes_batched(prompt_tokens: torch.Tensor | Sequence[int], block_size: int) -> list[int]:
    """Return the hash of every complete block of a prompt: tokens 0..7, block size 4 -> 2 hashes.

    Raises:
        ValueError: block_size is below 1.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    tokens = torch.as_tensor(prompt_tokens, dtype=torch.int64).cpu().numpy()
    return [block.hash for block in hash_blocks(tokens, block_size)]


__all__ = ["BlockHash", "DynamicInferenceRequest", "SamplingParams", "compute_block_hashes_batched"]
