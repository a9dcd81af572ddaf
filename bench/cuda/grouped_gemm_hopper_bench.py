"""Times the Hopper grouped product beside torch._grouped_mm: same tensors, one process, alternating.

    python3 grouped_gemm_hopper_bench.py LIBRARY.so… [--seconds 0.6] [--rounds 2] [--uneven]

LIBRARY.so is grouped_gemm_hopper_bench.cu built as a shared library; several are compared with each
other. Prints TFLOP/s, the SM clock and the power of each, medians over the rounds.
"""

import argparse
import ctypes
import statistics
import threading
import time

import torch

try:
    import pynvml
except ImportError:
    pynvml = None

SHAPES = [(8, 2048, 28672, 4096), (8, 2048, 4096, 14336), (128, 1024, 1536, 2048), (128, 1024, 2048, 768)]
KINDS = ["forward", "dgrad", "wgrad"]


class Sampler:
    """SM clock and power, read while a product runs."""

    def __init__(self):
        self.device = None
        if pynvml is not None:
            pynvml.nvmlInit()
            self.device = pynvml.nvmlDeviceGetHandleByIndex(0)

    def __enter__(self):
        self.clocks, self.watts, self.running = [], [], True
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self):
        time.sleep(0.15)
        while self.running and self.device is not None:
            self.clocks.append(pynvml.nvmlDeviceGetClockInfo(self.device, pynvml.NVML_CLOCK_SM))
            self.watts.append(pynvml.nvmlDeviceGetPowerUsage(self.device) / 1e3)
            time.sleep(0.03)

    def __exit__(self, *_):
        self.running = False
        self.thread.join()


def timed(run, seconds, sampler):
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    start.record()
    for _ in range(3):
        run()
    stop.record()
    stop.synchronize()
    times = max(3, int(seconds * 1e3 / (start.elapsed_time(stop) / 3)))
    with sampler:
        start.record()
        for _ in range(times):
            run()
        stop.record()
        stop.synchronize()
    mean = lambda values: statistics.mean(values) if values else float("nan")
    return start.elapsed_time(stop) / times, mean(sampler.clocks), mean(sampler.watts)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("libraries", nargs="+")
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--uneven", action="store_true", help="counts from 0.3 to 1.7 of the mean")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--shapes", default="0,1,2,3")
    args = parser.parse_args()
    libraries = [ctypes.CDLL(path if "/" in path else "./" + path) for path in args.libraries]
    sampler = Sampler()
    names = ["torch"] + [path.split("/")[-1].removesuffix(".so") for path in args.libraries]
    print(f"{'shape':>26} {'kind':>8} " + " ".join(f"{name:>24}" for name in names))
    ratios = []
    for groups, mean_rows, n, k in (SHAPES[int(i)] for i in args.shapes.split(",")):
        rows = groups * mean_rows
        counts = torch.full((groups,), mean_rows, dtype=torch.int64)
        if args.uneven:
            torch.manual_seed(1)
            shares = 0.3 + 1.4 * torch.rand(groups)
            counts = (shares / shares.sum() * rows).long()
        counts = counts.cuda()
        ends = counts.cumsum(0).int()
        total = int(counts.sum())
        x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
        dy = torch.randn(rows, n, dtype=torch.bfloat16, device="cuda")
        w = torch.randn(groups, n, k, dtype=torch.bfloat16, device="cuda")
        operands = {"forward": (x, w, (rows, n)), "dgrad": (dy, w, (rows, k)),
                    "wgrad": (dy, x, (groups, n, k))}
        peer = {"forward": lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends),
                "dgrad": lambda: torch._grouped_mm(dy, w, offs=ends),
                "wgrad": lambda: torch._grouped_mm(dy.t(), x, offs=ends)}
        for kind in args.kinds.split(","):
            a, b, shape = operands[kind]
            c = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, c, counts)]

            def ours(library):
                numbers = [ctypes.c_int64(v) for v in (groups, rows, n, k)]
                status = library.HopperGroupedGemmRun(KINDS.index(kind), 0, 0, *numbers, *pointers, stream)
                assert status == 0

            runs = [peer[kind]] + [lambda library=library: ours(library) for library in libraries]
            c.fill_(float("nan"))
            ours(libraries[0])
            expected = peer[kind]()
            used = slice(None) if kind == "wgrad" else slice(0, total)
            error = ((c[used].float() - expected[used].float()).norm() / expected[used].float().norm()).item()
            del expected
            results = [[] for _ in runs]
            for _ in range(args.rounds):
                for run, result in zip(runs, results):
                    result.append(timed(run, args.seconds, sampler))
            cells, speeds = [], []
            for result in results:
                ms, clock, watts = (statistics.median(column) for column in zip(*result))
                speeds.append(2e-9 * total * n * k / ms)
                cells.append(f"{speeds[-1]:7.1f} {clock:5.0f}MHz {watts:4.0f}W")
            print(f"{f'{groups}x{mean_rows},{n},{k}':>26} {kind:>8} " + " ".join(f"{c:>24}" for c in cells)
                  + " " + " ".join(f"{s / speeds[0]:.3f}x" for s in speeds[1:]) + f" err {error:.1e}", flush=True)
        del x, dy, w, a, b, c, operands, peer
        torch.cuda.empty_cache()


main()
