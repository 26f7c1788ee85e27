# SPDX-License-Identifier: Apache-2.0
"""What a program is compiled for: the pod, replicas, and which rows go where."""
