# SPDX-License-Identifier: Apache-2.0
"""The modules that PopTorch traces, and what is looked for meanwhile."""
