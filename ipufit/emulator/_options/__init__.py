# SPDX-License-Identifier: Apache-2.0
"""`Options` and its sections, execution strategies, settings of PopART."""
