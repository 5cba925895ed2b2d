"""What the GPU suite relies on: a pairwise design has every pair of values, in few cases."""

from itertools import combinations, product

from tests.pairs import each_pair


def test_every_pair_of_values_is_in_a_case_and_few_cases_are_needed():
    axes = {"a": [1, 2, 3], "b": [{}, {"c": 4}], "d": "xy", "e": (None, 5)}
    names, cases = each_pair(**axes)
    assert names == tuple(axes)
    for (i, some), (j, others) in combinations(enumerate(axes.values()), 2):
        assert all(any((case[i], case[j]) == pair for case in cases) for pair in product(some, others))
    assert len(cases) == 6  # of 24; the two longest axes have as many pairs
