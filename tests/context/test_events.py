"""What listeners hear: in true order, each once, only what was written, nothing that is gone."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

from context import (
    BackgroundListener,
    DynamicInferenceRequest,
    DynamoHelper,
    PrefixCachingEvictionPolicy,
    SamplingParams,
)
from tests.context.engine_model import BLOCK_SIZE, EngineModel, build_context

LRU = PrefixCachingEvictionPolicy.LRU


class Stream:
    """Everything that a helper has said."""

    def __init__(self, helper: DynamoHelper) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        helper.add_kv_event_listener(lambda kind, payload: self.events.append((kind, copy.deepcopy(payload))))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    def hashes(self, kind: str) -> list[int]:
        return [h for k, payload in self.events if k == kind for h in payload["block_hashes"]]


def stored(hashes: list[int], parent: int | None = None) -> dict[str, Any]:
    tokens = [h for h in hashes for _ in range(4)]
    return {"block_hashes": hashes, "token_ids": tokens, "num_block_tokens": [4] * len(hashes), "parent_hash": parent}


def request(request_id: int, tokens: list[int], generate: int = 4) -> DynamicInferenceRequest:
    return DynamicInferenceRequest(
        request_id, torch.tensor(tokens), SamplingParams(num_tokens_to_generate=generate),
        block_size_tokens=BLOCK_SIZE, enable_prefix_caching=True,
    )  # fmt: skip


def test_stored_waits_until_the_forward_has_succeeded() -> None:
    context = build_context(blocks=8, prefix_caching_eviction_policy=LRU)
    stream = Stream(context.dynamo_helper)
    context.add_request(request(1, [1] * 9))
    context.initialize_attention_state()
    assert stream.events == []
    context.dynamo_helper.publish_pending_kv_stored_events()
    assert stream.kinds() == ["stored"]
    assert len(stream.hashes("stored")) == 2


def test_a_failed_forward_unregisters_what_was_never_written() -> None:
    context = build_context(blocks=8, prefix_caching_eviction_policy=LRU)
    stream = Stream(context.dynamo_helper)
    failed = request(1, [1] * 9)
    context.add_request(failed)
    context.initialize_attention_state()
    assert context.rollback_step() == [1]
    assert context.kv_block_allocator.kv_hash_to_block_id == {}
    assert context.kv_block_allocator.pool_avail == 8
    assert stream.events == []
    again = request(2, [1] * 9)
    context.add_request(again)
    assert again.num_cached_tokens == 0, "a prompt matched blocks that were never written"
    context.check_integrity()


def test_an_interrupted_step_is_undone_by_the_next_steps_discard() -> None:
    context = build_context(blocks=8, prefix_caching_eviction_policy=LRU)
    context.add_request(request(1, [1] * 9))
    context.dynamo_helper.discard_pending_kv_stored_events()
    other = request(2, [1] * 9)
    context.add_request(other)
    assert other.num_cached_tokens == 0


def test_a_failed_forward_leaves_what_earlier_steps_wrote() -> None:
    context = build_context(blocks=8, prefix_caching_eviction_policy=LRU)
    engine = EngineModel(context)
    engine.submit(1, [1] * 9, 3)
    engine.step()
    engine.submit(2, [1] * 8 + [2] * 5, 3)
    engine.step(fail=True)
    assert len(context.kv_block_allocator.kv_hash_to_block_id) == 2
    engine.run_dry()
    assert engine.finished[2].generated == engine.finished[2].expected()
    assert engine.skipped_tokens == 8, "the retried prompt did not use the cache"


def test_a_block_stored_and_removed_before_publication_is_never_announced() -> None:
    helper = DynamoHelper()
    stream = Stream(helper)
    helper.queue_kv_stored_event(stored([11, 12, 13]))
    helper.on_kv_blocks_deregistered([], [12, 13])
    helper.publish_pending_kv_stored_events()
    assert stream.events == [("stored", stored([11]))]


def test_what_stands_behind_a_cancelled_block_keeps_its_true_parent() -> None:
    helper = DynamoHelper()
    stream = Stream(helper)
    helper.queue_kv_stored_event(stored([11, 12, 13]))
    helper.on_kv_blocks_deregistered([], {11})
    helper.publish_pending_kv_stored_events()
    assert stream.events == [("stored", stored([12, 13], parent=11))]


def test_removed_never_overtakes_the_store_that_comes_after_it() -> None:
    helper = DynamoHelper()
    stream = Stream(helper)
    helper.queue_kv_stored_event(stored([11]))
    helper.publish_pending_kv_stored_events()
    helper.on_kv_blocks_deregistered([0], {11})
    helper.queue_kv_stored_event(stored([11]))
    helper.publish_pending_kv_stored_events()
    assert stream.kinds() == ["stored", "removed", "stored"]
    assert helper.announced_hashes == {11}


def test_what_is_announced_already_is_not_announced_again() -> None:
    helper = DynamoHelper()
    stream = Stream(helper)
    helper.queue_kv_stored_event(stored([11, 12]))
    helper.queue_kv_stored_event(stored([11, 12, 13]))
    helper.publish_pending_kv_stored_events()
    helper.queue_kv_stored_event(stored([12, 13, 14], parent=11))
    helper.publish_pending_kv_stored_events()
    assert stream.hashes("stored") == [11, 12, 13, 14]
    assert [payload["parent_hash"] for _, payload in stream.events] == [None, 12, 13]


def test_removals_name_children_before_parents_in_a_fixed_order() -> None:
    helper = DynamoHelper()
    stream = Stream(helper)
    helper.queue_kv_stored_event(stored([50, 40, 30]))
    helper.queue_kv_stored_event(stored([20], parent=50))
    helper.publish_pending_kv_stored_events()
    helper.on_kv_blocks_deregistered([], {50, 40, 30, 20})
    assert stream.events[-1] == ("removed", {"block_hashes": [30, 20, 40, 50]})


def test_prompts_of_one_step_share_blocks_that_the_forward_makes_valid_in_time() -> None:
    """K and V of all rows are written layer by layer before attention reads them (logits: test_attention_...)."""
    context = build_context(blocks=8, prefix_caching_eviction_policy=LRU)
    stream = Stream(context.dynamo_helper)
    first, second = request(1, [1] * 9), request(2, [1] * 8 + [2, 2, 2])
    context.add_request(first)
    context.add_request(second)
    assert second.num_skipped_tokens == 8
    context.dynamo_helper.publish_pending_kv_stored_events()
    assert len(stream.hashes("stored")) == 2, "shared blocks are announced once"


def test_cleared_comes_exactly_when_nothing_stays_advertised() -> None:
    context = build_context(blocks=8, prefix_caching_eviction_policy=LRU)
    stream = Stream(context.dynamo_helper)
    engine = EngineModel(context)
    engine.submit(1, [1] * 9, 2)
    engine.run_dry()
    context.reset(preserve_prefix_cache=True)
    assert "cleared" not in stream.kinds()
    assert context.dynamo_helper.announced_hashes == set(context.kv_block_allocator.kv_hash_to_block_id) != set()
    context.reset()
    assert stream.kinds()[-1] == "cleared"
    assert context.dynamo_helper.announced_hashes == frozenset()


def test_a_listener_that_raises_stops_neither_the_others_nor_the_engine() -> None:
    helper = DynamoHelper()

    def broken(kind: str, payload: dict[str, Any]) -> None:
        raise RuntimeError("the bus is down")

    helper.add_kv_event_listener(broken)
    stream = Stream(helper)
    helper.queue_kv_stored_event(stored([11]))
    helper.publish_pending_kv_stored_events()
    assert stream.kinds() == ["stored"]
    assert helper.listener_failures == 1


def test_a_listener_that_never_returns_does_not_hold_the_engine_up() -> None:
    release, heard = threading.Event(), []

    def stuck(kind: str, payload: dict[str, Any]) -> None:
        release.wait()
        heard.append(payload["block_hashes"][0])

    helper = DynamoHelper()
    background = BackgroundListener(stuck, max_events=2)
    helper.add_kv_event_listener(background)
    for block_hash in (11, 12, 13, 14, 15):
        helper.queue_kv_stored_event(stored([block_hash]))
        helper.publish_pending_kv_stored_events()
    assert heard == []
    assert background.dropped in (2, 3), "two wait, and one more if the thread has taken the first"
    release.set()
    assert background.close()
    assert heard == sorted(heard)
    assert len(heard) == 5 - background.dropped


def test_a_listener_can_be_removed() -> None:
    helper = DynamoHelper()
    heard: list[str] = []

    def listener(kind: str, payload: dict[str, Any]) -> None:
        heard.append(kind)

    helper.add_kv_event_listener(listener)
    assert helper.has_kv_event_listeners
    helper.remove_kv_event_listener(listener)
    assert not helper.has_kv_event_listeners
    helper.notify_kv_cache_cleared()
    assert heard == []
    with pytest.raises(ValueError, match="not registered"):
        helper.remove_kv_event_listener(listener)


def test_blocks_that_decode_fills_are_announced_after_their_last_slot_was_written() -> None:
    context = build_context(blocks=8, prefix_caching_eviction_policy=LRU)
    stream = Stream(context.dynamo_helper)
    engine = EngineModel(context)
    engine.submit(1, [1] * 6, 7)
    engine.step()
    assert len(stream.hashes("stored")) == 1
    engine.step()
    assert len(stream.hashes("stored")) == 1, "7 tokens written: the second block is not full"
    engine.step()
    assert len(stream.hashes("stored")) == 2
    job = engine.running[1]
    assert stream.events[-1][1]["token_ids"] == job.history[4:8]
    assert stream.events[-1][1]["parent_hash"] == stream.hashes("stored")[0]


def test_the_next_turn_matches_through_the_previous_answer() -> None:
    context = build_context(blocks=8, prefix_caching_eviction_policy=LRU)
    engine = EngineModel(context)
    engine.submit(1, [1] * 6, 7)
    engine.run_dry()
    follow_up = request(2, [*engine.finished[1].history, 3, 3])
    context.add_request(follow_up)
    assert follow_up.num_cached_tokens == 12, "13 tokens were written: three full blocks"


def test_generated_blocks_are_not_hashed_when_configured_off() -> None:
    context = build_context(blocks=8, prefix_caching_eviction_policy=LRU, hash_generated_blocks=False)
    engine = EngineModel(context)
    engine.submit(1, [1] * 6, 7)
    engine.run_dry()
    assert len(context.kv_block_allocator.kv_hash_to_block_id) == 1


def test_a_multimodal_prompt_and_its_answer_get_no_hashes() -> None:
    context = build_context(blocks=8, prefix_caching_eviction_policy=LRU)
    prompt = DynamicInferenceRequest(
        1, torch.tensor([1, 1, 1]), SamplingParams(num_tokens_to_generate=4), block_size_tokens=BLOCK_SIZE,
        enable_prefix_caching=True, multimodal=True,
    )  # fmt: skip
    context.add_request(prompt)
    context.initialize_attention_state()
    for token in (2, 2):
        context.update_requests(torch.tensor([1]), torch.tensor([token]))
    assert context.kv_block_allocator.kv_hash_to_block_id == {}
