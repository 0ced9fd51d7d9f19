"""What Linnaeus says to its users, held word by word in one file per area: `tests/messages/AREA.txt`.

All other tests assert keys, values, exit codes, status and files, so that improving a sentence changes one
file: `make messages` writes the files anew, and the difference is what a reviewer reads.
"""

import difflib
import re
from pathlib import Path

import pytest

from linnaeus.runtime.errors import LinnaeusError

FOLDER = Path(__file__).parents[1] / "messages"


_OF_OTHERS = re.compile(
    r"""
      (?<=broken\ YAML:\ )(?!found\ duplicate|values\ are).*      # PyYAML
    | (?<=broken:\ )while\ parsing\ .*
    | (?<=broken\ CSV:\ ).*                                     # Python
    | [\w.]+\(\)\ (?:got\ an\ unexpected|missing\ \d)[^;(\n]*[^;(\s]
    | '\w+'\ object\ (?:has\ no|is\ not)\ [^;)\n]*
    | property\ '\w+'\ of\ '\w+'\ object\ [^;)\n]*
    | Expecting\ [^(\n]*\(char\ \d+\)
    | Error\ in\ (?:call|collecting)\ .*?\)(?=\ \(|$)            # Hydra
    | Expected\ a\ callable\ target,.*
    | (?<=:\ )Invalid\ defaults\ list\ .*
    | Input\ height\ .*                                        # timm
    | Config\ file\ not\ found[^;\n]*
    | (?<=\()Tensor\ on\ device\ [^)\n]*                       # torch
    | too\ many\ dimensions.*
    | (?<=\()0D\ or\ 1D\ target[^)\n]*
    | (?:(?<=RuntimeError:\ )|(?<=UnpicklingError:\ )).*?(?=\);\ save|\)$|$)
    """,
    re.VERBOSE | re.MULTILINE,
)
"""What Python and other libraries say. It differs between their versions."""


def compare(rewrites, area, messages, **names):
    """Compare all messages of an area, each under its title, without the words of other libraries.

    Args:
        rewrites: write the area's file in place of comparing it.
        area: name of the file.
        messages: a message for each title. Only one test gives those of an area.
        names: texts that differ from run to run, such as a folder, and the name to write for them.
    """
    text = "".join(f"## {title}\n{message.strip()}\n\n" for title, message in messages.items())
    for name, varying in names.items():
        text = text.replace(str(varying), f"<{name}>")
    text = _OF_OTHERS.sub("...", text)
    file = FOLDER / f"{area}.txt"
    if rewrites:
        file.write_text(text)
    known = file.read_text() if file.exists() else ""
    if _by_title(text) != _by_title(known):
        lines = difflib.unified_diff(
            known.splitlines(), text.splitlines(), str(file), "said now", n=2
        )
        pytest.fail("\n".join(["`make messages` writes what is said now", *lines]), pytrace=False)


def _by_title(text):
    parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def error_of(function, *args, **options):
    """The text of the error that a call raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its text is compared
        function(*args, **options)
    return str(caught.value)


def raised(function, *args, **options):
    """The kind of the error that a call raises, and its text."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - it is compared
        function(*args, **options)
    return f"{caught.type.__name__}: {caught.value}"


def error_and_code_of(function):
    """The text of the error that a user's mistake raises, and the exit code of a run that it ends."""
    with pytest.raises(LinnaeusError) as caught:
        function()
    return f"{str(caught.value).rstrip()}\nexit code {caught.value.exit_code}"
