"""The command that installs an optional part of this package. Standard library only."""

import json
from contextlib import suppress
from pathlib import Path


def pip_install(extra: str) -> str:
    """The command that adds the packages of an extra, such as "plot", to this installation.

    The package is in no registry yet, so the command names the folder that it was installed from; where that is not
    known or not there any more, it is one to run in a clone.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # slow, and seldom needed
    from urllib.parse import unquote, urlsplit

    with suppress(PackageNotFoundError, ValueError, KeyError, TypeError, OSError):
        source = json.loads(distribution("roxxel-dist").read_text("direct_url.json") or "")
        folder = Path(unquote(urlsplit(source["url"]).path))
        if (folder / "pyproject.toml").is_file():
            editable = "-e " if source["dir_info"].get("editable") else ""
            return f"pip install {editable}'{folder}[{extra}]'"
    return f"pip install '.[{extra}]' in a clone of the repository"
