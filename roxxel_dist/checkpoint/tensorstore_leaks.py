"""Ways around memory that tensorstore keeps for ever: where it makes a Python value of JSON, nothing frees the lists,
nor the keys and values of a dict. Orbax asks for such values in every save and restore, for each array."""

from contextlib import suppress
from functools import cache
from typing import Any

import tensorstore

METRICS_OF_STORES = "/tensorstore/kvstore/"
"""What Orbax asks for, twice in a save, to log how many bytes were written."""


@cache
def avoid_leaks() -> None:
    """From now on, tensorstore answers this process without JSON what Orbax asks in every save.

    The specification of a plain folder is made from its path. The metrics of stores are empty, for all who ask.
    A tensorstore that has these functions no more is left as it is.
    """
    with suppress(AttributeError, TypeError):
        specification: Any = tensorstore.KvStore.Spec
        to_json = specification.to_json

        def of_path(spec: Any, *args: Any, **options: Any) -> Any:
            with suppress(Exception):  # another kind of store has no path, or one that is no path of files
                plain = {"driver": "file", "path": spec.path}
                if not (args or options) and specification(plain) == spec:
                    return plain
            return to_json(spec, *args, **options)

        specification.to_json = of_path
    with suppress(AttributeError):
        metrics = tensorstore.experimental_collect_matching_metrics

        def of_others(metric_prefix: str = "", *args: Any, **options: Any) -> Any:
            return [] if metric_prefix == METRICS_OF_STORES else metrics(metric_prefix, *args, **options)

        tensorstore.experimental_collect_matching_metrics = of_others
