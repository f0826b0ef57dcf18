"""What transformers makes of models on disk, run by an interpreter of its own: JSON on stdin, JSON on stdout.

On stdin is {"read": …, "make": …}, on stdout what `read` gives.

read: {folder: [text, …]} -> {folder: [[id, …], …]}, and in each folder logits.npy of the tokens 0, 7, 14, …, and
    greedy.npy, what it adds to the first of them
make: {folder: {config}} -> a random model in each folder, and the same two files
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

LENGTH = 40
PROMPT, NEW = 9, 12


def write_logits(model, folder):
    tokens = torch.arange(LENGTH)[None] * 7 % model.config.vocab_size
    with torch.no_grad():
        np.save(Path(folder) / "logits.npy", model.eval()(tokens).logits.float().numpy())
        prompt = tokens[:, :PROMPT]  # whose token 0 is no padding
        options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None}
        added = model.generate(prompt, max_new_tokens=NEW, pad_token_id=0, **options)
        np.save(Path(folder) / "greedy.npy", added[0, PROMPT:].numpy())


def read(asked):
    found = {}
    for folder, texts in asked.items():
        write_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), folder)
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
        with torch.no_grad():
            for name, one in model.named_parameters():
                if "norm" in name or name.endswith("bias"):  # they begin as ones or zeros
                    one.add_(torch.randn_like(one), alpha=0.3)
        model.save_pretrained(folder, max_shard_size=limit)
        write_logits(model, folder)


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    make(asked["make"])
    print(json.dumps(read(asked["read"])))
