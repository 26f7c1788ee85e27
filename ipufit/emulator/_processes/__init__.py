# SPDX-License-Identifier: Apache-2.0
"""The processes that train one model, and what they exchange."""
