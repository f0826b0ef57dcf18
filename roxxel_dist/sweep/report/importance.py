"""How much each parameter matters."""

from roxxel_dist.sweep.study import Study

FEWEST = 8
"""Trials with a value below which shares would be made of chance."""
SAMPLES = 2048
MOST = 500
"""Trials that the process is fitted to: its cost grows with their cube."""


def importances(study: Study) -> dict[str, float]:
    """The share that each searched parameter has in the spread of the metric over the space; they sum to 1.

    The Gaussian process of `bayes` is fitted to the trials, and tells what it believes of points all over the space: a
    share is the parameter's total Sobol' index (Jansen 1999, doi 10.1016/S0010-4655(98)00154-4), what it does together
    with others included. Empty where there are too few trials, or nothing to tell apart.
    """
    import numpy as np

    from roxxel_dist.sweep.samplers.bayes import LEARN_FROM, SpaceTransform, one_thread, standardize, training_subset
    from roxxel_dist.sweep.samplers.gp import fit, learn

    free = study.sweep.space.free
    trials = [one for one in study.done if len(one.point) == len(free)]
    if len(trials) < FEWEST or len({one.value for one in trials}) < 2 or not free:
        return {}
    transform, rng = SpaceTransform(study.sweep.space, study.sweep.rules), np.random.default_rng(0)
    points = transform.encode(transform.rows([tuple(one.point) for one in trials]))
    values = standardize([study.sweep.sign * float(one.value or 0.0) for one in trials])
    cubes = [transform.from_cube(rng.random((SAMPLES, transform.dims))) for _ in range(2)]
    with one_thread():
        few = training_subset(values, LEARN_FROM)
        theta = learn(points[few], values[few])
        some = training_subset(values, MOST)
        process = fit(points[some], values[some], theta)
        believed = process.predict(transform.encode(cubes[0]))[0]
        found = []
        for dim in range(transform.dims):
            changed = cubes[0].copy()
            changed[:, dim] = cubes[1][:, dim]
            found.append(float(np.mean((believed - process.predict(transform.encode(changed))[0]) ** 2)))
    whole = sum(found)
    return {one.name: share / whole for one, share in zip(free, found, strict=True)} if whole > 0 else {}
