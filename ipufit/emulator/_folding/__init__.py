# SPDX-License-Identifier: Apache-2.0
"""Run several micro-batches at once, where that is the same maths."""
