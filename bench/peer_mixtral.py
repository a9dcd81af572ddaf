#!/usr/bin/env python3
"""Hugging Face Mixtral's training step on a CPU: the peer of `cistron bench --model small|wide|fine`.

A step is forward, backward, clipping at 1.0 and fused AdamW on random tokens, attention `sdpa`. Prints one JSON line:
tokens a second of the median step after two of warm-up, and the peak resident memory less what was held before the
model existed. One variant a process, so that the peaks do not mix. Needs torch and transformers (measured with
2.11.0 and 5.17.0), which nothing else in Cistron's build or tests does.
"""
import argparse
import json
import resource
import statistics
import time

import torch
from transformers import MixtralConfig, MixtralForCausalLM

# hidden, ffn, layers, heads, key/value heads, experts, top-k, sequence, batch
SHAPES = {
    "small": (192, 384, 4, 6, 2, 8, 2, 512, 8),
    "wide": (256, 768, 4, 4, 2, 8, 2, 512, 4),
    "fine": (256, 128, 4, 4, 2, 32, 4, 512, 4),
}
WARM_UP = 2


def peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, required=True)
    parser.add_argument("--experts", choices=("eager", "grouped_mm"), default="eager")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    before = peak_kib()

    hidden, ffn, layers, heads, kv, experts, top_k, length, batch = SHAPES[args.model]
    config = MixtralConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv, num_local_experts=experts,
        num_experts_per_tok=top_k, max_position_embeddings=length, sliding_window=None,
        output_router_logits=True)
    config._attn_implementation = "sdpa"
    config._experts_implementation = args.experts
    model = MixtralForCausalLM(config).train()
    model.set_experts_implementation(args.experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(0, 256, (batch, length))

    times = []
    for _ in range(WARM_UP + args.steps):
        begin = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - begin)
    median = statistics.median(times[WARM_UP:])
    print(json.dumps({
        "model": args.model, "peer": "transformers " + args.experts, "precision": "fp32",
        "threads": args.threads, "tokens_per_s": round(batch * length / median),
        "ms": round(median * 1e3, 1), "rss_mib": round((peak_kib() - before) / 1024),
        "loss": round(loss.item(), 3)}))


if __name__ == "__main__":
    main()
