"""Pages of documentation, followed as a reader would: every block of a page is run as it stands."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import warm
import yaml
from commands import environment
from one_process import OneProcess, plain

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
NOTE = re.compile(r"<!-- ((?:(?!-->).)*) -->\s*\Z", re.DOTALL)
PROCESSES: dict[tuple[tuple[str, str], ...], OneProcess] = {}
"""By their environments."""
OF_DEVICES = {"audit", "check-layouts"}
"""Commands that choose the devices of their process."""
LAUNCHED = re.compile(r"(?<=\broxxel-dist )(?=(?:train|find-lr|eval)\b)")
"""Where `launch local … --` goes when a page that was written for one process is followed on several."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: its page and line, the word after the fence, its text, and the HTML comment right above it."""

    page: Path
    line: int
    language: str
    text: str
    note: str

    @property
    def where(self) -> str:
        """As an editor opens it."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str:
        """The name in a first line such as `# run.yaml` or `# run.yaml: add these lines`; empty without one."""
        found = re.match(r"# ([\w./-]+\.(?:yaml|py|txt|ssh|sbatch))\b", self.text)
        return found.group(1) if found else ""


def blocks(page: Path, section: str = "") -> list[Block]:
    """The fenced blocks of a page, or of the one section with this heading and what is below it."""
    whole = page.read_text()
    begin, end = _section(whole, section) if section else (0, len(whole))
    found = []
    for match in FENCE.finditer(whole, begin, end):
        indent, note = match["indent"], NOTE.search(whole, 0, match.start())
        text = re.sub(rf"^{indent}", "", match["text"], flags=re.MULTILINE)
        line = whole.count("\n", 0, match.start()) + 1
        found.append(
            Block(page=page, line=line, language=match["language"], text=text, note=note.group(1) if note else "")
        )
    fences = len(re.findall(r"^ *```", whole[begin:end], re.MULTILINE))
    assert fences == 2 * len(found), f"{page}: {fences} fences for {len(found)} blocks"
    return found


def _section(page: str, heading: str) -> tuple[int, int]:
    """Where the text below a heading begins and ends; what stands in blocks is no heading."""
    masked = FENCE.sub(lambda match: " " * len(match[0]), page)
    found = re.search(rf"^(#+) {re.escape(heading)}$", masked, re.MULTILINE)
    assert found, f"no heading {heading!r}"
    after = re.compile(rf"^#{{1,{len(found[1])}}} ", re.MULTILINE).search(masked, found.end())
    return found.end(), after.start() if after else len(page)


def in_processes(
    words: list[str], *, cwd: Path, env: dict[str, str], timeout: float
) -> "subprocess.CompletedProcess[str]":
    """`subprocess.run` on this machine."""
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def here(words: list[str], *, cwd: Path, env: dict[str, str], timeout: float) -> "subprocess.CompletedProcess[str]":
    """The same, but commands and programs that start no processes are run where jax is imported already.

    That is one process with this environment, or a fork where a command has devices of its own.
    """
    lines = plain(words[-1]) if words[0] == "bash" else None
    if not lines:
        return in_processes(words, cwd=cwd, env=env, timeout=timeout)
    known = tuple(sorted((name, value) for name, value in env.items() if name != "PYTEST_CURRENT_TEST"))
    done = subprocess.CompletedProcess(words, 0, "", "")
    for line in lines:
        if done.returncode != 0:
            break
        if line[0] == "bash" or (line[0] == "python" and "--devices" in line):
            result = in_processes(line, cwd=cwd, env=env, timeout=timeout)
        elif line[0] == "roxxel-dist" and (line[1] in OF_DEVICES or "--devices" in line):
            result = warm.run(line[1:], cwd, env, timeout)
        else:
            if known not in PROCESSES or PROCESSES[known].process.poll() is not None:
                PROCESSES[known] = OneProcess(env)
            result = PROCESSES[known].run(line, cwd)
        done.returncode = result.returncode
        done.stdout += result.stdout
        done.stderr += result.stderr
    return done


class Reader:
    """Someone in a folder who does what the blocks say, on one process or, with `processes`, on several.

    `start` runs words to their end, here or on another host: it takes `cwd`, `env` and `timeout` as well.
    """

    def __init__(
        self,
        folder: Path,
        processes: int = 1,
        timeout: float = 240,
        start: Callable[..., "subprocess.CompletedProcess[str]"] = here,
        **more: str,
    ):
        self.folder, self.processes, self.timeout, self.start = folder, processes, timeout, start
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = environment(PATH=path, **more)
        self.files: dict[str, dict] = {}
        self.said: list[str] = []

    def follow(self, block: Block) -> str:
        """Run, or write down, one block; what a command said on stdout."""
        if block.language == "yaml" and block.file:
            # A page shows a file once and then the lines that it gains.
            self.files[block.file] = self.files.get(block.file, {}) | yaml.safe_load(block.text)
            self.write(block.file, yaml.safe_dump(self.files[block.file], sort_keys=False))
        elif block.language == "yaml":
            assert yaml.safe_load(block.text) is not None, block.where
        elif block.file:
            self.write(block.file, block.text)
        elif block.language == "bash":
            text = LAUNCHED.sub(self.launch, block.text) if self.processes > 1 else block.text
            return self.run(["bash", "-euo", "pipefail", "-c", text], block)
        elif block.language == "python":
            self.write("block.py", block.text)
            alone = self.processes == 1 or "Trainer(" not in block.text
            return self.run(["bash", "-c", ("" if alone else f"roxxel-dist {self.launch}") + "python block.py"], block)
        return ""

    @property
    def launch(self) -> str:
        """The words that start what follows them on several processes."""
        return f"launch local --nprocs {self.processes} --devices-per-proc 1 --max-restarts 0 -- "

    def write(self, name: str, text: str) -> None:
        """Put a file into the folder."""
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def run(self, words: list[str], block: Block) -> str:
        """What the command said on stdout; an assertion with both streams' ends where it failed."""
        result = self.start(words, cwd=self.folder, env=self.environment, timeout=self.timeout)
        told = f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        assert result.returncode == 0, f"{block.where}: exit code {result.returncode}\n{block.text}\n{told}"
        self.said.append(result.stdout)
        return result.stdout
