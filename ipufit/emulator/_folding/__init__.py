# SPDX-License-Identifier: Apache-2.0
"""Several micro-batches in one pass, where that is the same maths."""
