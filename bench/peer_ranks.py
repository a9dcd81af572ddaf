#!/usr/bin/env python3
"""The peers of training on several ranks: a whole Mixtral step of Hugging Face under FSDP2, and of plain torch with
expert parallelism.

    mpirun --bind-to none -np 8 bench/peer_ranks.py --impl eager|grouped_mm|expert_parallel --model MODEL.json
                                --data FASTA --shapes 1x8192,2x4096 [--recompute] [--device cpu]

eager, grouped_mm: MixtralForCausalLM with that implementation of its experts, attention `sdpa`, every layer a unit of
fully_shard over all ranks. expert_parallel: the same model, dense parameters on every rank, experts divided over all
ranks; rows travel by all_to_all_single and the experts' products are torch._grouped_mm.

A step is forward, backward, clipping at 1.0 and fused AdamW; weights, gradients and optimiser states are bf16 on GPUs
and fp32 on a CPU. MODEL.json has the fields of MixtralConfig; a shape is rows of a rank times their length, cut from
the sequences in the file, other ones on every rank and in every step. One JSON line a shape, from rank 0: the median
step after the warm-up, and the peak memory of the rank that took most. --recompute: layers are computed again in
backward. --even: tokens choose experts at random, since random weights send nearly all of them to the same two. A
shape that would begin after --seconds is left out, and its line says so. Needs torch and transformers (written for
2.11 and 5.17), which nothing else in Cistron's build or tests does.
"""
import argparse
import functools
import gzip
import json
import os
import pathlib
import resource
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed.fsdp import fully_shard


def route_evenly(router, x):
    """In the place of MixtralTopKRouter.forward: experts are drawn at random, weighed by their own probabilities."""
    logits = F.linear(x.reshape(-1, router.hidden_dim), router.weight)
    index = torch.rand_like(logits, dtype=torch.float32).topk(router.top_k, dim=-1).indices
    weights = logits.float().softmax(-1).gather(1, index)
    return logits, weights / weights.sum(-1, keepdim=True), index


class Exchange(torch.autograd.Function):
    """Rows to other ranks: sent[r] of them to rank r, received[r] from it; gradients go the way back."""

    @staticmethod
    def forward(ctx, x, sent, received):
        ctx.counts = sent, received
        return exchange(x, sent, received)

    @staticmethod
    def backward(ctx, dy):
        sent, received = ctx.counts
        return exchange(dy, received, sent), None, None


def exchange(x, sent, received):
    y = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(y, x.contiguous(), received, sent)
    return y


class RankExperts(torch.nn.Module):
    """In the place of MixtralExperts: this rank's experts, to which all ranks send their rows."""

    def __init__(self, config):
        super().__init__()
        self.experts, self.ranks = config.num_local_experts, dist.get_world_size()
        here = self.experts // self.ranks
        hidden, ffn = config.hidden_size, config.intermediate_size
        self.gate_up = torch.nn.Parameter(torch.empty(here, 2 * ffn, hidden))
        self.down = torch.nn.Parameter(torch.empty(here, hidden, ffn))

    def forward(self, x, index, weights):
        here = self.experts // self.ranks
        chosen = index.reshape(-1)
        order = chosen.argsort(stable=True)  # assignments by expert of all ranks
        token = order // index.shape[1]
        to = torch.bincount(chosen, minlength=self.experts)
        come = torch.empty_like(to)
        dist.all_to_all_single(come, to)
        come = come.view(self.ranks, here)
        sent, received = torch.stack([to.view(self.ranks, here).sum(1), come.sum(1)]).tolist()  # the host waits
        rows = Exchange.apply(x[token], sent, received)
        # As received: by rank, then expert. The products want them by expert.
        expert = torch.arange(here, device=x.device).repeat(self.ranks)
        by_expert = expert.repeat_interleave(come.reshape(-1), output_size=sum(received)).argsort(stable=True)
        ends = come.sum(0).cumsum(0, dtype=torch.int32)
        gate, up = torch._grouped_mm(rows[by_expert], self.gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        back = Exchange.apply(torch.empty_like(y).index_copy(0, by_expert, y), received, sent)
        scale = weights.reshape(-1)[order].to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, back * scale[:, None])


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def build(arguments, device):
    config = transformers.MixtralConfig(**json.loads(pathlib.Path(arguments.model).read_text(encoding="utf-8")))
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
        if arguments.impl == "expert_parallel":
            for layer in model.model.layers:
                layer.mlp.experts = RankExperts(config)
    torch.set_default_dtype(torch.float32)
    if arguments.impl != "expert_parallel":
        model.set_experts_implementation(arguments.impl)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    model.to_empty(device=device)
    # Dense parameters are the same on every rank only where they are drawn alike; a shard may be anything.
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                local(parameter).fill_(1)
            else:
                local(parameter).normal_(0, config.initializer_range)
        half = torch.arange(0, config.hidden_size // config.num_attention_heads, 2, device=device).float()
        for name, buffer in model.named_buffers():  # to_empty left them undefined
            assert name.endswith("inv_freq"), name
            buffer.copy_(1 / 1e6 ** (half / (2 * len(half))))
    model.train()
    if arguments.even:
        for layer in model.model.layers:
            layer.mlp.gate.forward = functools.partial(route_evenly, layer.mlp.gate)
    if arguments.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def sequences(path):
    """All letters of a FASTA file as a tensor of bytes."""
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rb") as file:
        letters = b"".join(line.strip() for line in file if not line.startswith(b">"))
    return torch.frombuffer(bytearray(letters), dtype=torch.uint8)


class Batches:
    """Windows of the file, one after another; a rank's are its own."""

    def __init__(self, letters, rows, length, device):
        self.letters, self.rows, self.length, self.device, self.next = letters, rows, length, device, dist.get_rank()

    def __call__(self):
        size = self.rows * self.length
        begin = self.next * size % (len(self.letters) - size)
        self.next += dist.get_world_size()
        return self.letters[begin:begin + size].view(self.rows, self.length).to(self.device, torch.int64)


def finish_gradients(model, expert_parallel):
    """Averages what ranks have of the same parameters and clips the global norm at 1; FSDP has averaged its shards."""
    if not expert_parallel:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return
    ranks = dist.get_world_size()
    dense = [p.grad for name, p in model.named_parameters() if ".experts." not in name]
    experts = [p.grad for name, p in model.named_parameters() if ".experts." in name]
    for grad in dense:
        dist.all_reduce(grad)
    torch._foreach_mul_(dense + experts, 1 / ranks)  # each rank's loss is the mean over its own tokens
    squares = [torch.stack(torch._foreach_norm(grads)).float().square().sum() for grads in (dense, experts)]
    dist.all_reduce(squares[1])
    factor = (1 / (squares[0] + squares[1]).sqrt().clamp(min=1)).item()
    torch._foreach_mul_(dense + experts, factor)


def most(value, device):
    t = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.item()


def measure(arguments, model, optimizer, letters, rows, length, device):
    batches = Batches(letters, rows, length, device)
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(arguments.warm_up + arguments.steps):
        begin = time.perf_counter()
        tokens = batches()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        finish_gradients(model, arguments.impl == "expert_parallel")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    timed = times[arguments.warm_up:]
    peak = torch.cuda.max_memory_allocated() if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    median = statistics.median(timed)
    return {"tokens_per_s_rank": rows * length / median, "ms": median * 1e3, "fastest_ms": min(timed) * 1e3,
            "peak_bytes": most(peak, device), "loss": loss.item()}


def connect(device_name):
    """This rank's device; ranks are those of mpirun on one machine, and meet at a port."""
    try:
        rank, ranks = (int(os.environ[f"OMPI_COMM_WORLD_{key}"]) for key in ("RANK", "SIZE"))
    except KeyError:
        sys.exit("peer_ranks: ranks are started by Open MPI: mpirun --bind-to none -np N bench/peer_ranks.py …")
    device = torch.device("cuda", rank) if device_name == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    port = 20000 + os.getppid() % 10000  # mpirun's number, which all of its ranks know
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", init_method=f"tcp://127.0.0.1:{port}",
                            rank=rank, world_size=ranks)
    return device


def leave(status=0):
    """Ends this rank when all have come here."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(status)  # gloo's threads, where they outlive the group, abort a process that ends in order


def run(arguments):
    begin = time.monotonic()
    device = connect(arguments.device)
    letters = sequences(arguments.data)
    model = build(arguments, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for shape in arguments.shapes.split(","):
        rows, length = map(int, shape.split("x"))
        line = {"impl": arguments.impl, "rows": rows, "sequence": length}
        if most(int(time.monotonic() - begin > arguments.seconds), device):
            line["left_out"] = f"more than {arguments.seconds:.0f} s had passed"
        else:
            line |= measure(arguments, model, optimizer, letters, rows, length, device)
        line |= {"torch": torch.__version__, "transformers": transformers.__version__}
        if dist.get_rank() == 0:
            print(json.dumps(line), flush=True)
    leave()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--impl", choices=("eager", "grouped_mm", "expert_parallel"), required=True)
    parser.add_argument("--model", required=True, help="a JSON file with the fields of MixtralConfig")
    parser.add_argument("--data", required=True, help="FASTA, plain or gzip")
    parser.add_argument("--shapes", required=True, help="rows of a rank times their length, as 1x8192,2x4096")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--even", action="store_true")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1e9)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
