# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import io
import json

import pytest

import eventline
from eventline import EventLog


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError


class Refused(Exception):
    exit_code = 10
    hint = "boot another kernel"


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def log(stream: io.StringIO) -> EventLog:
    return EventLog("component", "1.2.3", stream=stream, clock=lambda: 1_000_000_000.5)


def test_a_line_has_its_fixed_fields_and_leaves_out_what_is_not_known() -> None:
    stream = io.StringIO()
    log(stream).info("device.listed", device="0000:65:00.0", numa_node=None, count=3, healthy=True, ids=["a"])
    assert lines(stream) == [
        {
            "ts": "2001-09-09T01:46:40.500Z",
            "level": "info",
            "event": "device.listed",
            "component": "component",
            "version": "1.2.3",
            "device": "0000:65:00.0",
            "count": 3,
            "healthy": True,
            "ids": ["a"],
        }
    ]


def test_no_value_can_break_a_line() -> None:
    stream = io.StringIO()
    log(stream).warning("entry.skipped", reason='two\nlines " and \x1b[31m')
    assert len(stream.getvalue().splitlines()) == 1
    assert lines(stream)[0]["reason"] == 'two\nlines " and \x1b[31m'


def test_people_at_a_terminal_get_text_that_no_value_can_break_either() -> None:
    stream = Terminal()
    log(stream).error("run.finished", exit_code=1, error="a b\nc", ids=["x", "y"], empty="")
    assert stream.getvalue() == (
        '01:46:40.500 error   run.finished             exit_code=1 error="a b\\nc" ids=x,y empty=""\n'
    )


def test_a_stream_that_is_gone_does_not_stop_the_run() -> None:
    log(Closed()).info("run.started")


def test_the_last_line_of_a_run_is_its_exit_code() -> None:
    stream = io.StringIO()
    assert eventline.run(log(stream), lambda: 7) == 7
    assert lines(stream)[-1] == lines(stream)[-1] | {"event": "run.finished", "exit_code": 7, "level": "info"}


def raises(error: BaseException) -> int:
    raise error


def test_an_answer_for_the_operator_has_its_code_and_hint_and_no_traceback() -> None:
    stream = io.StringIO()
    assert eventline.run(log(stream), lambda: raises(Refused("0000:65:00.0: held"))) == 10
    last = lines(stream)[-1]
    assert (last["exit_code"], last["error"], last["hint"]) == (10, "0000:65:00.0: held", "boot another kernel")
    assert "traceback" not in last


@pytest.mark.parametrize("error", [ValueError("odd"), ExceptionGroup("several", [ValueError("odd")])])
def test_a_bug_is_exit_code_1_with_its_traceback_in_one_field(error: Exception) -> None:
    stream = io.StringIO()
    assert eventline.run(log(stream), lambda: raises(error)) == 1
    assert len(lines(stream)) == 1
    assert "odd" in str(lines(stream)[0]["traceback"])


def test_an_interrupt_is_told_as_one() -> None:
    stream = io.StringIO()
    assert eventline.run(log(stream), lambda: raises(KeyboardInterrupt())) == 130
    assert lines(stream)[-1]["error"] == "interrupted"
