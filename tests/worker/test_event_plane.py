"""A worker's heartbeat tells its load and place in the stream, and others can reach the address in it."""

import pytest

from worker.event_plane import heartbeat, new_publisher, reachable_host

from .world import Served, prompt_of


def test_an_address_that_others_can_use() -> None:
    assert reachable_host("10.1.2.3", "") == "10.1.2.3"
    assert reachable_host("fd00::1", "") == "[fd00::1]"
    assert reachable_host("0.0.0.0", "nats://127.0.0.1:4222") == "127.0.0.1"
    assert reachable_host("::", "nats://user:secret@127.0.0.1:4222,nats://other:4222") == "127.0.0.1"


def test_a_new_publisher_has_told_nothing() -> None:
    state = new_publisher("w", 3, "m", 16).state()
    assert (state.seq, state.blocks, state.digest) == (0, 0, 0)


@pytest.mark.parametrize("prompt_length", [40, 7])
async def test_a_heartbeat_tells_what_is_cached(served: Served, prompt_length: int) -> None:
    publisher = new_publisher("w", 0, "tiny", 16)
    context = served.worker.engine.core.context
    context.dynamo_helper.add_kv_event_listener(publisher.listener)
    await served.complete(prompt_of(prompt_length), max_tokens=3)
    await served.idle()
    beat = heartbeat(served.worker, publisher, "http://here")
    (source,) = beat.sources
    assert beat.state == "ready"
    assert beat.capacity_blocks == source.load.blocks_total == served.worker.engine.load.total_blocks
    assert beat.tokenizer == served.worker.tokenizer.fingerprint
    assert source.blocks == source.load.blocks_used == len(context.kv_block_allocator.kv_hash_to_block_id)
    assert (source.load.running, source.load.waiting, source.load.prefill_tokens) == (0, 0, 0)
    assert source.load.decode_blocks == 0
