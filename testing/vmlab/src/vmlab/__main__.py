# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m vmlab`."""

import sys

from vmlab.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
