# SPDX-License-Identifier: Apache-2.0
"""Compute calls, pipelines and memory of training, without running it."""
