#!/usr/bin/env python3
"""Peers on one GPU, torch and Hugging Face: one MoE layer, grouped products, a whole Mixtral training step.

Beside `cistron bench --device cuda --model 8x7b_2layers`: peer_moe.py --what step --layers 2 --batch 1; beside --model dna_128
and its like: --what small.
Needs torch and transformers (measured with 2.11.0 and 5.17.0).

Prints one JSON object a line: {"case", "impl", "fwd_ms", "fwdbwd_ms", "tflops", "peak_gib"}.
Every timing is the median of CUDA-event-timed runs after warm-up, on random data.
"""
import argparse, json, sys, time, torch, torch.nn.functional as F

torch.manual_seed(0)
DEV = "cuda"

CASES = {
    # name: tokens, hidden, ffn, experts, top_k
    "mixtral8x7b_t8192": (8192, 4096, 14336, 8, 2),
    "mixtral8x7b_t32768": (32768, 4096, 14336, 8, 2),
    "fine128_t16384": (16384, 2048, 768, 128, 8),
    "small8_t8192": (8192, 1024, 3584, 8, 2),
    "dna32_t16384": (16384, 768, 2688, 32, 2),
}


MIN_SECONDS = 0.6


def median_ms(fn, iters=10, warm=3):
    """Median of event-timed calls: at least `iters` of them and MIN_SECONDS in all (a short burst flatters a power-limited chip)."""
    for _ in range(warm):
        fn()
    torch.cuda.synchronize()
    ts = []
    while len(ts) < iters or sum(ts) < MIN_SECONDS * 1e3:
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record(); fn(); b.record(); b.synchronize()
        ts.append(a.elapsed_time(b))
    ts.sort()
    return ts[len(ts) // 2]


def report(case, impl, fwd, both, flops_fwd, peak, **kw):
    print(json.dumps(dict(case=case, impl=impl, fwd_ms=round(fwd, 3), fwdbwd_ms=round(both, 3),
                          fwd_tflops=round(flops_fwd / fwd / 1e9, 1), fwdbwd_tflops=round(3 * flops_fwd / both / 1e9, 1),
                          peak_gib=round(peak, 2), **kw)), flush=True)


class GroupedMM(torch.nn.Module):
    """Best plain-torch pipeline: sort by expert, torch._grouped_mm, SwiGLU, weighted scatter-add."""
    def __init__(s, h, f, e, k):
        super().__init__()
        s.w13 = torch.nn.Parameter(torch.randn(e, 2 * f, h, device=DEV, dtype=torch.bfloat16) * 0.02)
        s.w2 = torch.nn.Parameter(torch.randn(e, h, f, device=DEV, dtype=torch.bfloat16) * 0.02)
        s.gate = torch.nn.Parameter(torch.randn(e, h, device=DEV, dtype=torch.bfloat16) * 0.02)
        s.e, s.k = e, k

    def forward(s, x):
        p = F.linear(x, s.gate).float().softmax(-1)
        w, idx = p.topk(s.k, -1)
        w = w / w.sum(-1, keepdim=True)
        flat = idx.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.zeros(s.e, dtype=torch.int32, device=DEV).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        offs = counts.cumsum(0, dtype=torch.int32)
        tok = order // s.k
        xs = x[tok]
        g = torch._grouped_mm(xs, s.w13.transpose(-2, -1), offs=offs)
        a, b = g.chunk(2, -1)
        y = torch._grouped_mm(F.silu(a) * b, s.w2.transpose(-2, -1), offs=offs)
        y = y * w.reshape(-1)[order].unsqueeze(-1).to(y.dtype)
        return torch.zeros_like(x).index_add_(0, tok, y)


def hf_block(h, f, e, k, impl):
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    cfg = MixtralConfig(hidden_size=h, intermediate_size=f, num_local_experts=e, num_experts_per_tok=k)
    cfg._experts_implementation = impl
    blk = MixtralSparseMoeBlock(cfg).to(DEV, torch.bfloat16)
    for p in blk.parameters():
        torch.nn.init.normal_(p, 0, 0.02)
    return blk


def moe_layer(case, dims, impl):
    t, h, f, e, k = dims
    torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
    try:
        if impl == "torch_grouped_mm":
            m = GroupedMM(h, f, e, k)
        else:
            m = hf_block(h, f, e, k, impl.removeprefix("hf_"))
        x = torch.randn(1, t, h, device=DEV, dtype=torch.bfloat16, requires_grad=True)
        gy = torch.randn(1, t, h, device=DEV, dtype=torch.bfloat16)
        if impl == "torch_grouped_mm":
            x = x.detach()[0].requires_grad_(); gy = gy[0]

        def fwd():
            o = m(x)
            return o[0] if isinstance(o, tuple) else o

        def nograd():
            with torch.no_grad():
                fwd()

        def both():
            for p in m.parameters():
                p.grad = None
            x.grad = None
            fwd().backward(gy)
        f_ms, b_ms = median_ms(nograd), median_ms(both)
        report(case, impl, f_ms, b_ms, 2 * t * k * h * f * 3, torch.cuda.max_memory_allocated() / 2**30)
    except Exception as ex:
        print(json.dumps(dict(case=case, impl=impl, error=repr(ex)[:300])), flush=True)


def gemm_ceiling():
    n = 8192
    a = torch.randn(n, n, device=DEV, dtype=torch.bfloat16); b = torch.randn(n, n, device=DEV, dtype=torch.bfloat16)
    ms = median_ms(lambda: a @ b.t())
    print(json.dumps(dict(case="ceiling", impl="cublas_bf16_8192", ms=round(ms, 3), tflops=round(2 * n**3 / ms / 1e9, 1))), flush=True)
    aq, bq = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=DEV)
    for fast in (True, False):
        ms = median_ms(lambda: torch._scaled_mm(aq, bq.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast))
        print(json.dumps(dict(case="ceiling", impl=f"cublas_fp8_8192_fast{int(fast)}", ms=round(ms, 3), tflops=round(2 * n**3 / ms / 1e9, 1))), flush=True)
    src = torch.empty(2**32, dtype=torch.uint8, device=DEV).random_(); dst = torch.empty_like(src)
    ms = median_ms(lambda: dst.copy_(src))
    print(json.dumps(dict(case="ceiling", impl="d2d_copy", ms=round(ms, 3), tbps=round(2 * 2**32 / ms / 1e9, 3))), flush=True)


def grouped_gemms():
    """Grouped GEMM alone: forward (NT), dgrad (NN) and wgrad (TN), uneven splits."""
    for name, (t, h, f, e, k) in CASES.items():
        rows = t * k
        g = torch.Generator().manual_seed(1)
        w = torch.rand(e, generator=g) + 0.5
        c = (w / w.sum() * rows).floor().long(); c[-1] += rows - c.sum()
        offs = c.cumsum(0).to(DEV, torch.int32)
        x = torch.randn(rows, h, device=DEV, dtype=torch.bfloat16)
        wt = torch.randn(e, 2 * f, h, device=DEV, dtype=torch.bfloat16)
        dy = torch.randn(rows, 2 * f, device=DEV, dtype=torch.bfloat16)
        fl = 2 * rows * h * 2 * f
        for nm, fn in (("fwd", lambda: torch._grouped_mm(x, wt.transpose(-2, -1), offs=offs)),
                       ("dgrad", lambda: torch._grouped_mm(dy, wt, offs=offs)),
                       ("wgrad", lambda: torch._grouped_mm(dy.t(), x, offs=offs))):
            try:
                ms = median_ms(fn)
                print(json.dumps(dict(case=name, impl=f"torch_grouped_mm_{nm}", ms=round(ms, 3), tflops=round(fl / ms / 1e9, 1))), flush=True)
            except Exception as ex:
                print(json.dumps(dict(case=name, impl=f"torch_grouped_mm_{nm}", error=repr(ex)[:300])), flush=True)
        try:
            xq, wq = x.to(torch.float8_e4m3fn), wt.to(torch.float8_e4m3fn)
            sa = torch.ones(rows, device=DEV); sb = torch.ones(e, 2 * f, device=DEV)
            ms = median_ms(lambda: torch._scaled_grouped_mm(xq, wq.transpose(-2, -1), sa, sb, offs=offs, out_dtype=torch.bfloat16))
            print(json.dumps(dict(case=name, impl="torch_scaled_grouped_mm_fp8_rowwise", ms=round(ms, 3), tflops=round(fl / ms / 1e9, 1))), flush=True)
        except Exception as ex:
            print(json.dumps(dict(case=name, impl="torch_scaled_grouped_mm_fp8_rowwise", error=repr(ex)[:300])), flush=True)
        del x, wt, dy
        torch.cuda.empty_cache()


# hidden, ffn, layers, heads, key/value heads: those of `cistron bench --model`, 8 sequences of 1024 tokens, vocabulary 256.
SMALL = {
    "dna_128": (128, 256, 4, 4, 4),
    "dna_256": (256, 512, 6, 4, 4),
    "dna_512": (512, 1024, 8, 8, 8),
}


def small_step(name, impl, seq=1024, batch=8):
    """A whole training step of a small model, auxiliary loss on: tokens per second."""
    from transformers import MixtralConfig, MixtralForCausalLM
    h, f, layers, heads, kv = SMALL[name]
    try:
        cfg = MixtralConfig(hidden_size=h, intermediate_size=f, num_local_experts=8, num_experts_per_tok=2, vocab_size=256,
                            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv, max_position_embeddings=seq,
                            output_router_logits=True, router_aux_loss_coef=0.001)
        cfg._attn_implementation = "sdpa"
        cfg._experts_implementation = impl
        with torch.device(DEV):
            torch.set_default_dtype(torch.bfloat16)
            m = MixtralForCausalLM(cfg)
            torch.set_default_dtype(torch.float32)
        opt = torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True)
        ids = torch.randint(0, 256, (batch, seq), device=DEV)

        def step():
            m(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            opt.step(); opt.zero_grad(set_to_none=True)
        ms = median_ms(step, iters=5, warm=3)
        print(json.dumps(dict(case=f"{name}_step", impl=f"hf_{impl}", ms=round(ms, 2), tokens_per_s=round(batch * seq / ms * 1e3, 1))), flush=True)
    except Exception as ex:
        print(json.dumps(dict(case=f"{name}_step", impl=f"hf_{impl}", error=repr(ex)[:300])), flush=True)


def whole_step(impl, layers=2, seq=8192, batch=1, fused_adam=True):
    """A whole Mixtral-8x7B-shaped training step with few layers: tokens per second."""
    from transformers import MixtralConfig, MixtralForCausalLM
    torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
    try:
        cfg = MixtralConfig(hidden_size=4096, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2, vocab_size=512,
                            num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=seq)
        cfg._attn_implementation = "sdpa"
        cfg._experts_implementation = impl
        with torch.device(DEV):
            torch.set_default_dtype(torch.bfloat16)
            m = MixtralForCausalLM(cfg)
            torch.set_default_dtype(torch.float32)
        opt = torch.optim.AdamW(m.parameters(), lr=1e-4, fused=fused_adam)
        ids = torch.randint(0, 512, (batch, seq), device=DEV)

        def step():
            loss = m(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            opt.step(); opt.zero_grad(set_to_none=True)
        ms = median_ms(step, iters=5, warm=2)
        print(json.dumps(dict(case=f"mixtral8x7b_{layers}layers_{batch}x{seq}_step", impl=f"hf_{impl}", ms=round(ms, 2), tokens_per_s=round(batch * seq / ms * 1e3, 1),
                              params=sum(p.numel() for p in m.parameters()), peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2))), flush=True)
    except Exception as ex:
        print(json.dumps(dict(case=f"mixtral8x7b_{layers}layers_step", impl=f"hf_{impl}", error=repr(ex)[:300])), flush=True)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--what", default="ceiling,gemm,layer,step")
    ap.add_argument("--min-seconds", type=float, default=MIN_SECONDS)
    ap.add_argument("--layers", type=int, help="whole step: layers (default: 2 at batch 1 and 4 at batch 2)")
    ap.add_argument("--batch", type=int, default=1); ap.add_argument("--seq", type=int, default=8192)
    a = ap.parse_args(); MIN_SECONDS = a.min_seconds
    import transformers
    print(json.dumps(dict(torch=torch.__version__, transformers=transformers.__version__, gpu=torch.cuda.get_device_name())), flush=True)
    w = a.what.split(",")
    if "ceiling" in w: gemm_ceiling()
    if "gemm" in w: grouped_gemms()
    if "layer" in w:
        for c, d in CASES.items():
            for impl in ("torch_grouped_mm", "hf_eager", "hf_grouped_mm", "hf_batched_mm"):
                if impl == "hf_batched_mm" and "small" not in c:
                    continue
                moe_layer(c, d, impl)
    if "small" in w:
        for name in SMALL:
            for impl in ("eager", "grouped_mm"):
                small_step(name, impl)
    if "step" in w:
        for layers, batch in ([(a.layers, a.batch)] if a.layers else [(2, 1), (4, 2)]):
            for impl in ("eager", "grouped_mm"):
                whole_step(impl, layers=layers, seq=a.seq, batch=batch)
