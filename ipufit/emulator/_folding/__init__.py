# SPDX-License-Identifier: Apache-2.0
"""Run several micro-batches at once, where the results are those of the loop."""
