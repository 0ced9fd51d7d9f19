"""Prints the size of each room beside the most that `tools/size.toml` allows; exits with 1 above it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Count lines of Python and words of pages in the files that git tracks."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [path for path in map(Path, listed.splitlines()) if (ROOT / path).exists()]
    left = [path for path in files if path.suffix == ".py" and path.parts[0] in ("linnaeus", "tests")]
    exceeded = []
    for room, entry in tomllib.loads((ROOT / "tools/size.toml").read_text()).items():
        if entry.get("words"):
            found = [path for path in files if any(fnmatch(str(path), one) for one in entry["paths"])]
            unit = "words"
        else:
            found = [path for path in left if any(path.is_relative_to(one) for one in entry["paths"])]
            unit = "lines"
            left = [path for path in left if path not in found]
        texts = [(ROOT / path).read_text() for path in found]
        size = sum(len(text.split()) if unit == "words" else len(text.splitlines()) for text in texts)
        mark = "" if size <= entry["most"] else "  above"
        if mark:
            exceeded.append(room)
        print(f"{room:40} {size:7,} of {entry['most']:7,} {unit}{mark}")
    if exceeded:
        names = ", ".join(exceeded)
        advice = "remove lines there, or raise the number and say in CHANGELOG.md what users get for it"
        print(f"above its number in tools/size.toml: {names}; {advice}", file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    raise SystemExit(main())
