"""The running digest."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from roxxel_dist.curriculum.plan import Rows
from roxxel_dist.train.step.compile import AotCompiler
from roxxel_dist.train.step.digest_chain import DigestChain, hex_digest

ROWS = Rows(np.zeros(4, np.int32), np.arange(4, dtype=np.int64) * 17, 17)


def chain(*steps, digest="", begin=0):
    compiler = AotCompiler(Mesh(jax.devices()[:1], ("data",)))
    made = DigestChain(compiler, digest, begin)
    digests = [hex_digest(np.asarray(made.add(rows, jnp.float32(loss)))) for rows, loss in steps]
    compiler.close()
    return digests


def test_it_is_what_it_was():  # logs and checkpoints have it
    assert chain((ROWS, 1.5), (ROWS, 1.25)) == ["24deba227498e89d5338579bce362e95", "40c01c569346baf98bfaef4fc363d96c"]


def test_it_goes_on_from_its_own_text():
    first, second = chain((ROWS, 1.5), (ROWS, 1.25))
    assert chain((ROWS, 1.25), digest=first, begin=1) == [second]
    assert chain((ROWS, 1.25), begin=1) != chain((ROWS, 1.25))  # anew, behind a checkpoint that had none


def test_each_bit_of_rows_and_loss_counts_and_is_not_forgotten():
    usual = chain((ROWS, 1.5), (ROWS, 1.25))
    others = [
        (ROWS, np.nextafter(np.float32(1.5), 2)), (ROWS, -1.5), (ROWS, np.nan),
        (ROWS._replace(offset=ROWS.offset + 1), 1.5), (ROWS._replace(offset=ROWS.offset[::-1]), 1.5),
        (ROWS._replace(dataset=ROWS.dataset + 1), 1.5), (ROWS._replace(seq_len=18), 1.5),
        (ROWS._replace(packed=True), 1.5),
    ]  # fmt: skip
    seen = [chain(other, (ROWS, 1.25)) for other in others]
    for number in range(2):
        assert len({usual[number], *(digests[number] for digests in seen)}) == 1 + len(others)
