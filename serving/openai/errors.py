"""Errors that a client sees, in OpenAI's form: `{"error": {message, type, param, code}}`."""

from collections.abc import Mapping

import msgspec


class _Detail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class _Body(msgspec.Struct):
    error: _Detail


class OpenAIError(Exception):
    """An answer other than 200: `status` is HTTP's, `param` the path of the field to blame, `headers` are added."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type = status, message, type
        self.code, self.param = code, param
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON body."""
        return msgspec.json.encode(_Body(_Detail(self.message, self.type, self.param, self.code)))


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> OpenAIError:
    """A 400 that blames the field at path `param`."""
    return OpenAIError(400, message, param=param, code=code)
