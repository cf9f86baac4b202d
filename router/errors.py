"""Errors that a client of the router sees, in OpenAI's form."""

from collections.abc import Iterable

from serving.openai import OpenAIError


def unknown_model(model: str, known: Iterable[str]) -> OpenAIError:
    """404 that lists what is served."""
    listed = ", ".join(sorted(known)) or "none yet"
    return OpenAIError(
        404,
        f"The model {model!r} is not served here; served models: {listed}.",
        type="invalid_request_error",
        code="model_not_found",
        param="model",
    )


def unknown_worker(worker: str, known: Iterable[str], *, param: str = "x-warmroute-worker") -> OpenAIError:
    """404 for a worker that does not exist, or that is not ready for the model when it is forced."""
    listed = ", ".join(sorted(known)) or "none"
    return OpenAIError(
        404,
        f"{param} names {worker!r}, which is not a worker that can be used here; these can: {listed}.",
        type="invalid_request_error",
        code="worker_not_found",
        param=param,
    )


def unknown_decision(request_id: str, kept: int) -> OpenAIError:
    """404 for a decision that is not kept any more."""
    return OpenAIError(
        404,
        f"No decision is kept for request {request_id!r}; the last {kept} are.",
        type="invalid_request_error",
        code="decision_not_found",
        param="id",
    )


def too_long(tokens: int, limit: int) -> OpenAIError:
    """400 with both numbers."""
    return OpenAIError(
        400,
        f"The prompt has {tokens} tokens; its workers take sequences of at most {limit} tokens.",
        type="invalid_request_error",
        code="context_length_exceeded",
        param="messages",
    )


def no_worker(reason: str, retry_after_s: int) -> OpenAIError:
    """503 with Retry-After."""
    return OpenAIError(
        503,
        f"No worker can take the request now: {reason}. Try again in {retry_after_s} s.",
        type="service_unavailable",
        code="no_worker",
        param=None,
        headers={"Retry-After": str(retry_after_s)},
    )
