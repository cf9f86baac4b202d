"""Every policy spreads equals at random, and `warm` trades cache against waiting in one unit of time."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.policy.base import Candidate, Prompt
from router.policy.registry import BUILT_IN, policy_by_name

PROMPT = Prompt(tokens=1600, blocks=100, block_size=16)
IDLE = [Candidate("a", 0), Candidate("b", 0), Candidate("c", 0), Candidate("d", 0)]


def picks(name: str, candidates: list[Candidate], prompt: Prompt = PROMPT, times: int = 1000) -> Counter[str]:
    policy, rng = policy_by_name(name), random.Random(7)
    return Counter(
        candidates[policy.decide(replace(prompt, turn=turn), candidates, rng).pick].worker for turn in range(times)
    )


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"session-hash"}))
def test_equal_workers_share_evenly_whatever_their_order(name: str) -> None:
    shares = picks(name, IDLE)
    assert sorted(shares) == ["a", "b", "c", "d"]
    expected = 1000 / 4
    assert sum((n - expected) ** 2 / expected for n in shares.values()) < 16.3  # chi-square, 3 degrees, p = 0.001


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_prompts_without_a_full_block_spread(name: str) -> None:
    assert len(picks(name, IDLE, Prompt(tokens=12, blocks=0, block_size=16))) == 4


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@given(data=st.data())
def test_any_figures_lead_to_a_choice_with_one_score_a_candidate(name: str, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 200_000))
    blocks = tokens // 16
    counts = st.integers(0, 10**7)
    candidates = [
        Candidate(
            worker=f"w{i}",
            dp_rank=0,
            overlap_blocks=data.draw(st.integers(0, blocks)),
            expected_blocks=data.draw(st.integers(0, blocks)),
            queued_tokens=data.draw(counts),
            decode_blocks=data.draw(counts),
            running=data.draw(counts),
            recent_tokens=data.draw(st.floats(0, 1e9)),
            capacity_blocks=data.draw(counts),
        )
        for i in range(data.draw(st.integers(1, 5)))
    ]
    prompt = Prompt(tokens, blocks, 16, session=data.draw(st.none() | st.text()))
    choice = policy_by_name(name).decide(prompt, candidates, random.Random(1))
    assert 0 <= choice.pick < len(candidates)
    assert len(choice.scores) == len(candidates)
    assert choice.reason


def test_warm_follows_the_prefix_when_waiting_is_cheaper_than_computing() -> None:
    candidates = [
        Candidate("a", 0),
        Candidate("b", 0, overlap_blocks=90, expected_blocks=90, queued_tokens=1000),
    ]
    assert picks("warm", candidates) == {"b": 1000}


def test_warm_replicates_a_hot_prefix_when_waiting_costs_more_and_says_so() -> None:
    hot = Candidate("b", 0, overlap_blocks=90, expected_blocks=90, queued_tokens=3000)
    choice = policy_by_name("warm").decide(PROMPT, [Candidate("a", 0), hot], random.Random(1))
    assert (choice.pick, choice.kind) == (0, "replicate")
    assert "b holds 90" in choice.reason


def test_warm_sends_siblings_of_a_burst_after_the_first_before_its_events_arrive() -> None:
    assert picks("warm", [Candidate("a", 0), Candidate("b", 0, expected_blocks=100, queued_tokens=1500)]) == {"b": 1000}


def test_warm_leaves_a_saturated_pool_even_for_an_overlap() -> None:
    full = Candidate("a", 0, overlap_blocks=20, expected_blocks=20, decode_blocks=980, capacity_blocks=1000, running=2)
    roomy = Candidate("b", 0, decode_blocks=100, capacity_blocks=1000, running=10)
    assert picks("warm", [full, roomy]) == {"b": 1000}


def test_warm_lets_idle_workers_share_serial_prompts_by_recent_work() -> None:
    worked = Candidate("a", 0, overlap_blocks=1, expected_blocks=1, recent_tokens=5000)
    assert picks("warm", [worked, Candidate("b", 0)]) == {"b": 1000}


def test_a_session_stays_with_its_worker_and_only_the_lost_workers_sessions_move() -> None:
    def home(session: str, candidates: list[Candidate]) -> str:
        prompt = replace(PROMPT, session=session)
        return candidates[policy_by_name("session-hash").decide(prompt, candidates, random.Random()).pick].worker

    sessions = [f"s{i}" for i in range(400)]
    before = {s: home(s, IDLE) for s in sessions}
    after = {s: home(s, list(reversed(IDLE[1:]))) for s in sessions}
    assert all(after[s] == before[s] for s in sessions if before[s] != "a")
    assert len(Counter(before.values())) == 4


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match="round-robin"):
        policy_by_name("warmest")
