# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""One line per event on standard error, and one exit code per run.

A component names its events in a `StrEnum` and hands them to an `EventLog` with typed fields. Values stand in fields,
never in prose, so that a thousand nodes can be grouped by key. `run` turns whatever ended a run into its last line
and its exit code. Libraries do not use this package: they return or raise.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping
from enum import StrEnum
from json import dumps
from typing import Final, TextIO

__all__ = ["EXIT_BUG", "EXIT_OK", "EXIT_USAGE", "EventLog", "Field", "Level", "run"]

Field = str | int | float | bool | None | list[str]

EXIT_OK: Final = 0
EXIT_BUG: Final = 1
EXIT_USAGE: Final = 2

RUN_FINISHED: Final = "run.finished"


class Level(StrEnum):
    """How much a line matters: `info` a state changed, `warning` we go on and the operator should know, `error` the end."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class EventLog:
    """Writes one line per event: JSON, or aligned text where a person watches a terminal.

    Every line holds `ts` (UTC, milliseconds), `level`, `event`, `component` and `version`, then the event's own fields.
    A stream that can't be written to is not the component's business: the line is dropped and the run goes on.
    """

    def __init__(
        self,
        component: str,
        version: str,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._fixed = {"component": component, "version": version}
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._for_people = self._stream.isatty()

    def info(self, event: str, **fields: Field) -> None:
        """Say that a state changed."""
        self._write(Level.INFO, event, fields)

    def warning(self, event: str, **fields: Field) -> None:
        """Say something that the operator should know although the run goes on."""
        self._write(Level.WARNING, event, fields)

    def error(self, event: str, **fields: Field) -> None:
        """Say what ends the run."""
        self._write(Level.ERROR, event, fields)

    def _write(self, level: Level, event: str, fields: Mapping[str, Field]) -> None:
        now = self._clock()
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now * 1000) % 1000:03d}Z"
        if self._for_people:
            pairs = " ".join(f"{key}={_text(value)}" for key, value in fields.items() if value is not None)
            line = f"{stamp[11:-1]} {level:<7} {event:<24} {pairs}".rstrip()
        else:
            head = {"ts": stamp, "level": level.value, "event": str(event)}
            line = dumps(head | self._fixed | {key: value for key, value in fields.items() if value is not None})
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            return


def run(log: EventLog, main: Callable[[], int]) -> int:
    """Call `main` and return the exit code of the run; the last line is always `run.finished`.

    An exception that carries an `exit_code` is an answer for the operator: its message and its `hint` are printed. Any
    other exception is a bug: exit code 1, and the traceback goes escaped into one field, where it can be reported from.
    """
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
        log.error(RUN_FINISHED, exit_code=code, error="interrupted")
    except Exception as error:  # noqa: BLE001 - the one place where everything ends
        code = getattr(error, "exit_code", EXIT_BUG)
        trace = "".join(traceback.format_exception(error)) if code == EXIT_BUG else None
        log.error(
            RUN_FINISHED,
            exit_code=code,
            error=str(error) or type(error).__name__,
            hint=getattr(error, "hint", None),
            traceback=trace,
        )
    else:
        log.info(RUN_FINISHED, exit_code=code)
    return code


def _text(value: Field) -> str:
    text = ",".join(value) if isinstance(value, list) else str(value)
    return dumps(text) if not text or any(character.isspace() or character == '"' for character in text) else text
