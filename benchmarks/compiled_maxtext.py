"""The models of `compiled.py`, compiled by MaxText's own train_compile: what a chip computes, reads, writes and sends.

    python benchmarks/compiled_maxtext.py CHIPS MODEL [ROWS [FIELD=VALUE ...]]     such as 256 1.3B

Needs Python 3.12 or newer with `pip install 'maxtext[tpu]'`, and no TPU. CHIPS is 1, 4, 16, 64 or 256 of v5e; ROWS is
of a chip (1); fields are those of MaxText. The FLOPs are counted as `plan --target` counts them.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
}  # fmt: skip
sys.path.insert(0, str(Path(__file__).parent.parent))

from roxxel_dist.devices.program_cost import program_cost
from roxxel_dist.run.estimate.step_costs import costs_of, roofline_seconds

MODELS = {
    "124M": {
        "base_emb_dim": 768, "base_num_query_heads": 12, "base_num_kv_heads": 12, "head_dim": 64, "base_mlp_dim": 2048,
        "base_num_decoder_layers": 12, "max_target_length": 1024,
    },
    "1.3B": {
        "base_emb_dim": 2048, "base_num_query_heads": 16, "base_num_kv_heads": 16, "head_dim": 128,
        "base_mlp_dim": 5464, "base_num_decoder_layers": 24, "max_target_length": 2048,
    },
}  # fmt: skip
MODELS["8 x 124M"] = MODELS["124M"] | {
    "decoder_block": "mixtral", "num_experts": 8, "num_experts_per_tok": 2, "base_moe_mlp_dim": 2048,
}  # fmt: skip
OPTIONS = {
    "vocab_size": 50_304, "logits_via_embedding": True, "remat_policy": "full", "dtype": "bfloat16",
    "weight_dtype": "float32", "enable_checkpointing": False, "compile_topology_num_slices": 1, "run_name": "compiled",
}  # fmt: skip


def main() -> int:
    """Print the figures; returns the exit code."""
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    chips, model, rows = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1
    train_compile: Any = importlib.import_module("maxtext.trainers.pre_train.train_compile")
    config = Path(importlib.import_module("maxtext").__file__ or "").parent / "configs" / "base.yml"
    compiled: list[Any] = []
    compile_step = train_compile.jit_and_compile

    def keep(*args: Any, **options: Any) -> Any:
        compiled.append(compile_step(*args, **options))
        return compiled[0]

    train_compile.jit_and_compile = keep
    fields = OPTIONS | MODELS[model] | {"compile_topology": f"v5e-{chips}", "per_device_batch_size": rows}
    words = (f"{name}={value}" for name, value in fields.items())
    train_compile.main(["train_compile", str(config), *words, *sys.argv[4:]])
    memory = compiled[0].memory_analysis()
    cost = program_cost(compiled[0].as_text(), [0] * chips)
    found = {
        "flops": cost.flops, "bytes": cost.bytes_accessed, "sent": sum(cost.collectives.values()),
        "launches": cost.launches, "roofline_ms": 1000 * roofline_seconds(costs_of(cost, "TPU v5 lite")),
        "peak_bytes": memory.temp_size_in_bytes + memory.argument_size_in_bytes,
    }  # fmt: skip
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
