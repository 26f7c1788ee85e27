# SPDX-License-Identifier: Apache-2.0
"""What every other room uses: checks, logs, switches, types, nested tensors."""
