"""Several agents of this machine that stand for hosts, of which some have a slow or a wrong device.

The check's own process gets the fault, by a `sitecustomize` that only tests have: `wrong` changes one element of each
product; `slow` puts the process into a control group with a tenth of a core, from the first use of a device.
`python tests/support/device_hosts.py COUNT [KIND]` counts names: COUNT starts of three good hosts, and a tenth as
many with a slow one, and with a wrong one; or one of these kinds alone (good, slow, wrong).
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from cpu_quota import group

from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.preflight.checks import Requirements
from roxxel_dist.launcher.preflight.run import DeviceChecks, PreflightReport, check_hosts

SITE = """
import os, sys, threading
def wait_for_a_device():
    import time
    while not getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None):
        time.sleep(0.01)
    with open(os.environ["TEST_GROUP"], "w") as file:
        file.write(str(os.getpid()))
def spoil():
    import jax.numpy as jnp
    matmul = jnp.matmul
    jnp.matmul = lambda *args, **options: matmul(*args, **options).at[3, 5].add(1)
if "device_check" in " ".join(sys.orig_argv):
    fault = os.environ.get("TEST_DEVICE")
    if fault == "slow":
        threading.Thread(target=wait_for_a_device, daemon=True).start()
    elif fault == "wrong":
        spoil()
    elif fault == "broken":
        sys.exit("no driver here")
    if os.environ.get("TEST_QUICK"):
        from dataclasses import replace
        from roxxel_dist.devices import device_check
        device_check.OF_CPU = replace(device_check.OF_CPU, size=64, stretch=1, seconds=0.05)
"""
SLOW_CPUS = 0.1


class DeviceHosts(LocalBackend):
    """Hosts of this machine; `faults` by their names."""

    is_local = False

    def __init__(
        self, folder: Path, hosts: tuple[str, ...], faults: Mapping[str, str], slow: Path | None = None
    ) -> None:
        """`slow`: the file of a control group, for slow devices. Without it the check is a short one."""
        super().__init__()
        self.hosts = hosts
        self._slow = slow
        self._folder, self._faults = folder, faults
        (folder / "site").mkdir(parents=True, exist_ok=True)
        (folder / "site" / "sitecustomize.py").write_text(SITE)

    def start(self, host: str, module: str, *words: str) -> "subprocess.Popen[bytes]":
        """As its base, with the variables of the host."""
        own = {"PYTHONPATH": str(self._folder / "site"), "TEST_DEVICE": self._faults.get(host, ""), "HOST": host}
        own |= {"TEST_GROUP": str(self._slow)} if self._slow else {"TEST_QUICK": "1"}
        return subprocess.Popen(
            self.argv(host, module, *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **own, "JAX_PLATFORMS": "cpu"},
        )


def check(backend: DeviceHosts, checks: DeviceChecks | None = None) -> PreflightReport:
    """What a start would find of these hosts."""
    checks = checks or DeviceChecks(mode="on", command=None, pending={*backend.hosts})
    return check_hosts(Requirements(compare=False), backend, backend.hosts, devices=checks)


def main(count: int, *kinds: str) -> None:
    """Count how often good hosts are named, and how often slow and wrong ones are."""
    with tempfile.TemporaryDirectory() as folder, group(f"roxxel-devices-{os.getpid()}", SLOW_CPUS) as slow:
        for fault, times in (("", count), ("slow", count // 10), ("wrong", count // 10)):
            if kinds and (fault or "good") not in kinds:
                continue
            named, others, begun = 0, 0, time.monotonic()
            for number in range(times):
                backend = DeviceHosts(Path(folder), ("a", "b", "c"), {"b": fault}, slow)
                checks = DeviceChecks(mode="on", command=None, pending={*backend.hosts})
                suspects = check(backend, checks).suspects
                named += "b" in suspects
                others += bool(suspects.keys() - {"b"})
                mean = (time.monotonic() - begun) / (number + 1)
                print(
                    f"{fault or 'good'}: {number + 1} starts, b named in {named}, others in {others}, {mean:.1f} s "
                    f"each, load {os.getloadavg()[0]:.1f}: {suspects}",
                    flush=True,
                )
                if ("b" in suspects) != bool(fault):
                    print({host: one.times for host, one in checks.measured.items()}, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
