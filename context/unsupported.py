"""The reference's methods for features that this context refuses: each raises and names the feature.

They stand here so that a caller of the reference meets a clear error instead of an AttributeError.  The configuration
refuses the same features at construction.
"""

from __future__ import annotations

from typing import Any, NoReturn

_HYBRID = "hybrid Mamba models"
_SPECULATIVE = "speculative decoding"
_GRAPHS = "CUDA graphs"
_EXPERT_PARALLEL = "expert parallelism"
_ASYNC = "async scheduling"
_SUSPEND = "suspend and resume"
_ROTARY = "rotary embedding inside the context"


def _refuses(name: str, feature: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{feature} ({name}) is not supported by this context")

    refuse.__name__ = name
    refuse.__doc__ = f"Not supported: {feature}."
    return refuse


class UnsupportedFeatures:
    """Mixed into the facade."""

    mamba_states_cache = _refuses("mamba_states_cache", _HYBRID)
    reset_mamba_state = _refuses("reset_mamba_state", _HYBRID)
    _allocate_mamba_states = _refuses("_allocate_mamba_states", _HYBRID)
    _allocate_mamba_cache = _refuses("_allocate_mamba_cache", _HYBRID)
    _execute_pending_mamba_ops = _refuses("_execute_pending_mamba_ops", _HYBRID)
    _find_mamba_match_count = _refuses("_find_mamba_match_count", _HYBRID)
    speculative_required_logit_indices = _refuses("speculative_required_logit_indices", _SPECULATIVE)
    add_dummy_requests_for_cudagraph_capture = _refuses("add_dummy_requests_for_cudagraph_capture", _GRAPHS)
    add_dummy_requests_for_expert_parallel_step = _refuses(
        "add_dummy_requests_for_expert_parallel_step", _EXPERT_PARALLEL
    )
    set_ep_zmq_communicator = _refuses("set_ep_zmq_communicator", _EXPERT_PARALLEL)
    can_prepare_requests = _refuses("can_prepare_requests", _ASYNC)
    prepare_requests = _refuses("prepare_requests", _ASYNC)
    commit_sampled_tokens = _refuses("commit_sampled_tokens", _ASYNC)
    resolve_requests = _refuses("resolve_requests", _ASYNC)
    copy_async_sched_sample_to_forward = _refuses("copy_async_sched_sample_to_forward", _ASYNC)
    _get_async_sched_rows_requiring_new_block = _refuses("_get_async_sched_rows_requiring_new_block", _ASYNC)
    deallocate_inference_state_buffers = _refuses("deallocate_inference_state_buffers", _SUSPEND)
    reinitialize_inference_state_buffers = _refuses("reinitialize_inference_state_buffers", _SUSPEND)
    apply_fused_qk_rotary_emb = _refuses("apply_fused_qk_rotary_emb", _ROTARY)
    apply_rotary_emb_query = _refuses("apply_rotary_emb_query", _ROTARY)
    apply_rotary_emb_key = _refuses("apply_rotary_emb_key", _ROTARY)
