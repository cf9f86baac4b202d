"""What `warm` does over thousands of prompts: hot prefixes, serial traffic, new workers, bursts; against
the other policies.
"""

import random
from collections.abc import Iterator

from router.policy.registry import policy_by_name
from router.simulation import Arrival, Outcome, Simulation


def zipf_trace(count: int, *, rate: float, documents: int = 200, seed: int = 3) -> list[Arrival]:
    """Every prompt: 4 blocks in common with all, 12 of a document drawn by Zipf's law, 2 of its own."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(documents)]
    fresh = iter(range(10**6, 10**7))
    arrivals, now = [], 0.0
    for document in rng.choices(range(documents), weights, k=count):
        now += rng.expovariate(rate)
        body = range(1000 + document * 12, 1000 + document * 12 + 12)
        blocks = [*range(4), *body, next(fresh), next(fresh)]
        arrivals.append(Arrival(now, len(blocks) * 512, 100, blocks))
    return arrivals


def run(policy: str, trace: list[Arrival], *, workers: int = 8, capacity: int = 600) -> Outcome:
    return Simulation(policy_by_name(policy), workers=workers, capacity=capacity).run(trace)


def test_a_hot_prefix_keeps_the_load_even_and_nearly_all_hits_of_a_sticky_policy() -> None:
    trace = zipf_trace(4000, rate=20)
    warm, sticky = run("warm", trace), run("overlap-only", trace)
    assert warm.imbalance <= 1.3
    assert warm.token_hit >= 0.9 * sticky.token_hit
    assert sticky.imbalance > 4, "the sticky policy is what an overload looks like"


def test_warm_answers_sooner_than_every_other_policy_at_the_median_and_at_the_99th_percentile() -> None:
    trace = zipf_trace(4000, rate=25)
    warm = run("warm", trace)
    for other in ("round-robin", "random", "least-loaded", "power-of-two", "session-hash"):
        outcome = run(other, trace)
        assert warm.ttft_p50_ms <= outcome.ttft_p50_ms, other
        assert warm.ttft_p99_ms <= outcome.ttft_p99_ms, other


def serial(count: int, first: int = 0) -> Iterator[Arrival]:
    """Prompts with one common block, each so late that all workers are idle again."""
    for number in range(first, first + count):
        own = range(10**6 + number * 10, 10**6 + number * 10 + 9)
        yield Arrival(number * 100.0, 5120, 1, [0, *own])


def test_serial_prompts_on_idle_equal_workers_split_evenly_although_all_share_a_block() -> None:
    world = Simulation(policy_by_name("warm"), workers=2, capacity=10_000)
    world.run(serial(200))
    shares = [worker.work for worker in world.workers]
    assert 0.35 <= shares[0] / sum(shares) <= 0.65


def test_new_workers_get_their_share_of_shared_prefix_traffic() -> None:
    trace = zipf_trace(3000, rate=12)
    world = Simulation(policy_by_name("warm"), workers=4, capacity=600)
    newcomers, world.workers = world.workers[2:], world.workers[:2]
    world.run(trace[:1000])
    world.workers = world.workers + newcomers
    before = [worker.work for worker in world.workers]
    world.run(trace[1000:])
    done = [worker.work - b for worker, b in zip(world.workers, before, strict=True)]
    assert min(done[2:]) >= 0.5 * sum(done) / 4


def test_a_run_is_the_same_every_time() -> None:
    trace = zipf_trace(500, rate=20)
    assert run("warm", trace) == run("warm", trace)
