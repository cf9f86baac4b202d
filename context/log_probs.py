"""Log probabilities of the tokens a step has seen and sampled (spec: context core, section 13)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class ProcessedLogProbs(Protocol):
    """A sampling backend that can say which distribution it samples from."""

    def processed_log_probs(self, logits: Tensor, row_to_request: Tensor) -> Tensor:
        """`[rows, V]` float32 log probabilities after each row's temperature and filters (filtered tokens: -inf).

        Args:
            logits: `[rows, V]` raw.
            row_to_request: `[rows]` index of the active request whose parameters apply.
        """
        ...


def packed_targets(input_ids: Tensor, query_lengths: list[int], new_tokens: Tensor) -> Tensor:
    """The token that follows each packed token: prompts [a,b,c], [d,e] with samples x, y give [b,c,x,e,y].

    Args:
        input_ids: `[tokens]`, row after row.
        query_lengths: tokens of each row.
        new_tokens: `[rows]` sampled tokens.
    """
    targets = torch.roll(input_ids, -1)
    last = torch.tensor(query_lengths, device=input_ids.device).cumsum(0) - 1
    targets[last] = new_tokens.to(targets)
    return targets


def row_log_probs(
    logits: Tensor,
    n_active: int,
    query_lengths: list[int] | None,
    sampling: ProcessedLogProbs | None,
    row_to_request: Tensor | None = None,
) -> Tensor:
    """Log probabilities of the whole vocabulary per row: raw, or those that the sampler draws from.

    Args:
        logits: `[rows, V]` raw.
        n_active: active requests behind the rows.
        query_lengths: rows of each request; None: one row each.
        sampling: None: log_softmax of the float32 logits.
        row_to_request: `[rows]` explicit map for `sampling`; None: by `query_lengths`.
    """
    if sampling is None:
        return torch.log_softmax(logits.float(), dim=-1)
    if row_to_request is None:
        repeats = torch.ones(n_active, dtype=torch.int64) if query_lengths is None else torch.tensor(query_lengths)
        row_to_request = torch.repeat_interleave(torch.arange(n_active), repeats)
    return sampling.processed_log_probs(logits, row_to_request)


def select_targets(log_probs: Tensor, targets: Tensor) -> Tensor:
    """The log probability of each row's target: `[rows, V]`, `[rows]` -> `[rows]`."""
    return log_probs.gather(1, targets.long().unsqueeze(1)).squeeze(1)
