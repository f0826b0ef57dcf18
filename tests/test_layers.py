"""The house: who may import whom, and what costs start-up time."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "roxxel_dist"
# From the top of the house down; a file imports from its own layer and from those below it.
LAYERS = [
    ["__main__"],
    ["cli"],
    ["sweep"],
    ["launcher"],
    ["trainer"],
    ["experiment", "generator"],
    ["beginning", "export", "load"],
    ["evaluation", "find_lr", "outlook"],
    ["assemble"],
    ["report"],
    ["lineage", "reading", "save", "weights"],
    ["record", "run_directory"],
    ["config"],
    ["config_fields"],
    ["train"],
    ["stream"],
    ["curriculum"],
    ["data", "lora"],
    ["model", "sharding"],
    ["cluster"],
]
EXCEPTIONS = [("data", "stream"), ("model", "load")]  # Roxxel.stream and Transformer.from_pretrained, when called
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
# The public names are imported when they are first used; the bar is drawn by the launcher too, and imports rich alone.
NO_JAX = ["roxxel_dist.reading", "roxxel_dist.report.pictures", "roxxel_dist.curriculum.phases", "roxxel_dist.stream"]
LIGHT = [
    "roxxel_dist",
    "roxxel_dist.cli",
    "roxxel_dist.config",
    "roxxel_dist.launcher.control.supervisor",
    "roxxel_dist.sweep.engine",
    "roxxel_dist.sweep.wandb_agent",
]
HEAVY = {"jax", "numpy", "scipy", "flax", "optax", "orbax", "ray", "wandb", "optuna", "tokenizers", "matplotlib"}


def layer(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """(line, layer) of every import of this package, at module level or inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "roxxel_dist" and len(parts) > 1:
                yield node.lineno, parts[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    own = RANK[layer(path)]
    for line, name in imported(path):
        if (layer(path), name) in EXCEPTIONS:
            continue
        same = name == layer(path)
        assert same or RANK[name] > own, f"{path}:{line}: {layer(path)} imports {name}, which is not below it"


def test_nothing_imports_the_command_line():
    others = [path for path in FILES if layer(path) not in ("__main__", "cli")]
    assert not [path for path in others for _, name in imported(path) if name == "cli"]


def test_help_and_the_launcher_start_without_heavy_imports():
    code = f"import sys, {', '.join(LIGHT)}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_data_needs_no_jax():
    modules = [f"roxxel_dist.data.{path.stem}" for path in (PACKAGE / "data").glob("*.py") if path.stem != "__init__"]
    code = f"import sys, {', '.join(modules + NO_JAX)}; print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_the_layers_name_every_file():
    assert {layer(path) for path in FILES} == set(RANK)


def named(path):
    """The module of a file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def at_module_level(body):
    """The imports that run when a module is imported."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for part in ("orelse",) if typing_only else ("body", "orelse", "finalbody"):
                yield from at_module_level(getattr(node, part, ()))


def test_no_module_waits_for_itself():
    """No cycles: a module is whole before another one uses it."""
    modules = {named(path): path for path in PACKAGE.rglob("*.py")}
    graph = {}
    for name, path in modules.items():
        found = set()
        for node in at_module_level(ast.parse(path.read_text()).body):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [node.module, *(f"{node.module}.{one}" for one in names)]
            found.update(names)
        graph[name] = (found & modules.keys()) - {name}
    assert graph["roxxel_dist.cli"] > {"roxxel_dist.cli.sweep", "roxxel_dist.cli.arguments"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a cycle: {' <- '.join(error.args[1])}") from None


def test_neither_launcher_nor_sweep_needs_jax():
    """Every module of them, where it is imported alone: the launcher without numpy too."""
    report = "print(*sorted(({'jax', 'flax', 'orbax', 'ray', 'wandb', 'optuna'} | more) & set(sys.modules)))"
    for folder, more in (("launcher", {"numpy"}), ("sweep", set())):
        names = [named(path) for path in sorted((PACKAGE / folder).rglob("*.py"))]
        code = f"import sys, importlib; more = {more!r}\nfor name in {names!r}: importlib.import_module(name)\n{report}"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.strip() == "", folder
