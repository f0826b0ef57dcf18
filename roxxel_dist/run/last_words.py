"""What a run shows at its end: a sample of text from its model, and its loss curve."""

from pathlib import Path
from typing import Any

from roxxel_dist.cluster.distributed import is_primary
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer
from roxxel_dist.launcher.output.console import printable
from roxxel_dist.model.generate import generate, known_ids
from roxxel_dist.place.directory import CURVE
from roxxel_dist.process.extras import pip_install
from roxxel_dist.run.report import draw_losses, read_runs
from roxxel_dist.settings.config import Config
from roxxel_dist.train.loop import Loop
from roxxel_dist.weights.generator import pieces

SAMPLE_TOKENS, SAMPLE_LINES = 160, 8


def sample_text(config: Config, loop: Loop, tokenizer: Tokenizer | None, prompt: list[int]) -> str:
    """A sample of text from the model, on rank 0; every rank takes part, because each has a part of the model."""
    if tokenizer is None:
        return "no tokenizer: no sample"
    model, context = loop.state.local_model(), config.max_context
    if not is_primary():
        return ""
    ends: Any = {"stop_ids": [tokenizer.eos_id], "known_V": known_ids(tokenizer.ids, config.vocab_size or 0)}
    new = generate(model, prompt, min(SAMPLE_TOKENS, context // 2), max_context=context, seed=config.seed, **ends)
    before, cut = config.sample_prompt, len(prompt) - (context - 1)
    text = printable(before + "".join(pieces(tokenizer, new, before, prompt)))
    what = (
        f", which has not read the first {cut:,} tokens of sample_prompt (max_context is {context})" if cut > 0 else ""
    )
    return "\n".join([f"a sample of the text that the model generates{what}:", *text.split("\n")[:SAMPLE_LINES]])


def draw_curve(run: Path) -> str:
    """Draw the loss curve of a run; the line that says where it is, or why there is none."""
    try:
        draw_losses(read_runs([run]), run / CURVE)
    except ImportError:
        return f"no loss curve: it needs matplotlib: {pip_install('plot')}"
    except Exception as error:
        return f"no loss curve: {error!r}"
    return f"loss curve: {run / CURVE}"
