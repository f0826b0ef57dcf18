"""The commands about one run: train, save, and what is found out before: plan, find-lr, batch."""

import dataclasses
import importlib.util
import json
import os
import shlex
import sys
import sysconfig
from pathlib import Path

from roxxel_dist.checkpoint.metadata import CheckpointRange, CheckpointRef
from roxxel_dist.cli.arguments import ConfigArgs, check_new_run, check_training, parse_config, parse_train, step_range
from roxxel_dist.cli.flags import Positional
from roxxel_dist.cli.parser import parse
from roxxel_dist.launcher.output import info
from roxxel_dist.place.directory import CONFIG
from roxxel_dist.process.exit_codes import EXIT_DRAINED, EXIT_FAILED, EXIT_PREFLIGHT, UserError, pip_install
from roxxel_dist.settings.config import Config
from roxxel_dist.settings.usage_errors import usage_errors


def train(words: list[str]) -> int:
    """Train a model through a curriculum, on all the processes this one belongs to."""
    with usage_errors():
        args, config = parse_train(words)
        skipped = step_range("--skip_steps", args.skip_steps)
        if "ROXXEL_COORDINATOR" not in os.environ:  # the launcher has looked, or another host has the data
            check_training(args, config)
    if args.anneal and CheckpointRange.parse(args.anneal):
        from roxxel_dist.cli.sweep import anneal

        return anneal(args.anneal, args, config)
    from roxxel_dist.checkpoint.store import SaveError
    from roxxel_dist.data.remote.cache import CacheError
    from roxxel_dist.data.verify import DamagedData
    from roxxel_dist.objects.lease import LeaseLostError
    from roxxel_dist.run.experiment import Experiment
    from roxxel_dist.train.step.bad_steps import BadStep

    if args.anneal:
        from roxxel_dist.run.past import make_decay_branch

        with usage_errors():
            make_decay_branch(config, CheckpointRef.parse(args.anneal))
    experiment = Experiment(config)
    try:
        experiment.fit(
            args.data_path,
            args.run_dir,
            args.resume,
            args.amend,
            fork=args.fork or args.anneal,
            skip_steps=skipped,
            local_dir=args.local_dir,
        )
    # no fault of the program: its log has the traceback
    except (BadStep, CacheError, DamagedData, LeaseLostError, SaveError) as problem:
        info(str(problem))
        return EXIT_FAILED
    return EXIT_DRAINED if experiment.stopped else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchArgs:
    """Print the rows that one step reads."""

    source: Positional[str]
    """A run directory, or a config file."""
    step: int
    """The step, counted from 1 as in the log."""
    data_path: str | None = None
    """The shards. Default: the data of the run."""
    text: bool = False
    """Print the complete decoded rows, not only their beginnings."""


def batch(words: list[str]) -> int:
    """Print what one step reads: data set, shard, document, text."""
    args = parse(BatchArgs, words, "batch")
    with usage_errors():
        from roxxel_dist.run.curriculum import describe_batch

        print(describe_batch(args.source, args.step, args.data_path, text=args.text))
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveArgs:
    """Request a checkpoint of a running job, which saves it within two seconds or steps, and wait until it is on disk.
    Exit code 1: no checkpoint was saved."""

    run: Positional[str]
    """The run directory of the job."""
    timeout: float = 600.0
    """Maximum seconds to wait."""


def save(words: list[str]) -> int:
    """Ask a running job for a checkpoint, and wait until it is on disk."""
    args = parse(SaveArgs, words, "save")
    with usage_errors():
        from roxxel_dist.place.run_place import NotSaved, ask_for_checkpoint

        try:
            step = ask_for_checkpoint(args.run, args.timeout)
        except NotSaved as problem:
            info(str(problem))
            return EXIT_FAILED
    print(f"saved: step {step}")
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanArgs(ConfigArgs):
    """What a run would be: phases, tokens, parameters, memory, time. No run directory is made, and nothing is trained.

    `plan --config my.yaml --data_path data [options]`, or `plan RUN [options]`: the config, the data and the speed of a
    run directory. Exits with 2 where `train` would refuse, and where a phase does not fit the memory of a device.
    """

    data_path: str | None = None
    """A text file, a folder of text, or shards made by `data build`."""
    devices: int | None = None
    """Number of devices to plan for, simulated on CPU. Default: the devices of this machine."""
    target: str | None = None
    """Plan for accelerators that are not here, by their own compiler: v5e:4x4, v5p:2x2x2, v6e:4x4 (the chips of a TPU
    slice), or h100:2x8, h200:..., a100:..., b200:... (hosts x GPUs). It needs no such device."""
    processes: int | None = None
    """Number of processes that share the devices. Default with --target: one per host."""
    tokens_per_s: float | None = None
    """Speed over all devices, to estimate the time."""
    device_memory_gb: float | None = None
    """Memory of a device, in GB of 10^9 bytes. Default: the value that the device reports."""
    arrays: bool = False
    """One line for every array of parameters: its shape and its sharding."""
    mtbf: float | None = None
    """Print what failures cost instead, by a simulation of the launcher: mean days between two failures of a host. With
    --hosts."""
    hosts: int | None = None
    """With --mtbf: number of hosts, the spare ones too."""
    spare_hosts: int = 0
    """With --mtbf: how many of them are spare."""
    repair_hours: float = 2.0
    """With --mtbf: hours until a lost host is back."""
    step_s: float | None = None
    """With --mtbf: seconds of a step. Default: as the run measured it."""
    save_s: float | None = None
    """With --mtbf: seconds that training stands still for a checkpoint. Default: as measured, or 0."""
    start_s: float | None = None
    """With --mtbf: seconds from a start to the first step. Default: as measured, or 60."""
    costs: bool = False
    """With --target: where the time of a training step would go, by part: milliseconds, FLOPs, bytes, kernels."""
    layouts: bool = False
    """With --target, in place of the plan: the ways to divide the run over its devices (rows, fsdp, tensor, experts),
    each compiled, the best first, with the lines for the config."""
    json: bool = False
    """Print JSON instead of text."""


def plan(words: list[str]) -> int:
    """Print what a run would need, before you start it: steps, parameters, memory, time."""
    with usage_errors():
        run = words[0] if words and not words[0].startswith("-") else None
        saved = os.path.join(run, CONFIG) if run else ""
        of_run = saved if os.path.exists(saved) else None
        args, config = parse_config(PlanArgs, words[1:] if run else words, "plan", of_run)
        if args.mtbf is not None:
            return _plan_failures(args, args.mtbf, config, run)
        if args.hosts is not None:
            raise UserError(f"--hosts {args.hosts}: --hosts is for --mtbf DAYS; without it give --devices")
        asked = "costs" if args.costs else "layouts"
        if (args.costs or args.layouts) and args.target is None:
            raise UserError(
                f"{asked} is True, and there is no target: give --target too, such as v5e:4x4 or h100:1x8, because its "
                "compiler says what a step does"
            )
        if run is None:
            check_new_run(config, args.data_path)
    # A look at a device that is at work elsewhere must not take its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from roxxel_dist.cli.plan_table import layouts_table, table
    from roxxel_dist.cluster.distributed import is_primary
    from roxxel_dist.devices.targets import MissingCompiler
    from roxxel_dist.run.estimate.estimate import estimate
    from roxxel_dist.run.estimate.figures import EstimateRequest
    from roxxel_dist.run.estimate.target_layouts import LayoutComparison, compare_layouts
    from roxxel_dist.run.estimate.target_process import TargetError

    with usage_errors():
        names = ("devices", "target", "processes", "tokens_per_s", "device_memory_gb")
        request = EstimateRequest(run=Path(run) if run else None, **{name: getattr(args, name) for name in names})
    try:
        compare = compare_layouts if args.layouts else estimate
        result = compare(config, args.data_path, request)
    except MissingCompiler as problem:
        info(str(problem))
        return EXIT_PREFLIGHT
    except TargetError as problem:
        info(str(problem))
        return EXIT_FAILED
    if args.target or is_primary():  # with a target jax is not asked: it would look for accelerators here
        if args.json:
            fields = dataclasses.asdict(result)
            print(json.dumps(fields if args.arrays or args.layouts else fields | {"arrays": None}, indent=2))
        elif isinstance(result, LayoutComparison):
            print(layouts_table(result))
        else:
            print(table(result, every_array=args.arrays, every_part=args.costs))
        sys.stdout.flush()
    if result.problems:
        raise UserError("\n".join(result.problems))
    return 0


def _plan_failures(args: PlanArgs, mtbf: float, config: Config, run: str | None) -> int:
    """Print what failures of hosts cost a run."""
    from roxxel_dist.run.estimate.failures import Cluster, estimate_failures, failure_table

    for name in ("target", "devices", "layouts", "costs", "arrays"):
        if getattr(args, name):
            raise UserError(f"--mtbf {mtbf:g} compiles nothing: leave --{name} out, or --mtbf")
    if args.hosts is None:
        raise UserError(f"--mtbf {mtbf:g}: of how many hosts? Give --hosts too, for example --hosts 16")
    names = ("hosts", "spare_hosts", "repair_hours", "step_s", "save_s", "start_s")
    cluster = Cluster(mtbf_days=mtbf, **{name: getattr(args, name) for name in names})
    copies = config.memory_checkpoint_every != 0
    found = estimate_failures(
        cluster, checkpoint_every=config.checkpoint_every, copies=copies, run=Path(run) if run else None
    )
    if args.json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        print(failure_table(found))
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class FindLrArgs(ConfigArgs):
    """Find a learning rate: a short training whose learning rate grows at each step. No run is changed."""

    data_path: str | None = None
    """A text file, a folder of text, or shards made by `data build`."""
    min_lr: float = 1e-6
    """Learning rate of the first step."""
    max_lr: float = 0.1
    """Learning rate of the last step, if the loss does not diverge before; sgd needs a higher one."""
    num_steps: int = 100
    """Number of steps."""
    plot: bool = False
    """Plot the loss over the learning rate."""
    out: str = "lr_finder.png"
    """File of the plot."""


def find_lr(words: list[str]) -> int:
    """Find a learning rate by a short training whose rate grows."""
    with usage_errors():
        args, config = parse_config(FindLrArgs, words, "find-lr")
        if args.plot and importlib.util.find_spec("matplotlib") is None:  # known before the sweep, not after it
            raise UserError(f"--plot needs matplotlib: {pip_install('plot')}")
    from roxxel_dist.cluster.distributed import is_primary
    from roxxel_dist.run.experiment import Experiment
    from roxxel_dist.train.lr_finder import FALL_SHARE, plot_sweep, smooth

    suggested, rates, losses = Experiment(config).find_lr(
        args.data_path, min_lr=args.min_lr, max_lr=args.max_lr, num_steps=args.num_steps
    )
    if not is_primary():
        return 0
    curve = smooth(losses, args.num_steps)
    early = "" if len(losses) == args.num_steps else f" of {args.num_steps}, where the loss diverged"
    print(f"{len(losses)} steps{early}, learning rates {rates[0]:.2e} to {rates[-1]:.2e}")
    print(f"smoothed loss: {curve[0]:.4f} at first, {min(curve):.4f} at its lowest")
    if config.optimizer in FALL_SHARE and curve[-1] == min(curve):
        print(f"the loss still fell at {rates[-1]:.2e}: with a larger --max_lr the suggestion may be larger")
    problem = ""
    if args.plot:
        try:
            plot_sweep(rates, losses, args.num_steps, suggested, Path(args.out))
            print(f"picture: {args.out}")
        except OSError as error:  # the result of the sweep is still printed
            problem = f"--out {args.out} cannot be written: {error.strerror}"
    if config.model is None or config.parametrization == "mup":
        base = config.base_widths or config.base_dim or config.dim
        print(
            f"carries over to another width: with parametrization mup and base width {base} the same rate is the best"
        )
    print(f"Suggested LR: {suggested:.2e}", flush=True)
    if problem:
        raise UserError(problem)
    return 0


DEMO_CONFIG = Path(__file__).parent.parent / "demo.yaml"
EXCLUDED = ("test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data")
"""Folders of the standard library that are left out: tests, tables, and an editor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoArgs:
    """Train a small model here: a Transformer of a million parameters, on the sources of Python's standard library.

    It runs 2 processes with 2 simulated CPU devices each, for about three minutes on two cores. It prints the commands
    that it runs. Press Ctrl-C, or kill one of its processes, and start it again: it continues from its last checkpoint.
    """

    text: str | None = None
    """A folder of Python files to train on; the standard library where not given."""
    data_path: str = "demo_data"
    """The folder for the tokens."""
    run_dir: str = "runs/demo"
    """The folder for the run."""
    max_steps: int | None = None
    """Steps after which the run ends; all 400 where not given."""


def demo(words: list[str]) -> int:
    """Train a small model on this machine, with no files and no flags: about three minutes."""
    args = parse(DemoArgs, words, "demo")
    from roxxel_dist.cli.data import data_build

    build = corpus_words(args.data_path, args.text)
    train = ["train", "--config", str(DEMO_CONFIG), "--data_path", args.data_path, "--run_dir", args.run_dir]
    train.append("--resume")
    train += ["--max_steps", str(args.max_steps)] if args.max_steps else []
    launch = ["launch", "local", "--nprocs", "2", "--devices-per-proc", "2", "--", *train]
    info(f"$ roxxel-dist data build {shlex.join(build)}")
    if code := data_build(build):
        return code
    info(f"$ JAX_PLATFORMS=cpu roxxel-dist {shlex.join(launch)}")
    sys.stdout.flush()
    os.environ["JAX_PLATFORMS"] = "cpu"
    # In place of this process: the launcher has signals, limits and an exit code of its own.
    os.execv(sys.executable, [sys.executable, "-m", "roxxel_dist", *launch])


def corpus_words(out: str, text: str | None = None) -> list[str]:
    """The words behind `data build` that make the corpus of the demo in the folder `out`."""
    options = ["--tokenizer", "bpe", "--vocab_size", "2048", "--include", "*.py", "--exclude", *EXCLUDED]
    return [text or sysconfig.get_paths()["stdlib"], "--out", out, *options]
