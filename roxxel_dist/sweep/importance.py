"""How much each parameter matters."""

import warnings

from roxxel_dist.sweep.study import Study

FEWEST = 8
"""Trials with a value below which shares would be made of chance."""


def importances(study: Study) -> dict[str, float]:
    """The share (they sum to 1) that each searched parameter has in whether a trial is among the best tenth.

    By PED-ANOVA (Watanabe et al. 2023, arXiv 2304.10255), as optuna has it, on the points of the unit cube that the
    trials came from. Empty where there are too few trials, nothing to tell apart, or no optuna.
    """
    free = study.sweep.space.free
    trials = [one for one in study.done if one.point is not None and len(one.point) == len(free)]
    if len(trials) < FEWEST or len({one.value for one in trials}) < 2 or not free:
        return {}
    try:
        import optuna
    except ImportError:
        return {}
    kinds: dict[str, optuna.distributions.BaseDistribution] = {
        one.name: optuna.distributions.FloatDistribution(0.0, 1.0) for one in free
    }
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        told = optuna.create_study(direction="minimize" if study.sweep.sign > 0 else "maximize")
        told.add_trials(
            [
                optuna.trial.create_trial(
                    params=dict(zip(kinds, map(float, one.point or ()), strict=True)),
                    distributions=kinds,
                    value=float(one.value or 0.0),
                )
                for one in trials
            ]  # fmt: skip
        )
        found = optuna.importance.get_param_importances(
            told, evaluator=optuna.importance.PedAnovaImportanceEvaluator(), params=list(kinds)
        )
    whole = sum(found.values())
    return {name: share / whole for name, share in found.items()} if whole > 0 else {}
