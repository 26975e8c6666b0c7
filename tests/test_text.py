"""Names and values in a sentence."""

from fivefold.core.text import any_layer, listed, shortened


def test_what_is_long_is_cut_and_says_so() -> None:
    assert [listed(names, 2) for names in ([], ["a"], "ab", "abcd")] == ["", "a", "a, b", "a, b and 2 more"]
    assert [shortened("x" * size, 5) for size in (5, 6)] == ["xxxxx", "xx..."]
    assert [any_layer(each) for each in ("layers.12.mlp", "h.3", "norm1.weight")] == [
        "layers.*.mlp",
        "h.*",
        "norm1.weight",
    ]
