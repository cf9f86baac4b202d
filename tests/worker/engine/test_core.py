"""The engine gives every request the tokens it would get alone, whatever happens around it."""

import random

import pytest

from context import DynamicInferenceContext, PrefixCachingEvictionPolicy
from serving.tokenizer import Tokenizer
from worker.engine import FinishReason
from worker.models import Model

from ..conftest import MakeEngine
from ..world import BLOCK_SIZE, Collected, EngineWorld, Failing, prompt_of


def alone(make: MakeEngine, prompt: list[int], count: int, **fields: object) -> Collected:
    """The same generation in an engine of its own with room for everything."""
    world = make(blocks=200, max_tokens=512)
    collected = world.add(prompt, count, **fields)
    world.run()
    return collected


def test_a_batch_gives_each_request_what_it_gets_alone(engine: MakeEngine) -> None:
    world = engine()
    prompts = [prompt_of(length, seed=length) for length in (3, 17, 30, 1, 40)]
    answers = [world.add(prompt, 12) for prompt in prompts]
    world.run()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == alone(engine, prompt, 12).tokens
        assert answer.finish is FinishReason.LENGTH
    assert world.held == 0
    assert world.steps_told == world.core.counters.steps


def test_a_long_prompt_in_chunks_beside_decoding_rows_changes_nothing(engine: MakeEngine) -> None:
    world = engine(max_tokens=16)
    short = world.add(prompt_of(5, seed=1), 40)
    world.step(3)
    long = world.add(prompt_of(100, seed=2), 5)
    before = len(short.tokens)
    while not long.tokens:
        world.step()
    assert len(short.tokens) - before >= 100 // 16, "decoding went on while the prompt was read in chunks"
    world.run()
    assert long.tokens == alone(engine, prompt_of(100, seed=2), 5).tokens
    assert short.tokens == alone(engine, prompt_of(5, seed=1), 40).tokens


@pytest.mark.parametrize("length", [17, 33, 18, 34, 49])
def test_no_chunk_of_one_token_is_left(engine: MakeEngine, length: int) -> None:
    world = engine(max_tokens=16)
    chunks: list[int] = []
    add_request = world.context.add_request

    def noted(request: object, prefill_chunk_length: int | None = None) -> None:
        chunks.append(prefill_chunk_length or 0)
        add_request(request, prefill_chunk_length)  # type: ignore[arg-type]

    world.context.add_request = noted  # type: ignore[method-assign]
    answer = world.add(prompt_of(length), 3)
    world.run()
    assert sum(chunks) == length
    assert min(chunks) >= 2
    assert answer.tokens == alone(engine, prompt_of(length), 3).tokens


def test_sampled_tokens_do_not_depend_on_the_batch(engine: MakeEngine) -> None:
    world = engine(max_tokens=32)
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 11}
    others = [world.add(prompt_of(9 + n, seed=50 + n), 15, temperature=1.0, seed=n) for n in range(4)]
    answer = world.add(prompt_of(20, seed=3), 12, **sampling)
    world.run()
    assert answer.tokens == alone(engine, prompt_of(20, seed=3), 12, **sampling).tokens
    assert len({tuple(other.tokens) for other in others}) == 4


def test_cached_tokens_are_those_that_no_forward_computed(engine: MakeEngine) -> None:
    world = engine()
    prompt = prompt_of(3 * BLOCK_SIZE + 5)
    first = world.add(prompt, 11)
    world.run()
    assert first.cached_tokens == 0
    # The last generated token is never computed, so the blocks hold one token less than the conversation.
    conversation = prompt + first.tokens
    computed = (len(conversation) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert computed > len(prompt), "the test should reach into the generated tokens"
    before = world.core.counters.computed_tokens
    second = world.add([*conversation, *prompt_of(9, seed=8)], 1)
    world.run()
    assert second.cached_tokens == computed
    assert world.core.counters.computed_tokens - before == len(conversation) + 9 - computed
    assert second.tokens == alone(engine, [*conversation, *prompt_of(9, seed=8)], 1).tokens


def test_a_prompt_that_is_wholly_cached_recomputes_its_tail(engine: MakeEngine) -> None:
    world = engine()
    for extra, cached in ((0, 2 * BLOCK_SIZE), (1, 2 * BLOCK_SIZE), (2, 3 * BLOCK_SIZE)):
        prompt = prompt_of(3 * BLOCK_SIZE) + prompt_of(extra, seed=4)
        world.add(prompt, 1)
        world.run()
        again = world.add(prompt, 1)
        world.run()
        assert again.cached_tokens == cached, f"{extra} tokens beyond three whole blocks"


def test_prompts_admitted_together_share_their_prefix(engine: MakeEngine) -> None:
    world = engine(max_tokens=64)
    prefix = prompt_of(2 * BLOCK_SIZE)
    answers = [world.add(prefix + prompt_of(4, seed=n), 4) for n in range(3)]
    world.step()
    assert [answer.cached_tokens for answer in answers] == [0, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE]
    world.run()
    for n, answer in enumerate(answers):
        assert answer.tokens == alone(engine, prefix + prompt_of(4, seed=n), 4).tokens


def test_what_must_not_be_shared_is_neither_matched_nor_announced(engine: MakeEngine) -> None:
    world = engine()
    prompt = prompt_of(40)
    world.add(prompt, 20, cacheable=False)
    world.run()
    assert world.announced == set()
    again = world.add(prompt, 2)
    world.run()
    assert again.cached_tokens == 0


def test_requests_evicted_from_a_full_pool_begin_again_and_lose_nothing(engine: MakeEngine) -> None:
    world = engine(blocks=13, max_requests=4, max_tokens=32)
    prompts = [prompt_of(14, seed=n) for n in range(4)]
    answers = [world.add(prompt, 40) for prompt in prompts]
    world.run()
    assert world.core.counters.preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == alone(engine, prompt, 40).tokens
    assert world.held == 0


def test_an_open_chunk_yields_to_paused_requests(engine: MakeEngine) -> None:
    world = engine(blocks=11, max_requests=4, max_tokens=16)
    answers = [(prompt_of(7, seed=n), world.add(prompt_of(7, seed=n), 50)) for n in range(2)]
    world.step(4)
    answers.append((prompt_of(56, seed=9), world.add(prompt_of(56, seed=9), 20)))
    world.run()
    for prompt, answer in answers:
        assert answer.finish is FinishReason.LENGTH
        assert answer.tokens == alone(engine, prompt, len(answer.tokens)).tokens


@pytest.mark.parametrize("policy", list(PrefixCachingEvictionPolicy))
@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_over_a_small_pool_keeps_every_answer(
    engine: MakeEngine, seed: int, policy: PrefixCachingEvictionPolicy
) -> None:
    rng = random.Random(seed)
    world = engine(blocks=16, max_requests=5, max_tokens=20, policy=policy)
    prefixes = [prompt_of(24, seed=100 + n) for n in range(2)]
    running: list[tuple[list[int], int, Collected]] = []
    aborted: set[int] = set()
    for turn in range(60):
        if rng.random() < 0.3:
            prompt = rng.choice(prefixes)[: rng.randint(1, 24)] + prompt_of(rng.randint(1, 20), seed=seed * 99 + turn)
            count = rng.randint(1, 30)
            running.append((prompt, count, world.add(prompt, count)))
        if running and rng.random() < 0.08:
            _, _, victim = rng.choice(running)
            if victim.finish is None:
                world.core.abort([victim.number])
                aborted.add(victim.number)
                world.check()
        world.step()
    world.run()
    assert world.held == 0
    for prompt, count, answer in running:
        expected = alone(engine, prompt, count).tokens
        if answer.number in aborted:
            assert answer.finish is FinishReason.ABORT
            assert answer.tokens == expected[: len(answer.tokens)]
        else:
            assert answer.tokens == expected


# -- ends ----------------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_answer_and_is_not_shown(engine: MakeEngine, tokenizer: Tokenizer) -> None:
    tokens = alone(engine, prompt_of(9), 10).tokens
    ending = next(t for n, t in enumerate(tokens) if t not in tokens[:n] and n > 2)
    place = tokens.index(ending)
    stopped = alone(engine, prompt_of(9), 10, token_ids=frozenset([ending]))
    assert stopped.finish is FinishReason.STOP
    assert stopped.tokens == tokens[: place + 1]
    assert stopped.text == tokenizer.decode(tokens[:place])
    shown = alone(engine, prompt_of(9), 10, token_ids=frozenset([ending]), include_stop=True)
    assert shown.text == tokenizer.decode(tokens[: place + 1])


def test_a_stop_token_cannot_come_before_min_tokens(engine: MakeEngine) -> None:
    tokens = alone(engine, prompt_of(9), 6).tokens
    forced = alone(engine, prompt_of(9), 6, token_ids=frozenset(tokens[:1]), min_tokens=3)
    assert tokens[0] not in forced.tokens[:3]
    assert len(forced.tokens) >= 3


def test_a_stop_string_across_tokens_ends_the_answer(engine: MakeEngine, tokenizer: Tokenizer) -> None:
    tokens = alone(engine, prompt_of(9), 12).tokens
    pieces = [tokenizer.decode([token]) for token in tokens]
    assert len(pieces[4]) > 1, "the test needs a token of two characters"
    text = tokenizer.decode(tokens)
    start = len("".join(pieces[:4])) + 1
    stop = text[start : start + len(pieces[4])]
    stopped = alone(engine, prompt_of(9), 12, strings=(stop,))
    assert stopped.finish is FinishReason.STOP
    assert stopped.text == text[: text.index(stop)]
    assert len(stopped.tokens) <= 6


def test_text_is_whole_characters_and_complete(engine: MakeEngine, tokenizer: Tokenizer) -> None:
    answer = alone(engine, prompt_of(9), 60, temperature=3.0, seed=5)
    assert answer.text == tokenizer.decode(answer.tokens)
    assert all("\ufffd" not in output.text for output in answer.outputs[:-1]) or "\ufffd" in answer.text


def test_the_longest_sequence_ends_an_answer(engine: MakeEngine) -> None:
    world = engine(max_length=40)
    answer = world.add(prompt_of(30), 10)
    world.run()
    assert answer.finish is FinishReason.LENGTH
    assert len(answer.tokens) == 10


# -- cancellation and failure --------------------------------------------------------------------------------------


def free_blocks(world: EngineWorld) -> int:
    return world.context.kv_block_allocator.get_allocatable_count()


@pytest.mark.parametrize("steps", [0, 1, 2, 9])
def test_a_cancelled_request_gives_all_its_blocks_back(engine: MakeEngine, steps: int) -> None:
    world = engine(max_tokens=16)
    free = free_blocks(world)
    gone, stays = world.add(prompt_of(40, seed=1), 50), world.add(prompt_of(6, seed=2), 20)
    world.step(steps)
    world.core.abort([gone.number])
    world.check()
    assert gone.finish is FinishReason.ABORT
    world.run()
    assert stays.tokens == alone(engine, prompt_of(6, seed=2), 20).tokens
    assert free_blocks(world) == free
    world.core.abort([gone.number, 12345])


def test_a_step_that_fails_once_is_run_again_unnoticed(engine: MakeEngine, tiny: Model) -> None:
    failing = Failing(
        tiny, lambda context: context.step_count in (0, 4, 9) and failing.failed <= context.step_count // 4
    )
    world = engine(model=failing, max_tokens=16)
    prompts = [prompt_of(length, seed=length) for length in (5, 40, 12)]
    answers = [world.add(prompt, 10) for prompt in prompts]
    world.run()
    assert world.core.counters.step_failures == failing.failed == 3
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.error is None
        assert answer.tokens == alone(engine, prompt, 10).tokens


def test_a_step_that_fails_twice_ends_its_requests_and_no_others(engine: MakeEngine, tiny: Model) -> None:
    poison = 777

    def is_poisoned(context: DynamicInferenceContext) -> bool:
        return poison in context.current_input_and_position_ids()[0][0, : context.active_token_count].tolist()

    world = engine(model=Failing(tiny, is_poisoned), max_requests=1)
    fine = world.add(prompt_of(6, seed=1), 5)
    bad = world.add([poison, *prompt_of(20, seed=2)], 5)
    later = world.add(prompt_of(8, seed=3), 5)
    world.run()
    assert bad.finish is FinishReason.ERROR
    assert "failed twice" in (bad.error or "")
    assert fine.tokens == alone(engine, prompt_of(6, seed=1), 5).tokens
    assert later.tokens == alone(engine, prompt_of(8, seed=3), 5).tokens
    assert world.held == 0
    again = world.add(prompt_of(20, seed=2), 2)
    world.run()
    assert again.cached_tokens == 0, "blocks that a failed forward did not write must not be matched"


def test_a_reset_ends_everything_and_the_engine_serves_on(engine: MakeEngine) -> None:
    world = engine()
    answers = [world.add(prompt_of(20, seed=n), 10) for n in range(3)]
    world.step(2)
    world.core.reset("broken")
    world.check()
    assert [answer.error for answer in answers] == ["broken"] * 3
    assert world.announced == set()
    after = world.add(prompt_of(20, seed=1), 10)
    world.run()
    assert after.tokens == alone(engine, prompt_of(20, seed=1), 10).tokens


def test_load_tells_what_runs_waits_and_is_held(engine: MakeEngine) -> None:
    world = engine(max_requests=2, max_tokens=16)
    for n in range(3):
        world.add(prompt_of(10, seed=n), 4)
    world.step()
    load = world.core.load
    assert (load.running, load.waiting) == (1, 2)
    assert load.waiting_prompt_tokens == 4 + 10
    assert load.used_blocks > 0
    world.run()
    load = world.core.load
    assert (load.running, load.waiting, load.waiting_prompt_tokens, load.used_blocks) == (0, 0, 0, 0)
    assert load.cached_blocks == len(world.announced)
    assert world.core.counters.finished["length"] == 3
