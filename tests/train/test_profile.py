import jax
import jax.numpy as jnp
import pytest

from roxxel_dist.train.step.throughput import Profiler


def train(profiler, steps):
    step_of = jax.jit(lambda x: x @ x / 2)
    x = jnp.eye(8)
    for step in steps:
        profiler.begin_step(step, x)
        x = step_of(x)
        profiler.end_step(step, x)
    profiler.close()


def traces(folder):
    return [path for path in folder.rglob("*.xplane.pb") if path.stat().st_size]


@pytest.mark.parametrize(
    ("steps", "traced"), [(range(1, 8), "3 to 5"), (range(5, 9), "5 to 5"), (range(1, 5), "3 to 4"), (range(1, 3), "")]
)
def test_the_steps_asked_for_are_traced(tmp_path, steps, traced):
    said = []
    train(Profiler(tmp_path / "profile", 3, 5, said.append), steps)
    assert said == ([f"profile of steps {traced}: {tmp_path / 'profile'}"] if traced else [])
    assert len(traces(tmp_path)) == len(said)


def test_one_that_cannot_write_stops_nobody(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    train(Profiler(tmp_path / "file" / "profile", 2, 3, said.append), range(1, 6))
    assert len(said) == 1
    assert said[0].startswith("no profile of steps 2 to 3: ")


def test_one_that_cannot_begin_stops_nobody(tmp_path):
    said = []
    jax.profiler.start_trace(tmp_path / "other")  # the user's own: there is one profiler a process
    try:
        train(Profiler(tmp_path / "profile", 2, 3, said.append), range(1, 6))
    finally:
        jax.profiler.stop_trace()
    assert len(said) == 1
    assert said[0].startswith("no profile of steps 2 to 3: ")
