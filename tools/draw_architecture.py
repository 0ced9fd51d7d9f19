"""Draw the folders and modules of the package as a graph, made from their imports.

    python tools/draw_architecture.py            # print it
    python tools/draw_architecture.py --write    # put it into docs/architecture.md

An arrow points from a part to the parts that import it, so that the graph reads in the order in which things
are built. An arrow is left out where a longer path implies it. The output is a Mermaid graph, which GitHub
and the documentation site draw.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "linnaeus"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- made by tools/draw_architecture.py --write; do not edit -->\n\n"
END = "\n<!-- end of what tools/draw_architecture.py made -->\n"

Graph = dict[str, set[str]]
"""Of each part, the parts that it imports."""


def part_of(module: str) -> str:
    """`data` for `linnaeus.data.loader`; empty for the package itself."""
    part = f"{module}.".split(".")[1]
    return "" if part.startswith("__") else part


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions too; `from a import b` counts as `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def read_graph(package: Path) -> Graph:
    """A part is a folder or a module directly under the package."""
    graph: Graph = {}
    for path in sorted(package.rglob("*.py")):
        part = path.relative_to(package).with_suffix("").parts[0]
        if part != "__init__":
            own = {part_of(name) for name in imports(path) if name.startswith(f"{package.name}.")}
            graph.setdefault(part, set()).update(own - {part, ""})
    return graph


def without_detours(graph: Mapping[str, set[str]]) -> Graph:
    """The same graph without the arrows that a longer path implies (its transitive reduction).

    Raises:
        ValueError: parts that import each other, directly or through others.
    """
    reached = {part: set(_reachable(graph, part)) for part in graph}
    circle = sorted(part for part in graph if part in reached[part])
    if circle:
        raise ValueError(f"these parts import each other: {', '.join(circle)}")
    return {
        part: {other for other in own if not any(other in reached[between] for between in own)}
        for part, own in graph.items()
    }


def _reachable(graph: Mapping[str, set[str]], start: str) -> Iterator[str]:
    """All parts that `start` imports, directly or through others."""
    seen: set[str] = set()
    stack = list(graph[start])
    while stack:
        part = stack.pop()
        if part not in seen:
            seen.add(part)
            yield part
            stack += graph[part]


def mermaid(graph: Mapping[str, set[str]], package: Path) -> str:
    """The graph as a fenced Mermaid block; folders are boxes, single modules are round."""
    lines = ["```mermaid", "graph TD"]
    for part in sorted(graph):
        lines.append(f'  {part}["{part}/"]' if (package / part).is_dir() else f"  {part}({part})")
    lines += [f"  {other} --> {part}" for part in sorted(graph) for other in sorted(graph[part])]
    return "\n".join([*lines, "```\n"])


def drawing(package: Path = PACKAGE) -> str:
    """The graph of the package, as it is written between the two marks of the page."""
    return mermaid(without_detours(read_graph(package)), package)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the graph, or write it into the page."""
    parser = argparse.ArgumentParser(
        description="Draw the parts of the package from their imports."
    )
    parser.add_argument(
        "--write", action="store_true", help=f"put it into {PAGE.relative_to(ROOT)}"
    )
    if not parser.parse_args(argv).write:
        print(drawing(), end="")
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{drawing()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
