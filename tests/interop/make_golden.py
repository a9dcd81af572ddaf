#!/usr/bin/env python3
"""Makes a golden folder from Hugging Face's Mixtral, laid out like tests/golden/mixtral_tiny.

`cistron verify DIR` compares with it. Needs torch and transformers 5; the project itself needs neither.
The folders in tests/golden that this script made are listed, with their arguments, in PRESETS:

    tests/interop/make_golden.py --preset mixtral_window --out tests/golden/mixtral_window
    tests/interop/make_golden.py --hidden 48 --heads 4 --window 7 --out /tmp/mine
    tests/interop/make_golden.py --model runs/L0_sanity/final --batch 1 --seq 64 --out /tmp/trained
"""

import argparse
import json
import pathlib

import torch
from safetensors.torch import save_file
from transformers import MixtralConfig, MixtralForCausalLM

PRESETS = {
    # A window shorter than the sequence, and a width of experts that nothing divides.
    "mixtral_window": dict(hidden=24, ffn=19, layers=2, heads=4, kv=2, experts=3, topk=2, vocab=16,
                           batch=2, seq=40, window=9, seed=1),
    # One expert a token; more experts than tokens need, so that some stay empty; odd sizes.
    "mixtral_top1": dict(hidden=16, ffn=7, layers=2, heads=2, kv=1, experts=16, topk=1, vocab=16,
                         batch=2, seq=11, seed=2),
    # head_dim given, heads · head_dim different from hidden, tied embeddings, other theta and epsilon.
    "mixtral_tied": dict(hidden=20, ffn=11, layers=2, heads=3, kv=1, experts=4, topk=3, vocab=20,
                         batch=3, seq=17, head_dim=8, tied=True, theta=10000.0, rms_eps=1e-6,
                         seed=3),
    # Many experts, many a token; no auxiliary loss; keys for every head.
    "mixtral_many": dict(hidden=12, ffn=5, layers=1, heads=2, kv=2, experts=40, topk=8, vocab=12,
                         batch=1, seq=24, window=16, aux=0.0, init=0.3, seed=5),
    # Sequences of two tokens: the first query sees one key and the second has no label, so the
    # gradients of queries and keys are small beside what cancels in them.
    "mixtral_pairs": dict(hidden=12, ffn=5, layers=2, heads=2, kv=1, experts=3, topk=2, vocab=12,
                          batch=3, seq=2, seed=6),
    # One expert a token without auxiliary loss: the gradient of the gate is zero in exact arithmetic.
    "mixtral_noise": dict(hidden=12, ffn=5, layers=2, heads=2, kv=1, experts=4, topk=1, vocab=12,
                          batch=2, seq=12, aux=0.0, seed=7),
}

# HF measures the auxiliary loss only when asked; it enters the loss by its coefficient.
NOTE = ("loss is HF's: shifted cross entropy plus router_aux_loss_coef times the auxiliary loss; "
        "gradients before clipping")


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--preset", choices=sorted(PRESETS))
    for name, default in dict(seed=0, hidden=32, ffn=48, layers=2, heads=4, kv=2, experts=4, topk=2,
                              vocab=32, batch=2, seq=32, steps=10, window=0,
                              head_dim=0).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    for name, default in dict(theta=1e6, rms_eps=1e-5, aux=0.02, lr=1e-3, beta1=0.9, beta2=0.95,
                              eps=1e-8, weight_decay=0.1, clip=1.0, init=0.1).items():
        parser.add_argument("--" + name.replace("_", "-"), type=float, default=default)
    parser.add_argument("--tied", action="store_true", help="tie the head to the embedding")
    parser.add_argument("--no-weights-after", action="store_true",
                        help="leave out the weights after the last step")
    parser.add_argument("--model", type=pathlib.Path,
                        help="start from this model directory; shape arguments are ignored")
    parser.add_argument("--tokens", help="draw the input from these characters, e.g. ACGT")
    preset = parser.parse_known_args(arguments)[0].preset
    parser.set_defaults(**PRESETS.get(preset, {}))
    return parser.parse_args(arguments)


def build_model(a):
    config = MixtralConfig(
        vocab_size=a.vocab, hidden_size=a.hidden, intermediate_size=a.ffn,
        num_hidden_layers=a.layers, num_attention_heads=a.heads, num_key_value_heads=a.kv,
        head_dim=a.head_dim or None, num_local_experts=a.experts, num_experts_per_tok=a.topk,
        max_position_embeddings=2 * a.seq, sliding_window=a.window or None,
        rope_parameters={"rope_type": "default", "rope_theta": a.theta}, rms_norm_eps=a.rms_eps,
        initializer_range=a.init, router_aux_loss_coef=a.aux, output_router_logits=True,
        tie_word_embeddings=a.tied, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = MixtralForCausalLM._from_config(config, attn_implementation="eager",
                                            dtype=torch.float32)
    model.set_experts_implementation("eager")
    with torch.no_grad():  # weights of norms that are not 1 show where they are missing
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def load_model(a):
    model = MixtralForCausalLM.from_pretrained(a.model, attn_implementation="eager",
                                               experts_implementation="eager", dtype=torch.float32)
    c = model.config
    c.output_router_logits = True
    a.hidden, a.ffn, a.layers = c.hidden_size, c.intermediate_size, c.num_hidden_layers
    a.heads, a.kv, a.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim or 0
    a.experts, a.topk, a.vocab = c.num_local_experts, c.num_experts_per_tok, c.vocab_size
    a.window, a.tied, a.aux = c.sliding_window or 0, c.tie_word_embeddings, c.router_aux_loss_coef
    a.theta = c.rope_parameters["rope_theta"]
    return model


def draw_input(a):
    """Ids from 3: Hugging Face freezes the gradient of the pad token's row."""
    if not a.tokens:
        return torch.randint(3, a.vocab, (a.steps, a.batch, a.seq))
    ids = torch.tensor([ord(c) for c in a.tokens])
    return ids[torch.randint(len(ids), (a.steps, a.batch, a.seq))]


def routing_gap(router_logits, topk):
    """Smallest gap between the K-th and the next logit: closer values may route otherwise."""
    gap = float("inf")
    for logits in router_logits:
        if topk < logits.shape[-1]:
            top = logits.detach().topk(topk + 1, dim=-1).values
            gap = min(gap, (top[:, -2] - top[:, -1]).min().item())
    return gap


def make(arguments=None):
    """Makes the folder; returns one line that describes it."""
    a = parse_arguments(arguments)
    torch.manual_seed(a.seed)
    torch.use_deterministic_algorithms(True)
    model = load_model(a) if a.model else build_model(a)
    model.train()
    a.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(a.out)
    ids = draw_input(a)
    golden = {"input_ids": ids}

    result = model(input_ids=ids[0], labels=ids[0])
    result.loss.backward()
    golden |= {"logits": result.logits, "loss": result.loss, "aux_loss": result.aux_loss}
    for layer, logits in enumerate(result.router_logits):
        golden[f"router_logits.{layer}"] = logits
    for name, parameter in model.named_parameters():
        golden["grad." + name] = parameter.grad.clone()

    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(a.beta1, a.beta2), eps=a.eps,
                                  weight_decay=a.weight_decay)
    losses, norms, gap = [], [], float("inf")
    for step in range(a.steps):
        optimizer.zero_grad()
        result = model(input_ids=ids[step], labels=ids[step])
        result.loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), a.clip))
        optimizer.step()
        losses.append(result.loss.detach())
        gap = min(gap, routing_gap(result.router_logits, a.topk))
    golden |= {"train.loss": torch.stack(losses), "train.grad_norm": torch.stack(norms)}
    if not a.no_weights_after:
        for name, parameter in model.named_parameters():
            golden["after." + name] = parameter
    save_file({name: t.detach().contiguous().clone() for name, t in golden.items()},
              a.out / "golden.safetensors")

    about = {"name": a.out.name, "seed": a.seed, "hidden": a.hidden, "ffn": a.ffn,
             "layers": a.layers, "heads": a.heads, "kv": a.kv, "head_dim": a.head_dim,
             "experts": a.experts, "topk": a.topk, "vocab": a.vocab, "tied": a.tied,
             "batch": a.batch, "seq": a.seq, "steps": a.steps, "window": a.window,
             "theta": a.theta, "aux": a.aux, "lr": a.lr, "no_weights_after": a.no_weights_after,
             "betas": [a.beta1, a.beta2], "eps": a.eps, "weight_decay": a.weight_decay,
             "clip": a.clip, "note": NOTE,
             # null where every expert is chosen
             "smallest_routing_gap": None if gap == float("inf") else gap,
             "losses": [loss.item() for loss in losses]}
    (a.out / "about.json").write_text(json.dumps(about, indent=1, allow_nan=False) + "\n")
    size = sum(f.stat().st_size for f in a.out.iterdir())
    return (f"{a.out}: {size / 1000:.0f} kB, loss {losses[0]:.4f} -> {losses[-1]:.4f}, "
            f"smallest routing gap {gap:.1e}")


if __name__ == "__main__":
    print(make())
