"""Changes to finished algorithms, and filters joined."""

import torch
from pieces import example
from rows_corrections import pull

from funrl import algos


def test_corrected_and_filtered():
    """`corrected` puts its pieces first; `filtered` joins its filters with the algorithm's own."""
    batch = example()
    own = algos.Algorithm(
        advantage=algos.chain(algos.group_center(), algos.to_tokens()),
        losses={"policy": algos.reduce(pull, algos.token_mean())},
        filter=algos.unequal_scores(),
    )
    changed = algos.corrected(own, algos.clip_reward(-0.1, 0.1), algos.importance_weights())
    start = algos.Signal(batch.score, batch.mask)
    signal, _ = changed.advantage.update(start, changed.advantage.init(), batch)
    clipped, _ = own.advantage.update(start._replace(x=batch.score.clamp(-0.1, 0.1)), own.advantage.init(), batch)
    assert signal.x.equal(clipped.x)
    assert signal.weight is not None
    assert algos.reads(changed).required == algos.reads(own).required | {"rollout_logp", "old_logp"}
    fewer = algos.filtered(own, algos.not_truncated())
    assert fewer.filter is not None
    assert own.filter is not None
    left = own.filter(batch) & ~batch.truncated
    assert fewer.filter(batch).tolist() == (left & (torch.arange(7) != 5)).tolist()  # row 5 is left alone in its group


def test_filters_of_rows_come_first():
    """Whatever their order, filters of groups see what filters of rows have left; nothing may be left."""
    batch = example()._replace(score=example().score.new_tensor([1, 0, 1, 5, 0, 0, 5]))  # group 7 is rows 0, 2 and 4
    batch = batch._replace(truncated=batch.truncated.new_tensor([0, 0, 0, 0, 1, 0, 0]))
    unequal, whole = algos.unequal_scores(), algos.not_truncated()
    assert unequal(batch).tolist() == [True, False, True, False, True, False, False]
    for both in (algos.every(unequal, whole), algos.every(whole, unequal)):
        assert both(batch).tolist() == [False] * 7
        assert both(batch._replace(truncated=batch.truncated | True)).tolist() == [False] * 7
        open_ = batch._replace(truncated=batch.truncated & False)
        assert both(open_).tolist() == unequal(open_).tolist()
    sized = algos.every(algos.complete_groups(2), whole)
    assert sized(batch).tolist() == [True, True, True, False, False, True, False]
