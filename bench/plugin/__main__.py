# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Run the command line."""

import sys

from bench.plugin import cli

if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[1:]))
