# SPDX-License-Identifier: Apache-2.0
"""The emulated device: its copy of the weights, and the calls that run on it."""
