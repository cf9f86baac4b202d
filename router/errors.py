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


def unknown_worker(worker: str, known: Iterable[str]) -> OpenAIError:
    """404 for a forced worker that does not exist for the model."""
    listed = ", ".join(sorted(known)) or "none"
    return OpenAIError(
        404,
        f"x-warmroute-worker names {worker!r}, which is not a ready worker of this model; ready: {listed}.",
        type="invalid_request_error",
        code="worker_not_found",
        param="x-warmroute-worker",
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
