"""The pages of the documentation, and which module of tests follows the blocks of each."""

from pathlib import Path

from reader import ROOT

RUN_BY = {
    "README.md": "test_readme.py",
    "docs/quickstart.md": "test_guides.py",
    "docs/first-sweep.md": "test_guides.py",
    "docs/two-hosts.md": "test_howto_ssh.py",
    "docs/coming-from.md": "test_guides.py",
    "docs/concepts/plan.md": "test_guides.py",
    "docs/concepts/blends.md": "test_guides.py",
    "docs/concepts/failures.md": "test_guides.py",
    "docs/concepts/search.md": "test_guides.py",
    "docs/guides/evaluate.md": "test_guides.py",
    "docs/guides/packing.md": "test_guides.py",
    "docs/guides/plan.md": "test_guides.py",
    "docs/guides/python.md": "test_guides.py",
    "docs/guides/resume.md": "test_guides.py",
    "docs/guides/shard.md": "test_guides.py",
    "docs/guides/text.md": "test_guides.py",
    "docs/data.md": "test_guides.py",
    "docs/training.md": "test_guide.py",
    "docs/model.md": "test_guides.py",
    "docs/sweeps.md": "test_guides.py",
    "docs/howto/launching.md": "test_howto_launching.py",
    "docs/howto/long-rows.md": "test_guides.py",
    "docs/howto/top.md": "test_guides.py",
    "docs/howto/browser.md": "test_guides.py",
    "docs/howto/tensorboard.md": "test_guides.py",
    "docs/howto/versus.md": "test_guides.py",
    "docs/howto/exec.md": "test_howto_launching.py",
    "docs/howto/ssh.md": "test_howto_ssh.py",
    "docs/howto/gpu.md": "test_guides.py",
    "docs/howto/elastic.md": "test_howto_ssh.py",
    "docs/howto/slurm.md": "test_howto_slurm.py",
    "docs/howto/ray.md": "test_howto_ray.py",
    "docs/howto/kubernetes.md": "test_howto_kubernetes.py",
    "docs/howto/tpu.md": "test_howto_kubernetes.py",
    "docs/howto/wandb.md": "test_howto_wandb.py",
    "docs/troubleshooting.md": "test_troubleshooting.py",
    "tests/support/reference_pages/api.md": "test_guides.py",
    "tests/support/reference_pages/config.md": "test_guides.py",
    "docs/reference/exit-codes.md": "test_guides.py",
    "docs/reference/environment.md": "test_guides.py",
    "docs/reference/files.md": "test_guides.py",
}
"""Every block of these pages is run by the module, but those with a note (`left_out`)."""
LEFT_OUT = ("not run: ", "run by tests/", "run by docker/check")
"""How the comment right above a block begins that the page's own test passes over."""


def pages_of(module: str) -> list[Path]:
    """The pages that a module of tests follows: `pages_of(Path(__file__).name)`."""
    return [ROOT / page for page, one in RUN_BY.items() if one == module]


def left_out(note: str) -> bool:
    """Whether a block with this comment above it is not run where the others of its page are."""
    return note.startswith(LEFT_OUT)
