# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Waiting for a condition, with a deadline, in one event loop.

A condition is any function without arguments. It is asked again whenever something simulated changed, and every few
milliseconds besides, since conditions may also look at files and processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

T = TypeVar("T")

DEADLINE_S: Final = 10.0
_LOOK_S: Final = 0.005


def on_the_loops_clock(seconds: float) -> float:
    """Return how many seconds pass in the running loop while `seconds` pass outside; see `fast_clock`."""
    return seconds * float(getattr(asyncio.get_running_loop(), "rate", 1.0))


class NotInTime(AssertionError):
    """A condition did not come true. `state` says how things stood at the deadline."""

    def __init__(self, what: str, timeout_s: float, state: str) -> None:
        super().__init__(what, timeout_s, state)
        self.what = what
        self.timeout_s = timeout_s
        self.state = state

    def __str__(self) -> str:
        return f"{self.what}: not true within {self.timeout_s:g} s" + (f"; {self.state}" if self.state else "")


class Changes:
    """Tells those who wait that something changed; shared by whatever is waited for together."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        """Have every condition asked again."""
        self._event.set()

    async def wait_for(
        self,
        condition: Callable[[], T],
        *,
        timeout_s: float = DEADLINE_S,
        what: str = "condition",
        state: Callable[[], str] = str,
    ) -> T:
        """Return what `condition` gives as soon as that is true; the deadline is in the world's seconds.

        Raises: NotInTime, with the text that `state` gives then.
        """
        look_s = on_the_loops_clock(_LOOK_S)
        deadline_s = time.monotonic() + timeout_s
        while not (answer := condition()):
            if time.monotonic() >= deadline_s:
                raise NotInTime(what, timeout_s, state())
            self._event.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(look_s):
                    await self._event.wait()
        return answer


async def wait_for(condition: Callable[[], T], *, timeout_s: float = DEADLINE_S, what: str = "condition") -> T:
    """Wait for a condition that nothing simulated is part of.

    Raises: NotInTime.
    """
    return await Changes().wait_for(condition, timeout_s=timeout_s, what=what)
