"""Sampling obeys every setting, and a row's draw depends on its own request alone."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.sampling import Row, SamplingSettings, TokenHistory, derived_seed, sample, uniform

VOCABULARY = 1000


def logits(rows: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * scale


def drawn(row_logits: torch.Tensor, draws: int, **fields: float) -> Counter[int]:
    """Tokens of `draws` independent draws from one row of logits."""
    rows = [Row(SamplingSettings(seed=9, **fields), position) for position in range(draws)]  # type: ignore[arg-type]
    return Counter(result.token for result in sample(row_logits.expand(draws, -1), rows))


def test_a_greedy_batch_takes_the_likeliest_tokens() -> None:
    batch = logits(5)
    greedy = [
        Row(SamplingSettings(temperature=0), 3),
        Row(SamplingSettings(top_k=1), 3),
        *[Row(SamplingSettings(temperature=0), 4)] * 3,
    ]
    assert [result.token for result in sample(batch, greedy)] == batch.argmax(-1).tolist()


def test_a_greedy_row_stays_greedy_beside_sampled_ones() -> None:
    batch = logits(3)
    rows = [Row(SamplingSettings(seed=1), 5), Row(SamplingSettings(temperature=0), 5), Row(SamplingSettings(seed=2), 5)]
    assert sample(batch, rows)[1].token == int(batch[1].argmax())


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_draw_does_not_depend_on_its_place_or_its_batch_mates(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    batch = logits(count, seed=data.draw(st.integers(0, 99)))
    rows = [
        Row(
            SamplingSettings(
                temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
                top_k=data.draw(st.sampled_from([0, 1, 5, 400])),
                top_p=data.draw(st.sampled_from([1.0, 0.999, 0.9, 0.2])),
                min_p=data.draw(st.sampled_from([0.0, 0.05, 1.0])),
                presence_penalty=data.draw(st.sampled_from([0.0, 1.5])),
                logprobs=data.draw(st.sampled_from([None, 0, 3])),
                seed=data.draw(st.integers(0, 2**64 - 1)),
            ),
            data.draw(st.integers(0, 5000)),
            TokenHistory(frozenset([1, 2]), Counter([3, 3, 4])),
        )
        for _ in range(count)
    ]
    alone = [sample(batch[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    order = data.draw(st.permutations(range(count)))
    together = sample(batch[order], [rows[index] for index in order])
    for place, index in enumerate(order):
        assert together[place].token == alone[index].token


def test_draws_follow_the_distribution() -> None:
    row = torch.full((VOCABULARY,), -50.0)
    row[:4] = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    counts = drawn(row, 4000)
    shares = [counts[token] / 4000 for token in range(4)]
    assert np.allclose(shares, [0.1, 0.2, 0.3, 0.4], atol=0.03)


def test_a_low_temperature_sharpens_the_distribution() -> None:
    row = logits(1)[0]
    assert len(drawn(row, 300, temperature=0.05)) < len(drawn(row, 300, temperature=2.0))


def test_top_k_keeps_the_k_likeliest() -> None:
    row = logits(1)[0]
    assert set(drawn(row, 500, top_k=4, temperature=3.0)) == set(row.topk(4).indices.tolist())


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float) -> None:
    row = logits(1, scale=1.0)[0]
    probabilities, order = torch.softmax(row.double(), -1).sort(descending=True)
    size = int((probabilities.cumsum(-1) < top_p).sum()) + 1
    assert set(drawn(row, 2000, top_p=top_p)) <= set(order[:size].tolist())
    if size <= 40:
        assert len(drawn(row, 4000, top_p=top_p)) == size


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    row = logits(1)[0]
    probabilities = torch.softmax(row, -1)
    kept = torch.nonzero(probabilities >= 0.2 * probabilities.max()).flatten().tolist()
    assert set(drawn(row, 2000, min_p=0.2)) == set(kept)


def test_penalties_hold_for_prompt_and_answer_as_documented() -> None:
    row = torch.zeros(1, VOCABULARY)
    row[0, :4] = torch.tensor([4.0, 3.9, 3.8, 3.7])
    history = TokenHistory(frozenset([0]), Counter([1, 1]))

    def likeliest(**fields: float) -> int:
        chosen = SamplingSettings(temperature=0, **fields)  # type: ignore[arg-type]
        return sample(row, [Row(chosen, 5, history)])[0].token

    assert likeliest() == 0
    assert likeliest(repetition_penalty=1.5) == 2
    assert likeliest(presence_penalty=1.0) == 0  # the prompt does not count
    row[0, 0] = 0.0
    assert likeliest() == 1
    assert likeliest(presence_penalty=0.15) == 2
    assert likeliest(frequency_penalty=0.04) == 1
    assert likeliest(frequency_penalty=0.06) == 2  # twice in the answer


def test_a_repetition_penalty_pushes_negative_logits_down() -> None:
    row = torch.full((1, VOCABULARY), -9.0)
    row[0, 0], row[0, 1] = -1.0, -1.5
    penalised = SamplingSettings(temperature=0, repetition_penalty=2.0)
    assert sample(row, [Row(penalised, 5, TokenHistory(frozenset([0])))])[0].token == 1


def test_bias_and_bans_change_the_choice_and_not_the_logits() -> None:
    batch = logits(1)
    before = batch.clone()
    first, second = batch[0].topk(2).indices.tolist()
    assert sample(batch, [Row(SamplingSettings(temperature=0), 1, banned=(first,))])[0].token == second
    biased = SamplingSettings(temperature=0, logit_bias=((17, 100.0), (VOCABULARY + 5, 100.0)))
    assert sample(batch, [Row(biased, 1)])[0].token == 17
    assert torch.equal(batch, before)


def test_logprobs_are_the_models_own_and_sorted() -> None:
    batch = logits(2)
    wants = SamplingSettings(temperature=2.0, top_k=3, seed=5, logprobs=4)
    told, silent = sample(batch, [Row(wants, 1), Row(SamplingSettings(seed=5), 1)])
    expected = torch.log_softmax(batch[0], -1)
    assert silent.logprobs is None
    assert told.logprobs is not None
    assert told.logprobs.chosen == pytest.approx(float(expected[told.token]))
    assert [token for token, _ in told.logprobs.top] == expected.topk(4).indices.tolist()


def test_half_precision_logits_are_sampled_in_float32() -> None:
    batch = logits(2).to(torch.bfloat16)
    rows = [Row(SamplingSettings(seed=3, top_p=0.9), 7), Row(SamplingSettings(temperature=0), 7)]
    assert [r.token for r in sample(batch, rows)] == [r.token for r in sample(batch.float(), rows)]


def test_the_uniform_generator_is_splitmix64_and_spreads_evenly() -> None:
    # First outputs of splitmix64 from state 0 (reference implementation in the public domain).
    from worker.sampling import _mix

    assert _mix(0) == 0xE220A8397B1DCDAF
    values = np.array([uniform(42, position) for position in range(4000)])
    assert values.min() >= 0
    assert values.max() < 1
    assert np.abs(np.histogram(values, bins=10, range=(0, 1))[0] - 400).max() < 100


def test_choices_of_one_request_have_different_seeds() -> None:
    seeds = {derived_seed(7, choice) for choice in range(100)}
    assert len(seeds) == 100
    assert derived_seed(7, 0) == 7
    assert derived_seed(-1, 0) == 2**64 - 1
