"""Log probabilities of the tokens a step has seen and sampled (spec: context core, section 13)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from context.dynamic_context import DynamicInferenceContext


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


def step_log_probs(
    context: DynamicInferenceContext,
    logits: Tensor,
    new_tokens: Tensor,
    only_last: bool,
    sampling: ProcessedLogProbs | None,
    row_to_request: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `DynamicInferenceContext.calculate_log_probs_tensors`."""
    lengths = context.step.metadata.query_lengths_list
    per_request = only_last or context.is_decode_only()
    count = len(lengths) if per_request else sum(lengths)
    if logits.dim() != 3 or logits.shape[0] != 1 or logits.shape[1] < count:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; expected (1, at least {count} rows, vocabulary)")
    rows = logits[0, :count]
    if per_request:
        targets = new_tokens.to(logits.device)
    else:
        ids = context.current_input_and_position_ids()[0][0, :count]
        targets = packed_targets(ids.to(logits.device), lengths, new_tokens)
    if sampling is None:
        full = torch.log_softmax(rows.float(), dim=-1)
    else:
        if row_to_request is None:
            repeats = torch.ones(len(lengths), dtype=torch.int64) if per_request else torch.tensor(lengths)
            row_to_request = torch.repeat_interleave(torch.arange(len(lengths)), repeats)
        full = sampling.processed_log_probs(rows, row_to_request)
    selected = full.gather(1, targets.long().unsqueeze(1)).squeeze(1)
    return selected, full
