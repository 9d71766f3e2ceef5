"""All attacks, with what each process of them does."""

from tests.hostile import members, strangers, turncoats
from tests.hostile.scene import Attack
from tests.hostile.speakers import spoken
from tests.hostile.turncoats import lies
from tests.swarm import Work


def island(name: str, work: Work, **options: tuple[str, ...]) -> Attack:
    return Attack(name, work, is_island=True, **options)  # pyright: ignore[reportArgumentType]


STRANGERS = [
    Attack("garbage", strangers.on_streams(strangers.garbage, 8), has_key=False),
    Attack("frames of 127 MB", strangers.on_streams(strangers.long_frames, 8), has_key=False),
    Attack("half handshakes", strangers.on_streams(strangers.half_handshakes, 150), has_key=False),
    Attack("a thousand connections", strangers.on_streams(strangers.silence, 400), has_key=False),
    Attack(
        "vandal in the DHT", strangers.vandalises_the_dht, has_key=False, networks=("hivemind",)
    ),
]
SPEAKERS = [
    Attack("goodbyes for others", spoken(members.says_goodbye_for_others)),
    Attack("speaks in others' names", members.speaks_as_others),
    Attack("two ghosts", spoken(members.is_a_ghost, 2)),
    Attack("ghosts that accuse", spoken(members.accuses_as_a_ghost, 2)),
    Attack("2^61 tokens", spoken(members.claims_many_tokens)),
    Attack("overstated tokens", spoken(members.overstates_its_tokens)),
    Attack("comes and goes", members.comes_and_goes),
    Attack("replayed records", members.replays_records),
    Attack("long calls", spoken(members.sends_long_calls, 4)),
    Attack("wrong items", spoken(members.sends_wrong_items)),
    Attack("wrong items, new keys", members.sends_wrong_items_under_new_keys),
    Attack("replies not read", spoken(members.asks_and_does_not_read, 2)),
    Attack("flooded rendezvous", spoken(members.floods_the_rendezvous), networks=("gloo", "tls")),
]
TURNCOATS = [
    island("no votes", lies(turncoats.no_votes)),
    island("no receipts", lies(turncoats.no_receipts)),
    island("no plans", lies(turncoats.no_plans)),
    island("always no", lies(turncoats.plain_noes)),
    island("false accusations", lies(turncoats.accusations)),
    island("says aborted", lies(turncoats.always_aborted)),
    island("payloads of NaN", turncoats.sends_nan),
    island("payloads of noise", turncoats.sends_noise),
    island("payloads times 1e30", turncoats.sends_scaled),
    island("payloads withheld from one", turncoats.withholds),
    island("wrong digests", turncoats.sends_other_digests),
    island("payloads of 256 MB", turncoats.sends_long_payloads, networks=("tls", "hivemind")),
    island("says committed", lies(turncoats.noes_and_commits)),
    island("says it is ahead", lies(turncoats.ahead)),
]
ATTACKS = STRANGERS + SPEAKERS + TURNCOATS
CASES = [(attack, network) for attack in ATTACKS for network in attack.networks]
