"""Importance: the share of each parameter in the spread of the metric."""

from typing import Any

from roxxel_dist.sweep.study.folder import Study

FEWEST = 8
"""Trials with a value below which shares would be made of chance."""
SAMPLES = 2048
CONDITIONED_ON = 500
"""Trials that the process is given: its cost grows with their cube."""


def importances(study: Study) -> dict[str, float]:
    """The share that each searched parameter has in the spread of the metric over the space; they sum to 1.

    The Gaussian process of `bayes` is fitted to the trials, and predicts points all over the space: a share is the
    parameter's total Sobol' index (Jansen 1999, doi 10.1016/S0010-4655(98)00154-4), what it does together with others
    included. Empty where there are too few trials, or nothing to tell apart.
    """
    import numpy as np
    from threadpoolctl import threadpool_limits

    from roxxel_dist.sweep.samplers import gp
    from roxxel_dist.sweep.samplers.acquisition import FIT_TO, standardize, training_subset
    from roxxel_dist.sweep.samplers.bayes import SpaceTransform

    space = study.sweep.space
    keys = [key for mixture in space.mixtures for key in mixture.keys]
    trials = [t for t in study.done if len(t.point) == len(space.axes) and all(key in t.params for key in keys)]
    if len(trials) < FEWEST or len({trial.value for trial in trials}) < 2 or not space.axes:
        return {}
    transform, rng = SpaceTransform(study.sweep), np.random.default_rng(0)
    # The points of shares as the search has them depend on the data, which need not be here.
    points = [space.with_shares(trial.point, space.shares_of(trial.params)) for trial in trials]
    features = transform.encode(transform.rows(points))
    groups: dict[str, Any] = {parameter.name: dim for dim, parameter in enumerate(space.free)}
    for mixture, axes in zip(space.mixtures, space.share_axes, strict=True):
        groups[f"mixture.{mixture.phases[0]}"] = axes
    values = standardize([study.sweep.sign * float(trial.value or 0.0) for trial in trials])
    rows, others = (transform.from_cube(rng.random((SAMPLES, transform.dims))) for _ in range(2))
    with threadpool_limits(1, user_api="blas"):
        subset, given = training_subset(values, FIT_TO), training_subset(values, CONDITIONED_ON)
        theta = gp.fit_hyperparameters(features[subset], values[subset])
        process = gp.condition(features[given], values[given], theta)
        means, spread = process.predict(transform.encode(rows))[0], []
        for dims in groups.values():
            changed = rows.copy()
            changed[:, dims] = others[:, dims]
            spread.append(float(np.mean((means - process.predict(transform.encode(changed))[0]) ** 2)))
    total = sum(spread)
    return {name: share / total for name, share in zip(groups, spread, strict=True)} if total > 0 else {}
