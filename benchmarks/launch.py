"""What becomes of a job, and how soon, when something goes wrong: the launcher's table of targets, measured.

python benchmarks/launch.py [--quick] [--only WORD …] [--out FILE] [--json FILE]

It needs what tests/support/hosts.py needs (root, openssh-server, iproute2), and takes half an hour on two cores.
Nothing else should run on the machine. torchrun and mpirun are compared where they are installed.
"""

import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # this checkout, and the hosts of its tests

import launch_faults
import launch_peers
import launch_starts
from launch_table import Row, Setting, table
from machines import missing
from measure import Lines, Result, flags

GROUPS = {
    "kills": launch_faults.kills,
    "exceptions": launch_faults.exceptions,
    "links": launch_faults.links,
    "hangs": launch_faults.hangs,
    "controllers": launch_faults.controllers,
    "starts": launch_starts.starts,
    "restarts": launch_starts.restarts,
    "peers": launch_peers.peers,
}
COUNT, QUICK = 10, 3


def main() -> int:
    """Measure, print the table, and write all numbers to a file."""
    args = flags(__doc__)
    args.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="these groups of rows")
    args.add_argument("--out", type=Path, default=Path(".cache/benchmarks/launch.json"))
    given = args.parse_args()
    if problem := missing():
        print(f"the launcher cannot be measured here: {problem}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is taken away
    for name in [name for name in os.environ if name.startswith("ROXXEL_")]:
        del os.environ[name]
    os.environ["PYTHONPATH"] = str(ROOT)  # as on the hosts: what is measured is this checkout
    rows: list[Row] = []
    begun, load = time.time(), os.getloadavg()[0]
    report, setting = Lines(given.json), Setting(count=QUICK if given.quick else COUNT)

    def measured(name: str) -> Iterator[Result]:
        for row in GROUPS[name](setting):
            rows.append(row)
            write(given.out, rows, begun, load)
            yield row.as_result()

    for name in given.only:
        report.add(name, lambda name=name: measured(name))
    print(table(rows), file=sys.stderr)
    return report.end()


def write(path: Path, rows: list[Row], begun: float, load: float) -> None:
    """Write all measurements, and a description of the machine."""
    about = {
        "begun": begun,
        "seconds": time.time() - begun,
        "load_at_begin": load,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about | {"rows": [row.as_json() for row in rows]}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
