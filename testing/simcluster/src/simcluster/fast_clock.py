# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""An event loop whose clock runs faster than the world's.

For code with time limits of its own, run in the test's process: its 15 seconds pass in one, and no limit had to be made
a parameter for that. Files, sockets and directory events stay as they are.
"""

from __future__ import annotations

import asyncio
import selectors


class FastClockLoop(asyncio.SelectorEventLoop):
    """`rate` seconds pass in here for each second outside."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        super().__init__(_Selector(rate))

    def time(self) -> float:
        """Return the time by which everything in the loop is scheduled."""
        return super().time() * self.rate


class _Selector(selectors.EpollSelector):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout if timeout is None else timeout / self._rate)
