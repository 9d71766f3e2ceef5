"""Makes one model out of many islands. It knows named tensors and other islands, but no model and
no trainer.

The parts that a program may use. All others may change without notice (tests/test_floors.py checks
`diloco` for this):

    config, errors, hooks, report, cost     settings, errors, named phases of a round, reports, the
                                            cost of a round
    loop                                    build_loop and OuterLoop: begin, launch, land, finish;
                                            read this first
    connect.settings, connect.opening, connect.meeting, diagnostics
                                            the network of one rank, where islands meet; the calls
                                            of `diloco doctor`
    agreement.running.peers, space.ranks    this island's names, and its ranks
    identity.access, identity.island_key, identity.known_names      an island's key, owners of
                                                                    names, bans
    network.deadlines, network.endpoints, network.event_loop, network.frames, network.messages,
    network.retry, network.run_key membership.base, membership.dht.membership, membership.records,
    membership.rendezvous
                                            records of islands, bootstraps
    packages                                which third-party packages are installed
    own_code, codecs.own_codec, merges.own_merge, state.own_rule
                                            a codec, merge rule or outer optimizer of the user's
                                            own; its checks
    routes.addresses, routes.dialer, routes.proxy, routes.relay     how islands are reached over
                                                                    tls; the relay
    transports.gloo.groups, transports.gloo.open_files, transports.loopback
                                            addresses of gloo; the limit of open files; the hub of
                                            one process
    rounds.quorum                           rounds that wait for a quorum only
    codecs.choice, leases.ledger, rounds.checkpoint, space.digest, space.experts, space.fragments,
    space.holdings, space.layout, space.redistribute, state.earlier,
    state.part_state                        types and formats that it shows, and checks of what
                                            ranks hold
"""
