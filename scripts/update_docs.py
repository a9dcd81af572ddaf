#!/usr/bin/env python3
"""Puts the output of programs into the documents, or checks that it is there.

Usage: update_docs.py [--check] BUILD [ROOT]

A document marks the place:

    <!-- output: cistron info --ops -->
    …
    <!-- end -->

BUILD is a build folder with the programs named below. With --check nothing is written; exit status 1 and one
line a document that differs.
"""

import pathlib
import re
import shlex
import subprocess
import sys

# A document may run these and no others.
PROGRAMS = {"cistron": "bin/cistron", "format_example": "tests/format_example"}
PLACE = re.compile(r"(<!-- output: ([^\n]+) -->\n).*?(<!-- end -->)", re.S)


def run(build, command):
    program, *arguments = shlex.split(command)
    if program not in PROGRAMS:
        raise SystemExit(f"update_docs: {program} is not one of {', '.join(PROGRAMS)}")
    result = subprocess.run([build / PROGRAMS[program], *arguments], capture_output=True, text=True,
                            check=False)
    if result.returncode != 0:
        raise SystemExit(f"update_docs: {command} ended with {result.returncode}: {result.stderr}")
    return result.stdout


def updated(text, output_of):
    """The text with every place filled; fails when a mark has no end."""
    if text.count("<!-- output: ") != len(PLACE.findall(text)):
        raise SystemExit("update_docs: a mark <!-- output: … --> without <!-- end -->")
    return PLACE.sub(lambda m: m.group(1) + output_of(m.group(2)) + m.group(3), text)


def main():
    arguments = [a for a in sys.argv[1:] if a != "--check"]
    check = "--check" in sys.argv[1:]
    if not 1 <= len(arguments) <= 2:
        raise SystemExit(__doc__)
    build = pathlib.Path(arguments[0]).resolve()
    root = pathlib.Path(arguments[1] if len(arguments) > 1 else pathlib.Path(__file__).parent.parent)
    differ = places = 0
    for path in sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")]):
        text = path.read_text(encoding="utf-8")
        places += len(PLACE.findall(text))
        new = updated(text, lambda command: run(build, command))
        if new == text:
            continue
        differ += 1
        if check:
            print(f"{path.relative_to(root)} differs from what the programs print: "
                  "scripts/update_docs.py BUILD")
        else:
            path.write_text(new, encoding="utf-8")
            print(f"{path.relative_to(root)} updated")
    print(f"update_docs: {places} places, {differ} documents {'differ' if check else 'updated'}")
    return 1 if check and (differ or not places) else 0


if __name__ == "__main__":
    sys.exit(main())
