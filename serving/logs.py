"""Structured logging for every process: one event a line, on standard error, readable or JSON.

`log = logs.get_logger(__name__); log.info("worker.ready", address=address, ms=812)` names what happened and gives its
facts as fields; `logging.getLogger(__name__).info("worker.ready", extra={...})` comes out the same.
"""

import json as json_module
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_FIELDS = "event_fields"
_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", _FIELDS}


class EventLogger:
    """A logger whose facts are keyword arguments; safe to call from any thread."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: Any) -> None:
        """What only a developer wants to see."""
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        """A change of state that an operator may want to see."""
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        """Something went wrong and was handled."""
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        """Something went wrong and someone should look."""
        self._emit(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: Any) -> None:
        """An error with the exception that is being handled."""
        self._emit(logging.ERROR, event, fields, exc_info=True)

    def _emit(self, level: int, event: str, fields: dict[str, Any], exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: fields}, exc_info=exc_info)


def get_logger(name: str) -> EventLogger:
    """The event logger of a module; `name` is its `__name__`."""
    return EventLogger(name)


def setup(level: str = "info", json: bool = False, *, stream: TextIO | None = None) -> None:
    """Send every log of the process to `stream` (standard error), replacing what was set up before.

    `level` is debug, info, warning or error; raises `ValueError` for another one.  Standard output stays free for
    what a process prints to whoever started it.
    """
    if level.lower() not in _LEVELS:
        raise ValueError(f"log level {level!r} is unknown; use one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if json else _TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(_LEVELS[level.lower()])
    for chatty in ("asyncio", "numba", "aiohttp.access", "nats"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    given: Mapping[str, Any] = getattr(record, _FIELDS, {})
    others = {key: value for key, value in vars(record).items() if key not in _OWN_ATTRIBUTES}
    return {**others, **given}


def _time(record: logging.LogRecord) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{stamp}.{int(record.msecs):03d}Z"


class _JsonFormatter(logging.Formatter):
    """One JSON object a line; a field never hides time, level, logger or event."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line = _fields_of(record) | {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json_module.dumps(line, default=str, ensure_ascii=False)


class _TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z info  router.ready address=http://127.0.0.1:8000`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; an exception's traceback follows on lines of its own."""
        fields = "".join(f" {key}={_quoted(value)}" for key, value in _fields_of(record).items())
        line = f"{_time(record)} {record.levelname.lower():<7} {_one_line(record.getMessage())}{fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\r", "\\r")


def _quoted(value: Any) -> str:
    text = _one_line(str(value))
    return json_module.dumps(text, ensure_ascii=False) if " " in text or '"' in text or not text else text
