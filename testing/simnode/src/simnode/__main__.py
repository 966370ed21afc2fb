# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""`python -m simnode BOARD DIR` writes a board's tree; `python -m simnode --list` names the boards."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from simnode import boards
from simnode.tree import LiveNode


def main(argv: Sequence[str] | None = None) -> int:
    """Write one board for people to look at, or to point a program at; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m simnode", description="Write a simulated node as a directory tree.", allow_abbrev=False
    )
    parser.add_argument("--list", action="store_true", help="name the boards and exit")
    parser.add_argument("--unbound", action="store_true", help="GPUs and switches on their host drivers")
    parser.add_argument("board", nargs="?", choices=sorted(boards.ALL), metavar="BOARD", help="see --list")
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="a new or empty directory")
    arguments = parser.parse_args(argv)
    if arguments.list:
        for name, board in boards.ALL.items():
            print(f"{name:16} {(board.__doc__ or '').splitlines()[0]}")
        return 0
    if arguments.board is None or arguments.directory is None:
        parser.error("name a board and a directory, or ask for --list")
    directory: Path = arguments.directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        parser.error(f"{directory}: exists and is no empty directory; name another one")
    node = boards.ALL[arguments.board]()
    live = LiveNode.create(directory, boards.unbound(node) if arguments.unbound else node)
    print(f"{node.name}: {len(node.devices)} PCI functions; --sysfs {live.sysfs} --dev-vfio {live.dev_vfio}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
