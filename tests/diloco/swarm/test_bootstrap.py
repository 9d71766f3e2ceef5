"""What `diloco bootstrap` refuses before it listens anywhere."""

from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.swarm.bootstrap import bootstrap


@pytest.mark.parametrize(
    ("rendezvous", "identity", "key", "text"),
    [
        ("udp", None, None, "got 'udp'; allowed: dht"),
        ("dht", None, Path("KEY"), "--run-key-file: a dht needs none"),
        ("tcp", Path("id.key"), None, "--identity: a tcp address is host and port alone"),
    ],
)
def test_a_flag_of_the_other_rendezvous_is_refused_and_not_ignored(rendezvous, identity, key, text):
    with pytest.raises(ConfigError, match=text):
        bootstrap("127.0.0.1", 0, rendezvous, identity, key)


@pytest.mark.parametrize("host", ["300.1.1.1", "localhost", "::1", ""])
def test_a_host_that_no_dht_can_listen_on_is_refused_by_its_flags_name(host):
    with pytest.raises(
        ConfigError, match=r"--host: got .*; allowed: an IPv4 address of this machine"
    ):
        bootstrap(host, 0, "dht", None)
