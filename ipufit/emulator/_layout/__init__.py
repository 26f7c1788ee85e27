# SPDX-License-Identifier: Apache-2.0
"""The pod and its replicas, and which rows of a call go to which of them."""
