#!/usr/bin/env python3
"""The headline run (docs/benchmarks.md): checks, then training steps of ours and of the peers, one table.

Started by bench/headline.sh. Every piece has its own time limit; one that fails is named below the table and makes the
exit status 1, the others go on. OUT/headline.json has all of it, OUT/logs what the programs wrote.
"""
import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import table
from pieces import Failure, Pieces, Skipped
from runs import Layout, Program, measured, mpirun, require_near, require_same

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "data" / "ecoli_k12_mg1655.fna.gz"
WARM_UP, STEPS = 2, 6  # and one more, which is told op by op
PEERS = {"eager": "Hugging Face eager", "expert_parallel": "torch expert parallelism",  # those with goals first
         "grouped_mm": "Hugging Face grouped_mm"}


@dataclasses.dataclass(frozen=True)
class Shape:
    tokens: int  # of a rank, in a step of one micro-batch
    sequence: int

    @property
    def rows(self):
        return self.tokens // self.sequence


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured on a device: a model, shapes (the first is the one that counts most), time limits."""
    model: dict  # fields of MixtralConfig
    shapes: tuple
    precision: str
    goldens: tuple  # precisions
    check_seconds: float
    run_seconds: float
    peer_seconds: float


def mixtral(layers):
    return {"vocab_size": 256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": layers,
            "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
            "max_position_embeddings": 8192}


TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 256}


def work_of(device, ranks, layers):
    if device == "cpu":
        return Work(TINY, (Shape(128, 64), Shape(256, 128)), "fp32", ("fp32",), 60, 60, 120)
    layers = layers or {8: 32, 4: 16}.get(ranks, 4)
    shapes = (Shape(8192, 8192), Shape(16384, 8192), Shape(8192, 4096), Shape(16384, 4096))
    return Work(mixtral(layers), shapes, "bf16", ("fp32", "bf16"), 60, 90, 110)


def layouts_of(ranks):
    """(dp 1, ep N), (dp N/2, ep 2), (dp N, ep 1)."""
    return list(dict.fromkeys([Layout(1, ranks), Layout(ranks // 2, 2), Layout(ranks, 1)]))


def model_keys(model):
    return [f"model.{key}={value}" for key, value in model.items()]


def require_torch():
    """Skips the piece that asks where this interpreter cannot run the peers."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if shutil.which("mpirun") is None:
        raise Skipped("the peers' ranks are started by mpirun, and there is none")
    if missing:
        raise Skipped(f"{sys.executable} has no {' and no '.join(missing)}")


class Headline:
    def __init__(self, arguments):
        self.arguments = arguments
        self.out = pathlib.Path(arguments.out)
        self.runs = self.out / "runs"
        shutil.rmtree(self.runs, ignore_errors=True)
        self.work = work_of(arguments.device, arguments.ranks, arguments.layers)
        self.pieces = Pieces(self.out, arguments.seconds, say=lambda text: print(text, flush=True))
        self.program = Program(arguments.program, arguments.device, arguments.start, self.runs)
        self.layouts = layouts_of(arguments.ranks)
        self.rows = []
        self.measured = []  # runs, and how to repeat them
        self.essentials_are_done = False  # from here on what does not fit the time is left out

    # Checks.

    def check(self, name, work):
        return self.pieces.run(name, self.work.check_seconds, work)

    def checks(self):
        for precision in self.work.goldens:
            self.check(f"golden values, {precision}", lambda piece, precision=precision: piece.command(
                [self.program.binary, "verify", ROOT / "tests/golden/mixtral_tiny", "--device", self.arguments.device,
                 "--precision", precision]) and None)
        one = self.check("a tiny model on one rank", lambda piece: self.tiny(piece, "one", Layout(1, 1)))
        for layout in self.layouts:
            for shard in ("none", "full"):
                layout = dataclasses.replace(layout, shard=shard)
                self.check(f"{layout}: what one rank trains",
                           lambda piece, layout=layout: self.near_one(piece, layout, one))
        self.check("two runs, the same bits", self.same_bits)
        self.check("resumed under another layout", lambda piece: self.resume(piece, one))
        self.check("the export, loaded by transformers", self.load_export)
        if self.arguments.device == "cpu" and self.arguments.peers == "yes":
            self.pieces.run("expert parallelism in torch is Hugging Face's model", self.work.peer_seconds,
                            self.check_peer)

    def tiny(self, piece, name, layout, more=()):
        keys = ["--config-name", ROOT / "configs/L0_sanity.yaml", f"data.train={DATA}", *model_keys(TINY),
                "precision=fp32", "data.seq_len=32", f"batch.global_tokens={self.tiny_tokens}", "eval.every=0",
                "eval.tokens=64", "data.split=none", "checkpoint.every=0", "train.steps=10", "optim.warmup_steps=2",
                f"threads={self.threads(layout)}"]
        return self.program.train(piece, name, layout, [*keys, *more])

    @property
    def tiny_tokens(self):
        return 32 * max(4, self.arguments.ranks)

    def threads(self, layout):
        """One a rank: what ranks are given must not depend on the machine."""
        if self.arguments.device == "cuda":
            return 0
        return layout.ranks if self.arguments.start == "threads" else 1

    @property
    def bound(self):
        """Layouts add the same terms in another order: an element of a gradient is a sum over the batch's tokens, each
        of whose fp32 additions is off by 2^-24 of its value at most."""
        return self.tiny_tokens * 2 ** -24

    def near_one(self, piece, layout, one):
        if one is None:
            raise Failure("there is no run of one rank to compare with")
        worst = require_near(self.tiny(piece, f"tiny {layout}", layout), one, self.bound)
        return f"losses and gradient norms differ by {worst:.1e} at most, {self.bound:.1e} is allowed"

    def same_bits(self, piece):
        layout = dataclasses.replace(self.layouts[-1], shard="full")
        require_same(self.tiny(piece, "first", layout), self.tiny(piece, "second", layout))

    def resume(self, piece, one):
        if one is None:
            raise Failure("there is no run of one rank to compare with")
        first, last = self.layouts[0], dataclasses.replace(self.layouts[-1], shard="full")
        self.tiny(piece, "moved", first, ["train.steps=4", "optim.decay_end=10"])
        resumed = self.tiny(piece, "moved", last, ["optim.decay_end=10", "run.on_exists=resume"])
        worst = require_near(resumed, one, self.bound)
        return f"4 steps on {first}, 6 on {last}: {worst:.1e} at most from 10 of one rank"

    def load_export(self, piece):
        folder = self.runs / "moved" / "final"
        if not (folder / "config.json").exists():
            raise Failure(f"{folder} was not written")
        text = piece.command([sys.executable, ROOT / "bench/headline/load_export.py", folder], allowed=(0, 3)).strip()
        if not text.startswith("MixtralForCausalLM"):
            raise Skipped(text)
        return text

    def check_peer(self, piece):
        require_torch()
        self.python(piece, ROOT / "bench/headline/peer_check.py", self.model_file(), DATA)

    def python(self, piece, *words):
        """A program of the peers on all ranks."""
        start, environment = mpirun(self.arguments.ranks)
        return piece.command([*start, sys.executable, "-W", "ignore", *words], environment)

    def model_file(self):
        """The model as the peers are told of it."""
        file = self.out / "model.json"
        file.write_text(json.dumps({**self.work.model, "sliding_window": None, "output_router_logits": True,
                                    "router_aux_loss_coef": 0.01, "bos_token_id": 2, "eos_token_id": 0,
                                    "pad_token_id": 1}), encoding="utf-8")
        return file

    # Measurements.

    def cell(self, what, shape, **more):
        row = {"what": what, "tokens": shape.tokens, "sequence": shape.sequence, **more}
        self.rows.append(row)
        return row

    def keys(self, shape):
        ranks = self.arguments.ranks
        preset = "L0_sanity" if self.arguments.device == "cpu" else "L1_8x7B_bench"
        return ["--config-name", ROOT / f"configs/{preset}.yaml", f"data.train={DATA}", "data.split=none",
                *model_keys(self.work.model), f"precision={self.work.precision}", f"data.seq_len={shape.sequence}",
                f"batch.global_tokens={ranks * shape.tokens}", "eval.every=0", "checkpoint.every=0",
                f"model.moe_router_force_load_balancing={'true' if self.arguments.routing == 'even' else 'false'}",
                # The last step, which is told op by op, must not be one whose rate has come to 0: quotients of zeros
                # are slow.
                "optim.warmup_steps=2", "optim.decay_end=100", f"optim.states={self.arguments.states}",
                f"optim.gradients={self.arguments.gradients}"]

    def plan(self, piece, shape, layout):
        """The first that fits of: as the layout is; sharded; recomputing layers; both. Returns it with its plan."""
        largest = None
        for recompute in ("none", "layer"):
            # bf16, for which times are known.
            keys = [*self.keys(shape), *layout.keys(), "precision=bf16", f"recompute={recompute}",
                    f"cluster={self.arguments.ranks}xH200"]
            plans = json.loads(piece.command([self.program.binary, "plan", "--json", *keys]))["layouts"]
            for shard in ("none", "full"):
                for p in plans:
                    if (p["dp"], p["ep"], p["shard"]) != (layout.dp, layout.ep, shard):
                        continue
                    largest = p
                    if p["fits"]:
                        return recompute, Layout(layout.dp, layout.ep, shard), p
        if largest is None:
            raise Failure(f"plan knows no layout {layout}")
        raise Skipped(f"does not fit: {largest['peak_bytes'] / table.GIB:.1f} GiB planned; {largest['largest']}")

    def measure(self, shape, layout):
        text = f"{layout}, {shape.tokens} tokens, sequence {shape.sequence}"
        planned = self.pieces.run(f"plan of {text}", 20, lambda piece: self.plan(piece, shape, layout))
        if planned is None and self.last["status"] == "not run":
            self.cell(f"Cistron {layout}", shape, failed=self.last["text"], unfit=True)
            return
        recompute, layout, p = planned or ("none", layout, {})
        name = f"{layout} {shape.tokens} {shape.sequence}"
        total = WARM_UP + STEPS + 1
        keys = [*self.keys(shape), f"recompute={recompute}", "checkpoint.at_end=false", f"train.steps={total}",
                f"profile=steps:{total}", f"threads={self.threads(layout)}"]
        row = self.cell(f"Cistron {layout}", shape, recompute=recompute)
        if self.arguments.device == "cuda":  # what is planned is a GPU
            row |= {"plan_ms": p.get("step_ms"), "plan_bytes": p.get("peak_bytes", 0) - p.get("reserved_bytes", 0)}
        row["note"] = "" if recompute == "none" else f"recompute={recompute}"

        def work(piece):
            run = self.program.train(piece, name, layout, keys)
            row.update(measured(run, layout.ranks, WARM_UP, STEPS))
            return run

        run = self.pieces.run(f"training, {text}", self.work.run_seconds, work, self.needs("training"))
        if run is None:
            row |= {"failed": self.last["text"], "unfit": self.last["status"] == "not run"}
            return
        self.measured.append((text, name, layout, keys, run))

    def repeat(self, text, name, layout, keys, run):
        self.pieces.run(f"again, the same bits: {text}", self.work.run_seconds, lambda piece: require_same(
            self.program.train(piece, name + " again", layout, [*keys, *self.arguments.repeat_with]), run),
            self.needs("training"))

    @property
    def last(self):
        return self.pieces.done[-1]

    def needs(self, kind):
        """Seconds, of what may be left out where time is short: what another of its kind took, and a third more."""
        return 1.3 * self.pieces.seconds_of(kind) + 5 if self.essentials_are_done else 0

    def recomputes(self, shape):
        """Whether ours did, at its first layout: so do the peers."""
        return any(row.get("recompute") == "layer" for row in self.rows
                   if (row["tokens"], row["sequence"]) == (shape.tokens, shape.sequence))

    def peers(self, shapes):
        """Each in one process, which has all shapes that recompute alike."""
        for recompute in (False, True):
            some = [shape for shape in shapes if self.recomputes(shape) == recompute]
            for impl, name in PEERS.items():
                if some:
                    self.peer(impl, name, some, recompute)

    def peer(self, impl, name, shapes, recompute):
        before = len(self.rows)
        shapes_text = ",".join(f"{shape.rows}x{shape.sequence}" for shape in shapes)

        def work(piece):
            require_torch()
            out = ""
            try:
                out = self.python(piece, ROOT / "bench/peer_ranks.py", "--impl", impl, "--model", self.model_file(),
                                  "--data", DATA, "--shapes", shapes_text, "--device", self.arguments.device,
                                  "--warm-up", WARM_UP, "--steps", STEPS, "--seconds", f"{0.6 * piece.left():.0f}",
                                  *(["--recompute"] if recompute else []),
                                  *(["--even"] if self.arguments.routing == "even" else []))
            finally:  # what it measured before it failed counts
                self.take_peer(name, out or piece.log.read_text(encoding="utf-8"), shapes, recompute)

        self.pieces.run(f"{name}, {shapes_text}", self.work.peer_seconds, work, self.needs(name))
        last = self.last
        if last["status"] != "ok":
            for shape in shapes[len(self.rows) - before:]:
                self.cell(name, shape, peer=True, failed=last["text"], unfit=last["status"] == "not run")

    def take_peer(self, name, out, shapes, recompute):
        lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"impl"')]
        for shape, line in zip(shapes, lines):
            if "left_out" in line:
                self.cell(name, shape, peer=True, failed=line["left_out"], unfit=True)
                self.pieces.done.append({"piece": f"{name}, {shape}", "status": "not run", "seconds": 0,
                                         "text": line["left_out"]})
                continue
            row = self.cell(name, shape, peer=True, note="recompute=layer" if recompute else "", **line)
            known = [r for r in self.rows if r.get("peak_flops") and r["sequence"] == shape.sequence]
            if known:
                row["mfu"] = row["tokens_per_s_rank"] * known[0]["flops_per_token"] / known[0]["peak_flops"]

    def run(self):
        begin = datetime.datetime.now(datetime.timezone.utc)
        if self.arguments.what != "measure":
            self.checks()
        if self.arguments.what != "check":
            self.measure_all(self.work.shapes[:1])
            for i, run in enumerate(self.measured.copy()):
                self.essentials_are_done = i > 0
                self.repeat(*run)
            self.essentials_are_done = True
            self.measure_all(self.work.shapes[1:self.arguments.shapes])
        return self.report(begin)

    def measure_all(self, shapes):
        for shape in shapes:
            for layout in self.layouts[:self.arguments.layouts]:
                self.measure(shape, layout)
        if self.arguments.peers == "yes":
            self.peers(shapes)

    # What is said.

    def report(self, begin):
        order = {shape: i for i, shape in enumerate((s.tokens, s.sequence) for s in self.work.shapes)}
        rows = sorted(self.rows, key=lambda row: order[row["tokens"], row["sequence"]])
        machine = self.machine()
        goals = table.GOALS if self.arguments.device == "cuda" else {}  # they are GPUs'
        ratios, plan, failed = table.ratios(rows, goals), table.plan_text(rows), self.pieces.failed()
        command = shlex.join(["bench/headline.sh", *self.arguments.given])
        print(f"\n{begin:%Y-%m-%d}, {machine['device']}; `{command}`")
        print(f"{self.work.model['num_hidden_layers']} layers of hidden size {self.work.model['hidden_size']}, "
              f"{self.work.model['num_local_experts']} experts; {self.work.precision}, states {self.arguments.states}, "
              f"gradients {self.arguments.gradients}, "
              f"{self.arguments.routing} routing "
              f"(peers: weights and states of one type); median of {STEPS} steps after {WARM_UP}\n")
        if rows:
            print(table.markdown(rows) + "\n")
        if rows and self.arguments.device == "cpu":
            print("figures of a CPU mean nothing: they show that the script works")
        for line in [*map(table.ratio_text, ratios), plan]:
            if line:
                print(line)
        for piece in self.pieces.done:
            if piece["status"] == "not run":
                print(f"not run: {piece['piece']}: {piece['text']}")
        for name in failed:
            print(f"FAILED: {name}")
        passed = sum(piece["status"] == "ok" for piece in self.pieces.done)
        print(f"headline: {passed} pieces passed, {len(failed)} failed, {len(self.pieces.done) - passed - len(failed)} "
              f"not run")
        (self.out / "headline.json").write_text(json.dumps({
            "date": begin.isoformat(timespec="seconds"), "command": command, "machine": machine,
            "ranks": self.arguments.ranks, "model": self.work.model, "precision": self.work.precision,
            "states": self.arguments.states, "gradients": self.arguments.gradients,
            "routing": self.arguments.routing, "rows": rows, "ratios": ratios,
            "plan": plan, "pieces": self.pieces.done}, indent=1) + "\n", encoding="utf-8")
        return 1 if failed else 0

    def machine(self):
        def first_line(*words):
            try:
                return subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout
            except (OSError, subprocess.SubprocessError):
                return ""
        info = first_line(self.program.binary, "info")
        device = f"{self.arguments.ranks} ranks ({self.arguments.start}) of a CPU"
        if self.arguments.device == "cuda":
            gpus = first_line("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
            device = f"{self.arguments.ranks} of {len(gpus)} GPUs, {gpus[0] if gpus else 'unknown to nvidia-smi'}"
        return {"device": device, "info": info}


def parse(words):
    parser = argparse.ArgumentParser(prog="bench/headline.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True, help="GPUs, or ranks on a CPU: 2, 4 or 8")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--start", choices=("mpirun", "threads"), default="mpirun",
                        help="ranks are processes, or, on a CPU, threads of one")
    parser.add_argument("--out", default="build/headline", help="folder of results")
    parser.add_argument("--seconds", type=float, default=570, help="for everything together")
    parser.add_argument("--what", choices=("all", "check", "measure"), default="all")
    parser.add_argument("--peers", choices=("yes", "no"), default="yes")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: 32 on eight GPUs, 16 on four, else 4")
    parser.add_argument("--shapes", type=int, default=4, help="how many of the shapes, in order of importance")
    parser.add_argument("--layouts", type=int, default=3,
                        help="how many of the layouts are measured: (dp 1, ep N), (dp N/2, ep 2), (dp N, ep 1)")
    parser.add_argument("--routing", choices=("even", "own"), default="even",
                        help="even: experts are drawn at random, as a trained router would spread tokens; own: what "
                        "random weights choose, nearly always the same two experts")
    parser.add_argument("--states", choices=("fp32", "bf16"), default="fp32",
                        help="of our optimiser; bf16 has no masters, as the peers")
    parser.add_argument("--gradients", choices=("auto", "fp32", "bf16"), default="auto",
                        help="of our matrices, as optim.gradients; the peers' are bf16")
    parser.add_argument("--repeat-with", nargs="*", default=[], metavar="KEY=VALUE",
                        help="changes the runs that must repeat others bit for bit: proves that a difference is found")
    parser.add_argument("--program", required=True, help=argparse.SUPPRESS)  # bench/headline.sh gives it
    arguments = parser.parse_args(words)
    if arguments.ranks not in (2, 4, 8):
        parser.error(f"--ranks {arguments.ranks}: 2, 4 or 8")
    if arguments.device == "cuda" and arguments.start != "mpirun":
        parser.error("--start threads: ranks on GPUs are processes")
    arguments.program = str(pathlib.Path(arguments.program).resolve())
    if not os.access(arguments.program, os.X_OK):
        parser.error(f"{arguments.program} is no program")
    arguments.given = words[2:] if words[:1] == ["--program"] else words
    return arguments


if __name__ == "__main__":
    sys.exit(Headline(parse(sys.argv[1:])).run())
