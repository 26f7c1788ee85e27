# SPDX-License-Identifier: Apache-2.0
"""Who asks for a profile of a run: the config, a callback, or nobody."""

from __future__ import annotations

from ipufit.callbacks import CallbackList
from ipufit.callbacks.base import CallbackLike

from .no_profile import NO_PROFILE, NoProfile
from .parts import Model


def profile_of(model: Model, task: str, callbacks: CallbackLike) -> NoProfile:
    """The profile of a run that begins now.

    The recording of `IPUConfig.profile_dir` begins at once. A run in a callback of one
    that is recorded becomes a part of that.

    Args:
        model: The model.
        task: "fit", "evaluate" or "predict".
        callbacks: The user's.
    """
    given = [one._recorder for one in CallbackList(callbacks).callbacks]
    recorders = [one for one in given if one is not None]
    around = model._runs.profile or NO_PROFILE
    if model.config.profile_dir is None and not recorders and not around.timelines:
        return NO_PROFILE
    # Imported where it is asked for: most processes do without.
    from .profiled_run import Profile

    return Profile(model, task, recorders, around)
