"""Logs: one event a line, with its fields, readable or JSON."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from serving import logs


@pytest.fixture(autouse=True)
def _restore_root() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def json_line(emit: Any) -> dict[str, Any]:
    """The one JSON line that `emit` causes."""
    stream = io.StringIO()
    logs.setup("debug", json=True, stream=stream)
    emit()
    (line,) = stream.getvalue().splitlines()
    return dict(json.loads(line))


def test_fields_are_keys_of_the_json_line() -> None:
    line = json_line(lambda: logs.get_logger("a.b").info("worker.ready", address="http://x", ms=3))
    assert (line["event"], line["level"], line["logger"]) == ("worker.ready", "info", "a.b")
    assert (line["address"], line["ms"]) == ("http://x", 3)
    assert line["time"].endswith("Z")


def test_the_standard_loggers_extra_comes_out_the_same() -> None:
    line = json_line(lambda: logging.getLogger("a").warning("x.y", extra={"in_flight": 2}))
    assert (line["event"], line["in_flight"]) == ("x.y", 2)


def test_fields_may_have_names_that_log_records_use() -> None:
    line = json_line(lambda: logs.get_logger("a").info("x", name="n", args=1, module="m", event="e", level="l"))
    assert (line["name"], line["args"], line["module"]) == ("n", 1, "m")
    assert (line["event"], line["level"]) == ("x", "info")


def test_an_exception_is_a_field() -> None:
    def emit() -> None:
        try:
            raise KeyError("gone")
        except KeyError:
            logs.get_logger("a").exception("x.failed")

    line = json_line(emit)
    assert line["level"] == "error"
    assert "KeyError: 'gone'" in line["exception"]


def test_a_field_that_is_no_json_is_written_as_text() -> None:
    assert (
        json_line(
            lambda: logs.get_logger("a").info(
                "x",
                where={
                    1,
                },
            )
        )["where"]
        == "{1}"
    )


def test_a_readable_line_quotes_what_has_spaces_and_keeps_to_one_line() -> None:
    stream = io.StringIO()
    logs.setup("info", stream=stream)
    logs.get_logger("a").info("x.y", plain="v", text="two words", broken="a\nb", empty="")
    logs.get_logger("a").debug("not shown")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r'x.y plain=v text="two words" broken=a\nb empty=""')


def test_an_unknown_level_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'loud' is unknown; use one of debug, info, warning, error"):
        logs.setup("loud")
