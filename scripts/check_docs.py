#!/usr/bin/env python3
"""Checks what the documents promise.

Usage: check_docs.py [ROOT]

 - relative links in Markdown files resolve, anchors included
 - paths in the "Where is …?" table of ARCHITECTURE.md exist
 - a code block after `<!-- file: PATH -->` is that file, or a part of it: the tests build examples/, so what
   the documents show compiles
 - no source file is longer than 1,000 lines
 - no file names the folders of somebody's machine
 - a script that begins with #! may be executed, as the Makefile does
Exit status 1 and one line a fault.
"""

import os
import pathlib
import re
import subprocess
import sys

MAX_LINES = 1000
SOURCES = {".h", ".cc", ".cu", ".cuh", ".py", ".sh", ".cmake"}
TEXT = SOURCES | {".md", ".txt", ".json", ".yaml", ".yml", ".in", ""}
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`([^`\s]+)`")
BLOCK = re.compile(r"<!-- file: (\S+) -->\s*\n```[a-z+]*\n(.*?)\n```", re.S)
# Folders of one machine. Assembled, so that this file does not name them itself.
FOREIGN = re.compile("|".join(["/ho" + "me/[a-z]", "/ro" + "ot/", "/wo" + r"rk/", r"\.\./sha" + "red",
                               "/Us" + "ers/[A-Za-z]"]))


def tracked(root):
    """Files under version control, or all files where there is none."""
    git = subprocess.run(["git", "-C", str(root), "ls-files", "-z", "--cached", "--others",
                          "--exclude-standard"], capture_output=True, check=False)
    if git.returncode == 0 and git.stdout:
        names = [n for n in git.stdout.decode().split("\0") if n]
        return sorted(root / n for n in names if (root / n).is_file())
    return sorted(p for p in root.rglob("*") if p.is_file())


def anchors(text):
    """Anchors that headings get: lower case, spaces to hyphens, punctuation dropped."""
    result = set()
    for line in text.splitlines():
        if line.startswith("#"):
            title = line.lstrip("#").strip().lower()
            result.add(re.sub(r"[^\w\- ]", "", title).replace(" ", "-"))
    return result


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.S))


def check_links(root, path, text):
    for match in LINK.finditer(without_code(text)):
        target = match.group(1) or match.group(2)
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        destination = (path.parent / name).resolve() if name else path
        if not destination.exists():
            yield f"link to {target}, which does not exist"
        elif root.resolve() not in [destination.resolve(), *destination.resolve().parents]:
            yield f"link to {target}, outside the project"
        elif anchor and destination.suffix == ".md":
            if anchor not in anchors(destination.read_text(encoding="utf-8")):
                yield f"link to {target}: no such heading"


def check_where(root, text):
    """Every path in the table under the heading 'Where is …?'."""
    section = re.search(r"^## Where is.*?$(.*?)(?=^## |\Z)", text, re.M | re.S)
    if not section:
        yield "ARCHITECTURE.md has no section 'Where is …?'"
        return
    seen = 0
    for row in section.group(1).splitlines():
        if not row.startswith("|"):
            continue
        for name in PATH.findall(row.rsplit("|", 2)[1]):
            seen += 1
            if not (root / name.rstrip("/")).exists():
                yield f"'Where is …?' names {name}, which does not exist"
    if seen == 0:
        yield "'Where is …?' names no path"


def check_blocks(root, text):
    for name, code in BLOCK.findall(text):
        if not (root / name).is_file():
            yield f"code block of {name}, which does not exist"
        elif code not in (root / name).read_text(encoding="utf-8"):
            yield f"code block differs from {name}"


def check(root):
    found = []
    for path in tracked(root):
        name = path.relative_to(root).as_posix()
        if path.suffix not in TEXT or name.startswith("tests/golden/"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path.suffix in SOURCES and text.count("\n") > MAX_LINES:
            found.append(f"{name}: {text.count(chr(10))} lines, at most {MAX_LINES}")
        if text.startswith("#!") and not os.access(path, os.X_OK):
            found.append(f"{name}: begins with #!, but is not executable (chmod +x)")
        for number, line in enumerate(text.splitlines(), 1):
            if FOREIGN.search(line):
                found.append(f"{name}:{number}: names a folder of one machine: {line.strip()[:80]}")
        if path.suffix == ".md":
            found += [f"{name}: {m}" for m in check_links(root, path, text)]
            found += [f"{name}: {m}" for m in check_blocks(root, text)]
    architecture = root / "ARCHITECTURE.md"
    if architecture.is_file():
        text = architecture.read_text(encoding="utf-8")
        found += [f"ARCHITECTURE.md: {m}" for m in check_where(root, text)]
    else:
        found.append("ARCHITECTURE.md is missing")
    return found


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent)
    found = check(root.resolve())
    for line in found:
        print(line)
    print(f"check_docs: {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
