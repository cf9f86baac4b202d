"""The errors by which the context refuses a request, and their JSON form.

Every class says whether the refusal is transient (the same call may succeed after a later step) or permanent (the
request can never fit this context).
"""

from __future__ import annotations

from typing import Any


class ContextOverflowError(Exception):
    """A request does not fit.

    Args:
        request_id: the request that was refused, or None when no single request is to blame.
        message: what did not fit, with both numbers.
        is_transient: True if the same call may succeed later.
    """

    def __init__(self, request_id: int | None, message: str | None = None, *, is_transient: bool = True) -> None:
        super().__init__(f"request {request_id}" + (f": {message}" if message else ""))
        self.request_id = request_id
        self.message = message
        self.is_transient = is_transient


class RequestOverflowError(ContextOverflowError):
    """No request row is free."""


class TokenOverflowError(ContextOverflowError):
    """The step's token budget is spent."""


class MaxSequenceLengthOverflowError(ContextOverflowError):
    """Prompt plus generation is longer than any sequence may be; permanent by nature."""

    def __init__(self, request_id: int | None, message: str | None = None) -> None:
        super().__init__(request_id, message, is_transient=False)


class BlockOverflowError(ContextOverflowError):
    """Not enough KV blocks are free or evictable."""


class ActiveRequestCountOverflowError(ContextOverflowError):
    """More warm-up requests were asked for than the context has rows."""

    def __init__(self, max_request_count: int, active_request_count: int) -> None:
        super().__init__(
            None,
            f"active requests ({active_request_count}) exceed the context's rows ({max_request_count})",
            is_transient=True,
        )
        self.max_request_count = max_request_count
        self.active_request_count = active_request_count


class TensorStateDeallocatedError(ContextOverflowError):
    """The context's buffers are given back, as while the engine is suspended."""


_CLASSES: dict[str, type[ContextOverflowError]] = {
    cls.__name__: cls
    for cls in (
        ContextOverflowError,
        RequestOverflowError,
        TokenOverflowError,
        MaxSequenceLengthOverflowError,
        BlockOverflowError,
        ActiveRequestCountOverflowError,
        TensorStateDeallocatedError,
    )
}


class ContextErrorFactory:
    """Carries context errors over a JSON boundary: equal type, message, request id and flag on the other side."""

    @classmethod
    def serialize(cls, error: ContextOverflowError) -> dict[str, Any]:
        """Return `{"type", "request_id", "message", "is_transient"}`, plus the two counts of a count overflow.

        Raises:
            ValueError: the error is not of this family.
        """
        name = type(error).__name__
        if _CLASSES.get(name) is not type(error):
            raise ValueError(f"error type {name!r} is not a context error; known: {', '.join(sorted(_CLASSES))}")
        data: dict[str, Any] = {
            "type": name,
            "request_id": error.request_id,
            "message": error.message,
            "is_transient": error.is_transient,
        }
        if isinstance(error, ActiveRequestCountOverflowError):
            data["max_request_count"] = error.max_request_count
            data["active_request_count"] = error.active_request_count
        return data

    @classmethod
    def deserialize(cls, obj: dict[str, Any]) -> ContextOverflowError:
        """Rebuild the error through its own constructor.

        Raises:
            ValueError: unknown type, or a field is missing.
        """
        name = obj.get("type")
        error_class = _CLASSES.get(name) if isinstance(name, str) else None
        if error_class is None:
            raise ValueError(f"unknown context error type {name!r}; known: {', '.join(sorted(_CLASSES))}")
        try:
            if error_class is ActiveRequestCountOverflowError:
                return ActiveRequestCountOverflowError(obj["max_request_count"], obj["active_request_count"])
            if error_class is MaxSequenceLengthOverflowError:
                return MaxSequenceLengthOverflowError(obj["request_id"], obj["message"])
            return error_class(obj["request_id"], obj["message"], is_transient=obj["is_transient"])
        except KeyError as missing:
            raise ValueError(f"a serialized {name} lacks the field {missing.args[0]!r}") from missing
