#!/usr/bin/env python3
"""Loads what `cistron train` left as a Hugging Face directory with transformers: load_export.py FOLDER

Every tensor of the model must be in it, none besides, each of the shape that config.json asks for, and a step forward
must be finite. Exit status 1 where one is not; 3, with the reason, where torch or transformers is missing.
"""
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
try:
    import torch
    import transformers
except ImportError as missing:
    print(f"{sys.executable}: {missing}")
    sys.exit(3)


def main():
    folder = sys.argv[1]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    wrong = {key: sorted(map(str, info[key]))[:3]
             for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    fresh = transformers.AutoModelForCausalLM.from_config(model.config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    expected = {name: tuple(p.shape) for name, p in fresh.named_parameters()}
    if shapes != expected:
        wrong["shapes"] = sorted(set(shapes.items()) ^ set(expected.items()))[:3]
    with torch.no_grad():
        logits = model(torch.tensor([[65, 67, 71, 84]])).logits
    if not torch.isfinite(logits).all():
        wrong["logits"] = "not finite"
    if wrong:
        print(f"error: {folder}: {wrong}")
        return 1
    print(f"{type(model).__name__} of {sum(p.numel() for p in model.parameters())} parameters, "
          f"{len(shapes)} tensors of the shapes that config.json asks for (transformers {transformers.__version__})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
