"""Log probabilities of prompts and samples, raw and as the sampler sees them."""

from __future__ import annotations

import pytest
import torch

from context import DynamicInferenceContext, DynamicInferenceRequest, PrefixCachingEvictionPolicy, SamplingParams
from tests.context.engine_model import BLOCK_SIZE, build_context

VOCABULARY = 11


class Temperature:
    """A sampling backend that divides by a temperature per request and forbids token 0."""

    def __init__(self, temperatures: list[float]) -> None:
        self.temperatures = torch.tensor(temperatures)

    def processed_log_probs(self, logits: torch.Tensor, row_to_request: torch.Tensor) -> torch.Tensor:
        scaled = logits.float() / self.temperatures[row_to_request].unsqueeze(1)
        scaled[:, 0] = float("-inf")
        return torch.log_softmax(scaled, dim=-1)


def two_prompts(first: list[int], second: list[int]) -> DynamicInferenceContext:
    context = build_context(blocks=12, prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU)
    for number, prompt in enumerate((first, second)):
        context.add_request(
            DynamicInferenceRequest(
                number,
                torch.tensor(prompt),
                SamplingParams(num_tokens_to_generate=3),
                block_size_tokens=BLOCK_SIZE,
                enable_prefix_caching=True,
            )
        )
    context.initialize_attention_state()
    return context


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(1, rows, VOCABULARY, generator=torch.Generator().manual_seed(3))


def test_targets_are_the_next_tokens_and_the_samples() -> None:
    context = two_prompts([1, 2, 3], [4, 5])
    logits, samples = random_logits(context.padded_active_token_count), torch.tensor([7, 8])
    selected, full = context.calculate_log_probs_tensors(logits, samples)
    expected = torch.log_softmax(logits[0, :5].float(), -1)
    assert torch.equal(full, expected)
    assert torch.equal(selected, expected[torch.arange(5), torch.tensor([2, 3, 7, 5, 8])])
    lists, _ = context.calculate_log_probs(logits, samples)
    assert [len(part) for part in lists] == [3, 2]
    assert [value for part in lists for value in part] == selected.tolist()


def test_only_last_gives_one_row_a_request() -> None:
    context = two_prompts([1, 2, 3], [4, 5])
    logits, samples = random_logits(2), torch.tensor([7, 8])
    selected, full = context.calculate_log_probs_tensors(logits, samples, only_last_token_logits=True)
    assert full.shape == (2, VOCABULARY)
    assert selected.tolist() == [full[0, 7].item(), full[1, 8].item()]
    assert context.calculate_log_probs(logits, samples, True)[0] == [[selected[0].item()], [selected[1].item()]]


def test_decode_gives_one_row_a_request() -> None:
    context = two_prompts([1, 2, 3], [4, 5])
    context.update_requests(torch.tensor([1, 1]), torch.tensor([7, 8]))
    context.initialize_attention_state()
    lists, full = context.calculate_log_probs(random_logits(context.padded_active_token_count), torch.tensor([1, 2]))
    assert full.shape == (2, VOCABULARY)
    assert [len(part) for part in lists] == [1, 1]


def test_a_skipped_prefix_has_no_log_probs() -> None:
    context = two_prompts([1] * 9, [1] * 8 + [2, 2, 2])
    lists, _ = context.calculate_log_probs(random_logits(context.padded_active_token_count), torch.tensor([3, 4]))
    assert [len(part) for part in lists] == [9, 3]


def test_processed_rows_follow_their_requests_parameters() -> None:
    context = two_prompts([1, 2, 3], [4, 5])
    logits, sampling = random_logits(context.padded_active_token_count), Temperature([0.5, 2.0])
    _, full = context.calculate_log_probs_tensors(logits, torch.tensor([7, 8]), False, sampling)
    assert torch.equal(full, sampling.processed_log_probs(logits[0, :5], torch.tensor([0, 0, 0, 1, 1])))
    assert (full[:, 0] == float("-inf")).all()


def test_an_explicit_row_map_is_used_as_given() -> None:
    context = two_prompts([1, 2, 3], [4, 5])
    logits, sampling = random_logits(2), Temperature([0.5, 2.0])
    rows = torch.tensor([1, 0])
    _, full = context.calculate_log_probs_tensors(logits, torch.tensor([7, 8]), True, sampling, rows)
    assert torch.equal(full, sampling.processed_log_probs(logits[0], rows))


def test_logits_of_another_shape_are_refused_with_both_numbers() -> None:
    context = two_prompts([1, 2, 3], [4, 5])
    with pytest.raises(ValueError, match=r"\(1, 4, 11\); expected \(1, at least 5 rows"):
        context.calculate_log_probs_tensors(random_logits(4), torch.tensor([7, 8]))
