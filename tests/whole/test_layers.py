"""The layers: which module may import which, and what costs start-up time."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from importlib.util import find_spec

from layers import (
    ASK_IS_URL,
    EXCEPTIONS,
    FRONT,
    IN_A_RANK,
    INNER,
    OF_TRAIN,
    ON_A_HOST,
    PACKAGE,
    RANKS,
)

import roxxel_dist

RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
# The public names are imported when they are first used; the bar is drawn by the launcher too, and imports rich alone.
NO_JAX = [
    "roxxel_dist.audit.record",
    "roxxel_dist.run.curriculum",
    "roxxel_dist.run.report",
    "roxxel_dist.curriculum.phases",
    "roxxel_dist.input.stream",
]
LIGHT = [
    "roxxel_dist",
    "roxxel_dist.cli",
    "roxxel_dist.settings.config",
    "roxxel_dist.launcher.control.supervisor",
    "roxxel_dist.sweep.samplers",
    "roxxel_dist.sweep.wandb_server",
]
HEAVY = {"jax", "numpy", "scipy", "flax", "optax", "orbax", "ray", "wandb", "optuna", "tokenizers", "matplotlib"}


def named(path):
    """The module of a file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module):
    """The name in RANKS of a module of the package."""
    return module.split(".")[1]


def inner(module):
    """The room of a module inside its room; FRONT for a file that lies there itself."""
    room, *parts = module.split(".")[1:]
    folders = {path.name for path in (PACKAGE / room).iterdir() if (path / "__init__.py").exists()}
    return parts[0] if parts and parts[0] in folders else FRONT


MODULES = {named(path) for path in FILES}


@cache
def imported(path):
    """(line, module) of every import of this package: at its top, inside functions, for types alone, by a string."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else str(node.module) for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        else:
            continue
        found += [(node.lineno, name) for name in names if name in MODULES]
    return found


def goes_down(path, module):
    """Whether a file may import a module: of its own room, and there as `INNER` says, or of a room below."""
    own, other = layer(named(path)), layer(module)
    if (named(path), module) in EXCEPTIONS or own != other:
        return (named(path), module) in EXCEPTIONS or RANK[other] > RANK[own]
    # The front of a room, its `__init__`, gives names from all of it when they are first used.
    if own not in INNER or path == PACKAGE / own / "__init__.py":
        return True
    return INNER[own].index(inner(named(path))) <= INNER[own].index(inner(module))


def test_imports_go_down():
    up = [f"{path}:{n}: {m}, which is not below" for path in FILES for n, m in imported(path) if not goes_down(path, m)]
    assert not up, "\n".join(up)


def test_there_is_no_circle():
    """No file needs itself over others, whenever it imports them."""
    graph = {
        named(path): {module for _, module in imported(path) if (named(path), module) not in EXCEPTIONS} - {named(path)}
        for path in FILES
    }
    assert graph["roxxel_dist.cli.launch"] > {"roxxel_dist.cli.arguments", "roxxel_dist.launcher.backends"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle: {' <- '.join(error.args[1])}") from None


def test_what_a_process_needs_of_the_system_is_of_the_standard_library():
    for path in sorted((PACKAGE / "process").glob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        strange = {name for name in modules if name.partition(".")[0] not in {*sys.stdlib_module_names, "roxxel_dist"}}
        assert not strange, f"{path}: {strange}"


def test_the_launcher_could_be_a_package_of_its_own():
    for path in sorted((PACKAGE / "launcher").rglob("*.py")):
        for line, module in imported(path):
            fine = module.startswith(("roxxel_dist.launcher", "roxxel_dist.process"))
            assert fine or (named(path), module) in {IN_A_RANK, ON_A_HOST, *OF_TRAIN}, f"{path}:{line}: {module}"


def test_the_policy_of_the_launcher_is_pure_functions():
    """No clock, no process, no file and no words: what they decide depends on their arguments alone."""
    pure = {"collections", "dataclasses", "enum", "itertools", "re", "signal", "typing"}
    for path in sorted((PACKAGE / "launcher" / "policy").glob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        for name in modules:
            own = name.startswith(("roxxel_dist.launcher.policy", "roxxel_dist.process"))
            assert own or name.partition(".")[0] in pure, f"{path}: {name}"
        assert not {node.id for node in nodes if isinstance(node, ast.Name)} & {"print", "open", "input"}, path


def test_the_rules_for_hosts_have_no_clock_and_no_process():
    """What happens is an event, and the time is given: months of a job pass in seconds."""
    for path in sorted((PACKAGE / "launcher" / "fleet").glob("*.py")):
        modules = {module for _, module in imported(path)} if path.name != "driver.py" else set()
        nodes = [*ast.walk(ast.parse(path.read_text()))] if path.name != "driver.py" else []
        modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        allowed = {"random"} if path.name == "simulation.py" else set()  # its caller gives the generator
        assert not (modules - allowed) & {"time", "os", "threading", "queue", "socket", "subprocess", "random"}, path
        assert not [name for name in modules if name.startswith("roxxel_dist.launcher.transport")], path


def test_nothing_imports_the_command_line():
    arrows = {(named(path), name) for path in FILES for _, name in imported(path) if name.startswith("roxxel_dist.cli")}
    assert not [arrow for arrow in arrows - OF_TRAIN if layer(arrow[0]) not in ("__main__", "cli")]


def test_few_files_know_a_bucket_from_a_folder():
    assert {named(path) for path in FILES if "is_url" in path.read_text()} == ASK_IS_URL


def test_help_and_the_launcher_start_without_heavy_imports():
    commands = [named(path) for path in FILES if layer(named(path)) == "cli" and not path.stem.endswith("_table")]
    code = f"import sys, {', '.join(LIGHT + commands)}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_data_needs_no_jax():
    modules = [named(path) for path in (PACKAGE / "data").rglob("*.py")]
    code = f"import sys, {', '.join(modules + NO_JAX)}; print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_the_layers_name_every_room():
    assert {layer(named(path)) for path in FILES} == set(RANK)


def test_neither_launcher_nor_sweep_needs_jax():
    """Every module of them, where it is imported alone: the launcher without numpy too."""
    report = "print(*sorted(({'jax', 'flax', 'orbax', 'ray', 'wandb', 'optuna'} | more) & set(sys.modules)))"
    for folder, more in (("launcher", {"numpy"}), ("sweep", set())):
        names = [named(path) for path in sorted((PACKAGE / folder).rglob("*.py"))]
        code = f"import sys, importlib; more = {more!r}\nfor name in {names!r}: importlib.import_module(name)\n{report}"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.strip() == "", folder


def test_the_package_shows_its_public_names_alone():
    assert dir(roxxel_dist) == sorted([*roxxel_dist.__all__, "__version__"])
    assert roxxel_dist._WHERE.keys() == set(roxxel_dist.__all__)
    assert "load_run" in dir(roxxel_dist)


def test_what_benchmarks_and_examples_import_is_there():
    """Nothing else in `make test` runs most of them, and modules move."""
    missing = []
    for path in [*(PACKAGE.parent / "benchmarks").glob("*.py"), *(PACKAGE.parent / "examples").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "roxxel_dist":
                module = import_module(str(node.module))
                for name in [name.name for name in node.names if not hasattr(module, name.name)]:
                    if find_spec(f"{node.module}.{name}") is None:
                        missing.append(f"{path.name}: {node.module}.{name}")
    assert missing == []
