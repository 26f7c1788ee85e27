# SPDX-License-Identifier: Apache-2.0
"""`ipufit check` and the other commands that look at a model and run none of it."""
