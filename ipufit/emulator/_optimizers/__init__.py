# SPDX-License-Identifier: Apache-2.0
"""The optimizer on the device, and its settings, read from the host's optimizer."""
