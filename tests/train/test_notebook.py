"""Training in the real kernel of a notebook: what its page is sent."""

import re

import pytest
from jupyter_client.manager import KernelManager

from roxxel_dist.train.log.console import in_notebook

LIMIT_S = 200
CELL = """
from roxxel_dist import Config, Experiment
config = Config(
    dim=16, num_blocks=1, n_heads=2, max_context=16, n_devices=1, eval_iters=1, eval_every=3, log_every=1,
    tokenizer_type="byte", phases=[{"steps": 6, "batch_size": 8, "seq_len": 17}],
)
Experiment(config).fit("text.txt", "run")
"""
READ = """
from roxxel_dist import read_run
read_run("run")
"""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_a_bar_and_the_losses_in_the_output_of_the_cell(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(3000)))
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.blocking_client()
    messages = []
    try:
        client.start_channels()
        client.wait_for_ready(timeout=LIMIT_S)
        reply = client.execute_interactive(CELL, timeout=LIMIT_S, output_hook=messages.append)
        assert reply["content"]["status"] == "ok", messages
        errors, results = ([], [])
        client.execute_interactive(CELL, timeout=LIMIT_S, output_hook=errors.append)
        client.execute_interactive(READ, timeout=LIMIT_S, output_hook=results.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    kinds = [message["msg_type"] for message in messages]
    assert kinds.count("display_data") == 1
    (shown,) = (message["content"] for message in messages if message["msg_type"] == "display_data")
    updates = [message["content"] for message in messages if message["msg_type"] == "update_display_data"]
    place = shown["transient"]["display_id"]
    assert {update["transient"]["display_id"] for update in updates} == {place}
    last = updates[-1]["data"]["text/html"]
    assert '<progress value="6" max="6"' in last
    assert "step 6 of 6" in last
    assert re.search(r"\| train_loss \d\.\d{4} \| val_loss \d\.\d{4}</div>", last)
    printed = "".join(message["content"]["text"] for message in messages if message["msg_type"] == "stream")
    assert "run directory: run" in printed
    assert "Step 3/6" not in printed
    # The same cell again: the mistake is a line, not a traceback.
    (error,) = (message["content"] for message in errors if message["msg_type"] == "error")
    (line,) = error["traceback"]
    assert re.fullmatch(r"(UserError|UsageError|FolderIsHeld): .*run holds a run already.*", line), line
    (read,) = (message["content"]["data"] for message in results if message["msg_type"] == "execute_result")
    assert read["text/plain"].startswith("<RunData run: <Columns of 6 rows: step, ")
    assert read["text/plain"].endswith(">, 1 phase(s), checkpoints of 1, 6>")


def test_no_notebook_here():
    assert not in_notebook()
