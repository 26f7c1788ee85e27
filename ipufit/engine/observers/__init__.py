# SPDX-License-Identifier: Apache-2.0
"""Observers of the operations of a trace, and the mode that shows them to these."""
