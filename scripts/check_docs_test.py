#!/usr/bin/env python3
"""check_docs.py must find each kind of fault."""

import pathlib
import tempfile
import unittest

import check_docs

WHERE = "# A\n\n## Where is …?\n| what | where |\n|---|---|\n| sums | `src/sum.cc` |\n"


class Docs(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = pathlib.Path(self.folder.name).resolve()
        self.write("ARCHITECTURE.md", WHERE)
        self.write("src/sum.cc", "int Sum(int a, int b) {\n  return a + b;\n}\n")

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def faults(self):
        return check_docs.check(self.root)

    def test_a_clean_tree_passes(self):
        self.write("README.md", "[sum](src/sum.cc) [where](ARCHITECTURE.md#where-is-) [x](https://x)")
        self.assertEqual(self.faults(), [])

    def test_where_names_what_exists(self):
        self.write("ARCHITECTURE.md", WHERE + "| gone | `src/gone.cc` |\n")
        self.assertIn("src/gone.cc", self.faults()[0])

    def test_where_must_be_there(self):
        self.write("ARCHITECTURE.md", "# A\n")
        self.assertEqual(len(self.faults()), 1)
        (self.root / "ARCHITECTURE.md").unlink()
        self.assertEqual(len(self.faults()), 1)

    def test_links_resolve(self):
        self.write("README.md", "[a](gone.md)")
        self.assertIn("gone.md", self.faults()[0])
        self.write("README.md", "[a](ARCHITECTURE.md#nowhere)")
        self.assertIn("no such heading", self.faults()[0])
        self.write("README.md", "![picture](docs/gone.png)")
        self.assertIn("gone.png", self.faults()[0])
        self.write("README.md", "`[a](gone.md)`")  # code is not a link
        self.assertEqual(self.faults(), [])

    def test_code_blocks_are_their_files(self):
        block = "<!-- file: src/sum.cc -->\n```cpp\n{}\n```\n"
        self.write("README.md", block.format("  return a + b;"))
        self.assertEqual(self.faults(), [])
        self.write("README.md", block.format("  return a - b;"))
        self.assertIn("differs", self.faults()[0])

    def test_scripts_are_executable(self):
        self.write("scripts/go.sh", "#!/bin/sh\n")
        self.assertIn("not executable", self.faults()[0])
        (self.root / "scripts/go.sh").chmod(0o755)
        self.assertEqual(self.faults(), [])

    def test_long_files_are_refused(self):
        self.write("src/long.cc", "\n" * 1000)
        self.assertEqual(self.faults(), [])
        self.write("src/long.cc", "\n" * 1001)
        self.assertIn("1001 lines", self.faults()[0])

    def test_folders_of_a_machine_are_refused(self):
        self.write("src/a.cc", "// see /ho" + "me/somebody/notes\n")
        self.assertIn("folder of one machine", self.faults()[0])


if __name__ == "__main__":
    unittest.main()
