"""The command that continues a text."""

import dataclasses

import tyro

from roxxel_dist.cli.arguments import Switch, parse
from roxxel_dist.config import usage_errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateArgs:
    """Continue a text with a trained model."""

    run_dir: tyro.conf.Positional[str]
    """The run directory of the model, what `export` has made of one, or a folder of Hugging Face."""
    prompt: str = ""
    """The text to continue; the beginning of a document where empty."""
    max_new_tokens: int = 200
    """Tokens to add at most."""
    temperature: float = 0.8
    """0 takes the likeliest token each time, 1 draws from the model's distribution."""
    top_k: int = 0
    """Draw from so many of the likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Draw from the fewest of the likeliest tokens that have this probability together; 1 for all."""
    seed: int = 0
    """Of the draws."""
    num_samples: int = 1
    """Texts to write, drawn with this seed and the ones behind it."""
    step: int | None = None
    """The checkpoint to use; the newest where not given."""
    best: Switch = False
    """The checkpoint with the lowest val_loss."""


def generate(words: list[str]) -> int:
    """Continue a text with a trained model."""
    args = parse(GenerateArgs, words, "generate")
    with usage_errors():
        if args.num_samples < 1:
            raise ValueError(f"--num_samples is {args.num_samples}: it must be at least 1")
        if args.best and args.step is not None:
            raise ValueError("--best and --step name two checkpoints: use one of the two")
        from roxxel_dist.cluster.distributed import enable_compilation_cache, initialize
        from roxxel_dist.generator import Generator

        initialize()
        enable_compilation_cache()
        model = Generator(args.run_dir, best=args.best, step=args.step)
        how = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
        if args.num_samples == 1:
            pieces = model.stream(args.prompt, seed=args.seed, **how)
            # The first one, before anything is shown: what is wrong with the arguments is found now.
            print(args.prompt + next(pieces, ""), end="", flush=True)
            for piece in pieces:
                print(piece, end="", flush=True)
            print()
        else:
            seeds = range(args.seed, args.seed + args.num_samples)
            for i, text in enumerate(model.generate([args.prompt] * args.num_samples, seed=seeds, **how)):
                print(f"--- sample {i + 1}, seed {seeds[i]}\n{args.prompt}{text}", flush=True)
    return 0
