"""Pages of docs/howto, followed block by block on this machine or on hosts that are network namespaces.

The lines of a block `text` are looked for in the output of the block before it. Numbers, times, hosts and folders may
differ (`comparable`).
"""

import os
import platform
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from commands import FAST
from hosts import CONTROLLER, ROOT, Cluster
from machines import PATH
from reader import Block, Reader, blocks, here

from roxxel_dist.data.dataset import Roxxel

HOWTO = ROOT / "docs" / "howto"
CONFIG = """\
{dim: 16, num_blocks: 1, kv_heads: 1, head_size: 8, max_context: 32, grad_accum: 1, lr: 3.0e-3,
 phases: [{steps: 60, batch_size: 8, seq_len: 33}],
 log_every: 10, eval_every: 30, eval_iters: 1, checkpoint_every: 20}
"""
# Found by every Python of a reader: the run that pages stop while it trains has time left until then.
SLOW = """
import sys, time
from roxxel_dist.process.progress import Progress
enter = Progress.enter
def slowly(self, *step):
    time.sleep(0.5)
    enter(self, *step)
if "runs/night" in sys.orig_argv and "--resume" not in sys.orig_argv:
    Progress.enter = slowly
"""
STEPS = {1, *range(10, 61, 10)}
"""That are logged."""


def prepare(folder: Path) -> None:
    """What every page says that the reader has: `my_data` and `run.yaml`."""
    folder.mkdir(exist_ok=True)
    tokens = np.random.default_rng(0).integers(0, 300, 1 << 16, np.uint16)
    (folder / "my_data").mkdir()
    Roxxel(folder / "my_data" / "corpus_*.rox").write([tokens], separator=None, vocab_size=300)
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SLOW)


def python_path(folder: Path) -> str:
    """PYTHONPATH for the commands of a page."""
    return os.pathsep.join((str(folder / "site"), str(ROOT)))


class Follower(Reader):
    """A reader of a page of docs/howto, in a folder with what `prepare` makes.

    Args:
        folder: where commands are given.
        start: runs words there, as `reader.here` does.
        more: variables.
    """

    def __init__(self, folder: Path, start: Any = here, **more: str) -> None:
        prepare(folder)
        super().__init__(folder, start=start, **({"XLA_FLAGS": FAST, "PYTHONPATH": python_path(folder)} | more))
        self.printed = ""

    def page(self, name: str, *sections: str, without: str = "") -> None:
        """Follow the blocks of a page, or of some of its sections, but for those that hold `without`."""
        for section in sections or ("",):
            for block in blocks(HOWTO / name, section):
                if block.note.startswith(("not run", "run by")) or (without and without in block.text):
                    self.printed = ""
                elif block.language == "text":
                    self.check(block)
                else:
                    self.follow(block)

    def check(self, block: Block) -> None:
        """The lines that the page shows were printed."""
        assert self.printed, f"{block.where}: no command before it"
        printed = {self.comparable(line) for line in self.printed.splitlines()}
        missing = [line for line in block.text.splitlines() if self.comparable(line) not in printed]
        assert not missing, f"{block.where}: {missing} is not in\n{self.printed}"

    def comparable(self, line: str) -> str:
        """A line without paths, hosts and numbers, which differ; numbers behind = stay."""
        line = re.sub(r"\S*/bin/python[\d.]*", "python3", line.replace(str(self.folder), "/home/me/work"))
        line = re.sub(r"\b(\d{8}_\d{6})_\d+\b", r"\1", line)  # of two jobs that began in one second
        line = re.sub(r" - +(?=\d\d:\d\d:\d\d )", " 0 ", line)  # `ps` is a second behind: no step yet
        line = re.sub(r"-[0-9a-f]{8}\b", "-ID", line)  # before numbers: an id may have digits alone
        line = re.sub(r"\b(?:node|h)\d\b|\b[\d.]{7,}\b", "HOST", line.replace(platform.node(), "node1"))
        return " ".join(re.sub(r"(?<![=\d,.:])\d[\d.,:]*", "N", line).split())

    def run(self, words: list[str], block: Block | None = None) -> str:
        """Run the words of a block, or others, where the page is followed; what they said on stdout."""
        result = self.start(words, cwd=self.folder, env=self.environment, timeout=self.timeout)
        self.printed = result.stdout + result.stderr
        what = f"{block.where}:\n{block.text}" if block else " ".join(words)
        assert result.returncode == 0, f"{what}\nexit code {result.returncode}\n{self.printed[-6000:]}"
        self.said.append(self.printed)
        return result.stdout


def on_hosts(hosts: Cluster, folder: Path, machine: str = CONTROLLER, **more: str) -> Follower:
    """A reader at one machine of a cluster, in a folder that all of them see, who reaches all hosts by `ssh NAME`."""
    for name in (*hosts.names, CONTROLLER):
        hosts.bind(name, hosts.ssh_config, "/etc/ssh/ssh_config")
    home = hosts.home(machine)
    own = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state")} | more
    doing = Follower(folder, partial(hosts.run, on=machine), **own)
    # Who logs in at a host finds its tools.
    doing.environment["PATH"] = os.pathsep.join((doing.environment["PATH"], PATH))
    return doing
