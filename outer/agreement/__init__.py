"""How islands agree on a round: who takes part, whether the result is applied, and which islands
live.

state_machine.py    the round protocol of one island, without sockets and clocks: start here
round_state.py      what the island knows of the round under way
vote_exchange.py    how votes, lists of votes and outcomes are exchanged
coordination.py     which island collects the ready messages, and how a plan reaches all
                    participants
messages.py         the messages that islands send each other
planner.py          which island plans a round, and which islands take part in it
suspicions.py       which islands are left out because of attempts that failed
knowledge.py, votes.py, rules.py    the tables and checks that the protocol uses
proofs/             signed votes, certificates of commits, and the claims of other islands that they
                    prove
running/            runs the protocol over the network: driver, peers, failure detector, grace,
                    limits, waits

Two islands deliver their outboxes to each other. Island "a" plans the round, because it is the
first by name:

>>> from outer.agreement.knowledge import Knowledge
>>> from outer.agreement.messages import Ready, Status, Vote
>>> from outer.agreement.proofs.claims import Claims
>>> from outer.agreement.proofs.signer import IslandSigner
>>> from outer.agreement.proofs.witnesses import Witnesses
>>> from outer.agreement.rules import Rules
>>> from outer.agreement.state_machine import RoundProtocol
>>> from outer.identity.island_key import IslandKey
>>> from outer.identity.known_names import KnownNames
>>> start = Status(round=0, tokens=0, digest="00" * 8)
>>> def build(name):
...     signer = IslandSigner(IslandKey.generate(), KnownNames(), "run")
...     return RoundProtocol(Knowledge(name, Rules(), start, Claims(Witnesses(signer))))
>>> islands = {name: build(name) for name in "ab"}
>>> def deliver():
...     while any(island.outbox for island in islands.values()):
...         for sender, island in islands.items():
...             messages, island.outbox = island.outbox, []
...             for receiver, message in messages:
...                 if (reply := islands[receiver].receive(sender, message)) is not None:
...                     island.receive(receiver, reply)
>>> for name, island in islands.items():
...     island.knowledge.add(islands)
...     island.prepare(Ready(
...         island=name, incarnation="0" * 8, key=island.knowledge.signer.public, round=0,
...         attempt=0,
...         digest=start.digest, base_tokens=0, tokens=100, weight=100,
...         carriers=[(0, 1)], transport_addresses=["host:1"], control_addresses=["host:2"],
...     ))
>>> deliver()
>>> plan = islands["a"].try_plan(is_late=False)
>>> deliver()
>>> for name, island in islands.items():
...     island.vote(Vote.yes(plan, name, digest="ab" * 8))
>>> deliver()
>>> [island.conclude(is_late=False) for island in islands.values()]
['commit', 'commit']
"""
