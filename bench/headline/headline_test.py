#!/usr/bin/env python3
"""Tests of the headline run's parts: what is wrong must be found, and what fails must be named."""
import json
import math
import os
import pathlib
import shutil
import sys
import tempfile
import time
import unittest

import table
from headline import Headline, Shape, layouts_of, parse, work_of
from pieces import Failure, Piece, Pieces, Skipped, last_line
from runs import Layout, Run, measured, mpirun, read_run, require_near, require_same, share_of

PROFILE = """mean of steps 9 to 9, op by op; the time between the beginnings of two ops is the first's
op               implementation    calls         ms              rate  roof   share
grouped_mlp      hopper                4     60.000   612.10 TFLOP/s   78%   50.0%
all_to_all       nccl                 12     24.000                        20.0%
all_to_all       mpi                   1      6.000                         5.0%
all ops 119.000 ms of 120.000 ms a step; roof: products 780.00 TFLOP/s, copies 4280 GB/s, measured here
"""


def step(number, **changes):
    values = {"step": number, "loss": 5.0 / number, "aux_loss": 1.0, "grad_norm": 0.5, "expert_load": [[0.5, 0.5]],
              "step_ms": 100.0 + number, "tokens_per_s": 8000.0 / number, "flops_per_s": 8e12, "mfu": 0.5,
              "memory_peak_bytes": 100 + number}
    return {**values, **changes}


def run(steps=3, checksum="abc", profile="", **changes):
    """A run whose second step is changed."""
    return Run([step(n, **(changes if n == 2 else {})) for n in range(1, steps + 1)], checksum, profile)


class Comparison(unittest.TestCase):
    def test_same_runs_are_the_same(self):
        require_same(run(), run())

    def test_any_difference_is_found(self):
        tiny = math.nextafter(2.5, 3)
        for other in (run(loss=tiny), run(grad_norm=math.nextafter(0.5, 1)), run(aux_loss=1.1),
                      run(expert_load=[[0.4, 0.6]]), run(checksum="abd"), run(steps=2), run(steps=4),
                      run(loss=math.nan)):
            with self.assertRaises(Failure):
                require_same(run(), other)

    def test_nothing_is_no_proof(self):
        for other in (run(steps=0), run(checksum="")):
            with self.assertRaises(Failure):
                require_same(other, other)
        with self.assertRaises(Failure):
            require_near(run(steps=0), run(steps=0), 1)

    def test_speed_is_no_value(self):
        require_same(run(step_ms=1.0, tokens_per_s=2.0, memory_peak_bytes=3), run())

    def test_near_is_within_the_bound(self):
        self.assertEqual(require_near(run(), run(), 0), 0)
        self.assertAlmostEqual(require_near(run(loss=2.5 * (1 + 1e-6)), run(), 2e-6), 1e-6)
        for other in (run(loss=2.5 * (1 + 3e-6)), run(grad_norm=0.6), run(loss=math.nan), run(loss=math.inf),
                      run(steps=2)):
            with self.assertRaises(Failure):
                require_near(other, run(), 2e-6)
        with self.assertRaises(Failure):
            require_near(run(), run(loss=math.nan), 2e-6)


class Figures(unittest.TestCase):
    def test_shares_of_all_rows_of_an_op(self):
        self.assertAlmostEqual(share_of(PROFILE, "all_to_all"), 0.25)
        self.assertAlmostEqual(share_of(PROFILE, "grouped_mlp"), 0.5)
        self.assertEqual(share_of(PROFILE, "all_gather"), 0)
        self.assertIsNone(share_of("", "all_to_all"))

    def test_medians_are_of_measured_steps_and_one_rank(self):
        figures = measured(run(steps=6, profile=PROFILE), ranks=2, warm_up=2, steps=3)
        self.assertEqual(figures["ms"], 104)
        self.assertEqual(figures["fastest_ms"], 103)
        self.assertEqual(figures["tokens_per_s_rank"], 1000)
        self.assertEqual(figures["peak_bytes"], 105)  # of the warm-up too, not of what follows
        self.assertEqual(figures["peak_flops"], 8e12)  # 8e12 on two ranks are half of it
        with self.assertRaises(Failure):
            measured(run(steps=4), ranks=2, warm_up=2, steps=3)

    def test_a_run_is_read_from_its_folder(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "metrics.jsonl").write_text("".join(json.dumps(step(n)) + "\n" for n in (1, 2)))
            (folder / "final.json").write_text('{"weights_checksum": "0f"}')
            self.assertEqual(read_run(folder), Run([step(1), step(2)], "0f", ""))

    def test_layouts_and_models_by_ranks(self):
        self.assertEqual(layouts_of(2), [Layout(1, 2), Layout(2, 1)])
        self.assertEqual(layouts_of(8), [Layout(1, 8), Layout(4, 2), Layout(8, 1)])
        self.assertEqual([work_of("cuda", n, 0).model["num_hidden_layers"] for n in (2, 4, 8)], [4, 16, 32])
        self.assertEqual(Shape(16384, 4096).rows, 4)


class OfPieces(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.said = []
        self.pieces = Pieces(self.folder.name, 60, say=self.said.append)

    def tearDown(self):
        self.folder.cleanup()

    def status(self):
        return [piece["status"] for piece in self.pieces.done]

    def test_the_programs_error_is_told_before_mpiruns(self):
        with tempfile.TemporaryDirectory() as folder:
            log = pathlib.Path(folder) / "log"
            log.write_text("$ mpirun\nerror: no data\nMPI_ABORT was invoked with errorcode 2.\n", encoding="utf-8")
            self.assertEqual(last_line(log), "error: no data")
            log.write_text("first\nRuntimeError: broken\nlast\n", encoding="utf-8")
            self.assertEqual(last_line(log), "RuntimeError: broken")

    def test_a_piece_that_fails_is_named_and_the_rest_goes_on(self):
        def fails(piece):
            piece.command([sys.executable, "-c", "import sys; print('error: no such thing'); sys.exit(7)"])

        def skips(piece):
            raise Skipped("no torch")
        self.assertIsNone(self.pieces.run("a", 30, fails))
        self.assertIsNone(self.pieces.run("b", 30, skips))
        self.assertEqual(self.pieces.run("c", 30, lambda piece: piece.command(["echo", "out"])), "out\n")
        self.pieces.run("d", 30, lambda piece: piece.command(["no-such-program"]))
        self.pieces.run("e", 30, lambda piece: {}["missing"])
        self.pieces.run("f", 30, lambda piece: json.loads("no JSON"))
        self.assertEqual(self.status(), ["FAILED", "not run", "ok", "FAILED", "FAILED", "FAILED"])
        self.assertEqual(self.pieces.failed(), ["a", "d", "e", "f"])
        self.assertIn("exit status 7", self.said[0])
        self.assertIn("error: no such thing", self.said[0])

    def test_a_piece_that_takes_too_long_is_ended_with_its_processes(self):
        mark = pathlib.Path(self.folder.name) / "mark"
        begin = time.monotonic()
        self.pieces.run("slow", 0.5, lambda piece: piece.command(["sh", "-c", f"(sleep 2; touch {mark}) & sleep 30"]))
        self.assertLess(time.monotonic() - begin, 10)
        self.assertEqual(self.status(), ["FAILED"])
        self.assertIn("out of time", self.said[0])
        time.sleep(2.5)
        self.assertFalse(mark.exists())

    @unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
    def test_ranks_of_mpirun_are_ended_with_it(self):
        pids = pathlib.Path(self.folder.name) / "pids"
        start, environment = mpirun(2)
        script = f"trap '' TERM; echo $$ >>{pids}; while :; do sleep 1; done"
        self.pieces.run("slow", 2, lambda piece: piece.command([*start, "sh", "-c", script], environment))
        self.assertEqual(self.status(), ["FAILED"])
        self.assertEqual(len(pids.read_text().split()), 2)
        for pid in pids.read_text().split():
            stat = pathlib.Path(f"/proc/{pid}/stat")  # gone, or dead and not yet buried
            state = stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else "gone"
            self.assertIn(state, ("gone", "Z", "X"))

    def test_without_time_nothing_is_run(self):
        pieces = Pieces(self.folder.name, 0, say=self.said.append)
        self.assertIsNone(pieces.run("late", 30, lambda piece: self.fail("it ran")))
        self.assertEqual(pieces.failed(), ["late"])
        self.assertIsNone(pieces.run("later", 30, lambda piece: self.fail("it ran"), needs=5))
        self.assertEqual(pieces.failed(), ["late"])
        self.assertEqual(pieces.done[-1]["status"], "not run")

    def test_what_a_kind_of_piece_takes(self):
        self.pieces.done += [{"piece": "a b", "seconds": 3}, {"piece": "a c", "seconds": 4},
                             {"piece": "b", "seconds": 9}]
        self.assertEqual(self.pieces.seconds_of("a"), 4)
        self.assertEqual(self.pieces.seconds_of("c"), 0)


class OfTable(unittest.TestCase):
    ROWS = [{"what": "Cistron dp 1, ep 2", "tokens": 64, "sequence": 32, "tokens_per_s_rank": 3000.0, "ms": 10.0,
             "mfu": 0.5, "peak_bytes": 2 * table.GIB, "all_to_all": 0.25, "plan_ms": 9.0,
             "plan_bytes": 2.2 * table.GIB, "note": ""},
            {"what": "Cistron dp 2, ep 1", "tokens": 64, "sequence": 32, "tokens_per_s_rank": 2000.0, "ms": 15.0,
             "peak_bytes": table.GIB},
            {"what": "Hugging Face eager", "tokens": 64, "sequence": 32, "tokens_per_s_rank": 1000.0, "ms": 30.0,
             "peer": True},
            {"what": "torch expert parallelism", "tokens": 64, "sequence": 32, "tokens_per_s_rank": 2500.0,
             "peer": True},
            {"what": "Hugging Face grouped_mm", "tokens": 64, "sequence": 32, "peer": True, "failed": "out of time"}]

    def test_rows(self):
        lines = table.markdown(self.ROWS).splitlines()
        self.assertEqual(len(lines), 2 + len(self.ROWS))
        self.assertEqual(len({len(line) for line in lines}), 1)
        for part in ("3,000", "50%", "25%", "9.0 (-10%)", "2.20 (+10%)"):
            self.assertIn(part, lines[2])
        self.assertIn("FAILED", lines[6])
        self.assertIn("out of time", lines[6])
        self.assertIn("not run", table.markdown([{**self.ROWS[4], "unfit": True}]))

    def test_ratios_are_of_the_fastest_layout(self):
        ratios = table.ratios(self.ROWS, table.GOALS)
        self.assertEqual([(r["layout"], r["peer"], r["ratio"]) for r in ratios],
                         [("Cistron dp 1, ep 2", "Hugging Face eager", 3.0),
                          ("Cistron dp 1, ep 2", "torch expert parallelism", 1.2)])
        self.assertIn("met", table.ratio_text(ratios[0]))
        self.assertIn("missed", table.ratio_text(ratios[1]))
        self.assertEqual(table.ratios(self.ROWS[2:], table.GOALS), [])

    def test_how_far_the_plan_is_off(self):
        text = table.plan_text(self.ROWS)
        self.assertIn("memory by at most 10.0%", text)
        self.assertIn("goal 5%: missed", text)
        self.assertIn("time by at most 10.0%", text)
        self.assertIn("goal 15%: met", text)
        self.assertEqual(table.plan_text(self.ROWS[1:]), "")


class OfHeadline(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()

    def tearDown(self):
        self.folder.cleanup()

    def headline(self, script, *more):
        """A headline run whose program is a shell script."""
        program = pathlib.Path(self.folder.name) / "program"
        program.write_text("#!/bin/sh\n" + script)
        program.chmod(0o755)
        return Headline(parse(["--program", str(program), "--ranks", "2", "--device", "cpu", "--start", "threads",
                               "--out", self.folder.name, "--peers", "no", *more]))

    def result(self):
        return json.loads((pathlib.Path(self.folder.name) / "headline.json").read_text())

    def test_a_program_that_fails_fails_all_pieces_and_the_run(self):
        self.assertEqual(self.headline("echo error: broken >&2; exit 1").run(), 1)
        result = self.result()
        self.assertEqual({piece["status"] for piece in result["pieces"]}, {"FAILED"})
        self.assertTrue(all(row["failed"] for row in result["rows"]))
        self.assertEqual(len(result["rows"]), 4)

    def test_a_layout_that_does_not_fit_is_no_failure(self):
        layouts = [{"dp": dp, "ep": 2 // dp, "shard": shard, "fits": False, "peak_bytes": 2 ** 40, "largest": "moments"}
                   for dp in (1, 2) for shard in ("none", "full")]
        script = f"echo '{json.dumps({'layouts': layouts})}'\n"
        self.assertEqual(self.headline(script, "--what", "measure").run(), 0)
        self.assertEqual({piece["status"] for piece in self.result()["pieces"]}, {"not run"})
        self.assertIn("1024.0 GiB planned", self.result()["rows"][0]["failed"])

    def test_every_cell_on_gpus_has_a_plan_that_fits(self):
        if "CISTRON_BIN" not in os.environ:
            self.skipTest("CISTRON_BIN, the folder of cistron, is not set")
        for ranks in (2, 4, 8):
            headline = Headline(parse(["--program", os.environ["CISTRON_BIN"] + "/cistron", "--ranks", str(ranks),
                                       "--out", self.folder.name]))
            for shape in headline.work.shapes:
                for layout in headline.layouts:
                    recompute, chosen, plan = headline.plan(Piece(f"{self.folder.name}/log", 60), shape, layout)
                    self.assertEqual((chosen.dp, chosen.ep), (layout.dp, layout.ep))
                    self.assertTrue(plan["fits"])
                    self.assertGreater(plan["step_ms"], 0)
                    if ranks == 2:  # four layers
                        self.assertEqual((recompute, chosen.shard), ("none", "none"))

    def test_arguments(self):
        with self.assertRaises(SystemExit):
            self.headline("", "--ranks", "3")
        with self.assertRaises(SystemExit):
            self.headline("", "--device", "cuda")


if __name__ == "__main__":
    unittest.main()
