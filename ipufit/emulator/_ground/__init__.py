# SPDX-License-Identifier: Apache-2.0
"""Modules that all of the emulator uses: logs, switches, types, nested tensors."""
