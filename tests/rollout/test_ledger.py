"""The ledger by hand on small cases, its bound, its size, and the work of a step."""

import pickle
import random
import sys

import pytest

from funrl.rollout.ledger import Ledger, LedgerError, LedgerRule, PlaceState


def started(places=2, staleness=1.0, window=1, until=100, **options):
    """A ledger whose one runner has begun what it may at version 0."""
    ledger = Ledger(LedgerRule(places, staleness, window, **options), until)
    ledger.begin(0, ledger.next_places(version=0, room=until), version=0)
    return ledger


def write(ledger, *numbers):
    for number in numbers:
        assert ledger.deliver(0, number, ledger.places[number].attempt)


def test_places_begin_by_the_version_of_their_runner():
    ledger = Ledger(LedgerRule(2, 1.0), until=5)
    assert ledger.next_places(version=-1, room=100) == [0, 1]
    assert ledger.next_places(version=0, room=100) == [0, 1, 2, 3]  # floor(i / 2) - 1 <= 0
    assert ledger.next_places(version=0, room=1) == [0]
    ledger.begin(0, [0, 1, 2, 3], version=0)
    write(ledger, 0, 1)
    assert ledger.fill_batch() == {0: 0, 1: 0}
    assert ledger.take() == (0, 1) and ledger.version == 1
    assert ledger.next_places(version=0, room=100) == []
    assert ledger.next_places(version=1, room=100) == [4]  # the run ends


def test_a_window_of_one_keeps_the_order_and_a_larger_one_takes_what_is_written():
    for window, joined in ((1, []), (2, [1]), (3, [1, 2]), (4, [1, 2])):
        ledger = started(window=window)
        write(ledger, 3, 1, 2)
        assert list(ledger.fill_batch()) == joined  # a batch has two
        ledger = started(window=window)
        write(ledger, 3, 1, 2, 0)
        assert list(ledger.fill_batch()) == [0, 1]


def test_a_runner_may_report_places_in_any_order():
    ledger = Ledger(LedgerRule(4), until=8)
    ledger.begin(0, [2], version=0)
    assert ledger.waiting == [0, 1] and ledger.next_places(version=0, room=100) == [0, 1, 3]


def test_the_places_of_a_lost_runner_begin_again():
    ledger = started(places=4, staleness=0)
    write(ledger, 1)
    assert ledger.lost(1) == []
    assert ledger.lost(0) == [0, 2, 3] and ledger.places[2].version is None
    assert ledger.waiting == [0, 2, 3] and not ledger.deliver(0, 0, attempt=1)
    assert ledger.begin(1, [2], version=0) == {2: 2}
    assert not ledger.deliver(0, 2, attempt=1) and ledger.deliver(1, 2, attempt=2)


def test_refills_share_the_budget_of_their_batch_in_the_order_of_places():
    ledger = started(places=3, staleness=0, prompts=2)
    write(ledger, 0, 1, 2)
    ledger.fill_batch()
    assert ledger.refill([2, 0]) == [0, 2] and ledger.take() is None
    ledger.begin(0, [0, 2], version=0)
    write(ledger, 0, 2)
    assert ledger.refill([0, 2]) == [0]  # three in all
    ledger.begin(0, [0], version=0)
    write(ledger, 0)
    assert ledger.refill([0]) == [] and ledger.take() == (0, 1, 2)


def test_models_score_a_batch_before_it_is_taken():
    ledger = started(scores=True)
    write(ledger, 0, 1)
    ledger.fill_batch()
    assert ledger.take() is None
    ledger.score([0, 1])
    assert ledger.take() == (0, 1)
    assert ledger.counts == {"begun": 4, "taken": 2}


def test_a_resumed_run_begins_first_what_was_overtaken():
    ledger = started(window=3)
    write(ledger, 1, 2)
    ledger.fill_batch()
    assert ledger.take() == (1, 2)
    ledger = Ledger.restored(ledger.rule, ledger.until, ledger.version, ledger.taken_in_window)
    assert ledger.waiting == [0] and ledger.next_places(version=1, room=100) == [0, 3, 4, 5]


@pytest.mark.parametrize("staleness,ahead,most", [(0, 0, 0), (0.25, 1, 1), (0.5, 2, 1), (1, 4, 1), (1.25, 5, 2)])
def test_a_fraction_of_a_batch_may_be_ahead(staleness, ahead, most):
    rule = LedgerRule(places=4, staleness=staleness)
    assert rule.ahead == ahead and rule.most_age == most
    assert [rule.least_version(i) <= 0 for i in range(12)] == [i < 4 + ahead for i in range(12)]


@pytest.mark.parametrize("places,staleness,window,most", [(4, 2, 1, 2), (4, 2, 2, 3), (4, 2, 5, 3), (4, 2, 6, 4)])
def test_the_bound_is_the_published_one(places, staleness, window, most):
    assert LedgerRule(places, staleness, window).most_age == most


@pytest.mark.parametrize(
    "act,message",
    [
        (lambda a: a.begin(0, [0], 0), "place 0 is to begin at version 0 of 0; it is Place(state=<PlaceState.RUNNING"),
        (lambda a: a.begin(0, [100], 0), "place 100 is to begin at version 0 of 0; it is None"),
        (lambda a: a.begin(0, [4], 0), "place 4 is to begin at version 0 of 0; it is Place(state=<PlaceState.WAITING"),
        (lambda a: a.begin(0, [4], 1), "place 4 is to begin at version 1 of 0; it is Place(state=<PlaceState.WAITING"),
        (lambda a: a.refill([0]), "places [0] are to be refilled and are not written, or not their batch"),
        (lambda a: a.score([0]), "place 0 is to be scored and is not written, or not of the batch"),
        (lambda a: LedgerRule(0).checked(), "places, window and prompts are at least 1"),
        (
            lambda a: started(staleness=0).refill([0]),
            "places [0] are to be refilled and are not written, or not their batch",
        ),
    ],
)
def test_what_the_rule_does_not_allow_is_refused(act, message):
    with pytest.raises(LedgerError) as error:
        act(started())
    assert message in str(error.value)


@pytest.mark.parametrize("places,staleness,window", [(1, 1, 1), (4, 1, 1), (4, 2, 3), (4, 2, 5), (4, 2, 6), (3, 4, 9)])
def test_the_bound_is_reached(places, staleness, window):
    """One place is late until the trainer can take no other: no smaller bound holds."""
    ledger = Ledger(LedgerRule(places, staleness, window), until=1000)
    late = places * (staleness + 1) - 1  # the last that begins at version 0
    ages = {}
    while late not in ages:
        numbers = ledger.next_places(ledger.version, room=1000)
        ledger.begin(0, numbers, ledger.version)
        write(ledger, *(number for number in numbers if number != late))
        joined = ledger.fill_batch()
        if not joined:
            write(ledger, late)
            joined = ledger.fill_batch()
        ages |= joined
        ledger.take()
    assert ages[late] == max(ages.values()) == ledger.rule.most_age


def test_a_ledger_of_many_rows_is_small():
    ledger = started(places=8192, staleness=1, until=10**6)
    write(ledger, *range(0, 16384, 2))
    assert len(ledger.places) == 16384 and len(pickle.dumps(ledger)) < 2**20


def one_step(ledger, runners, rng):
    """Begin all places on the runners, write them in a drawn order, and take a batch; the number of places begun."""
    owners = {}
    while numbers := ledger.next_places(ledger.version, room=4):
        owner = rng.randrange(runners)
        owners |= {number: (owner, attempt) for number, attempt in ledger.begin(owner, numbers, ledger.version).items()}
    order = list(owners)
    rng.shuffle(order)
    for number in order:
        owner, attempt = owners[number]
        ledger.deliver(owner, number, attempt)
        ledger.fill_batch()
    assert ledger.take() is not None
    return len(owners)


@pytest.mark.parametrize("window", [1, 64])
def test_work_grows_with_the_places_of_a_step(window):
    """Calls in the ledger for each place are the same, however many there are: fewer than 80."""
    calls = []
    for places in (256, 4096):
        ledger = Ledger(LedgerRule(places, 1 if window > 1 else 0, window), until=100 * places)
        count = 0

        def count_call(frame, event, _):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(count_call)
        begun = one_step(ledger, 512, random.Random(0))
        sys.setprofile(None)
        calls.append(count / begun)
    assert calls[1] < 1.1 * calls[0] and calls[1] < 80, calls


@pytest.mark.parametrize("window", [1, 3, 9])
@pytest.mark.parametrize("staleness", [0.0, 1.5])
@pytest.mark.parametrize("prompts", [1, 3])
def test_what_a_checkpoint_has_of_a_ledger_is_all_that_decides_what_a_resumed_run_begins(window, staleness, prompts):
    """Places are begun, written and refilled at random; after each batch the run might be resumed."""
    draw = random.Random(window)
    ledger = Ledger(LedgerRule(4, staleness, window, prompts), until=80)
    taken = set()
    owners = {}
    written = 0
    while len(taken) < ledger.until:
        for owner in range(3):
            numbers = ledger.next_places(ledger.version, draw.randint(0, 4))
            owners |= dict.fromkeys(ledger.begin(owner, numbers, ledger.version), owner)
        for number, place in list(ledger.places.items()):
            if place.state == PlaceState.RUNNING and draw.random() < 0.4:
                assert ledger.deliver(owners[number], number, place.attempt)
                if staleness and draw.random() < 0.3:
                    ledger.refill([number])
        ledger.fill_batch()
        batch = ledger.take()
        if batch is None:
            continue
        taken.update(batch)
        written += len(ledger.written)
        resumed = Ledger.restored(ledger.rule, ledger.until, ledger.version, ledger.taken_in_window)
        left = [number for number in range(ledger.until) if number not in taken]
        for version in range(ledger.version + 1):
            may_begin = [number for number in left if ledger.rule.least_version(number) <= version]
            for room in (1, 5, 80):
                assert resumed.next_places(version, room) == may_begin[:room]
        assert (resumed.oldest, resumed.overtaken) == (ledger.oldest, ledger.overtaken)
        for number, place in ledger.places.items():  # that runners of the run before had
            assert not resumed.deliver(owners.get(number, 0), number, place.attempt)
    assert bool(written) == (staleness > 0)
