# SPDX-License-Identifier: Apache-2.0
"""Data loaders that give each call all the rows it takes."""
