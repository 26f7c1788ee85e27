# SPDX-License-Identifier: Apache-2.0
"""The command `ipufit`, also `python -m ipufit`."""

from __future__ import annotations

from ipufit.cli import main

if __name__ == "__main__":
    main()
