"""Policies by name: the built-in ones, and any that an installed package offers as entry point group
`warmroute.policies`.
"""

from collections.abc import Callable
from importlib.metadata import entry_points

from router.policy.base import Policy
from router.policy.least_loaded import LeastLoaded
from router.policy.overlap_only import OverlapOnly
from router.policy.power_of_two import PowerOfTwo
from router.policy.round_robin import RoundRobin
from router.policy.session_hash import SessionHash
from router.policy.uniform import Uniform
from router.policy.warm import Warm

BUILT_IN: dict[str, Callable[[], Policy]] = {
    policy.name: policy for policy in (Warm, RoundRobin, Uniform, LeastLoaded, PowerOfTwo, OverlapOnly, SessionHash)
}


def policy_by_name(name: str) -> Policy:
    """A policy by its name.  Raises ValueError that lists the known names."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    offered = {point.name: point for point in entry_points(group="warmroute.policies")}
    if name in offered:
        policy: Policy = offered[name].load()()
        return policy
    known = ", ".join([*BUILT_IN, *offered])
    raise ValueError(f"policy {name!r} is unknown; known policies: {known}")
