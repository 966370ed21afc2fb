# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The plugin as it is installed: its command, in a process of its own, with its event lines."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from conformance.waiting import wait_until


class PluginProcess:
    """One instance, from its start on; a context manager that kills it. Its event lines go to `log`."""

    def __init__(self, argv: Sequence[str], log: Path) -> None:
        self.log = log
        self.started_ns = time.monotonic_ns()
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, stderr=stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """Return the event lines so far, or those of one name."""
        text = self.log.read_text()
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [line for line in lines if not name or line["event"] == name]

    def wait_for(self, name: str, *, count: int = 1, within_s: float = 10.0) -> dict[str, Any]:
        """Wait for an event line to have come so often; return the last of them."""
        wait_until(
            lambda: len(self.events(name)) >= count,
            lambda: f"{name} {count} times, observed:\n{self.log.read_text()}",
            within_s=within_s,
        )
        return self.events(name)[count - 1]

    def is_running(self) -> bool:
        return self._process.poll() is None

    def terminate(self, *, within_s: float = 5.0) -> int:
        """Send SIGTERM and return the exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(within_s)

    def kill(self) -> None:
        """Send SIGKILL: nothing is cleaned up."""
        self._process.kill()
        self._process.wait()
