# SPDX-License-Identifier: Apache-2.0
"""The optimiser on the device."""
