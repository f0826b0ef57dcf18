"""Flags and options of XLA that this package sets. XLA ends a process that has a flag it does not know, so each
is tried with each jaxlib: tests/cluster/test_xla_flags.py."""

import os
import re
from importlib.metadata import version

from roxxel_dist.cluster.versions import number
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.platforms import why_bad_flags

CPU_DEVICES = "xla_force_host_platform_device_count"
"""The number of devices that a CPU simulates."""
DETERMINISTIC = "xla_gpu_deterministic_ops"
"""The same bits each time on a GPU. It excludes kernels whose sums depend on the order in which threads come (atomics),
and takes the first kernel that fits where XLA would measure which is fastest. (XLA, gpu/autotuning: the same as
xla_gpu_exclude_nondeterministic_ops and xla_gpu_autotune_level=0.)"""
SAVE_MEMORY = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""An order of operations that saves memory, as compilers for accelerators use. XLA for CPU schedules for parallel work
otherwise, with scratch memory for many arrays at once."""
UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""No optimization of code that runs seldom or never: it takes half the compile time."""
RUN_ONCE = UNOPTIMIZED | {"xla_cpu_parallel_codegen_split_count": 1}
"""Options for a program of a CPU that runs a few times: it takes half of that again."""
if number(version("jaxlib")) < (0, 11, 1):  # a later one has fusion emitters in any case
    RUN_ONCE |= {"xla_cpu_use_fusion_emitters": False}


def check_flags() -> None:
    """Check XLA_FLAGS; a rank's its launcher has tried. Raises UserError where XLA would end this process for them."""
    if "ROXXEL_COORDINATOR" in os.environ:
        return
    table = SAVE_MEMORY | RUN_ONCE | {DETERMINISTIC: True}
    known = {f"--{name}={value}".lower() for name, value in table.items()}
    flags = os.environ.get("XLA_FLAGS", "").lower().split()
    count = re.compile(rf"--{CPU_DEVICES}=[1-9]\d{{0,3}}")
    strange = [flag for flag in flags if flag not in known and not count.fullmatch(flag)]
    if (strange or not flags) and (why := why_bad_flags(os.environ)):
        raise UserError(why)
