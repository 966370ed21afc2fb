# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Run the command line."""

import sys

from kata_device_plugin import cli


def main() -> None:
    """Run the command line with this process's arguments and exit with its code."""
    sys.exit(cli.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
