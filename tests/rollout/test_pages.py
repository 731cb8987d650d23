"""The pool of pages, by hand and against a plain model of it."""

import random

import pytest

from funrl.rollout.native.pages import PagePool

SIZE = 2  # tokens of a page


def used_by(pool, tokens):
    """A sequence that begins: it shares what is known of its text, takes the rest, and makes all of it known."""
    result = pool.find(tokens)
    pool.share(result)
    pages = result + pool.take(-(-len(tokens) // SIZE) - len(result))
    pool.remember(tokens, pages)
    return pages


def test_sequences_that_begin_alike_share_whole_pages():
    pool = PagePool(8, SIZE)
    first = used_by(pool, [1, 2, 3, 4, 5])
    second = used_by(pool, [1, 2, 3, 4, 6, 7])
    other = used_by(pool, [9, 2, 3, 4])  # its second page has the same tokens, and another one before it
    assert first[:2] == second[:2] and first[2] != second[2]
    assert not set(other) & set(first + second)
    assert pool.used == 4 + 2 and pool.available == 2
    pool.give_back(first)
    assert pool.used == 3 + 2  # the other one still uses the first two pages
    assert pool.find([1, 2, 3, 4, 6, 7]) == second


def test_half_a_page_is_not_found():
    pool = PagePool(4, SIZE)
    pages = used_by(pool, [1, 2, 3])
    assert pool.find([1, 2, 3]) == pages[:1] and pool.find([1]) == [] and pool.find([]) == []
    pool.give_back(pages)
    assert pool.find([1, 2, 3, 4]) == pages[:1]
    assert pool.available == 4 and pool.used == 0


def test_content_that_nobody_uses_stays_until_its_memory_is_needed():
    pool = PagePool(6, SIZE)
    old, new = used_by(pool, [1, 2, 3, 4]), used_by(pool, [5, 6, 7, 8])
    pool.give_back(old)
    pool.give_back(new)
    assert pool.available == 6
    assert not set(pool.take(2)) & set(old + new)  # what was never used goes first
    assert pool.find([1, 2, 3, 4]) == old and pool.find([5, 6, 7, 8]) == new
    assert pool.take(1) == old[1:]  # then the end of what has been unused for longest
    assert pool.find([1, 2, 3, 4]) == old[:1]
    assert pool.take(2) == [old[0], new[1]]
    assert pool.find([1, 2, 3, 4]) == [] and pool.find([5, 6, 7, 8]) == new[:1]
    assert pool.available == 1


def test_content_that_is_used_again_is_the_last_to_go():
    pool = PagePool(4, SIZE)
    first, second = used_by(pool, [1, 2, 3, 4]), used_by(pool, [5, 6, 7, 8])
    pool.give_back(first)
    pool.give_back(second)
    assert used_by(pool, [1, 2, 3, 4]) == first
    pool.give_back(first)
    assert pool.take(2) == [second[1], second[0]]
    assert pool.find([1, 2, 3, 4]) == first


def test_the_same_content_computed_twice_is_known_once():
    pool = PagePool(6, SIZE)
    first, second = pool.take(2), pool.take(2)
    pool.remember([1, 2, 3, 4], first)
    pool.remember([1, 2, 3, 4], second)
    assert pool.find([1, 2, 3, 4]) == first
    pool.give_back(second)
    assert pool.take(4 - 2) and pool.find([1, 2, 3, 4]) == first  # the copy was free at once


def test_a_page_whose_beginning_is_computed_anew_is_not_found_behind_it():
    """The second one's page stands behind the first one's copy of [1, 2]; once that is gone, what comes in its place
    is other content, although of the same tokens."""
    pool = PagePool(5, SIZE)
    first, second = pool.take(1), pool.take(2)
    pool.remember([1, 2], first)
    pool.remember([1, 2, 3, 4], second)
    assert pool.find([1, 2, 3, 4]) == [first[0], second[1]]
    pool.give_back(first)
    taken = pool.take(3)
    assert first[0] in taken and pool.find([1, 2, 3, 4]) == []
    pool.remember([1, 2], taken[:1])
    assert pool.find([1, 2, 3, 4]) == taken[:1]


def test_the_peak_is_that_of_pages_in_use():
    pool = PagePool(6, SIZE)
    first = used_by(pool, [1, 2, 3, 4])
    pool.give_back(first)
    assert pool.peak == 2 and pool.used == 0
    used_by(pool, [1, 2, 3, 4])
    used_by(pool, [5, 6])
    assert pool.peak == 3


class PlainPool:
    """What a pool does, by lists that are searched from end to end.

    Attributes:
      users: of each page.
      known: (entry before, tokens, page) of each page whose content is known; entries differ by identity.
      idle: known pages that nobody uses, the longest unused first.
    """

    def __init__(self, pages):
        self.users, self.known, self.idle = [0] * pages, [], []

    def entry(self, page):
        return next((item for item in self.known if item[2] == page), None)

    def free(self):
        return {p for p, count in enumerate(self.users) if not count and p not in self.idle}

    def took(self, pages):
        for page in pages:
            free = self.free()
            if not free:
                assert page == self.idle.pop(0)
                self.known.remove(self.entry(page))
            else:
                assert page in free
            self.users[page] += 1

    def share(self, pages):
        for page in pages:
            self.users[page] += 1
            self.idle = [p for p in self.idle if p != page]

    def give_back(self, pages):
        for page in pages[::-1]:
            self.users[page] -= 1
            if not self.users[page] and self.entry(page):
                self.idle.append(page)

    def walk(self, tokens):
        """The entries of the longest known beginning."""
        results = [None]
        for low in range(0, len(tokens) - SIZE + 1, SIZE):
            here = [item for item in self.known if item[0] is results[-1] and item[1] == tokens[low : low + SIZE]]
            if not here:
                break
            results += here
        return results[1:]

    def remember(self, tokens, pages):
        for i in range(min(len(tokens) // SIZE, len(pages))):
            known = self.walk(tokens[: (i + 1) * SIZE])
            if len(known) > i:
                continue
            if self.entry(pages[i]):
                return
            self.known.append((known[-1] if known else None, tokens[i * SIZE : (i + 1) * SIZE], pages[i]))


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_against_the_plain_pool(seed):
    """Sequences over three tokens begin, grow and end in pools that are mostly full. Beside the plain pool stands what
    each page really holds: all tokens up to its end."""
    chance, count = random.Random(seed), 5 + 4 * seed
    pool, plain, truth, running = PagePool(count, SIZE), PlainPool(count), {}, []
    found_pages = evicted = 0
    for _ in range(1500):
        action = chance.choice(["begin"] * 3 + ["grow"] * 4 + ["end"] * 3)
        if action == "begin":
            text = [chance.randrange(3) for _ in range(chance.randrange(1, 12))]
            pages = pool.find(text)
            assert pages == [page for *_, page in plain.walk(text)]
            assert all(truth[page] == text[: (i + 1) * SIZE] for i, page in enumerate(pages))
            pool.share(pages)
            plain.share(pages)
            found_pages += len(pages)
            running.append([text, pages])
        elif action == "grow" and running:
            chance.choice(running)[0].extend(chance.randrange(3) for _ in range(chance.randrange(4)))
        elif action == "end" and running:
            text, pages = running.pop(chance.randrange(len(running)))
            pool.give_back(pages)
            plain.give_back(pages)
        for sequence in running[:]:
            text, pages = sequence
            lacking = -(-len(text) // SIZE) - len(pages)
            if lacking > pool.available:  # it gives up
                running.remove(sequence)
                pool.give_back(pages)
                plain.give_back(pages)
                continue
            evicted += max(0, lacking - len(plain.free()))
            taken = pool.take(lacking)
            plain.took(taken)
            pages += taken
            truth |= {page: text[: (i + 1) * SIZE] for i, page in enumerate(pages)}
            if chance.random() < 0.7:
                pool.remember(text, pages)
                plain.remember(text, pages)
        users = [sum(page in pages for _, pages in running) for page in range(count)]
        assert users == plain.users
        assert pool.used == sum(n > 0 for n in users) and pool.available == count - pool.used
        assert len(plain.free()) + len(plain.idle) == pool.available
    assert found_pages > 50 and evicted > 50
    for _, pages in running:
        pool.give_back(pages)
    assert pool.available == count and pool.used == 0
    assert sorted(pool.take(count)) == list(range(count)) and pool.peak == count


def test_one_text_takes_the_tail_of_another():
    pool = PagePool(6, SIZE)
    pages = used_by(pool, [1, 2, 3])
    pool.remember_tail([1, 2, 3], pages)
    assert pool.find_tail([1, 2, 3], pages[:1]) == []  # it is in use
    pool.give_back(pages)
    assert pool.available == 6 and pool.find([1, 2, 3, 4]) == pages[:1]
    assert pool.find_tail([1, 2, 9], pages[:1]) == pool.find_tail([1, 2], pages[:1]) == []
    assert pool.find_tail([1, 2, 3], pages[:1]) == pages[1:]
    pool.share(pages)
    pool.fill(pages[1])
    pool.remember([1, 2, 3, 4], pages)
    pool.give_back(pages)
    assert pool.find([1, 2, 3, 4]) == pages and pool.find_tail([1, 2, 3], pages[:1]) == []
    tails = [used_by(pool, [token]) for token in (7, 8, 8)]
    for token, own in zip((7, 8, 8), tails, strict=True):
        pool.remember_tail([token], own)
        pool.give_back(own)
    assert pool.find_tail([7], []) == tails[0] and pool.find_tail([8], []) == tails[1]
    assert len(pool.take(6)) == 6 and pool.used == 6 and pool.find_tail([8], []) == []


def test_tails_keep_every_page_in_one_place():
    chance = random.Random(5)
    pool, running, hits = PagePool(12, SIZE), [], 0
    for _ in range(3000):
        if running and (chance.random() < 0.5 or pool.available < 5):
            tokens, pages = running.pop(chance.randrange(len(running)))
            pool.remember_tail(tokens, pages)
            pool.give_back(pages)
        else:
            tokens = [chance.randrange(2) for _ in range(chance.randint(1, 7))]
            shared = pool.find(tokens[:-1])
            tail = pool.find_tail(tokens[:-1], shared)
            pool.share(shared + tail)
            for page in tail:
                pool.fill(page)
                hits += 1
            pages = shared + tail + pool.take(-(-len(tokens) // SIZE) - len(shared + tail))
            pool.remember(tokens, pages)
            running.append((tokens, pages))
        used = {page for _, pages in running for page in pages}
        assert pool.used == len(used) and sorted([*pool._free, *pool._idle, *used]) == list(range(12))
        assert set(pool._tail) == set(pool._tails.values())
    assert hits > 50
