# SPDX-License-Identifier: Apache-2.0
"""Find, check, save and restore the state of a run in checkpoints."""
