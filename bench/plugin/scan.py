# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Our scan as a program of its own: one pass for every line on standard input, as go/scan does.

A line names what to do: `facts` reads what the Go program reads, vendor, class and NUMA node of every VFIO device;
`first` is everything that the plugin looks at when it starts, `again` what it looks at every ten seconds. Each answer
is the number of devices and the nanoseconds that it took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

from kata_device_plugin.scanner import Scanner
from pcifacts import function, vfio
from pcifacts.sysfs import Roots


class Passes:
    """The three passes over one node."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._known = Scanner(roots)
        self._known.everything(())

    def facts(self) -> int:
        found = [function.traits_in(link.directory) for link in vfio.links(self._roots).found]
        return sum(traits is not None for traits in found)

    def first(self) -> int:
        return len(Scanner(self._roots).everything(()).sightings)

    def again(self) -> int:
        return len(self._known.everything(()).sightings)


def main(arguments: list[str]) -> int:
    """Answer line by line until the input ends."""
    sysfs, dev_vfio = arguments
    passes = Passes(Roots(sysfs, dev_vfio))
    known: Final[dict[str, Callable[[], int]]] = {
        "facts": passes.facts,
        "first": passes.first,
        "again": passes.again,
    }
    for line in sys.stdin:
        one_pass = known[line.strip()]
        began_ns = time.perf_counter_ns()
        count = one_pass()
        print(count, time.perf_counter_ns() - began_ns, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
