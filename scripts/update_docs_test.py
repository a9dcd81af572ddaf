#!/usr/bin/env python3
"""update_docs.py must fill its places, and nothing else."""

import unittest

import update_docs


class Places(unittest.TestCase):
    def test_the_output_replaces_what_was_there(self):
        text = "a\n<!-- output: cistron info --ops -->\nold\n<!-- end -->\nb\n"
        new = update_docs.updated(text, lambda command: f"new {command}\n")
        self.assertEqual(new, "a\n<!-- output: cistron info --ops -->\nnew cistron info --ops\n<!-- end -->\nb\n")
        self.assertEqual(update_docs.updated(new, lambda command: f"new {command}\n"), new)

    def test_two_places_are_told_apart(self):
        text = "<!-- output: a -->\n<!-- end -->\nkept\n<!-- output: b -->\n<!-- end -->\n"
        self.assertEqual(update_docs.updated(text, lambda command: command + "\n"),
                         "<!-- output: a -->\na\n<!-- end -->\nkept\n<!-- output: b -->\nb\n<!-- end -->\n")

    def test_a_place_without_end_is_an_error(self):
        with self.assertRaises(SystemExit):
            update_docs.updated("<!-- output: a -->\n", lambda command: command)

    def test_other_programs_are_refused(self):
        with self.assertRaises(SystemExit):
            update_docs.run(None, "rm -r x")


if __name__ == "__main__":
    unittest.main()
