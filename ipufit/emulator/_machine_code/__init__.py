# SPDX-License-Identifier: Apache-2.0
"""Programs as machine code: only the choice of a runner imports this room."""
