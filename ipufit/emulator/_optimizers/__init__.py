# SPDX-License-Identifier: Apache-2.0
"""The optimizer on the device, and what it reads of the host's."""
