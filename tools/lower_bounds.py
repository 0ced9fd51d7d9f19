"""Print the oldest versions that pyproject.toml allows, as constraints for pip.

`make test-floor` installs them.
"""

import re
import sys
import tomllib
from pathlib import Path

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[\w,-]+\])?>=(?P<version>[\w.]+)(?:,<[\w.]+)?")


def lower_bounds(text: str) -> dict[str, str]:
    """Return the lower bound of each package.

    Args:
        text: content of a pyproject.toml.

    Raises:
        ValueError: a requirement has no lower bound, or its package has another one already.
    """
    project = tomllib.loads(text)["project"]
    extras = project.get("optional-dependencies", {}).values()
    bounds: dict[str, str] = {}
    for requirement in (*project["dependencies"], *(each for extra in extras for each in extra)):
        if requirement.startswith(f"{project['name']}["):
            continue
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise ValueError(f"{requirement!r} in pyproject.toml: write NAME>=VERSION")
        if match["name"] in bounds:
            raise ValueError(
                f"{match['name']} in pyproject.toml has two bounds: "
                f"name it in one extra, and that extra as {project['name']}[EXTRA] in the others"
            )
        bounds[match["name"]] = match["version"]
    return bounds


if __name__ == "__main__":
    try:
        found = lower_bounds(Path("pyproject.toml").read_text(encoding="utf-8"))
    except ValueError as error:
        sys.exit(str(error))
    for name, version in found.items():
        print(f"{name}=={version}")
