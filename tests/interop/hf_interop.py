#!/usr/bin/env python3
"""Models between Cistron and Hugging Face transformers, both ways, as their users would move them.

    tests/interop/hf_interop.py [--program build/release/bin/cistron] [--model runs/L0_sanity/final]

In: models that `save_pretrained` wrote (fp32, bf16, fp16; one file and shards; tied and untied) become
checkpoints and come back. Every tensor must be there, bit for bit, and every field of config.json.
Out: what `cistron convert` writes, one tensor an expert or stacked, is loaded by AutoModelForCausalLM
and AutoTokenizer, offline; its logits must be those of the original, and `cistron verify` must find
our logits, losses, gradients and ten AdamW steps within the bounds of the golden files, at random
shapes. With --model, the same for a trained model. Needs torch, transformers 5 and safetensors.
Prints one line a check, and a Markdown table with --markdown; exit code 1 when one fails.
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors import safe_open  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import make_golden  # noqa: E402

RESULTS = []


def check(name, passed, detail=""):
    RESULTS.append((name, passed, detail))
    print(f"{'ok    ' if passed else 'FAILED'} {name}{': ' + detail if detail else ''}", flush=True)


def run(program, *arguments):
    result = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    if result.returncode not in (0, 1):
        print(result.stdout + result.stderr)
    return result


def tensors_of(directory):
    """All tensors of a directory's safetensors files, by the names in them."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                assert name not in found, f"{name} is in two files"
                found[name] = file.get_tensor(name)
    return found


def same_bits(a, b):
    return (a.dtype == b.dtype and a.shape == b.shape
            and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))


def compare_directories(source, target):
    """Empty when tensors and config.json agree; otherwise what differs."""
    a, b = tensors_of(source), tensors_of(target)
    if a.keys() != b.keys():
        return f"names differ: {sorted(a.keys() ^ b.keys())[:3]}"
    different = [name for name in a if not same_bits(a[name], b[name])]
    if different:
        return f"tensors differ: {different[:3]}"
    before, after = (json.loads((d / "config.json").read_text()) for d in (source, target))
    fields = [k for k in before.keys() | after.keys() if before.get(k) != after.get(k)]
    return f"config.json differs in {fields}" if fields else ""


def random_shape(rng):
    """A small model of any shape (but ffn 1, which save_pretrained writes without that dimension)."""
    kv = rng.choice([1, 2, 3])
    experts = rng.choice([1, 2, 3, 5, 8, 13])
    heads = kv * rng.choice([1, 2, 3])
    head_dim = rng.choice([2, 4, 6, 8])
    shape = dict(hidden=heads * head_dim, heads=heads, kv=kv, ffn=rng.randint(2, 40),
                 layers=rng.randint(1, 3), experts=experts, topk=rng.randint(1, min(experts, 4)),
                 vocab=rng.randint(8, 60), batch=rng.randint(1, 3), seq=rng.randint(4, 48),
                 init=0.2, aux=rng.choice([0.0, 0.02, 0.05]),
                 theta=rng.choice([1e4, 1e6]), seed=rng.randint(0, 10**6))
    # Where the exact gradient is zero, what is left is rounding, of theirs or ours, and AdamW makes steps
    # of it: with one expert a token the loss does not reach the router, with one key not the queries.
    if shape["topk"] == 1:
        shape["aux"] = 0.05
    if rng.random() < 0.5:
        shape["window"] = rng.randint(2, shape["seq"])
    if rng.random() < 0.4:
        shape["head_dim"] = head_dim
        shape["hidden"] = rng.randint(3, 40)
    return shape, rng.random() < 0.3


def as_arguments(shape, tied, out):
    arguments = ["--out", str(out)] + (["--tied"] if tied else [])
    for key, value in shape.items():
        arguments += ["--" + key.replace("_", "-"), str(value)]
    return arguments


def load(directory, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager").eval()


def round_trips(program, root):
    """save_pretrained -> checkpoint -> Hugging Face directory, in every dtype, sharded or not."""
    cases = [(dtype, shards, tied) for dtype in ("float32", "bfloat16", "float16")
             for shards in (False, True) for tied in (False, True)]
    for dtype, shards, tied in cases:
        name = f"{dtype}, {'shards' if shards else 'one file'}, {'tied' if tied else 'untied'}"
        directory = root / name.replace(", ", "_").replace(" ", "_")
        config = transformers.MixtralConfig(
            vocab_size=256, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=11,
            max_position_embeddings=64, tie_word_embeddings=tied, bos_token_id=2, eos_token_id=0,
            pad_token_id=1, my_own_field={"kept": [1, 2.5, None]})
        torch.manual_seed(len(name))
        model = transformers.MixtralForCausalLM._from_config(config, dtype=getattr(torch, dtype))
        model.save_pretrained(directory / "source", max_shard_size="60KB" if shards else "5GB")
        sharded = (directory / "source/model.safetensors.index.json").exists()
        assert sharded == shards
        first = run(program, "convert", directory / "source", directory / "checkpoint",
                    "--to", "checkpoint")
        step = directory / "checkpoint/step-00000000"
        second = run(program, "convert", step, directory / "back", "--to", "huggingface")
        if first.returncode or second.returncode:
            check(f"round trip, {name}", False, "convert failed")
            continue
        problem = compare_directories(directory / "source", directory / "back")
        check(f"round trip, {name}", not problem, problem or "bitwise, with config.json")

        stacked = directory / "stacked"
        run(program, "convert", directory / "back", stacked, "--layout", "stacked")
        ids = torch.randint(3, 256, (2, 20))
        want = load(directory / "source")(ids).logits
        for layout, path in (("one tensor an expert", directory / "back"), ("stacked", stacked)):
            got = load(path)(ids).logits
            # Equal weights; the products may still round otherwise where they lie in memory.
            difference = ((got - want).abs().max() / want.abs().max()).item()
            check(f"transformers loads ours ({layout}), {name}", difference <= 1e-6,
                  f"logits differ by {difference:.1e} of the largest")
        run(program, "convert", stacked, directory / "again", "--layout", "published")
        problem = compare_directories(directory / "source", directory / "again")
        check(f"stacked and back, {name}", not problem, problem or "bitwise")
    check_tokenizer(directory / "back")


def check_tokenizer(directory):
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    wrong = [c for c in range(128) if tokenizer(chr(c)).input_ids != [c]]
    check("tokenizer: ids of the 128 ASCII characters are their codes", not wrong, str(wrong or ""))
    text = "".join(map(chr, range(128))) + "  ACGT\r\n\tacgtn "
    ids = tokenizer(text).input_ids
    check("tokenizer: a text of all of them, nothing added", ids == [ord(c) for c in text])
    check("tokenizer: decodes to the same text", tokenizer.decode(ids) == text)
    other = "é Ā ∑"
    check("tokenizer: other characters are their UTF-8 bytes",
          tokenizer(other).input_ids == list(other.encode()))
    specials = (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id,
                tokenizer.unk_token_id)
    check("tokenizer: end, pad, begin, unknown are 0, 1, 2, 3", specials == (0, 1, 2, 3),
          str(specials))
    check("tokenizer: 256 tokens", len(tokenizer) == 256, str(len(tokenizer)))


def verify(program, name, folder, allowance=None):
    """`allowance`: by how much a quantity may exceed its bound."""
    result = run(program, "verify", folder)
    rows = [line.split() for line in result.stdout.splitlines()[2:] if len(line.split()) >= 3]
    shares = {row[0]: float(row[1]) / float(row[2]) for row in rows}
    passed = len(rows) >= 7 and all(share <= (allowance or {}).get(quantity, 1)
                                    for quantity, share in shares.items())
    quantity = max(shares, key=shares.get, default="none")
    check(name, passed, f"largest error, of {quantity}, is {100 * shares.get(quantity, 0):.0f}% of "
          "its bound")
    if not passed:
        print(result.stdout + result.stderr)


def random_models(program, root, count, seed):
    """Random shapes: their goldens are made by transformers from what we exported."""
    rng = random.Random(seed)
    for i in range(count):
        shape, tied = random_shape(rng)
        folder = root / f"random{i}"
        make_golden.make(as_arguments(shape, tied, folder / "made") + ["--steps", "1"])
        exported = run(program, "convert", folder / "made", folder / "export", "--to",
                       "huggingface", "--layout", rng.choice(["published", "stacked"]))
        text = " ".join(f"{k}={v}" for k, v in shape.items()) + (" tied" if tied else "")
        if exported.returncode:
            check(f"convert, {text}", False)
            continue
        make_golden.make(["--model", str(folder / "export"), "--out", str(folder / "golden"),
                          "--batch", str(shape["batch"]), "--seq", str(shape["seq"]),
                          "--seed", str(shape["seed"])])
        gap = json.loads((folder / "golden/about.json").read_text())["smallest_routing_gap"]
        if gap is not None and gap < 1e-5:  # two experts so close that rounding may choose either
            print(f"skipped verify, {text}: routing gap {gap:.0e}")
            continue
        verify(program, f"verify, {text}", folder / "golden")


def trained_model(program, root, directory):
    check_tokenizer(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = load(directory)
    ids = tokenizer("ACGT" * 8, return_tensors="pt").input_ids
    check("trained model: loads and computes", bool(model(ids).logits.isfinite().all()))
    make_golden.make(["--model", str(directory), "--out", str(root / "trained"), "--batch", "1",
                      "--seq", "64", "--steps", "3", "--tokens", "ACGT"])
    # Gradients of its queries and keys are small sums of large terms: Hugging Face's own, in fp32, differ
    # from those in fp64 by 2e-5, twice the bound.
    verify(program, "trained model: verify", root / "trained", {"grad": 10})


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="build/release/bin/cistron")
    parser.add_argument("--model", type=pathlib.Path, help="a model that Cistron trained")
    parser.add_argument("--random", type=int, default=20, help="random shapes to verify")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", type=pathlib.Path, help="write the results as a table")
    a = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        round_trips(a.program, root)
        random_models(a.program, root, a.random, a.seed)
        if a.model:
            trained_model(a.program, root, a.model)
    failed = sum(not passed for _, passed, _ in RESULTS)
    print(f"{len(RESULTS)} checks, {failed} failed (transformers {transformers.__version__}, "
          f"torch {torch.__version__})")
    if a.markdown:
        lines = ["| check | result |", "|---|---|"]
        lines += [f"| {name} | {'ok' if passed else '**failed**'}{', ' + d if d else ''} |"
                  for name, passed, d in RESULTS]
        a.markdown.write_text("\n".join(lines) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
