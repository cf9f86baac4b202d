"""The proof's own judgement, on figures given by hand."""

from typing import Any

import pytest

from warmroute.proof import Proof, Turn, computable


def turn(label: str, **changes: Any) -> Turn:
    """A turn of 1,300 tokens; nothing cached unless said."""
    values: dict[str, Any] = {
        "label": label, "worker": "worker-0", "reason": "because", "overlap_blocks": 0, "prompt_blocks": 81,
        "prompt_tokens": 1300, "cached_tokens": 0, "ttft_ms": 2000.0, "text": "An answer.",
    }  # fmt: skip
    return Turn(**values | changes)


def proof(**warm: Any) -> Proof:
    """A proof that holds, with changes to the warm turn."""
    held = {"overlap_blocks": 80, "cached_tokens": 1280, "ttft_ms": 100.0}
    return Proof(turn("first"), turn("warm", **held | warm), turn("cold", worker="worker-1"), 16)


def test_a_warm_answer_that_came_sooner_proves_it() -> None:
    assert proof().failures() == []
    assert proof().as_dict() == {
        "cold_ttft_ms": 2000.0, "warm_ttft_ms": 100.0, "speedup": 20.0, "overlap_blocks": 80, "cached_tokens": 1280,
        "worker": "worker-0", "text": "An answer.",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ttft_ms": 1500.0}, "only 1.3 times sooner"),
        ({"cached_tokens": 1264}, "took 1264 tokens from its cache, the router promised 80 blocks"),
        ({"overlap_blocks": 0, "cached_tokens": 0}, "overlapped no block"),
        ({"text": " \n"}, "the answer is empty"),
        ({"worker": "worker-1"}, "went to worker-1, though worker-0 holds the conversation"),
    ],
)
def test_a_proof_that_does_not_hold_says_why(changes: dict[str, Any], reason: str) -> None:
    assert any(reason in failure for failure in proof(**changes).failures())


@pytest.mark.parametrize(
    ("overlap", "tokens", "expected"),
    [(2, 40, {32}), (2, 34, {32}), (2, 33, {32, 16}), (2, 32, {32, 16}), (0, 5, {0}), (1, 16, {16, 0})],
)
def test_cached_tokens_agree_with_the_overlap_but_for_the_last_two_tokens(
    overlap: int, tokens: int, expected: set[int]
) -> None:
    assert computable(overlap, tokens, 16) == expected
