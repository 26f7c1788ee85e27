# SPDX-License-Identifier: Apache-2.0
"""Calls, pipelines and memory of a training, computed without running it."""
