from dataclasses import asdict

from roxxel_dist.train.checkpoint.metadata import Standing


def test_the_best_loss_and_the_validations_since():
    standing = Standing()
    assert [standing.judge(loss) for loss in (3.0, 2.0, 2.5, float("nan"), 2.0)] == [True, True, False, False, False]
    assert (standing.best_loss, standing.waited) == (2.0, 3)


def test_patience():
    standing = Standing(best_loss=2.0, waited=3)
    assert standing.gave_up(3)
    assert not standing.gave_up(4)
    assert not standing.gave_up(0)


def test_it_survives_a_checkpoint_among_other_things():
    standing = Standing(best_loss=1.5, waited=2, rewinds=1)
    assert Standing.of({**asdict(standing), "plan": {}, "corpus": "x"}) == standing
    assert Standing.of({}) == Standing()
