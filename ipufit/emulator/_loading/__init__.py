# SPDX-License-Identifier: Apache-2.0
"""Data loaders whose batches hold the rows of one call."""
