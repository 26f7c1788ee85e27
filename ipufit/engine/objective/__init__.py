# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics of `compile()`, and the figures that they come to."""
