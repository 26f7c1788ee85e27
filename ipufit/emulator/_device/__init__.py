# SPDX-License-Identifier: Apache-2.0
"""The device: its weights, and calls that run on them."""
