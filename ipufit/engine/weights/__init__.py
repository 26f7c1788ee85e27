# SPDX-License-Identifier: Apache-2.0
"""The weights of a user's module on the host, beside the copies that a device has."""
