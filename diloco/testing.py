"""Checks for your own tests: what every codec, merge rule and outer optimizer must do.

    from diloco.testing import check_codec
    from my_package.codecs import Sign

    def test_it_is_a_codec():
        check_codec(Sign())

Each check raises InputError with the first claim that does not hold. A run makes the same checks
before it begins.
"""

from outer.codecs.own_codec import check_codec
from outer.merges.own_merge import check_merge
from outer.state.own_rule import check_outer_rule

__all__ = ["check_codec", "check_merge", "check_outer_rule"]
