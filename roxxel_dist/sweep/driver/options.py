"""Options of a sweep, and the resources of its trials."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from roxxel_dist.launcher.backends.ray.cluster import check_address
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.trial.process import Ranks

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LEAST_AMOUNT = 1e-4
"""The smallest amount of a resource that Ray counts."""
BUILT_IN = {"CPU", "GPU", "memory", "object_store_memory"}
"""Resources that Ray finds on every machine."""
LEAST = {
    "count": 1, "workers": 1, "hosts_per_trial": 1, "procs_per_host": 1, "gpus_per_trial": 1, "max_failures": 1,
    "max_retries": 0, "max_steps_total": 1, "confirm": 1,
}  # fmt: skip
MOST = {"workers": 10_000, "hosts_per_trial": 100_000, "procs_per_host": 10_000, "gpus_per_trial": 1_000_000}
"""More than any cluster takes: a sweep would begin them all."""
LONGEST_S = 10 * 365 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class TrialResources(Ranks):
    """The resources that a trial takes of the machines."""

    task: Mapping[str, float]
    """What Ray keeps for the trial's task, as Ray counts it: CPU, GPU, memory in bytes, custom resources."""


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """Settings of trials: how many run at once, and what each takes of which machines."""

    workers: int = 1
    """Number of trials that run at the same time."""
    ray_address: str | None = None
    """A Ray cluster: `auto` on one of its nodes or in a Ray job, or HOST:PORT of its head. Default: a private Ray on
    this machine."""
    insecure: bool = False
    """Also use a cluster without a token. Anyone who reaches such a cluster can run programs as you."""
    hosts_per_trial: int = 1
    """Number of nodes for each trial."""
    procs_per_host: int = 1
    """Number of processes of each trial on each of its nodes."""
    cpus_per_trial: float | None = None
    """CPUs that Ray reserves for a trial on each of its nodes. Default: `resources` of --extras, or one a process."""
    gpus_per_trial: int | None = None
    """GPUs of each trial, on all its nodes together. Default: all GPUs of its nodes."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Settings of a search: what is searched, from what, and how."""

    sweep_config: str | None = None
    """YAML file of the sweep, in the format of W&B: method, metric, parameters … An existing study has a copy."""
    extras: str | None = None
    """A second YAML file, for keys that the format of W&B does not have: derived, constraints, when, resources."""
    data_path: str | None = None
    """A text file, a folder of text, or shards made by `data build`. An existing study uses its own data."""
    count: int | None = None
    """Number of trials, those of earlier starts included. Default: run_cap of the YAML file, else until Ctrl-C."""
    study: str | None = None
    """Folder of the study, or an address (s3://…, gs://…, az://…). An existing study continues. Default: studies/NAME,
    where NAME is that of the YAML file or the sweep id."""
    method: str | None = None
    """bayes, tpe, random or grid. Default: the method of the YAML file."""
    sweep_seed: int = 0
    """Random seed of the search. The seed of each training is `seed`."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions(TrialOptions, SearchOptions):
    """Settings of a sweep: each field is a flag of `roxxel-dist sweep`. Raises ValueError for a value that breaks its
    rule."""

    max_trial_time: str | None = None
    """Time limit of a trial: seconds, or for example 90m, 2h, 1d. Then the trial ends, and its best value counts."""
    max_steps_total: int | None = None
    """Budget of steps of all trials together, by their reports. After that all trials pause, and the sweep ends."""
    max_hours: float | None = None
    """Budget of hours, those of earlier starts included. After that all trials pause, and the sweep ends."""
    max_failures: int = 5
    """Number of trials that fail one after the other before the sweep ends."""
    max_retries: int = 3
    """Number of retries of a trial whose worker or node was lost."""
    sweep_id: str | None = None
    """ENTITY/PROJECT/ID of a sweep on a W&B server. The server chooses the trials."""
    transfer_to: str | None = None
    """Config of a wider or deeper model. At the end of the search, the study has transferred.yaml: that config with the
    best parameters, with parametrization mup, and with base_dim set to the width of the search."""
    confirm: int | None = None
    """Of a study with `mixtures`: train its best mixture, and the natural and the uniform one, for so many times the
    steps of a trial, with 3 new seeds each. The study gets the folder confirm, and its report compares."""
    dry_run: bool = False
    """Print the trials, the devices and, if known, the hours. Nothing runs."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"--{name} {value}: must be at least {least}")
            if value is not None and value > (most := MOST.get(name, value)):
                raise UserError(f"--{name} {value}: must be at most {most:,}")
        for name in ("cpus_per_trial", "max_hours"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"--{name} {value:g}: must be more than 0, and finite")
        if self.ray_address is not None:
            try:
                check_address(self.ray_address)
            except ValueError as error:
                message = str(error).replace("--address", "--ray_address", 1)
                raise UserError(message.replace("launch ray --address", "sweep --ray_address")) from None
        if self.hosts_per_trial > 1 and self.ray_address is None:
            raise UserError(
                f"--hosts_per_trial {self.hosts_per_trial}: this machine is one host: name a cluster with --ray_address"
            )
        if self.gpus_per_trial is not None and self.gpus_per_trial % self.procs_per_trial:
            raise UserError(
                f"--gpus_per_trial {self.gpus_per_trial} is not a multiple of --procs_per_host x --hosts_per_trial, "
                f"{self.procs_per_trial}: use a multiple"
            )
        if self.max_time_s is not None and not 0 < self.max_time_s <= LONGEST_S:
            raise UserError(
                f"--max_trial_time {self.max_trial_time or 'has no value'}: write seconds, or such as 90m, 2h or 1d, "
                f"up to 3650d"
            )

    @property
    def folder(self) -> Path:
        """The study's: `study`, or else studies/NAME."""
        name = Path(self.sweep_config).stem if self.sweep_config else (self.sweep_id or "").rpartition("/")[2]
        return Path(self.study) if self.study else Path("studies", name or "sweep")

    @property
    def procs_per_trial(self) -> int:
        """Processes of a trial, over all its hosts."""
        return self.hosts_per_trial * self.procs_per_host

    @property
    def max_time_s(self) -> float | None:
        """`max_trial_time` in seconds; 0 if it is not a time."""
        if self.max_trial_time is None:
            return None
        unit = self.max_trial_time[-1:].lower()
        try:
            return float(self.max_trial_time[:-1] if unit in UNITS else self.max_trial_time) * UNITS.get(unit, 1.0)
        except ValueError:
            return 0.0

    def _check_amounts(self, amounts: Mapping[str, float]) -> None:
        """Raises UserError for amounts that Ray does not take, and for those that this machine can never have."""
        for name, amount in amounts.items():
            if 0 < amount < LEAST_AMOUNT:
                raise UserError(f"resources.{name}: {amount:g} is too little: Ray counts from {LEAST_AMOUNT:g} on")
            if name == "GPU" and amount > 1 and amount != int(amount):
                raise UserError(f"resources.GPU: {amount:g}: only a part of one GPU can be shared: use a whole number")
        if self.ray_address is not None:
            return
        cores = os.cpu_count() or 1
        if amounts["CPU"] > cores:
            raise UserError(f"a trial needs {amounts['CPU']:g} CPU (`resources`), and this machine has {cores}")
        if custom := sorted(name for name in amounts.keys() - BUILT_IN if amounts[name]):
            raise UserError(
                f"resources.{custom[0]}: this machine has no such resource: leave it out, or name a cluster that has it"
                " with --ray_address"
            )

    def trial_resources(self, rules: Mapping[str, float]) -> TrialResources:
        """The resources of each trial.

        `rules` are `resources` of the sweep's second file: CPU on each host, GPU over all of them, and custom ones. The
        flags win over them. Raises ValueError for what cannot be dealt to hosts and processes.
        """
        # A CPU a process; on this machine not more than there are: they are shared, as with `launch local`.
        each = self.procs_per_host if self.ray_address else min(self.procs_per_host, os.cpu_count() or 1)
        cpus = rules.get("CPU", each) if self.cpus_per_trial is None else self.cpus_per_trial
        self._check_amounts({**rules, "CPU": cpus})
        gpus, amount = None, rules.get("GPU", 0) if self.gpus_per_trial is None else self.gpus_per_trial
        if self.gpus_per_trial is not None or (amount and self.procs_per_trial > 1):
            if amount % self.procs_per_trial:
                raise UserError(
                    f"resources.GPU: {amount:g} is not a multiple of the {self.procs_per_trial} processes of a trial "
                    "(--hosts_per_trial x --procs_per_host): use a multiple"
                )
            gpus = int(amount) // self.hosts_per_trial  # else one process has what Ray gives it, a part of a GPU too
        task = {**rules, "CPU": cpus} | ({"GPU": gpus} if gpus else {})
        if self.hosts_per_trial > 1:
            if custom := sorted(rules.keys() - {"CPU", "GPU"}):
                raise UserError(
                    f"resources: {', '.join(custom)}: a trial of --hosts_per_trial {self.hosts_per_trial} can ask for "
                    "CPU and GPU alone: leave the others out"
                )
            # The launcher takes its own on each of the hosts; the task that waits for it takes nothing.
            cpus, task = cpus or each, dict.fromkeys({"CPU", *rules}, 0.0)
        return TrialResources(
            hosts=self.hosts_per_trial,
            procs_per_host=self.procs_per_host,
            gpus_per_host=gpus,
            cpus_per_host=cpus,
            ray_address=self.ray_address,
            insecure=self.insecure,
            task=task,
        )
