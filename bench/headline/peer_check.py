#!/usr/bin/env python3
"""Whether the peer of expert parallelism computes what Hugging Face's model does.

    mpirun -np 2 bench/headline/peer_check.py MODEL.json FASTA

On ranks of a CPU, in fp32: loss and gradients, averaged and clipped, of bench/peer_ranks.py's expert_parallel
beside those of `eager` experts on every rank with the same weights, with and without recomputation. A sum over T tokens
rounds by T·2^-24 at most. Exit status 1 where they are further apart; needs torch and transformers.
"""
import argparse
import json
import pathlib
import sys

import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import peer_ranks  # noqa: E402

ROWS, LENGTH = 2, 64


def ours(name):
    return name.replace("gate_up_proj", "gate_up").replace("down_proj", "down")


def whole_model(arguments, parallel):
    """Hugging Face's model with the weights of all ranks."""
    config = transformers.MixtralConfig(**json.loads(pathlib.Path(arguments.model).read_text(encoding="utf-8")))
    model = transformers.MixtralForCausalLM(config).train()
    model.set_experts_implementation("eager")
    parts = dict(parallel.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = parts[ours(name)].detach().contiguous()
            if ".experts." not in name:
                parameter.copy_(part)
                continue
            all_parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
            dist.all_gather(all_parts, part)
            parameter.copy_(torch.cat(all_parts))
    return model


def check(arguments):
    """Whether this rank's values are Hugging Face's."""
    number, ranks = dist.get_rank(), dist.get_world_size()
    parallel = peer_ranks.build(arguments, torch.device("cpu"))
    torch.manual_seed(1 + number)  # every expert another
    with torch.no_grad():
        for name, parameter in parallel.named_parameters():
            if ".experts." in name:
                parameter.normal_(0, 0.1)
    whole = whole_model(arguments, parallel)
    tokens = peer_ranks.Batches(peer_ranks.sequences(arguments.data), ROWS, LENGTH, torch.device("cpu"))()
    losses = []
    for model in (parallel, whole):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    for parameter in whole.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    peer_ranks.finish_gradients(parallel, expert_parallel=True)
    worst = abs(losses[0] - losses[1]) / losses[1]
    parts = dict(parallel.named_parameters())
    for name, parameter in whole.named_parameters():
        got, expected = parts[ours(name)].grad, parameter.grad
        if ".experts." in name:
            expected = expected.chunk(ranks)[number]
        worst = max(worst, ((got - expected).norm() / expected.norm()).item())
    bound = ranks * ROWS * LENGTH * 2 ** -24
    print(f"{'ok' if worst <= bound else 'error'}: rank {number}, recompute {arguments.recompute}: loss "
          f"{losses[0]:.6f}, loss and gradients within "
          f"{worst:.1e} of Hugging Face's, {bound:.1e} is rounding", flush=True)
    return worst <= bound


def main():
    model, data = sys.argv[1:]
    peer_ranks.connect("cpu")
    right = [check(argparse.Namespace(impl="expert_parallel", model=model, data=data, recompute=recompute, even=False))
             for recompute in (False, True)]
    peer_ranks.leave(not all(right))


if __name__ == "__main__":
    main()
