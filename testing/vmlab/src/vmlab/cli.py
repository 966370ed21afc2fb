# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: `build` makes what guests need, `prune` removes what older checkouts made."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vmlab import artifacts
from vmlab.errors import LabError


def main(argv: Sequence[str]) -> int:
    """Run one command; return the exit status."""
    parser = argparse.ArgumentParser(prog="vmlab", description="Guests with a real kernel.")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="make what guests need, once, into the cache")
    build.add_argument("--anew", action="store_true", help="with the packages of today, even if they are there")
    commands.add_parser("prune", help="remove what other checkouts and older recipes made")
    arguments = parser.parse_args(argv)
    if arguments.command == "prune":
        for path in artifacts.prune():
            print(f"removed {path}")
        return 0
    try:
        made = artifacts.ensure(anew=arguments.anew)
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    versions = " ".join(f"{name} {made.packages[name]}" for name in ("qemu-system-x86",) if name in made.packages)
    print(f"{made.root}\nkernel {made.kernel_release}, CPython {made.python}, {versions}")
    return 0
