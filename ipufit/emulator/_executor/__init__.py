# SPDX-License-Identifier: Apache-2.0
"""The executor that `trainingModel` and `inferenceModel` return, and its parts."""
