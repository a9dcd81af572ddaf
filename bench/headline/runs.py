"""Runs of `cistron` on ranks: how they are started, what they leave, and how two of them are compared."""
import dataclasses
import json
import pathlib
import statistics

from pieces import Failure


@dataclasses.dataclass(frozen=True)
class Layout:
    dp: int
    ep: int
    shard: str = "none"

    @property
    def ranks(self):
        return self.dp * self.ep

    def __str__(self):
        return f"dp {self.dp}, ep {self.ep}" + (", sharded" if self.shard == "full" else "")

    def keys(self):
        return [f"parallel.dp={self.dp}", f"parallel.ep={self.ep}", f"parallel.shard={self.shard}"]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run left: a line of metrics a step, the profile's rows, the checksum of its weights."""
    steps: list
    checksum: str
    profile: str = ""


def mpirun(ranks):
    """The words before those of a rank, and the environment."""
    return (["mpirun", "--oversubscribe", "--bind-to", "none", "-np", ranks],
            {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})  # as containers do


class Program:
    def __init__(self, binary, device, start, folder):
        self.binary, self.device, self.start = pathlib.Path(binary), device, start
        self.folder = pathlib.Path(folder)

    def train(self, piece, name, layout, keys):
        """Trains as folder/name on the ranks of the layout and returns what the run left."""
        words = [self.binary, "train", "--no-report", *keys, *layout.keys(), f"device={self.device}",
                 f"output={self.folder / name}", f"data.cache_dir={self.folder / 'cache'}"]
        environment = {}
        if layout.ranks > 1 and self.start == "mpirun":
            start, environment = mpirun(layout.ranks)
            words = [*start, *words]
        piece.command(words, environment)
        return read_run(self.folder / name)


def read_run(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    profile, summary = folder / "profile.txt", json.loads((folder / "final.json").read_text(encoding="utf-8"))
    return Run([json.loads(line) for line in lines], summary["weights_checksum"],
               profile.read_text(encoding="utf-8") if profile.exists() else "")


# What of a step does not depend on how fast it was.
VALUES = ("step", "loss", "aux_loss", "grad_norm", "expert_load")


def require_same(a, b):
    """Fails unless two runs have the same steps and the same weights, bit for bit."""
    if len(a.steps) != len(b.steps) or not a.steps:
        raise Failure(f"{len(a.steps)} and {len(b.steps)} steps")
    for x, y in zip(a.steps, b.steps):
        for key in VALUES:
            if x[key] != y[key]:
                raise Failure(f"step {x['step']} has {key} {x[key]} and {y[key]}")
    if not a.checksum or a.checksum != b.checksum:
        raise Failure(f"the weights have the checksums '{a.checksum}' and '{b.checksum}'")


def require_near(many, one, bound):
    """Fails unless loss and gradient norm of every step differ by at most `bound`, relative to the value; returns the
    largest difference."""
    if len(many.steps) != len(one.steps) or not one.steps:
        raise Failure(f"{len(many.steps)} and {len(one.steps)} steps")
    worst = 0.0
    for x, y in zip(many.steps, one.steps):
        for key in ("loss", "grad_norm"):
            difference = abs(x[key] - y[key]) / abs(y[key])
            if not difference <= bound:  # NaN is no small number
                raise Failure(f"step {x['step']}: {key} is {x[key]}, of one rank {y[key]}: "
                              f"{difference:.1e} apart, at most {bound:.1e} is rounding")
            worst = max(worst, difference)
    return worst


def share_of(profile, op):
    """The part of a step, 0 to 1, that an op's rows of a profile have; None without a profile."""
    rows = [line.split() for line in profile.splitlines()]
    shares = {}
    for row in rows:
        if len(row) >= 5 and row[-1].endswith("%") and row[2].isdigit():
            shares[row[0]] = shares.get(row[0], 0.0) + float(row[-1][:-1]) / 100
    return shares.get(op, 0.0) if shares else None


def measured(run, ranks, warm_up, steps):
    """Figures of a run: its median step of `steps` after `warm_up`, of one rank."""
    timed = run.steps[warm_up:warm_up + steps]
    if len(timed) != steps:
        raise Failure(f"{len(run.steps)} steps are fewer than {warm_up} and {steps}")
    mfu = [step["mfu"] for step in timed if step["mfu"] is not None]
    rate = statistics.median(step["tokens_per_s"] for step in timed)
    figures = {
        "tokens_per_s_rank": rate / ranks,
        "ms": statistics.median(step["step_ms"] for step in timed),
        "fastest_ms": min(step["step_ms"] for step in timed),
        "mfu": statistics.median(mfu) if mfu else None,
        # Not of the step that is told op by op, before which the machine is measured.
        "peak_bytes": max(step["memory_peak_bytes"] for step in run.steps[:warm_up + steps]),
        "all_to_all": share_of(run.profile, "all_to_all"),
        "loss": timed[-1]["loss"],
    }
    if mfu:  # what the program found a GPU to do, for peers to be told by the same
        figures["peak_flops"] = timed[-1]["flops_per_s"] / ranks / timed[-1]["mfu"]
        figures["flops_per_token"] = timed[-1]["flops_per_s"] / timed[-1]["tokens_per_s"]
    return figures
