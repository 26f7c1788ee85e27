# SPDX-License-Identifier: Apache-2.0
"""What `trainingModel` and `inferenceModel` return."""
