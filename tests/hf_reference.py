"""What transformers makes of models on disk, run by an interpreter of its own: JSON on stdin, JSON on stdout.

read: {folder: [text, …]} -> {folder: [[id, …], …]}, and in each folder logits.npy of the tokens 0, 7, 14, …
make: {folder: {config}} -> a random model in each folder, and its logits.npy
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

LENGTH = 40


def write_logits(model, folder):
    tokens = torch.arange(LENGTH)[None] * 7 % model.config.vocab_size
    with torch.no_grad():
        np.save(Path(folder) / "logits.npy", model.eval()(tokens).logits.float().numpy())


def read(asked):
    found = {}
    for folder, texts in asked.items():
        write_logits(AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32), folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        assert [tokenizer.decode(one) for one in ids] == texts
        assert tokenizer.eos_token == "<|endoftext|>"
        found[folder] = ids
    return found


def make(asked):
    torch.manual_seed(0)
    for folder, fields in asked.items():
        limit = fields.pop("max_shard_size", "5GB")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
        model.save_pretrained(folder, max_shard_size=limit)
        write_logits(model, folder)
    return {}


if __name__ == "__main__":
    print(json.dumps({"read": read, "make": make}[sys.argv[1]](json.load(sys.stdin))))
